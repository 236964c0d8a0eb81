"""The engine for asynchronous use: it runs in a thread or a process of its own, and text is made on the event loop.

:mod:`freewheel.engine.loop` says what the two sides tell each other.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING
from uuid import uuid4

from freewheel.engine.engine import Engine
from freewheel.engine.inputs import Prompt, make_request
from freewheel.engine.loop import Abort, EngineDeadError, EngineThread, Failed, Finish, News, Step
from freewheel.engine.outputs import Reply, RequestOutput
from freewheel.engine.process import EngineProcess
from freewheel.grammar import Compiler
from freewheel.request import FinishReason, Stats, StepOutput
from freewheel.sampling import SamplingParams
from freewheel.sampling.params import shown

if TYPE_CHECKING:
    from freewheel.models.tokenizer import Tokenizer


logger = logging.getLogger(__name__)


class AsyncEngine:
    """Use it as ``async with AsyncEngine(engine, tokenizer) as engine``, once and from one event loop.

    Args:
        engine: runs in a thread; or it has a process, and is loaded. Not to be used by anyone else from here on.
        tokenizer: the model's.

    Attributes:
        limits: what it takes.
        stats: what it did after its latest step.
    """

    def __init__(self, engine: Engine | EngineProcess, tokenizer: "Tokenizer") -> None:
        self._engine = engine if isinstance(engine, EngineProcess) else EngineThread(engine)
        self.limits = engine.limits
        self.stats = Stats()
        self._tokenizer = tokenizer
        self._names: dict[str, _Active] = {}  # by the user's id, from the moment that one is asked for
        self._active: dict[str, _Active] = {}  # by the engine's id, once they are prepared
        self._ids = count()
        self._dead: str | None = "the engine was not started"
        self._grammars = engine.grammars if isinstance(engine, Engine) else Compiler(tokenizer, engine.limits.logits)
        self._compiling = ThreadPoolExecutor(2, "freewheel-grammars")
        self._entered = False

    @property
    def dead(self) -> str | None:
        """Why it takes no requests; None while it does."""
        return self._dead

    async def __aenter__(self) -> "AsyncEngine":
        if self._entered:
            raise RuntimeError("an AsyncEngine can be entered only once")
        self._entered = True
        self._loop = asyncio.get_running_loop()
        self._dead = None
        if self._grammars is not None:  # if the library is there, the first grammar need not wait for that
            self._compiling.submit(self._grammars.prepare)
        await self._engine.start(self._take)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._die("the engine was closed")
        self._compiling.shutdown(wait=False, cancel_futures=True)
        await self._engine.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt and yield its state whenever it has news, the last time with ``finished``.

        A reader that is slower than the engine gets several steps' news in one. Cancelling the reader, or closing the
        iterator, aborts the request.

        Args:
            prompt: text, token ids, or a mapping with ``prompt_token_ids``.
            sampling_params: None for the defaults.
            request_id: a name for :meth:`abort`, unique among unfinished requests; None takes a random one.
            priority: smaller is more urgent.

        Raises:
            ValueError: the prompt or a parameter is wrong, or ``request_id`` is in use.
            EngineDeadError: the engine takes no more requests. One that it had taken ends with the reason "error".
        """
        name = uuid4().hex if request_id is None else request_id
        if not isinstance(name, str):
            raise ValueError(f"request_id must be a string, not {shown(name)}")
        if name in self._names:
            raise ValueError(f"request_id {shown(name)} is in use")
        active = self._names[name] = _Active(str(next(self._ids)))
        try:
            # In another thread, as a long prompt or list takes long; and grammars, which take longer, in few of them.
            constrained = isinstance(sampling_params, SamplingParams) and sampling_params.grammar is not None
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            preparing = self._loop.run_in_executor(
                self._compiling if constrained else None,
                self._prepare, active.engine_id, name, prompt, sampling_params, priority,
            )  # fmt: skip
            try:
                await asyncio.wait([preparing])
            except asyncio.CancelledError:
                preparing.cancel()
                raise
            if preparing.cancelled():  # by the end of the engine
                raise EngineDeadError(self._dead or "the engine was closed")
            reply = preparing.result()
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            active.reply = reply
            self._active[active.engine_id] = active
            if active.aborted:
                choices = range(reply.request.params.n)
                self._deliver([StepOutput(active.engine_id, i, finish_reason=FinishReason.ABORT) for i in choices])
            else:
                self._engine.send(reply.request)
            output = None
            while output is None or not output.finished:
                await active.news.wait()
                active.news.clear()
                if (output := reply.take()) is not None:
                    yield output
        finally:
            if self._active.pop(active.engine_id, None) is not None and not active.reply.finished:
                self._engine.send(Abort(active.engine_id))
            del self._names[name]

    def _prepare(
        self, engine_id: str, name: str, prompt: Prompt, params: SamplingParams | None, priority: int
    ) -> Reply:
        request, text = make_request(self._tokenizer, engine_id, prompt, params, priority)
        request = self.limits.validate(request, self._grammars)
        if isinstance(self._engine, EngineProcess):  # which compiles the grammar anew: here it need not be kept
            request = replace(request, grammar=None)
        return Reply(request, text, self._tokenizer, request_id=name)

    def abort(self, request_id: str) -> None:
        """End a request; its iterator comes to its end with the reason "abort". Safe to call from any thread."""
        active = self._names.get(request_id)
        if active is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort, active)

    def _abort(self, active: "_Active") -> None:
        """On the loop, where no preparation can come to its end meanwhile."""
        active.aborted = True
        self._engine.send(Abort(active.engine_id))

    def _take(self, news: News) -> None:
        """On the loop: what the engine tells."""
        match news:
            case Step(outputs, stats):
                self.stats = stats
                self._deliver(outputs)
            case Failed(message, details):
                if self._dead is None:
                    logger.error("%s", "\n".join(filter(None, (message, details))))
                self._die(message)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """On the loop: hand a step's outputs to their readers."""
        for output in outputs:
            active = self._active.get(output.request_id)
            if active is None:  # its reader has left
                continue
            try:
                if active.reply.add(output):
                    self._engine.send(Finish(output.request_id, output.index))
            except Exception as error:
                active.reply.fail(f"{type(error).__name__}: {error}")
                self._engine.send(Abort(output.request_id))
            active.news.set()

    def _die(self, message: str) -> None:
        """On the loop: take no more requests, and end all that have no end yet."""
        self._dead = self._dead or message
        self.stats = self.stats._replace(running=0, waiting=0)
        for active in self._active.values():
            active.reply.fail(message)
            active.news.set()


class _Active:
    """A request with a reader."""

    reply: Reply  # set when it is prepared

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id
        self.aborted = False
        self.news = asyncio.Event()
