"""A coordinator to be killed: welcomes the agents named, prints its address and READY, waits."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from harness.wire import keys
from harness.wire.link import Link


async def main(folder: Path, lost_ns: int, names: list[str]) -> None:
    pair, allowed = keys.load(folder, keys.COORDINATOR), keys.allow_list(folder, names)
    async with Link(
        bind="127.0.0.1:0",
        pair=pair,
        agents=allowed,
        run="r",
        beat_ns=lost_ns // 5,
        lost_ns=lost_ns,
    ) as link:
        sys.stdout.write(f"{link.address}\n")
        sys.stdout.flush()
        await link.ready(names, 20 * 10**9)
        sys.stdout.write("READY\n")
        sys.stdout.flush()
        await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
