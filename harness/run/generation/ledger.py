"""Every request of a run and every token that was delivered of it. Pure.

The coordinator owns the requests; engines only borrow them. Whatever happens to an engine, a
request continues from what is in here: tokens that an engine had not told are generated anew and
never counted. Outputs are applied in the order of their node's events. Stamps are on the
coordinator's clock, lengths in tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from harness.model.prompts import Prompts
from harness.model.replay import ReplayRequest, Turn
from harness.model.requests import Carried
from harness.wire.generation import Output, Work

State = Literal["queued", "sent", "held", "finished", "refused"]
"""`queued`: waits here for an instance; `sent`: at `Entry.at`; `held`: taken from an instance, and
in the hands of whoever took it (a switch, a migration)."""

UNKNOWN_ID = 0
"""Stands for a token that was lost, so that those after it keep their positions."""


@dataclass(slots=True, eq=False)
class Entry:
    """A request: a whole trajectory, of which turn `turn` is being generated."""

    request: ReplayRequest
    arrived_ns: int
    context_tokens: int
    """Prompt of the present turn: all turns before it, with their outputs and tool output."""
    state: State = "queued"
    at: str = ""
    """Name of the instance that has it; "" unless `sent`."""
    home: str = ""
    """The instance that had it last: its KV may still be cached there."""
    assigned: str = ""
    """The one instance it is to run in, as long as that is there; "": any."""
    turn: int = 0
    produced_tokens: int = 0
    """Delivered of the present turn."""
    first_token_ns: int = 0
    last_token_ns: int = 0
    """Of the whole trajectory; 0: none yet."""
    resumed_ns: int = 0
    """First token since it was last sent somewhere; 0: none yet."""
    cached_tokens: int = 0
    """Of its context, then: those whose KV was there already."""
    version_first: int | None = None
    version_last: int | None = None
    """Weights that produced the present turn."""
    version_oldest: int | None = None
    """Of all weights that produced any of it."""
    preemptions: int = 0
    reason: str = ""
    """Why it was refused."""
    refusals: dict[int, str] = field(default_factory=dict)
    """Why instances, by the serials of their places, would not have it."""
    prompt: array[int] = field(default_factory=lambda: _ids(()))
    output: array[int] = field(default_factory=lambda: _ids(()))
    """Ids of the present turn's context and response; empty where only counts are known."""

    @property
    def id(self) -> str:
        """The request's."""
        return self.request.id

    @property
    def now(self) -> Turn:
        """The present turn."""
        return self.request.turns[self.turn]

    @property
    def known_tokens(self) -> int:
        """Context and response so far: what is in KV while it decodes."""
        return self.context_tokens + self.produced_tokens

    @property
    def length_tokens(self) -> int:
        """Of the present turn at its end."""
        return self.context_tokens + self.now.response_tokens

    @property
    def total_tokens(self) -> int:
        """Delivered of the whole trajectory: all turns so far."""
        given = sum(turn.prompt_tokens for turn in self.request.turns[: self.turn + 1])
        return self.known_tokens - given

    @property
    def sibling(self) -> tuple[int, int]:
        """Step and prompt: what the samples of one prompt share."""
        return self.request.step, self.request.prompt


@dataclass(eq=False)
class Ledger:
    """All entries by id, and the sums over them."""

    prompts: Prompts | None = None
    """Token ids; None where engines only count."""
    entries: dict[str, Entry] = field(default_factory=dict)
    tokens: int = 0
    """Delivered, each position once."""
    lost_tokens: int = 0
    """Positions that an engine skipped or left out at the end. 0, or something is wrong."""
    doubled_tokens: int = 0
    """Positions delivered again, or beyond the end. 0, or something is wrong."""
    finished: int = 0
    refused: int = 0
    forgotten: int = 0
    """Entries that ended and are kept no longer."""
    on_end: Callable[[Entry], None] | None = None
    """Told of every trajectory that finished or was refused."""
    siblings_home: dict[tuple[int, int], str] = field(default_factory=dict)
    """By step and prompt, where a sample of it was sent last."""
    _at: dict[str, dict[str, None]] = field(default_factory=dict)
    _known_tokens: dict[str, int] = field(default_factory=dict)

    @property
    def open(self) -> int:
        """Requests that have neither finished nor been refused."""
        return len(self.entries) + self.forgotten - self.finished - self.refused

    def at(self, name: str) -> tuple[str, ...]:
        """Return the ids that an instance has, in the order they were sent there."""
        return tuple(self._at.get(name, ()))

    def count_at(self, name: str) -> int:
        """Return how many requests an instance has."""
        return len(self._at.get(name, ()))

    def generating(self, name: str) -> list[Entry]:
        """Return what gives tokens in an instance: each has a seat there."""
        return [entry for id_ in self._at.get(name, ()) if (entry := self.entries[id_]).resumed_ns]

    def known_tokens_at(self, name: str) -> int:
        """Return the context and output of all that an instance has: what its KV is to hold."""
        return self._known_tokens.get(name, 0)

    @property
    def held(self) -> tuple[str, ...]:
        """Ids of requests in somebody's hands."""
        return tuple(entry.id for entry in self.entries.values() if entry.state == "held")

    # -- what becomes of a request --------------------------------------------------------

    def add(self, requests: Iterable[ReplayRequest], now_ns: int) -> list[str]:
        """Take new requests and return their ids; `ValueError` on one that is here already."""
        ids = []
        for request in requests:
            if request.id in self.entries:
                raise ValueError(f"request {request.id} is in the ledger already")
            self.entries[request.id] = Entry(request, now_ns, request.prompt_tokens)
            ids.append(request.id)
        return ids

    def send(self, id_: str, name: str) -> None:
        """Note that a queued or held request goes to an instance; before the message leaves."""
        entry = self._in(id_, "queued", "held")
        entry.state, entry.at, entry.home, entry.resumed_ns = "sent", name, name, 0
        self.siblings_home[entry.sibling] = name
        self._at.setdefault(name, {})[id_] = None
        self._known_tokens[name] = self._known_tokens.get(name, 0) + entry.known_tokens

    def hold(self, id_: str, left: Carried | None = None) -> None:
        """Note that a request was taken from where it was; it waits for `send` or `requeue`."""
        entry = self._in(id_, "sent", "held")
        if left is not None:
            entry.preemptions = left.preemptions
            entry.version_first = left.version_first
        self._take(entry, "held")

    def requeue(self, id_: str) -> None:
        """Note that a held request waits for any instance."""
        self._in(id_, "held").state = "queued"

    def refuse(self, id_: str, reason: str) -> None:
        """End a request that can run nowhere."""
        entry = self._in(id_, "queued", "held")
        entry.state, entry.reason = "refused", reason
        self.refused += 1
        self._ended(entry)

    def drop(self, id_: str) -> None:
        """Let go of a request that nobody wants any longer; it is at no instance."""
        self._in(id_, "queued", "held")
        del self.entries[id_]

    def forget(self, ids: Iterable[str]) -> None:
        """Keep requests that have ended no longer: their tokens were used."""
        for id_ in ids:
            self._in(id_, "finished", "refused")
            del self.entries[id_]
            self.forgotten += 1

    def restore(self, entry: Entry) -> None:
        """Take a request as an earlier run left it: queued, with its tokens so far, or finished."""
        if entry.id in self.entries:
            raise ValueError(f"request {entry.id} is in the ledger already")
        self._in_state(entry, "queued", "finished")
        self.entries[entry.id] = entry
        self.finished += entry.state == "finished"

    def apply(self, output: Output, first_ns: int, last_ns: int) -> Entry | None:
        """Deliver tokens, stamped on our clock; return the entry, None where it is not there.

        At the end of a turn that is not the last, the next one is `queued`.
        """
        entry = self.entries.get(output.id)
        if entry is None or entry.state != "sent" or entry.at != output.instance:
            return None  # an engine that no longer had it: given up, or torn down by force
        if output.count:
            self._deliver(entry, output)
            entry.first_token_ns = entry.first_token_ns or first_ns
            entry.last_token_ns = last_ns
            if not entry.resumed_ns:
                entry.resumed_ns, entry.cached_tokens = first_ns, output.cached_tokens
        if output.ended == "finished":
            self._finish(entry)
        elif output.ended:
            self._take(entry, "held")
        return entry

    # -- what goes to engines -------------------------------------------------------------

    def work_of(self, id_: str, *, kv_tokens: int = 0, kv_transfer: str = "") -> Work:
        """Return a request as it continues: its context, its output so far, KV sent ahead."""
        entry = self.entries[id_]
        carried = Carried(
            id=id_,
            prompt_tokens=entry.context_tokens,
            response_tokens=entry.now.response_tokens,
            arrived_ns=entry.arrived_ns,
            produced_tokens=entry.produced_tokens,
            kv_tokens=kv_tokens,
            version_first=entry.version_first,
            version_last=entry.version_last,
            preemptions=entry.preemptions,
            first_token_ns=entry.first_token_ns if entry.version_first is not None else None,
        )
        return Work(
            carried=carried,
            prompt=tuple(self._prompt(entry)),
            output=tuple(entry.output),
            kv_transfer=kv_transfer,
        )

    def digest(self, ids: Iterable[str]) -> str:
        """Hash (SHA-256, hex) what these were given and gave, if finished: lengths, and token ids.

        Repeats of a request that gave the same count once, so that runs can be compared in which
        they were repeated more or less often.
        """
        found = set()
        for entry in (self.entries[id_] for id_ in ids):
            if entry.state == "finished":
                request = entry.request
                name = f"{request.step}-{request.prompt}-{request.sample}"
                line = f"{name} {entry.context_tokens}+{entry.produced_tokens}\n".encode()
                tokens = (entry.prompt + entry.output).tobytes()
                found.add(hashlib.sha256(line + tokens).digest())
        return hashlib.sha256(b"".join(sorted(found))).hexdigest()

    # -- inside -----------------------------------------------------------------------------

    def _in(self, id_: str, *states: State) -> Entry:
        return self._in_state(self.entries[id_], *states)

    def _in_state(self, entry: Entry, *states: State) -> Entry:
        if entry.state not in states:
            raise ValueError(f"request {entry.id} is {entry.state}, not {' or '.join(states)}")
        return entry

    def _ended(self, entry: Entry) -> None:
        if self.on_end is not None:
            self.on_end(entry)

    def _deliver(self, entry: Entry, output: Output) -> None:
        """Add what is new of an output; count gaps, and what was there already."""
        end = output.start + output.count
        end_known = max(entry.produced_tokens, min(end, entry.now.response_tokens))
        further = end_known - entry.produced_tokens
        lost = min(max(0, output.start - entry.produced_tokens), further)
        new = further - lost
        self.lost_tokens += lost
        self.doubled_tokens += output.count - new
        self.tokens += new
        self._known_tokens[entry.at] += further
        entry.produced_tokens = end_known
        if entry.version_first is None:
            entry.version_first = output.version
        if entry.version_oldest is None:
            entry.version_oldest = output.version
        entry.version_last = output.version
        if self.prompts is not None:
            entry.output.extend([UNKNOWN_ID] * lost)
            entry.output.extend(output.ids[len(entry.output) - output.start :][:new])

    def _finish(self, entry: Entry) -> None:
        self.lost_tokens += entry.now.response_tokens - entry.produced_tokens
        if entry.turn + 1 == len(entry.request.turns):
            self._take(entry, "finished")
            self.finished += 1
            self._ended(entry)
            return
        self._take(entry, "queued")
        prompts, context = self.prompts, self._prompt(entry)
        entry.turn += 1
        if prompts is not None:
            added = prompts.added(entry.request, entry.turn)
            entry.prompt = context + entry.output + _ids(added)
        entry.context_tokens += entry.produced_tokens + entry.now.prompt_tokens
        entry.produced_tokens, entry.output = 0, _ids(())
        entry.version_first = entry.version_last = None

    def _take(self, entry: Entry, state: State) -> None:
        """Take an entry from its instance, if it is at one."""
        if entry.at:
            del self._at[entry.at][entry.id]
            self._known_tokens[entry.at] -= entry.known_tokens
        entry.state, entry.at = state, ""

    def _prompt(self, entry: Entry) -> array[int]:
        if self.prompts is not None and not entry.prompt:
            entry.prompt = _ids(self.prompts.added(entry.request, 0))
        return entry.prompt


def _ids(ids: Iterable[int]) -> array[int]:
    """Keep token ids in 4 bytes each, for every one of a run is kept."""
    return array("I", ids)
