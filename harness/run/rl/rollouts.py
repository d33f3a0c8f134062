"""Which responses may be asked for, which train, and which are too old: an exact account. Pure.

Training step k makes weights of version k into k + 1. A response is as old as the weights that
gave its first token: used in step k, it is k - version_first versions stale, and never more than
the bound. Batch k may be asked for once weights of version k - bound are up. Then at most k + 1
batches have begun under versions up to k - bound, of which k are used before step k: what must be
used in a step, because it would be too old for the next, is never more than one batch.

Nothing livelocks: responses only age when a step trains, so while a step waits they all get done.
What is due is waited for; or it is dropped, once the step has enough without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.model.replay import ReplayRequest

State = Literal["open", "complete", "used", "dropped"]


@dataclass(eq=False)
class Group:
    """The samples of one prompt, asked for in one batch. `oldest`: version that began the first."""

    key: int
    batch: int
    requests: tuple[ReplayRequest, ...]
    """With ids of their own."""
    state: State = "open"
    oldest: int | None = None
    left: set[str] = field(default_factory=set)
    """Samples that have not ended."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Of its samples."""
        return tuple(request.id for request in self.requests)


@dataclass(kw_only=True)
class Rollouts:
    """All groups of a loop. `per_step` groups train a step."""

    bound: int
    per_step: int
    order: Literal["in_order", "first_ready"] = "in_order"
    over_age: Literal["wait", "drop"] = "wait"
    groups: dict[int, Group] = field(default_factory=dict)
    asked: int = 0
    """Batches so far."""
    dropped: int = 0
    _next_key: int = 0
    _group_of: dict[str, Group] = field(default_factory=dict)
    _complete: Counter[int] = field(default_factory=Counter)
    """By batch, its groups that are complete and not used."""

    def may_ask(self, version: int) -> bool:
        """Whether the next batch may begin under weights of `version`."""
        return version >= self.asked - self.bound

    def ask(self, groups: Sequence[Sequence[ReplayRequest]]) -> list[Group]:
        """Take the next batch: one sequence of samples for each prompt."""
        if len(groups) != self.per_step:
            raise ValueError(f"a batch has {self.per_step} groups, not {len(groups)}")
        batch, self.asked = self.asked, self.asked + 1
        return [self.take(batch, tuple(requests)) for requests in groups]

    def begun(self, id_: str, version: int) -> None:
        """Note the weights that gave a sample's first token."""
        group = self._group_of[id_]
        group.oldest = version if group.oldest is None else min(group.oldest, version)

    def ended(self, id_: str, version_first: int) -> None:
        """Note that a sample is done; `ValueError` for one that was, or is not asked for."""
        group = self._group_of[id_]
        if id_ not in group.left:
            raise ValueError(f"sample {id_} has ended before")
        self.begun(id_, version_first)
        group.left.remove(id_)
        if not group.left:
            group.state = "complete"
            self._complete[group.batch] += 1

    def ready(self, version: int) -> list[Group] | None:
        """Return the groups that train step `version`; None: not all of them are complete yet."""
        in_order = self.order == "in_order"
        there = self._complete[version] if in_order else self._complete.total()
        if there < self.per_step:
            return None
        complete = [group for group in self._unused() if group.state == "complete"]
        if in_order:
            complete = [group for group in complete if group.batch == version]
        elif self.over_age == "wait" and self.late(version):
            return None
        complete.sort(key=lambda group: (group.oldest or 0, group.key))
        return complete[: self.per_step] if len(complete) >= self.per_step else None

    def late(self, version: int) -> list[Group]:
        """Return what is due in step `version`, and not complete."""
        return [group for group in self.due(version) if group.state == "open"]

    def due(self, version: int) -> list[Group]:
        """Return what step `version` must use, for the next one could not any more."""
        last = version - self.bound
        return [g for g in self._unused() if g.oldest is not None and g.oldest <= last]

    def use(self, groups: Iterable[Group], version: int) -> list[int]:
        """Hand groups to step `version`; return how stale each sample's group is.

        Raises `ValueError` for one that is not complete, was used before, or is too old.
        """
        ages = []
        for group in groups:
            if group.state != "complete" or group.oldest is None:
                raise ValueError(f"group {group.key} is {group.state}, and cannot train")
            age = version - group.oldest
            if age > self.bound:
                raise ValueError(f"group {group.key} is {age} versions old; {self.bound} at most")
            group.state = "used"
            self._complete[group.batch] -= 1
            ages.append(age)
        return ages

    def drop(self, group: Group, again: Sequence[ReplayRequest]) -> Group:
        """Give up a group that is not complete, and ask for its prompt `again`, with fresh ids."""
        if group.state != "open":
            raise ValueError(f"group {group.key} is {group.state}, and cannot be dropped")
        group.state = "dropped"
        self.dropped += 1
        self.forget(group)
        return self.take(group.batch, tuple(again))

    def forget(self, group: Group) -> None:
        """Let go of a group that was used or dropped."""
        del self.groups[group.key]
        for id_ in group.ids:
            del self._group_of[id_]

    def _unused(self) -> list[Group]:
        return [group for group in self.groups.values() if group.state in {"open", "complete"}]

    def take(self, batch: int, requests: tuple[ReplayRequest, ...]) -> Group:
        """Take one group of a batch that was asked for, none of whose samples has ended."""
        key, self._next_key = self._next_key, self._next_key + 1
        group = Group(key, batch, requests, left={request.id for request in requests})
        if twice := [id_ for id_ in group.ids if id_ in self._group_of]:
            raise ValueError(f"sample {twice[0]} is asked for already")
        self.groups[key] = group
        self._group_of |= dict.fromkeys(group.ids, group)
        return group
