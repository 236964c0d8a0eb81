"""The application: routes, limits, and the stream of a reply.

Tokenising and templating happen in threads, the model runs in a process of its own: the event loop is for HTTP alone.
"""

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freewheel import __version__
from freewheel.engine.async_engine import AsyncEngine, EngineDeadError
from freewheel.engine.engine import Engine
from freewheel.engine.inputs import Prompt, TokensPrompt
from freewheel.engine.outputs import CompletionOutput, RequestOutput
from freewheel.engine.process import EngineProcess
from freewheel.models.tokenizer import Tokenizer
from freewheel.sampling import SamplingParams
from freewheel.server.assets import page_routes
from freewheel.server.bodies import Body, encoded, read
from freewheel.server.description import openapi
from freewheel.server.errors import ApiError
from freewheel.server.metrics import Metrics
from freewheel.server.protocol import (
    ChatCompletionRequest,
    Completed,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
    field_of,
    renamed,
)
from freewheel.server.protocol import Message as ChatMessage
from freewheel.server.replies import (
    Answer,
    Object,
    Progress,
    Texts,
    event,
    framed,
    listed,
    token_fields,
    usage,
)
from freewheel.server.responses import ResponsesRequest, respond
from freewheel.server.streams import Outputs, Stream, before, begun, following, last, merged
from freewheel.server.tools import Function, described, told

LONG = 2**14  # characters that are tokenised whatever becomes of them
MANY = 1000  # log probabilities, or tokens, that are written without a thread
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)  # what clients may call a request in headers and logs

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


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

    It names every request, and counts and logs all answers, whoever gives them.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics) -> None:
        self._app, self._config, self._metrics = app, config, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        name = given if REQUEST_ID.fullmatch(given) else uuid4().hex
        status, size = 0, 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
                if status >= 400:
                    self._metrics.refused(status)
            await send(message)

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._config.max_body:
                raise self._too_large()
            return message

        try:
            error = self._refused(scope["path"], headers)
            await (self._app if error is None else error.response())(scope, counted, noted)
        finally:
            body = scope.get("state", {}).get("body")
            counts = list(body.metrics.values()) if isinstance(body, Sampled) else []
            logger.info(
                "%s %s %s %s, %d + %d tokens, %.3f s", name, scope["method"],
                scope["path"][:200].encode("unicode_escape").decode(), status or "left",
                sum(count.prompt_tokens for count in counts), sum(count.output_tokens for count in counts),
                time.perf_counter() - began,
            )  # fmt: skip

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

    def __init__(self, engine: Engine | EngineProcess, tokenizer: Tokenizer, config: ServerConfig) -> None:
        self.engine = AsyncEngine(engine, tokenizer)
        self.tokenizer, self.config = tokenizer, config
        self.max_model_len = engine.limits.max_model_len
        self.active = 0
        self.metrics = Metrics(self.engine)
        self.texts = Texts(tokenizer)
        # One: more of them would only take the interpreter from the event loop more often.
        self._thread = ThreadPoolExecutor(1, "freewheel-server")

    async def __aenter__(self) -> None:
        await self.engine.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await self.engine.__aexit__(*error)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """ApiError where it is another one."""
        if name is not None and name != self.config.name:
            raise ApiError(404, f"model {name[:100]!r} does not exist: this server has {self.config.name!r}", "model")

    def check_room(self, prompts: int = 1) -> None:
        """ApiError where that many more cannot be taken."""
        if self.active + prompts > self.config.max_requests:
            raise ApiError(429, "too many requests are waiting; try again later", headers={"Retry-After": "1"})
        if self.engine.dead:
            raise ApiError(503, self.engine.dead)

    def check_length(self, field: str, length: int, unit: str = "characters") -> None:
        """ApiError where a prompt is too long, whatever tokens its text may have: that is known before these are."""
        most = self.max_model_len
        if unit == "characters":
            most = max(most * self.tokenizer.longest, LONG) if length > LONG else LONG
        if length > most:
            limit = f"the longest sequence of {self.max_model_len} tokens can hold"
            raise ApiError(400, f"{field} has {length} {unit}, more than {limit}", field)

    async def params(self, request: Sampled) -> SamplingParams:
        """ApiError names the field that is wrong."""
        return await self.within(request, request.sampling_params)

    async def within(self, request: Body, make: Callable[[], Value]) -> Value:
        """What is made of a request, in a thread if that may take long. A ValueError becomes status 400."""
        try:
            return await self.in_thread(make) if request.large else make()
        except ValueError as error:
            message = renamed(str(error), request)
            raise ApiError(400, message, field_of(message, request)) from None

    async def in_thread(self, make: Callable[[], Value]) -> Value:
        """The value of a long computation. The event loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    async def run(self, prompts: Sequence[Prompt], params: SamplingParams, request: Sampled) -> Outputs:
        """The outputs of all prompts as they come, with the number of each. Left early, it aborts what is unfinished.

        Raises:
            ApiError: too many requests, a prompt that does not fit, time is up, or the engine is dead.
        """
        self.check_room(len(prompts))
        self.active += len(prompts)
        timeout = self.config.timeout
        ends = None if timeout is None else asyncio.get_running_loop().time() + timeout
        try:
            streams = [self.engine.generate(prompt, params, priority=request.priority) for prompt in prompts]
            async with aclosing(merged(streams)) as outputs:
                while True:
                    coming = anext(outputs, None)
                    item = await (coming if ends is None else before(ends, coming))
                    if item is None:
                        break
                    number, output = item
                    self.metrics.observe(output, request.metrics.get(number))
                    request.metrics[number] = output.metrics
                    yield item
        except TimeoutError:
            raise ApiError(504, f"the request took longer than {timeout:g} seconds") from None
        except ValueError as error:
            message = renamed(str(error), request)
            raise ApiError(400, message, field_of(message, request)) from None
        except EngineDeadError as error:
            raise ApiError(503, str(error)) from None
        finally:
            self.active -= len(prompts)

    async def complete(self, request: CompletionRequest) -> Response:
        """``/v1/completions``."""
        self.check_model(request.model)
        params = await self.params(request)
        prompts = await self.within(request, request.prompts)
        self.check_room(len(prompts))
        for prompt in prompts:
            self.check_length("prompt", len(prompt), "characters" if isinstance(prompt, str) else "tokens")
        answer = Answer("text_completion", "cmpl", self.config.name)

        def choice(number: int, output: RequestOutput, one: CompletionOutput, progress: Progress) -> Object:
            """What is new of a choice; all, the first time."""
            first = not (progress.characters or progress.tokens)
            ids, entries = progress.news(one)
            text = one.delta if request.stream else one.text
            listed = entries
            shown = list(ids)
            start = progress.characters
            if request.echo and first:
                text = (output.prompt or self.tokenizer.decode(output.prompt_token_ids)) + text
                if output.prompt_logprobs is not None:
                    listed = [*output.prompt_logprobs.entries(), *listed]
                    shown = [*output.prompt_token_ids, *shown]
            progress.characters += len(text)
            made: Object = {"index": number * params.n + one.index, "text": text, "finish_reason": one.finish_reason}
            made["logprobs"] = None if request.logprobs is None else self.texts.completion(listed, shown, start)
            made["stop_reason"] = one.stop_reason
            if request.return_token_ids:
                made |= {**token_fields(one, ids), "prompt_token_ids": output.prompt_token_ids if first else None}
            return made

        return await self._reply(request, prompts, params, answer, choice, None)

    async def chat(self, request: ChatCompletionRequest) -> Response:
        """``/v1/chat/completions``."""
        self.check_model(request.model)
        self.check_room()
        params = await self.params(request)
        variables = {"add_generation_prompt": request.add_generation_prompt, **request.chat_template_kwargs}
        prompt = await self.templated("messages", lambda: templated(request.messages), request.offered, variables)
        answer = Answer("chat.completion", "chatcmpl", self.config.name)

        def choice(number: int, output: RequestOutput, one: CompletionOutput, progress: Progress) -> Object:
            ids, entries = progress.news(one)
            part, reason = answered(request, one, progress)
            if not request.stream:
                part = {"role": "assistant", **part, "refusal": None}
            made: Object = {"index": one.index, "delta" if request.stream else "message": part}
            made["logprobs"] = self.texts.chat(entries, params.logprobs or 0) if request.logprobs else None
            made |= {"finish_reason": reason, "stop_reason": one.stop_reason}
            if request.return_token_ids:
                made |= token_fields(one, ids)
            return made

        def begin(index: int) -> Object:
            return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

        return await self._reply(request, [prompt], params, answer, choice, begin)

    async def templated(
        self, field: str, turns: Callable[[], list[Object]], tools: Sequence[Function], variables: Mapping[str, Any]
    ) -> TokensPrompt:
        """A conversation as the model's template writes it; ``field`` is where the client gave it."""

        def render() -> TokensPrompt:
            native = self.tokenizer.knows_tools
            given, options = told(turns(), tools, native), dict(variables)
            if tools and native:
                options["tools"] = [described(tool) for tool in tools]
            self.check_length(field, characters(given, options.get("tools", ())))
            ids, text = self.tokenizer.encode_chat(given, **options)
            return {"prompt_token_ids": ids, "prompt": text}

        if clash := variables.keys() & {"messages", "tools"}:
            raise ApiError(400, f"chat_template_kwargs must not have {sorted(clash)[0]}", "chat_template_kwargs")
        try:
            return await asyncio.to_thread(render)
        except ValueError as error:
            raise ApiError(400, f"{field}: {str(error)[:500]}", field) from None

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

            def whole() -> Object:
                choices = [
                    choice(n, output, one, Progress()) for n, output in enumerate(done) for one in output.outputs
                ]
                return answer.whole(choices, done)

            entries = sum(
                listed(params, output.metrics.output_tokens, len(output.prompt_logprobs or ())) for output in done
            )
            return Response(await self.made(entries, whole), media_type="application/json")
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
                events: list[bytes] = []
                for one in output.outputs:
                    key = number, one.index
                    if key not in progress:
                        progress[key] = Progress()
                        if begin is not None:
                            events.append(event(answer.chunk([begin(one.index)])))
                    silent = not (one.delta or params.logprobs is not None or request.return_token_ids)
                    nothing = silent or len(one.token_ids) == progress[key].tokens
                    if key in ended or (nothing and not one.finish_reason):
                        continue
                    if one.finish_reason:
                        ended.add(key)
                    more = {}
                    if options is not None and options.continuous_usage_stats:
                        more = {"usage": usage([output])}

                    def chunk(
                        output: RequestOutput = output, one: CompletionOutput = one, more: Object = more, key: Any = key
                    ) -> Object:
                        return answer.chunk([choice(key[0], output, one, progress[key])], **more)

                    new = len(one.token_ids) - progress[key].tokens
                    prompt = 0 if progress[key].tokens else len(output.prompt_logprobs or ())
                    events.append(framed(await self.made(listed(params, new, prompt), chunk)))
                if events:
                    yield b"".join(events)
            if counts:
                yield event(answer.chunk([], usage=usage([latest[number] for number in sorted(latest)])))
        except ApiError as error:
            yield event(error.body())
        yield b"data: [DONE]\n\n"

    async def made(self, entries: int, make: Callable[[], Any]) -> bytes:
        """JSON of what is made, which has so many log probabilities or tokens."""
        return await self.worked(entries, lambda many: encoded(make(), in_pieces=many))

    async def worked(self, entries: int, make: Callable[[bool], Value]) -> Value:
        """What is made of so many log probabilities or tokens: in a thread if they are many, which ``make`` is told."""
        return make(False) if entries <= MANY else await self.in_thread(lambda: make(True))

    async def tokenize(self, request: TokenizeRequest) -> Response:
        """``/tokenize``."""
        self.check_model(request.model)
        messages, text = request.messages, request.prompt
        if (text is None) == (messages is None):
            raise ApiError(400, "prompt or messages must be given, and not both", "prompt")
        if messages is not None:
            variables = {"add_generation_prompt": request.add_generation_prompt}
            ids = (await self.templated("messages", lambda: templated(messages), (), variables))["prompt_token_ids"]
        else:
            self.check_length("prompt", len(text or ""))
            try:
                ids = await asyncio.to_thread(self.tokenizer.encode, text or "", request.add_special_tokens)
            except ValueError as error:
                raise ApiError(400, f"prompt: {error}", "prompt") from None
        about = {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}
        return Response(await self.made(len(ids), lambda: about), media_type="application/json")

    async def detokenize(self, request: DetokenizeRequest) -> Response:
        """``/detokenize``."""
        self.check_model(request.model)

        def decode() -> str:
            size = self.tokenizer.vocab_size
            if not all(type(id) is int and 0 <= id < size for id in request.tokens):
                raise ValueError(f"tokens must hold token ids below {size}, the vocabulary's size")
            return self.tokenizer.decode(request.tokens, False)

        return JSONResponse({"prompt": await self.within(request, decode)})


def answered(request: ChatCompletionRequest, one: CompletionOutput, progress: Progress) -> tuple[Object, str | None]:
    """What a choice says, or of a stream what is new, with the calls of tools read out of it; and why it ended."""
    text, reason = one.delta if request.stream else one.text, one.finish_reason
    if progress.reader is None:
        progress.reader = request.reader()
    reader = progress.reader
    if reader is None:
        return {"content": text}, reason
    content, parts = reader.push(text, last=reason is not None)
    if request.stream:
        return ({"content": content} if content else {}) | ({"tool_calls": parts} if parts else {}), (
            reader.finish_reason(reason)
        )
    calls = [call.told() for call in reader.read]
    return {"content": content or None} | ({"tool_calls": calls} if calls else {}), reader.finish_reason(reason)


def templated(messages: Sequence[ChatMessage]) -> list[Object]:
    """A conversation as templates take it."""
    return [message.templated() for message in messages]


def characters(turns: Sequence[Object], tools: Sequence[Object]) -> int:
    """How many a template will write of these, at least."""
    calls = [call["function"]["arguments"] for turn in turns for call in turn.get("tool_calls", ())]
    given = [json.dumps(one, ensure_ascii=False) for one in (*calls, *tools)]
    return sum(map(len, given)) + sum(len(turn["content"]) for turn in turns)


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


def make_app(engine: Engine | EngineProcess, tokenizer: Tokenizer, config: ServerConfig) -> FastAPI:
    """The application. The engine is its own from here on, prepared or loaded, and runs while the application does."""
    service = Service(engine, tokenizer, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    description = openapi(__version__)
    app.state.service = service
    app.routes.extend(page_routes())

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

    @app.get("/openapi.json")
    async def described() -> JSONResponse:
        return JSONResponse(description)

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
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionRequest, service.in_thread)
        return await while_there(request, service.complete(body))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatCompletionRequest, service.in_thread)
        return await while_there(request, service.chat(body))

    @app.post("/v1/responses", response_model=None)
    async def responses(request: Request) -> Response:
        body = await read(request, ResponsesRequest, service.in_thread)
        return await while_there(request, respond(service, body))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read(request, TokenizeRequest, service.in_thread)
        return await while_there(request, service.tokenize(body))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read(request, DetokenizeRequest, service.in_thread)
        return await while_there(request, service.detokenize(body))

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
