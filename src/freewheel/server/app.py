"""The application: routes, limits, and the stream of a reply.

Tokenising and templating happen in threads, the model runs in the engine's own: the event loop is for HTTP alone.
"""

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freewheel import __version__
from freewheel.engine.async_engine import AsyncEngine, EngineDeadError
from freewheel.engine.engine import Engine
from freewheel.engine.inputs import Prompt, TokensPrompt
from freewheel.engine.outputs import CompletionOutput, RequestOutput
from freewheel.models.tokenizer import Tokenizer
from freewheel.sampling import SamplingParams
from freewheel.server.errors import ApiError, answer_unfit
from freewheel.server.metrics import Metrics
from freewheel.server.protocol import (
    Body,
    ChatCompletionRequest,
    Completed,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
    field_of,
    renamed,
)
from freewheel.server.replies import (
    Answer,
    Object,
    Progress,
    chat_logprobs,
    completion_logprobs,
    event,
    usage,
)
from freewheel.server.responses import ResponsesRequest, respond
from freewheel.server.streams import Outputs, Stream, begun, following, last

MOST_PROMPTS = 256  # of a request


@dataclass(frozen=True)
class ServerConfig:
    """Options of the server.

    Attributes:
        name: what the model is called.
        api_key: that clients have to send, if any.
        max_requests: most prompts that run or wait; more are refused with 429.
        max_body: most bytes of a request.
        timeout: seconds until a request is aborted; None: never.
        cors_origins: web pages of these origins may ask.
    """

    name: str
    api_key: str | None = field(default=None, repr=False)
    max_requests: int = 1024
    max_body: int = 2 * 2**20
    timeout: float | None = None
    cors_origins: tuple[str, ...] = ()


class Limits:
    """Middleware that refuses what is too large, or comes without the key, before any of it is looked at.

    It counts all answers that are errors, whoever gives them.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics) -> None:
        self._app, self._config, self._metrics = app, config, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._metrics.refused(message["status"])
            await send(message)

        headers = {name.lower(): value for name, value in scope["headers"]}
        error = self._refused(scope["path"], headers)
        if error is not None:
            await error.response()(scope, receive, noted)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._config.max_body:
                raise self._too_large()
            return message

        async def answered(message: Message) -> None:
            if size <= self._config.max_body:
                await noted(message)
            elif message["type"] == "http.response.start":  # of FastAPI, which makes 400 of whatever reading raises
                await self._too_large().response()(scope, receive, noted)

        await self._app(scope, counted, answered)

    def _refused(self, path: str, headers: Mapping[bytes, bytes]) -> ApiError | None:
        key = self._config.api_key
        if key is not None and path.startswith(("/v1", "/tokenize", "/detokenize")):
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), key.encode()):
                return ApiError(401, "the API key is missing or wrong", headers={"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._config.max_body:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than the limit of {self._config.max_body} bytes")


class Service:
    """Makes replies by one engine.

    Attributes:
        engine: it runs.
        active: prompts that run or wait.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self.engine = AsyncEngine(engine, tokenizer)
        self.tokenizer, self.config = tokenizer, config
        self.max_model_len = engine.max_model_len
        self.active = 0
        self.metrics = Metrics(engine)

    def check_model(self, name: str | None) -> None:
        """ApiError where it is another one."""
        if name is not None and name != self.config.name:
            raise ApiError(404, f"model {name[:100]!r} does not exist: this server has {self.config.name!r}", "model")

    def params(self, request: Sampled) -> SamplingParams:
        """ApiError names the field that is wrong."""
        with naming(request):
            return request.sampling_params()

    async def run(self, prompts: Sequence[Prompt], params: SamplingParams, request: Sampled) -> Outputs:
        """The outputs of all prompts as they come, with the number of each. Left early, it aborts what is unfinished.

        Raises:
            ApiError: too many requests, a prompt that does not fit, time is up, or the engine is dead.
        """
        if self.active + len(prompts) > self.config.max_requests:
            raise ApiError(429, "too many requests are waiting; try again later", headers={"Retry-After": "1"})
        self.active += len(prompts)
        # One item, so that a client that reads slowly gets several steps' news in one.
        news: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(1)

        async def follow(number: int, prompt: Prompt) -> None:
            try:
                async with aclosing(self.engine.generate(prompt, params, priority=request.priority)) as outputs:
                    async for output in outputs:
                        if output.finished:
                            self.metrics.ended(output)
                        await news.put((number, output))
                await news.put(None)
            except Exception as error:
                await news.put(error)

        timeout = self.config.timeout
        ends = None if timeout is None else asyncio.get_running_loop().time() + timeout
        readers = [asyncio.create_task(follow(number, prompt)) for number, prompt in enumerate(prompts)]
        try:
            left = len(readers)
            while left:
                async with asyncio.timeout_at(ends):  # of one wait: a stream's first is another task's than the rest
                    item = await news.get()
                if isinstance(item, tuple):
                    yield item
                elif isinstance(item, BaseException):
                    raise item
                else:
                    left -= 1
        except TimeoutError:
            raise ApiError(504, f"the request took longer than {self.config.timeout:g} seconds") from None
        except ValueError as error:
            message = renamed(str(error), request)
            raise ApiError(400, message, field_of(message, request)) from None
        except EngineDeadError as error:
            raise ApiError(503, str(error)) from None
        finally:
            self.active -= len(prompts)
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def complete(self, request: CompletionRequest) -> Response:
        """``/v1/completions``."""
        self.check_model(request.model)
        params = self.params(request)
        with naming(request):
            prompts = request.prompts()
        if len(prompts) > MOST_PROMPTS:
            raise ApiError(400, f"prompt has {len(prompts)} entries, more than the limit of {MOST_PROMPTS}", "prompt")
        answer = Answer("text_completion", "cmpl", self.config.name)

        def choice(number: int, output: RequestOutput, one: CompletionOutput, progress: Progress) -> Object:
            """What is new of a choice; all, the first time."""
            first = not (progress.characters or progress.tokens)
            ids, entries = progress.news(one)
            text = one.delta if request.stream else one.text
            listed: list[Any] = list(entries)
            shown = list(ids)
            start = progress.characters
            if request.echo and first:
                text = (output.prompt or self.tokenizer.decode(output.prompt_token_ids)) + text
                if output.prompt_logprobs is not None:
                    listed = [*output.prompt_logprobs, *listed]
                    shown = [*output.prompt_token_ids, *shown]
            progress.characters += len(text)
            made: Object = {"index": number * params.n + one.index, "text": text, "finish_reason": one.finish_reason}
            made["logprobs"] = None if request.logprobs is None else completion_logprobs(listed, shown, start)
            made["stop_reason"] = one.stop_reason
            if request.return_token_ids:
                made |= {"token_ids": ids, "prompt_token_ids": output.prompt_token_ids if first else None}
            return made

        return await self._reply(request, prompts, params, answer, choice, None)

    async def chat(self, request: ChatCompletionRequest) -> Response:
        """``/v1/chat/completions``."""
        self.check_model(request.model)
        params = self.params(request)
        turns = [message.templated() for message in request.messages]
        prompt = await self.templated("messages", turns, request.add_generation_prompt, request.chat_template_kwargs)
        answer = Answer("chat.completion", "chatcmpl", self.config.name)

        def choice(number: int, output: RequestOutput, one: CompletionOutput, progress: Progress) -> Object:
            ids, entries = progress.news(one)
            part: Object = {"content": one.delta if request.stream else one.text}
            if not request.stream:
                part = {"role": "assistant", **part, "refusal": None}
            made: Object = {"index": one.index, "delta" if request.stream else "message": part}
            made["logprobs"] = chat_logprobs(entries, ids, params.logprobs or 0) if request.logprobs else None
            made |= {"finish_reason": one.finish_reason, "stop_reason": one.stop_reason}
            if request.return_token_ids:
                made["token_ids"] = ids
            return made

        def begin(index: int) -> Object:
            return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

        return await self._reply(request, [prompt], params, answer, choice, begin)

    async def templated(
        self, field: str, turns: list[Object], add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> TokensPrompt:
        """A conversation as the model's template writes it; ``field`` is where the client gave it."""
        if clash := variables.keys() & {"messages", "tools", "add_generation_prompt"}:
            raise ApiError(400, f"chat_template_kwargs must not have {sorted(clash)[0]}", "chat_template_kwargs")
        options = {"add_generation_prompt": add_generation_prompt, **variables}
        try:
            ids, text = await asyncio.to_thread(self.tokenizer.encode_chat, turns, **options)
        except ValueError as error:
            raise ApiError(400, f"{field}: {error}", field) from None
        return {"prompt_token_ids": ids, "prompt": text}

    async def _reply(
        self,
        request: Completed,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        answer: Answer,
        choice: Callable[[int, RequestOutput, CompletionOutput, Progress], Object],
        begin: Callable[[int], Object] | None,
    ) -> Response:
        outputs = self.run(prompts, params, request)
        if not request.stream:
            done = await last(outputs)
            choices = [
                choice(number, output, one, Progress()) for number, output in enumerate(done) for one in output.outputs
            ]
            return JSONResponse(answer.whole(choices, done))
        first = await begun(outputs)
        return Stream(self._events(request, following(first, outputs), params, answer, choice, begin), outputs)

    async def _events(
        self,
        request: Completed,
        outputs: AsyncIterator[tuple[int, RequestOutput]],
        params: SamplingParams,
        answer: Answer,
        choice: Callable[[int, RequestOutput, CompletionOutput, Progress], Object],
        begin: Callable[[int], Object] | None,
    ) -> AsyncIterator[bytes]:
        """Server-sent events: a chunk for each choice that has news, at the end the usage if it is asked for."""
        options = request.stream_options
        counts = options is not None and (options.include_usage or options.continuous_usage_stats)
        progress: dict[tuple[int, int], Progress] = {}
        ended: set[tuple[int, int]] = set()
        latest: dict[int, RequestOutput] = {}

        try:
            async for number, output in outputs:
                latest[number] = output
                for one in output.outputs:
                    key = number, one.index
                    if key not in progress:
                        progress[key] = Progress()
                        if begin is not None:
                            yield event(answer.chunk([begin(one.index)]))
                    silent = not (one.delta or params.logprobs is not None or request.return_token_ids)
                    nothing = silent or len(one.token_ids) == progress[key].tokens
                    if key in ended or (nothing and not one.finish_reason):
                        continue
                    if one.finish_reason:
                        ended.add(key)
                    more = {}
                    if options is not None and options.continuous_usage_stats:
                        more = {"usage": usage([output])}
                    yield event(answer.chunk([choice(number, output, one, progress[key])], **more))
            if counts:
                yield event(answer.chunk([], usage=usage([latest[number] for number in sorted(latest)])))
        except ApiError as error:
            yield event(error.body())
        yield b"data: [DONE]\n\n"

    async def tokenize(self, request: TokenizeRequest) -> Object:
        """``/tokenize``."""
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "prompt or messages must be given, and not both", "prompt")
        if request.messages is not None:
            turns = [message.templated() for message in request.messages]
            prompt = await self.templated("messages", turns, request.add_generation_prompt, {})
            ids = prompt["prompt_token_ids"]
        else:
            try:
                ids = await asyncio.to_thread(self.tokenizer.encode, request.prompt or "", request.add_special_tokens)
            except ValueError as error:
                raise ApiError(400, f"prompt: {error}", "prompt") from None
        return {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}

    async def detokenize(self, request: DetokenizeRequest) -> Object:
        """``/detokenize``."""
        self.check_model(request.model)
        unknown = [id for id in request.tokens if not 0 <= id < self.tokenizer.vocab_size]
        if unknown:
            raise ApiError(400, f"tokens has an id outside the vocabulary of {self.tokenizer.vocab_size}", "tokens")
        return {"prompt": await asyncio.to_thread(self.tokenizer.decode, request.tokens, False)}


class naming:  # noqa: N801
    """A context in which a ValueError becomes the answer 400 that names the client's field."""

    def __init__(self, request: Body) -> None:
        self._request = request

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError):
            message = renamed(str(error), self._request)
            raise ApiError(400, message, field_of(message, self._request)) from None


async def while_there(request: Request, reply: Awaitable[Response]) -> Response:
    """The reply, unless the client leaves before it is made: then nobody works on it any more."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    making, leaving = asyncio.ensure_future(reply), asyncio.create_task(left())
    try:
        await asyncio.wait({making, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await making if making.done() else Response(status_code=499)  # which nobody sees
    finally:
        for task in (making, leaving):
            task.cancel()
        await asyncio.gather(making, leaving, return_exceptions=True)


def make_app(engine: Engine, tokenizer: Tokenizer, config: ServerConfig) -> FastAPI:
    """The application. The engine is its own from here on, prepared, and runs while the application does."""
    service = Service(engine, tokenizer, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.engine:
            yield

    app = FastAPI(title="Freewheel", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine takes requests."""
        return Response(status_code=503 if service.engine.dead else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/v1/models")
    async def models() -> Object:
        return {"object": "list", "data": [card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Object:
        service.check_model(name)
        return card()

    def card() -> Object:
        about = {"created": 0, "owned_by": "freewheel", "max_model_len": service.max_model_len}
        return {"id": config.name, "object": "model", **about}

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await while_there(request, service.complete(body))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await while_there(request, service.chat(body))

    @app.post("/v1/responses", response_model=None)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await while_there(request, respond(service, body))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Object:
        return await service.tokenize(body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Object:
        return await service.detokenize(body)

    async def answer_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        reasons = {404: f"there is nothing at {request.url.path[:200]!r}", 405: "the method is not allowed here"}
        message = reasons.get(error.status_code, str(error.detail))
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def answer_api(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    handlers: list[tuple[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]] = [
        (ApiError, answer_api),
        (RequestValidationError, answer_unfit),
        (HTTPException, answer_http),
    ]
    for kind, handler in handlers:
        app.add_exception_handler(kind, handler)
    app.add_middleware(Limits, config=config, metrics=service.metrics)
    if config.cors_origins:
        from fastapi.middleware.cors import CORSMiddleware

        origins = list(config.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app
