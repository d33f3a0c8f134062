"""One rank of training: a child of an agent that makes groups and a trainer, and takes its steps.

``python -m agents.training.rank`` is started with an inherited socket. Its main thread does one
order at a time; a *control* thread reads the line, so that a rank that hangs in a collective can
still be asked where it stands. What fails without being a refusal ends the process: its groups are
of no use any more, and the others notice by its end. So does the line's end.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import queue
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import NoReturn
from zlib import crc32

from agents.frames import Frame
from agents.line import Line
from agents.process import die_with
from agents.training.base import Groups, Trainer
from agents.training.groups import join
from agents.training.orders import FRAMES, Body, Join, Joined, Learned, Publish, Published, Told
from harness.errors import ExitCode, InfrastructureError, UsageError
from harness.wire.messages import Done, Failure, Message
from harness.wire.training import KeepTrainer, PhaseHappened, PlanStep, StepPlan, TrainStep

MODULES = {"paced": "agents.training.paced", "real": "agents.training.torch_trainer"}
"""Which module has a trainer: its ``make(spec, groups)`` returns one."""

_READ_BYTES = 1 << 22


class Rank:
    """State of one rank; all but the line is the main thread's."""

    def __init__(self, line: socket.socket, modules: Mapping[str, str]) -> None:
        self._modules = modules
        self._orders: queue.SimpleQueue[Frame[Body]] = queue.SimpleQueue()
        self.line = Line(line, FRAMES, self._orders.put)
        self._groups: Groups | None = None
        self._trainer: Trainer | None = None
        self._tells = False
        self._version: int | None = None
        """Of its weights, as far as the orders tell."""

    # -- the main thread -----------------------------------------------------------------------

    def work(self) -> NoReturn:
        """Do orders as they come."""
        while True:
            frame = self._orders.get()
            body = frame.body
            self.line.begin(body)
            try:
                answer = self._answer(body)
            except UsageError as error:
                answer = Failure(error=type(error).__name__, text=str(error))
            except Exception as error:  # whatever it raises is this rank's end
                self._fail(frame.seq, error)
            self.line.say(frame.seq, answer)
            self.line.doing = ""

    def _fail(self, seq: int, error: Exception) -> NoReturn:
        """Say what happened, to the log in full, and end."""
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}"
        if broken(error):  # by whoever is at fault: this one follows it, and names nobody
            self.line.say(seq, Failure(error="RankDied", text=f"its group broke: {text}"))
        else:
            self.line.say(seq, Failure(error="RankFailed", text=text))
        sys.stderr.flush()
        os._exit(ExitCode.BUG)

    def _answer(self, body: Body) -> Message:
        match body, self._trainer:
            case Join(), None:
                return self._join(body)
            case TrainStep(), trainer if trainer:
                return self._step(body, trainer)
            case PlanStep(), trainer if trainer:
                return StepPlan(phases=trainer.phases(body.tokens))
            case Publish(), trainer if trainer:
                return self._publish(body, trainer)
            case KeepTrainer(), trainer if trainer:
                return self._keep(body, trainer)
        raise UsageError(f"a rank that {self._joined} is not ordered to {self.line.doing}")

    @property
    def _joined(self) -> str:
        return "has joined" if self._trainer else "has not joined"

    def _join(self, asked: Join) -> Message:
        make = import_module(self._modules[asked.spec.mode]).make
        self._groups = join(asked)
        self._trainer = trainer = make(asked.spec, self._groups)
        self._tells = asked.tells
        backend = "nccl" if self._groups.device.startswith("cuda") else "gloo"
        return Joined(
            facts={"backend": backend, "device": self._groups.device, **trainer.facts},
            parameters=trainer.parameters,
            weights_bytes=trainer.weights_bytes(),
        )

    def _step(self, asked: TrainStep, trainer: Trainer) -> Message:
        assert self._groups is not None
        self._require(asked.version, "cannot be stepped from")
        begin_ns = time.monotonic_ns()
        done = trainer.step(asked.version, asked.samples, self._tell if self._tells else _silent)
        self._version = asked.version + 1
        return Learned(
            dp=self._groups.place.dp,
            tokens=done.tokens,
            micro_batches=done.micro_batches,
            begin_ns=begin_ns,
            end_ns=time.monotonic_ns(),
            compute_ns=done.compute_ns,
            communicate_ns=done.communicate_ns,
            figures=done.figures,
        )

    def _tell(self, phase: PhaseHappened) -> None:
        self.line.say(0, Told(phases=(phase,)))

    def _publish(self, asked: Publish, trainer: Trainer) -> Message:
        self._require(asked.version, "cannot be published")
        begin_ns = time.monotonic_ns()
        path = Path(asked.path) if asked.path else None
        trainer.publish(path, asked.writers)
        end_ns = time.monotonic_ns()
        size, checksum = measured(path) if path else (0, 0)
        return Published(begin_ns=begin_ns, end_ns=end_ns, bytes=size, checksum=checksum)

    def _keep(self, asked: KeepTrainer, trainer: Trainer) -> Message:
        folder = Path(asked.path)
        if not asked.load:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                trainer.keep(folder)
            except OSError as error:
                why = error.strerror or error
                raise InfrastructureError(f"{folder} cannot be written: {why}") from error
            if asked.instead_of:  # every rank of the node: the first one does it
                shutil.rmtree(asked.instead_of, ignore_errors=True)
        elif folder.is_dir():
            self._load(folder, trainer)
        else:
            raise UsageError(f"no training state was kept at {folder} on this node")
        return Done(t_ns=time.monotonic_ns())

    def _load(self, folder: Path, trainer: Trainer) -> None:
        try:
            trainer.load(folder)
        except Exception as error:  # a file that is cut short has as many names as file formats
            if isinstance(error, UsageError) or broken(error):
                raise
            why = f"{type(error).__name__}: {error}"
            raise InfrastructureError(f"what {folder} holds cannot be read: {why}") from error
        self._version = None

    def _require(self, version: int, how: str) -> None:
        if self._version not in (None, version):
            raise UsageError(f"weights of version {version} {how}: here is {self._version}")


def broken(error: BaseException) -> bool:
    """Tell whether a collective failed because another rank is gone or late, as torch says it."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error)


def measured(path: Path) -> tuple[int, int]:
    """Return a file's bytes and its CRC-32, read back."""
    size, checksum = 0, 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            size, checksum = size + len(data), crc32(data, checksum)
    return size, checksum


def _silent(_phase: PhaseHappened) -> None:
    """Tell nobody: the node's lowest rank does."""


def main(modules: Mapping[str, str] = MODULES) -> None:
    """Run one rank; see `agents.training.crew` for who starts it."""
    options = argparse.ArgumentParser(description=__doc__)
    for name in ("parent", "fd", "rank"):
        options.add_argument(f"--{name}", type=int, required=True)
    found = options.parse_args()
    die_with(found.parent)
    faulthandler.enable()
    rank = Rank(socket.socket(fileno=found.fd), modules)
    threading.Thread(target=rank.line.control, name="control", daemon=True).start()
    rank.work()


if __name__ == "__main__":
    main()
