"""The engine's side of a conversation with whoever has its requests: it runs in a thread or in a process of its own.

The two sides exchange plain messages. Requests and their ends go in through an inbox; what a step brought comes back
as one message, whoever carries it (:class:`EngineThread`, :class:`freewheel.engine.process.EngineProcess`).
"""

import asyncio
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from freewheel.request import Request, Stats, StepOutput

if TYPE_CHECKING:
    from freewheel.engine.engine import Engine


class Abort(NamedTuple):
    """End a request."""

    request_id: str


class Finish(NamedTuple):
    """End one choice that has met a stop string."""

    request_id: str
    choice: int


class Refuse(NamedTuple):
    """Answer a request that cannot be taken: the last output of each of its choices."""

    outputs: list[StepOutput]


class Close(NamedTuple):
    """End the loop."""


class Step(NamedTuple):
    """What a step brought, and what the engine does after it."""

    outputs: list[StepOutput]
    stats: Stats


class Failed(NamedTuple):
    """The engine is no more: why, and the traceback if a step raised."""

    message: str
    details: str = ""


Order = Request | Abort | Finish | Refuse | Close
News = Step | Failed


class EngineDeadError(RuntimeError):
    """The engine takes no more requests: it was closed, a step raised, or its process ended."""


def run(engine: "Engine", inbox: "SimpleQueue[Order]", tell: Callable[[News, bool], None]) -> None:
    """Step until :class:`Close` comes or a step raises.

    Args:
        engine: it is not used by anyone else.
        inbox: a look at it takes no system call: between steps there is no time for that.
        tell: delivers a message. It must not wait for the reader, unless its second argument says that there is
            nothing else to do.
    """
    told = None
    try:
        while True:
            while not inbox.empty() or not engine.has_unfinished:
                if inbox.empty():
                    tell(Step([], engine.stats), True)
                match inbox.get():
                    case Request() as request:
                        engine.add(request, checked=True)
                    case Abort(request_id):
                        engine.abort(request_id)
                    case Finish(request_id, choice):
                        engine.finish(request_id, choice)
                    case Refuse(outputs):
                        tell(Step(outputs, engine.stats), False)
                    case Close():
                        return
            outputs, stats = engine.step(), engine.stats
            if outputs or stats != told:
                tell(Step(outputs, stats), False)
                told = stats
    except BaseException as error:
        with suppress(OSError, RuntimeError):  # nobody may listen any more
            tell(Failed(f"the engine failed: {type(error).__name__}: {error}", traceback.format_exc()), True)


class EngineThread:
    """An engine in a thread of this process.

    Args:
        engine: not to be used by anyone else from here on.

    Attributes:
        limits: what it takes.
    """

    def __init__(self, engine: "Engine") -> None:
        self.limits = engine.limits
        self._engine = engine
        self._inbox: SimpleQueue[Order] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self, deliver: Callable[[News], None]) -> None:
        """Let it run; ``deliver`` is called on the loop with its messages."""
        loop = asyncio.get_running_loop()

        def tell(news: News, idle: bool) -> None:
            loop.call_soon_threadsafe(deliver, news)

        self._thread = threading.Thread(
            target=run, args=(self._engine, self._inbox, tell), name="freewheel-engine", daemon=True
        )
        self._thread.start()

    def send(self, order: Order) -> None:
        """Give it a message. Returns at once."""
        self._inbox.put(order)

    async def close(self) -> None:
        """Wait for its end, which comes with the end of a step."""
        self.send(Close())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
