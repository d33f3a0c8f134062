"""An agent whose work gets stuck: `StopRanks` starts a child and then blocks the event loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import agents.agent
from agents.labour import Handler, Notify
from harness.wire import keys
from harness.wire.meeting import Coordinator
from harness.wire.messages import Message, StopRanks
from harness.wire.sockets import split_address


class Stuck:
    def __init__(self, notify: Notify, pid_file: Path) -> None:
        self.pid_file = pid_file
        self.child: subprocess.Popen[bytes] | None = None

    def commands(self) -> dict[type[Message], Handler]:
        return {StopRanks: self._block}

    async def _block(self, asked: StopRanks, deadline_ns: int) -> Message:
        self._block_the_loop()
        raise AssertionError("nobody killed this process")

    def _block_the_loop(self) -> None:
        self.child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        self.pid_file.write_text(str(self.child.pid))
        time.sleep(60)

    async def close(self) -> None:
        raise AssertionError("a stuck loop cannot close its labour")

    def kill_now(self) -> None:
        if self.child:
            os.killpg(self.child.pid, signal.SIGKILL)


def main(name: str, address: str, folder: Path, end_within_ns: int) -> int:
    agents.agent.END_WITHIN_NS = end_within_ns
    pair, key = keys.load(folder, name), keys.load_public(folder / "coordinator.pub")
    coordinator = Coordinator(*split_address(address), key, pair)
    return agents.agent.run(
        coordinator, 20 * 10**9, lambda notify, _: (Stuck(notify, folder / "child"),)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
