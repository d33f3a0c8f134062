"""Commands to an engine's requests, given between steps: submit, abort, export, import, pause.

What leaves is a `Carried` value with all of its partial output, so a request continues elsewhere
where it stopped: nothing lost, nothing doubled. Pure; raises `Refused` with the reason where an
engine cannot take a request, before anything has changed.
"""

from __future__ import annotations

from bisect import insort

from harness.errors import UsageError
from harness.model.batching import Batching, join, preempt, release, settle
from harness.model.requests import Carried, Request, carried


class Refused(UsageError):
    """The engine cannot take this request, or not with its KV; the message says why."""


def submit(state: Batching, carried_in: Carried) -> None:
    """Queue a request behind those that wait; partial output is kept and will be recomputed.

    A step that is planned or under way is not disturbed.
    """
    request = _entering(state, carried_in)
    state.requests[request.id] = request
    state.waiting[request.id] = request


def import_with_kv(state: Batching, carried_in: Carried) -> None:
    """Take over a request together with its KV: it goes on with the next step, without queueing.

    Raises `Refused` where no seat or no blocks are free: then it can still be submitted, or wait.
    """
    request = _entering(state, carried_in)
    if not 0 < carried_in.kv_tokens < request.known_tokens:
        raise Refused(f"{request.id}: comes with KV of {carried_in.kv_tokens} tokens; submit it")
    decodes = request.produced_tokens > 0 and carried_in.kv_tokens == request.known_tokens - 1
    tokens = carried_in.kv_tokens if decodes else request.known_tokens
    blocks = -(-tokens // state.limits.block_tokens)
    if len(state.running) >= state.limits.sequences_max:
        raise Refused(f"{request.id}: all {state.limits.sequences_max} sequences are running")
    if blocks > state.blocks_free:
        raise Refused(
            f"{request.id}: needs {blocks} KV blocks; {state.blocks_free} of "
            f"{state.limits.blocks} are free"
        )
    state.serial += 1
    state.requests[request.id] = request
    state.blocks_used += blocks
    request.computed_tokens = carried_in.kv_tokens
    request.move("admit")
    insort(state.running, request, key=lambda r: r.place)
    if decodes:
        request.move("decode")
        join(state, request)
    else:
        insort(state.prefilling, request, key=lambda r: r.place)


def abort(state: Batching, name: str) -> Carried | None:
    """End a request here; return it with its partial output, or None where it is not here.

    It may have finished just before: that is no error.
    """
    return _leave(state, name, "abort")


def abort_all(state: Batching) -> list[Carried]:
    """End all requests here, oldest first; return them with their partial outputs."""
    oldest_first = sorted(state.requests.values(), key=lambda request: request.place)
    return [left for r in oldest_first if (left := _leave(state, r.id, "abort"))]


def export(state: Batching, name: str) -> Carried | None:
    """Hand a request over, to be imported elsewhere; None where it is not here."""
    return _leave(state, name, "export")


def view(state: Batching, name: str) -> Carried | None:
    """Return how far a request is; None where it is not here."""
    request = state.requests.get(name)
    return carried(settle(state, request)) if request else None


def stop_admitting(state: Batching) -> None:
    """Let what runs run out: nobody waiting is admitted; the preempted still are."""
    state.admitting = False
    state.serial += 1


def admit_again(state: Batching) -> None:
    """Undo `stop_admitting`."""
    state.admitting = True
    state.serial += 1


def drained(state: Batching) -> bool:
    """Whether nothing runs or is to be resumed; requests may wait."""
    return not state.running and not state.preempted


def pause(state: Batching) -> None:
    """Freeze: no step is planned; requests keep their KV, and new ones wait."""
    state.paused = True
    state.serial += 1


def resume(state: Batching) -> None:
    """Undo `pause`."""
    state.paused = False
    state.serial += 1


def drop_kv(state: Batching) -> int:
    """Drop the KV of all that runs, to be recomputed (as after new weights); return how many."""
    running = list(reversed(state.running))
    for request in running:
        preempt(state, request)
    state.serial += 1
    return len(running)


def set_version(state: Batching, version: int) -> None:
    """Say which weights produce tokens from now on. KV stays: see `drop_kv`."""
    if version < state.version:
        raise Refused(f"weights {version} are older than {state.version}, which are in use")
    for request in state.running:
        settle(state, request)
    state.version = version
    state.serial += 1


def _entering(state: Batching, found: Carried) -> Request:
    """Return a new request from a value; refuse what could never end here."""
    limits = state.limits
    length = found.prompt_tokens + found.response_tokens
    if found.id in state.requests:
        raise Refused(f"{found.id}: is here already")
    if found.prompt_tokens < 1 or not 0 <= found.produced_tokens < found.response_tokens:
        raise Refused(
            f"{found.id}: expected a prompt of 1 token or more, and output that is not complete "
            f"({found.produced_tokens} of {found.response_tokens} tokens)"
        )
    if length > limits.length_max_tokens:
        raise Refused(f"{found.id}: {length} tokens; the model takes {limits.length_max_tokens}")
    if length - 1 > limits.blocks * limits.block_tokens:
        raise Refused(
            f"{found.id}: {length} tokens; all of the KV cache holds "
            f"{limits.blocks * limits.block_tokens}"
        )
    state.places += 1
    return Request(
        id=found.id,
        prompt_tokens=found.prompt_tokens,
        response_tokens=found.response_tokens,
        arrived_ns=found.arrived_ns,
        place=state.places,
        produced_tokens=found.produced_tokens,
        version_first=found.version_first,
        version_last=found.version_last,
        preemptions=found.preemptions,
        first_token_ns=found.first_token_ns,
    )


def _leave(state: Batching, name: str, verb: str) -> Carried | None:
    if (request := state.requests.get(name)) is None:
        return None
    release(state, request)
    request.move("abort" if verb == "abort" else "export")
    del state.requests[name]
    state.serial += 1
    return carried(request)
