"""What a bench starts is watched: one that ends by itself is told at once, with its last words."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from harness.bench.children import Children
from harness.errors import InfrastructureError


def test_a_child_that_ends_early_is_named_with_its_last_words(tmp_path: Path) -> None:
    async def main() -> None:
        children = Children(tmp_path, None)
        try:
            children.start("store", ["sleep", "60"])
            children.start("agent-n0", [sys.executable, "-c", "raise SystemExit('no torch here')"])
            async with asyncio.timeout(20):
                with pytest.raises(
                    InfrastructureError, match="n0 ended early, with status 1: no torch"
                ):
                    await children.watch()
        finally:
            children.end()

    asyncio.run(main())


def test_a_child_that_is_killed_early_is_named_with_the_signal(tmp_path: Path) -> None:
    async def main() -> None:
        children = Children(tmp_path, None)
        try:
            children.start("agent-n0", ["sleep", "60"]).kill()
            async with asyncio.timeout(20):
                with pytest.raises(InfrastructureError, match="ended early, killed by SIGKILL: it"):
                    await children.watch()
        finally:
            children.end()

    asyncio.run(main())


def test_children_that_live_are_watched_without_a_word(tmp_path: Path) -> None:
    async def main() -> None:
        children = Children(tmp_path, None)
        try:
            children.start("store", ["sleep", "60"])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await children.watch()
        finally:
            children.end()

    asyncio.run(main())
