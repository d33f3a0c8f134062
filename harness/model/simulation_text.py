"""A calibration as the TOML text that `harness.model.load.load_calibration` reads. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from harness.model.simulation import Calibration, Figure


def calibration_text(calibration: Calibration, heading: Sequence[str] = ()) -> str:
    """Return the file's text, opened by `heading` as comments; figures stand one a line."""
    lines = [f"# {_plain(line)}".rstrip() for line in heading]
    lines += ["", f"name = {_text(calibration.name)}", f"date = {_text(calibration.date)}"]
    if calibration.runs:
        lines.append(f"runs = [{', '.join(map(_text, calibration.runs))}]")
    if calibration.one_machine:
        lines.append("one_machine = true")
    for table in calibration.__struct_fields__:
        part = getattr(calibration, table)
        if hasattr(part, "__struct_fields__"):
            lines += ["", f"[{table}]", *_rows(part)]
    if calibration.fitted:
        lines += ["", "[fitted]"]
        lines += [
            f"{load} = {{ low = {_number(fitted.low)}, high = {_number(fitted.high)} }}"
            for load, fitted in calibration.fitted.items()
        ]
    return "\n".join(lines).lstrip("\n") + "\n"


def _rows(part: object) -> Iterator[str]:
    """Yield a table's keys: figures, and the word that says which they are of."""
    for key in part.__struct_fields__:  # type: ignore[attr-defined]  # a Struct, as was seen
        value = getattr(part, key)
        if value != "":
            yield f"{key} = {_figure(value) if isinstance(value, Figure) else _text(value)}"


def _figure(figure: Figure) -> str:
    parts = [f"value = {_number(figure.value)}"]
    if figure.plus_minus:
        parts.append(f"plus_minus = {_number(figure.plus_minus)}")
    if figure.source:
        parts.append(f"source = {_text(figure.source)}")
    return f"{{ {', '.join(parts)} }}"


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _text(text: str) -> str:
    """Return a basic string, its escapes those of JSON."""
    return json.dumps(_plain(text), ensure_ascii=False)


def _plain(text: str) -> str:
    """Return the text with spaces instead of characters that TOML refuses."""
    return "".join(character if character.isprintable() else " " for character in text)
