"""What one part of a network costs, and what it draws: TOML files, each figure with its source.

Prices in US $, power in W, by rate in Gbit/s. `PRICES` and `POWER` are read where a user names no
file of their own.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from harness.errors import BadFile, UsageError
from harness.model.bench import Strict
from harness.model.schema import examine

DATA = Path(__file__).parent / "data"
PRICES, POWER = DATA / "prices-2025.toml", DATA / "power-2025.toml"

Item = Literal["nic", "transceiver", "eps_port", "ocs_port", "patch_port", "fibre"]
TITLES: Mapping[Item, str] = {
    "nic": "NIC",
    "transceiver": "transceiver",
    "eps_port": "EPS port",
    "ocs_port": "OCS port",
    "patch_port": "patch-panel port",
    "fibre": "fibre",
}
"""What a reader calls an item; EPS: electrical packet switch, OCS: optical circuit switch."""

Sure = Literal["stated", "inferred", "assumed"]
"""By a maker of a product; worked out from second-hand figures; a round number."""


class Price(Strict, frozen=True, kw_only=True):
    """US $ each, by rate in Gbit/s."""

    usd: dict[str, float]
    date: str
    source: str


class Prices(Strict, frozen=True, kw_only=True):
    """A whole file of prices."""

    name: str
    nic: Price
    transceiver: Price
    eps_port: Price
    ocs_port: Price
    patch_port: Price
    fibre: Price

    def usd(self, item: Item, rate_gbit_per_s: float) -> float:
        """Return what one costs; raises `UsageError` where there is no price above 0."""
        price: Price = getattr(self, item)
        usd = _at(self.name, f"{item}.usd", price.usd, rate_gbit_per_s)
        if not usd > 0:
            raise UsageError(f"{self.name}: {_priced(item, f'{rate_gbit_per_s:g}', usd)}")
        return usd


class Draw(Strict, frozen=True, kw_only=True):
    """W each, by rate in Gbit/s."""

    w: dict[str, float]
    date: str
    sure: Sure
    source: str


class Power(Strict, frozen=True, kw_only=True):
    """A whole file of power."""

    name: str
    nic: Draw
    transceiver: Draw
    eps_port: Draw
    ocs_port: Draw
    patch_port: Draw
    fibre: Draw

    def w(self, item: Item, rate_gbit_per_s: float) -> float:
        """Return what one draws; raises `UsageError` where no figure is given."""
        draw: Draw = getattr(self, item)
        return _at(self.name, f"{item}.w", draw.w, rate_gbit_per_s)

    def sure(self, item: Item) -> Sure:
        """Return how sure the figures of an item are."""
        draw: Draw = getattr(self, item)
        return draw.sure


def load_prices(path: str | Path = PRICES) -> Prices:
    """Read a file of prices. Raises `BadFile` with every problem found."""
    prices = _load(Path(path), Prices)
    problems = [
        _priced(item, rate, usd)
        for item in TITLES
        for rate, usd in getattr(prices, item).usd.items()
        if not usd > 0
    ]
    _refuse(path, [*_problems(prices, "usd"), *problems])
    return prices


def load_power(path: str | Path = POWER) -> Power:
    """Read a file of power. Raises `BadFile` with every problem found."""
    power = _load(Path(path), Power)
    problems = [
        f"{item}.w.{rate} = {w:g}: expected 0 or more"
        for item in TITLES
        for rate, w in getattr(power, item).w.items()
        if w < 0
    ]
    _refuse(path, [*_problems(power, "w"), *problems])
    return power


# -- what must hold --------------------------------------------------------------------------------

T = TypeVar("T", Prices, Power)


def _load(path: Path, struct: type[T]) -> T:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(str(path), [f"cannot be read: {error.strerror}"]) from error
    except ValueError as error:  # TOMLDecodeError, and bytes that are not UTF-8
        raise BadFile(str(path), [f"not TOML: {error}"]) from error
    value, problems = examine(table, struct)
    _refuse(path, problems)
    assert value is not None, "none without a problem"
    return value


def _problems(tables: Prices | Power, unit: str) -> Iterator[str]:
    """Yield what is wrong with the figures of both kinds of file, each with its key."""
    for item in TITLES:
        entry = getattr(tables, item)
        if not entry.source.strip():
            yield f"{item}.source: say where the figures come from"
        for rate in getattr(entry, unit):
            if not rate.isascii() or not rate.isdigit():
                yield f"{item}.{unit}.{rate}: the key is a rate in whole Gbit/s, such as 400"


def _refuse(path: str | Path, problems: list[str]) -> None:
    if problems:
        raise BadFile(str(path), problems)


def _priced(item: Item, rate: str, usd: float) -> str:
    return f"{item}.usd.{rate} = {usd:g}: nothing is free; expected US $ above 0"


def _at(name: str, key: str, figures: Mapping[str, float], rate_gbit_per_s: float) -> float:
    """Return the figure of a rate; nothing is made up between two rates."""
    found = figures.get(f"{rate_gbit_per_s:g}")
    if found is None:
        known = ", ".join(figures) or "none"
        raise UsageError(f"{name}: {key}: no figure at {rate_gbit_per_s:g} Gbit/s; known: {known}")
    return found
