"""What a person writes for ports, cables and sizes is read as meant, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.model.ports import (
    Cable,
    ListedCircuit,
    format_ports,
    parse_cable,
    parse_circuit,
    parse_ports,
)
from harness.model.sizes import SIZE_MAX, format_size, parse_size


def test_ports_are_single_numbers_and_ranges() -> None:
    assert parse_ports("1-3, 17") == {1, 2, 3, 17}
    assert parse_ports("5") == {5}


@pytest.mark.parametrize("text", ["", "0", "0-3", "3-1", "1,,2", "1-2-3", "a", "1,1", "70000", "¹"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"port|listed twice"):
        parse_ports(text)


@given(st.frozensets(st.integers(1, 2000), min_size=1))
def test_ports_are_read_as_they_are_written(ports: frozenset[int]) -> None:
    assert parse_ports(format_ports(ports)) == ports


def test_a_cable_names_one_port_or_both() -> None:
    assert parse_cable("tor0:u1", "agg0:1") == Cable("tor0", "u1", "agg0", 1, None)
    assert parse_cable("tor0:u1", "agg0:1/20") == Cable("tor0", "u1", "agg0", 1, 20)
    assert parse_cable("tor0:u01", "agg0:1").uplink == "u1"


@pytest.mark.parametrize(
    ("near", "far"),
    [
        ("tor0", "agg0:1"),
        ("tor0:1", "agg0:1"),
        ("tor0:u0", "agg0:1"),
        ("tor0:u1", "agg0"),
        ("tor0:u1", "agg0:0"),
        ("tor0:u1", "agg0:1/0"),
        ("tor0:u1", "agg0:1/"),
    ],
)
def test_half_a_cable_is_refused(near: str, far: str) -> None:
    with pytest.raises(ValueError, match="side is a"):
        parse_cable(near, far)


def test_a_circuit_names_two_tors_and_a_switch() -> None:
    free = ListedCircuit(("tor0", "tor1"), (None, None), "agg-0")
    assert parse_circuit("tor0-tor1@agg-0") == free
    named = ListedCircuit(("tor0", "tor1"), ("u1", "u2"), "agg-0")
    assert parse_circuit("tor0:u1-tor1:u2@agg-0") == named
    for text in ("tor0-tor1", "tor0@agg0", "tor0-tor1-tor2@agg0", "tor0-tor0@agg0"):
        with pytest.raises(ValueError, match=r"circuit|itself"):
            parse_circuit(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1MiB", 2**20),
        ("64 KiB", 2**16),
        ("1GB", 10**9),
        ("1KB", 1000),
        ("512", 512),
        ("512B", 512),
        ("1.5KiB", 1536),
    ],
)
def test_sizes_are_1024_based_only_with_an_i(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@given(st.integers(1, SIZE_MAX))
def test_sizes_are_read_as_they_are_written(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes
