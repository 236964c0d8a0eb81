"""The outputs of a request on their way to a client."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from freewheel.engine.outputs import RequestOutput
from freewheel.server.errors import ApiError

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
            raise ApiError(500, one.error or "the request failed")
