"""A rank that misbehaves as told by ODD_RANK (``RANK:FAULT``): run in place of `agents.rank`."""

import os
import signal
import sys
import threading

from agents import rank
from agents.collective import Operation
from harness.wire.messages import Message, Resumed

number, fault = os.environ["ODD_RANK"].split(":")
mine = f"--rank={number}" in sys.argv


def never(_self: Operation, *_args: object) -> None:
    threading.Event().wait()


def die_inside(_self: Operation, _iteration: int) -> None:
    sys.stderr.write("about to fall over\n")
    os.kill(os.getpid(), signal.SIGKILL)


def stop_inside(_self: Operation, _iteration: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def answer_late(self: rank.Rank, seq: int, message: Message) -> None:
    if isinstance(message, Resumed):
        threading.Event().wait(0.2)
    honest_say(self, seq, message)


def spoil(self: Operation) -> None:
    honest_fill(self)
    self._sent[0][3] += 1


honest_fill = Operation.fill
honest_say = rank.Rank._say
if mine and fault == "late":
    rank.Rank._samples = never  # type: ignore[method-assign,assignment]
elif mine and fault == "dies":
    Operation.launch = die_inside  # type: ignore[method-assign]
elif mine and fault == "stops":
    Operation.launch = stop_inside  # type: ignore[method-assign]
elif mine and fault == "tardy":
    rank.Rank._say = answer_late  # type: ignore[method-assign]
elif mine and fault == "spoils":
    Operation.fill = spoil  # type: ignore[method-assign]

rank.main()
