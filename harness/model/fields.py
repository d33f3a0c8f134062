"""How the fields of streams are declared: one function for each kind. Pure.

`source` says who measured it: coordinator, agent, rank, device, emulator, model.
"""

from __future__ import annotations

from harness.model.documents import Field


def ms_of(source: str) -> Field:
    """Declare milliseconds."""
    return Field(unit="ms", source=source)


def s_of(source: str) -> Field:
    """Declare seconds."""
    return Field(unit="s", source=source)


def ns_of(source: str) -> Field:
    """Declare nanoseconds, whole: stamps are on the coordinator's clock."""
    return Field(unit="ns", dtype="integer", source=source)


def pct_of(source: str) -> Field:
    """Declare a share, in per cent."""
    return Field(unit="%", source=source)


def text_of(source: str) -> Field:
    """Declare text."""
    return Field(dtype="string", source=source)


def whole_of(source: str) -> Field:
    """Declare a count, or the number of something."""
    return Field(dtype="integer", source=source)


def bytes_of(source: str) -> Field:
    """Declare bytes, whole."""
    return Field(unit="bytes", dtype="integer", source=source)


def tokens_of(source: str) -> Field:
    """Declare tokens, whole."""
    return Field(unit="tokens", dtype="integer", source=source)


def tokens_per_s_of(source: str) -> Field:
    """Declare tokens per second."""
    return Field(unit="tokens/s", source=source)
