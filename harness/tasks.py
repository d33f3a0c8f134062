"""Work beside other work: over when its owner leaves, or finished whatever happens.

`asyncio.TaskGroup` is for tasks that all must succeed, and wraps what goes wrong. These are for the
others: one that is given up when nobody needs it any longer, several whose error is to stay what it
is, and one that a cancellation must not cut short.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run `work` beside the body; it is over when the body is left.

    Its result, or its error, is for the body that awaits it. A body that is left without having
    awaited it did not need it.
    """
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        if task.cancel():  # it was still at work
            await asyncio.gather(task, return_exceptions=True)
        elif not task.cancelled():
            task.exception()  # seen: else the loop would report it as lost


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all of these come to; where one fails, or this is cancelled, all are over."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end(tasks)


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and see them ended; how is for whoever awaited them."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Finish `work` and return its result; a cancellation meanwhile takes effect afterwards.

    An error of `work` outranks the cancellation. `work` needs a limit of its own.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
