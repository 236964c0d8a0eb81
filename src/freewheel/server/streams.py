"""The outputs of a request on their way to a client."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from freewheel.engine.engine import ERRORS
from freewheel.engine.outputs import RequestOutput
from freewheel.sampling import Status
from freewheel.server.errors import ApiError

T = TypeVar("T")
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]  # of several prompts, with the number of each


class Stream(StreamingResponse):
    """Server-sent events. However it ends, even before it begins, its outputs are closed."""

    def __init__(self, events: AsyncIterator[bytes], outputs: Outputs) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._outputs.aclose()


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """What all of them yield as it comes, with the number of each. Left early, it closes them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    # With little room, as each of them brings several steps' news in one to whoever reads slowly.
    news: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(len(streams))

    async def follow(number: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await news.put((number, item))
            await news.put(None)
        except Exception as error:
            await news.put(error)

    readers = [asyncio.create_task(follow(number, stream)) for number, stream in enumerate(streams)]
    try:
        left = len(readers)
        while left:
            item = await news.get()
            if isinstance(item, tuple):
                yield item
            elif item is not None:
                raise item
            else:
                left -= 1
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def before(ends: float, result: Awaitable[T]) -> T:
    """Wait for it, until a time of the loop's clock at most: then TimeoutError is raised."""
    async with asyncio.timeout_at(ends):
        return await result


async def last(outputs: Outputs) -> list[RequestOutput]:
    """Of each prompt the last output.

    Raises:
        ApiError: one of them failed.
    """
    done: dict[int, RequestOutput] = {}
    async with aclosing(outputs):
        async for number, output in outputs:
            done[number] = output
            check(output)
    return [done[number] for number in sorted(done)]


async def begun(outputs: Outputs) -> tuple[int, RequestOutput]:
    """The first output, before a stream of them begins: what is wrong with the request has a status of its own then."""
    try:
        first = await anext(outputs)
        check(first[1])
    except BaseException:
        await outputs.aclose()
        raise
    return first


async def following(first: tuple[int, RequestOutput], outputs: Outputs) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The first output again, and the rest; ApiError where one failed."""
    yield first
    async for item in outputs:
        check(item[1])
        yield item


def check(output: RequestOutput) -> None:
    """ApiError where a choice failed."""
    for one in output.outputs:
        if one.finish_reason == "error":
            asked = one.error == ERRORS[Status.EMPTY] or (one.error or "").startswith("the grammar")
            raise ApiError(400 if asked else 500, one.error or "the request failed")
