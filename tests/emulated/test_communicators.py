"""Communicators of one rank, with torch itself: destroying them leaves nobody who holds them."""

from __future__ import annotations

import pytest

from agents.communicators import Communicators
from harness.clock import NS_PER_S
from harness.wire.messages import Groups


def groups(store: str, generation: int) -> Groups:
    return Groups(
        generation=generation,
        world_size=1,
        store=store,
        interface="lo",
        backend="gloo",
        timeout_ns=10 * NS_PER_S,
    )


def test_a_destroyed_group_is_held_by_no_operation_so_its_end_is_timed_where_it_ends() -> None:
    torch = pytest.importorskip("torch.distributed")
    served = torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = f"127.0.0.1:{served.port}"
    communicators = Communicators(rank=0, local=0)
    communicators.make(groups(store, 1))
    operation = communicators.operation(communicators.everyone, "all_reduce", 1024, "float32")
    operation.launch(0)
    communicators.destroy()
    assert operation.member.group is None
    with pytest.raises(ValueError, match="destroyed"):
        operation.launch(1)
    communicators.make(groups(store, 2))
    operation.bind(communicators.everyone)
    operation.launch(2)
    communicators.destroy()
