"""How many bytes pass a unit's serial line for what its driver says: each takes a slow line time.

Pure. Commands are the drivers' own; answers are counted as units frame them, of a unit that does
as it is told. Times are counted in bytes too, from the first that leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from drivers.address import baud_of
from drivers.base import NS_PER_S, Circuit, Delta
from drivers.dialects import scpi, tl1
from drivers.ocs.polatis import BATCH_MAX, PolatisScpi, PolatisTl1, batches

Driver = type[PolatisScpi | PolatisTl1]
Batch = tuple[Sequence[Circuit], Sequence[Circuit]]
"""Circuits that one command drops, and makes."""

BITS = 10
"""Bit times that a byte takes: start, eight data bits, stop."""
NO_ERROR = '0,"No error"'
TAG = 100
"""A session that has gone on for a while numbers what it says with three digits."""


@dataclass(frozen=True)
class Turn:
    """A command and its answer, in bytes; the circuits that it drops, then makes."""

    out: int
    back: int
    drop: Sequence[Circuit] = ()
    make: Sequence[Circuit] = ()


@dataclass(frozen=True)
class Exchange:
    """Commands that are sent together. Each is obeyed when all of it has come, and then answered.

    A line carries both ways at once; an answer waits for those before it.
    """

    turns: tuple[Turn, ...]

    @cached_property
    def obeyed(self) -> tuple[int, ...]:
        """When each command has come."""
        return tuple(accumulate(turn.out for turn in self.turns))

    @cached_property
    def answered(self) -> tuple[int, ...]:
        """When each answer has come."""
        heard, found = 0, []
        for turn, said in zip(self.turns, self.obeyed, strict=True):
            heard = max(heard, said) + turn.back
            found.append(heard)
        return tuple(found)

    @property
    def commanded(self) -> int:
        """When all that changes anything has come."""
        return self.obeyed[self._last]

    @property
    def acknowledged(self) -> int:
        """When that is answered: over TL1 the map follows it."""
        return self.answered[self._last]

    @cached_property
    def _last(self) -> int:
        changes = [i for i, turn in enumerate(self.turns) if turn.drop or turn.make]
        return max(changes, default=-1)


def byte_ns(url: str) -> int:
    """Return what a byte takes on the line of a device URL, ns; 0 where nothing paces it."""
    baud = baud_of(url)
    return BITS * NS_PER_S // baud if baud else 0


def reading(
    driver: Driver, name: str, circuits: Collection[Circuit], *, tag: int = TAG
) -> Exchange:
    """Return what passes when the unit `name` is asked for its map, and that is `circuits`.

    `tag` numbers the command, over TL1.
    """
    if driver is PolatisScpi:
        return Exchange((_scpi(PolatisScpi.MAP, _map(circuits)),))
    return Exchange((_tl1(PolatisTl1.READ.command(str(tag)), _patches(name, circuits, tag)),))


def changing(
    driver: Driver,
    name: str,
    drop: Sequence[Circuit],
    make: Sequence[Circuit],
    after: Collection[Circuit],
    *,
    tag: int = TAG,
    reports: int = TAG,
) -> list[Exchange]:
    """Return what passes when a unit is told to drop, then to make, and reads `after` back.

    Nothing passes where there is nothing to do. Over TL1 `tag` numbers the first command, and
    `reports` what the unit first tells unasked: it tells of each change before it answers.
    """
    said = driver.preview(Delta(tuple(drop), tuple(make), ()))
    if not said:
        return []
    parts = _parts(drop, make)
    if driver is PolatisScpi:
        if len(drop) + len(make) <= BATCH_MAX:
            parts = [(drop, make)]
        heard = [NO_ERROR] * (len(parts) - 1) + [_map(after)]
        return [
            Exchange((_scpi(message, answer, *batch),))
            for message, answer, batch in zip(said, heard, parts, strict=True)
        ]
    tags = range(tag, tag + len(said))
    heard = [
        _report(name, reports + i, *batch) + _frame(name, f"M  {tags[i]} COMPLD")
        for i, batch in enumerate(parts)
    ] + [_patches(name, after, tags[-1])]
    turns = (
        _tl1(command.replace("<ctag>", str(ctag)), answer, *batch)
        for command, ctag, answer, batch in zip(said, tags, heard, [*parts, ((), ())], strict=True)
    )
    return [Exchange(tuple(turns))]


def looking(
    driver: Driver,
    name: str,
    ports: Sequence[int],
    shown_dbm: Callable[[int, int], float],
    *,
    tag: int = TAG,
) -> Exchange:
    """Return what passes when meters are looked at, of no more ports than one question takes.

    `shown_dbm` is told a port, and how many bytes of the question had passed when it was obeyed.
    """
    if driver is PolatisScpi:
        question = f"{PolatisScpi.POWER} {scpi.ports(ports)}"
        said = _scpi(question, "").out
        answer = ",".join(f"{shown_dbm(port, said):.2f}" for port in ports)
        return Exchange((_scpi(question, f"({answer})"),))
    command = tl1.Request(PolatisTl1.POWER, tl1.aid(ports)).command(str(tag))
    said = _tl1(command, "").out
    rows = (f"{port}:{shown_dbm(port, said):.2f}" for port in ports)
    return Exchange((_tl1(command, _frame(name, f"M  {tag} COMPLD", rows)),))


def _parts(drop: Sequence[Circuit], make: Sequence[Circuit]) -> list[Batch]:
    """Return what goes into one command each, where it does not all go into one."""
    gone: list[Batch] = [(batch, ()) for batch in batches(drop, BATCH_MAX)]
    return [*gone, *(((), batch) for batch in batches(make, BATCH_MAX))]


# -- SCPI ------------------------------------------------------------------------------------------


def _scpi(
    message: str, answer: str, drop: Sequence[Circuit] = (), make: Sequence[Circuit] = ()
) -> Turn:
    return Turn(len(f"{message}\r\n"), len(f"{answer}\r\n"), drop, make)


def _map(circuits: Collection[Circuit]) -> str:
    return scpi.pairs(tuple(circuits))


# -- TL1 -------------------------------------------------------------------------------------------


def _tl1(
    command: str, answer: str, drop: Sequence[Circuit] = (), make: Sequence[Circuit] = ()
) -> Turn:
    return Turn(len(f"{command}\n"), len(answer), drop, make)


def _patches(name: str, circuits: Collection[Circuit], tag: int) -> str:
    return _frame(name, f"M  {tag} COMPLD", (f"{a},{b}" for a, b in circuits))


def _report(name: str, number: int, dropped: Collection[Circuit], made: Collection[Circuit]) -> str:
    rows = [f"{a},{b}:DISCONNECTED" for a, b in dropped]
    rows += [f"{a},{b}:CONNECTED" for a, b in made]
    return _frame(name, f"A  {number} REPT EVT PATCH", rows)


def _frame(name: str, head: str, rows: Iterable[str] = ()) -> str:
    """Return a frame with its prompt, as `drivers.dialects.tl1` has it."""
    body = "".join(f'   "{row}"\r\n' for row in rows)
    return f"\r\n\n   {name} 26-01-31 12:00:00\r\n{head}\r\n{body};\r\n>"
