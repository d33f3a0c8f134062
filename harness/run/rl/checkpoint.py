"""What a coordinator leaves after every step, so that another can go on where it was killed.

A file of msgpack beside the journal, replaced as a whole: the version, every sample that no step
has used yet with all of its tokens and the weights that began it, and what forecasts remember. The
trainer's state of that version lies in a folder beside it. A run that goes on is another run: it
reads both and writes its own.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from harness.errors import UsageError
from harness.model.replay import ReplayRequest
from harness.run.generation.ledger import Entry
from harness.run.rl.rollouts import Group, Rollouts
from harness.run.rl.terms import terms_of
from harness.scheduling.view import Finished

if TYPE_CHECKING:
    from harness.run.rl.loop import Loop

FILE = "loop.msgpack"


class SavedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A sample as the ledger had it, with versions of the loop. It goes on anywhere."""

    request: ReplayRequest
    ended: bool
    turn: int
    context_tokens: int
    produced_tokens: int
    version_first: int | None
    version_last: int | None
    version_oldest: int | None
    prompt: tuple[int, ...]
    output: tuple[int, ...]


class SavedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that no step has used, by the ids of its samples."""

    batch: int
    ids: tuple[str, ...]


class SavedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A past batch as forecasts remember it: see `harness.scheduling.view.Finished`."""

    batch: int
    group: tuple[int, ...]
    length: tuple[int, ...]
    recomputed: tuple[int, ...] | None


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to go on. `digest` is that of the requests, which must be the same."""

    step: int
    """Number of the scenario's step, counted through repeats."""
    policy: int
    """Which of the step's policies, by index."""
    version: int
    trained_version: int
    """The same, as the ranks count."""
    digest: str
    terms: dict[str, str]
    """See `harness.run.rl.terms`."""
    asked: int
    dropped: int
    groups: tuple[SavedGroup, ...]
    samples: tuple[SavedSample, ...]
    past: tuple[SavedBatch, ...]
    """What forecasts remember."""

    def history(self) -> list[Finished]:
        """Return what forecasts remember."""
        return [
            Finished(
                saved.batch,
                np.array(saved.group, np.int64),
                np.array(saved.length, np.int64),
                None if saved.recomputed is None else np.array(saved.recomputed, np.int64),
            )
            for saved in self.past
        ]

    def entries(self, now_ns: int) -> list[Entry]:
        """Return the samples as entries of a ledger; for it, all of them came now."""
        return [_entry(saved, now_ns) for saved in self.samples]

    def restore(self, rollouts: Rollouts) -> None:
        """Fill an empty account with the groups, in their order."""
        saved = {sample.request.id: sample for sample in self.samples}
        rollouts.asked, rollouts.dropped = self.asked, self.dropped
        for group in self.groups:
            there = [saved[id_] for id_ in group.ids]
            rollouts.take(group.batch, tuple(sample.request for sample in there))
            for sample in there:
                if sample.ended:
                    rollouts.ended(sample.request.id, sample.version_oldest or 0)


@dataclass(frozen=True)
class Kept:
    """A checkpoint as found in a run's folder: `folder` has the trainer's state too."""

    folder: Path
    checkpoint: Checkpoint

    @property
    def trainer(self) -> Path:
        """The folder of the trainer's state."""
        saved = self.checkpoint
        return trainer_folder(self.folder, saved.step, saved.policy, saved.version)


def trainer_folder(folder: Path, step: int, policy: int, version: int) -> Path:
    """Return where the trainer's state of a version lies: no other loop of the run writes there."""
    return folder / f"{step}.{policy}-version-{version}"


def write_checkpoint(loop: Loop, folder: Path) -> None:
    """Replace the checkpoint by one of now, between two steps."""
    groups = [group for group in loop.rollouts.groups.values() if group.state != "used"]
    entries = [loop.fleet.ledger.entries[id_] for group in groups for id_ in group.ids]
    saved = Checkpoint(
        step=loop.number,
        policy=loop.index,
        version=loop.version,
        trained_version=loop.trainees.version,
        digest=loop.digest,
        terms=terms_of(loop.session.scenario, loop.number),
        asked=loop.rollouts.asked,
        dropped=loop.rollouts.dropped,
        groups=tuple(_saved_group(group) for group in groups),
        samples=tuple(_saved(entry, loop.base) for entry in entries),
        past=tuple(map(_saved_batch, loop.history)),
    )
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{FILE}.new"
    with fresh.open("wb") as file:
        file.write(msgspec.msgpack.encode(saved))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(folder / FILE)


def read_checkpoint(folder: Path) -> Kept:
    """Read the last checkpoint of a run's folder; raises `UsageError` where there is none."""
    path = folder / FILE
    try:
        return Kept(folder, msgspec.msgpack.decode(path.read_bytes(), type=Checkpoint))
    except FileNotFoundError as error:
        text = "has no checkpoint: its loop had made no step, or checkpoint = false"
        raise UsageError(f"{folder.parent}: {text}") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path}: no checkpoint of this version: {error}") from error


def _saved_group(group: Group) -> SavedGroup:
    return SavedGroup(batch=group.batch, ids=group.ids)


def _saved(entry: Entry, base: int) -> SavedSample:
    def since(version: int | None) -> int | None:
        return None if version is None else version - base

    return SavedSample(
        request=entry.request,
        ended=entry.state == "finished",
        turn=entry.turn,
        context_tokens=entry.context_tokens,
        produced_tokens=entry.produced_tokens,
        version_first=since(entry.version_first),
        version_last=since(entry.version_last),
        version_oldest=since(entry.version_oldest),
        prompt=tuple(entry.prompt),
        output=tuple(entry.output),
    )


def _entry(saved: SavedSample, now_ns: int) -> Entry:
    entry = Entry(saved.request, now_ns, saved.context_tokens)
    entry.state = "finished" if saved.ended else "queued"
    entry.turn, entry.produced_tokens = saved.turn, saved.produced_tokens
    entry.version_first, entry.version_last = saved.version_first, saved.version_last
    entry.version_oldest = saved.version_oldest
    entry.prompt, entry.output = array("I", saved.prompt), array("I", saved.output)
    return entry


def _saved_batch(past: Finished) -> SavedBatch:
    recomputed = None if past.recomputed is None else tuple(past.recomputed.tolist())
    return SavedBatch(
        batch=past.batch,
        group=tuple(past.group.tolist()),
        length=tuple(past.length.tolist()),
        recomputed=recomputed,
    )
