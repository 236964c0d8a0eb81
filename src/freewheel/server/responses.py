"""``/v1/responses``: OpenAI's other interface to the same answers, with items, parts, and events that have types.

Nothing is stored here, so each request brings its whole conversation.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from uuid import uuid4

from fastapi.responses import Response
from pydantic import Field

from freewheel.engine.outputs import CompletionOutput, RequestOutput
from freewheel.sampling import SamplingParams
from freewheel.server.bodies import Body, encoded
from freewheel.server.errors import ApiError
from freewheel.server.formats import FlatFormat, Format
from freewheel.server.protocol import MOST_MESSAGES, Sampled
from freewheel.server.replies import Entry, Object, Progress, framed
from freewheel.server.streams import Stream, begun, following, last

if TYPE_CHECKING:
    from freewheel.server.app import Service

LOGPROBS = "message.output_text.logprobs"  # what ``include`` calls them


class Part(Body):
    """A part of a message: text that comes in, or that came out earlier."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(Body):
    """One turn of the conversation. Messages of earlier responses may be given back as they were."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def templated(self) -> Object:
        """What templates take."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class TextOptions(Body):
    """What the text has to look like."""

    format: FlatFormat | None = None


class ResponsesRequest(Sampled):
    """``POST /v1/responses``."""

    renames: ClassVar[Mapping[str, str]] = {
        "logprobs": "top_logprobs",
        "max_tokens": "max_output_tokens",
        "prompt": "input",
    }

    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    store: Literal[False] | None = None
    previous_response_id: None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def format(self) -> tuple[str, Format | None]:
        return "text.format", self.text and self.text.format

    def turns(self) -> list[Object]:
        """The conversation, as templates take it."""
        instructions = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*instructions, {"role": "user", "content": self.input}]
        return [*instructions, *(message.templated() for message in self.input)]

    def sampling_params(self) -> SamplingParams:
        asked = self._asked()
        asked["max_tokens"] = self.max_output_tokens  # None: as many as fit
        if self.include:
            asked["logprobs"] = self.top_logprobs or 0
        elif self.top_logprobs:
            raise ValueError(f"top_logprobs needs include to have {LOGPROBS!r}")
        return SamplingParams(**asked)


async def respond(service: "Service", request: ResponsesRequest) -> Response:
    """``/v1/responses``."""
    service.check_model(request.model)
    service.check_room()
    params = await service.params(request)
    variables = {"add_generation_prompt": True, **request.chat_template_kwargs}
    prompt = await service.templated("input", request.turns, (), variables)
    reply = _Reply(service, request, params)
    outputs = service.run([prompt], params, request)
    if not request.stream:
        [output] = await last(outputs)
        made = await reply.made(output.metrics.output_tokens, lambda: reply.ended(output))
        return Response(made, media_type="application/json")
    first = await begun(outputs)
    return Stream(reply.events(following(first, outputs)), outputs)


class _Reply:
    """One response: the object, its single message, and the events that tell how they come about."""

    def __init__(self, service: "Service", request: ResponsesRequest, params: SamplingParams) -> None:
        self._service = service
        self._logprobs = params.logprobs
        self._message_id = f"msg_{uuid4().hex}"
        self._head: Object = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": params.max_tokens,
            "metadata": request.metadata or {},
            "model": service.config.name,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": request.user,
        }
        self._place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._sent = 0

    def ended(self, output: RequestOutput) -> Object:
        """The response when its text has ended."""
        [one] = output.outputs
        status = _status(one)
        more: Object = {"usage": usage(output)}
        if status == "completed":
            more["completed_at"] = int(time.time())
        else:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._response(status, [self._message(status, [self._part(one)])], **more)

    async def events(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncIterator[bytes]:
        """Server-sent events, as the text comes."""
        yield self._event("response.created", response=self._response("in_progress", []))
        yield self._event("response.in_progress", response=self._response("in_progress", []))
        yield self._event("response.output_item.added", output_index=0, item=self._message("in_progress", []))
        yield self._event("response.content_part.added", **self._place, part=_part("", []))
        progress = Progress()
        output = None
        try:
            async for _, output in outputs:
                [one] = output.outputs
                new = len(one.token_ids) - progress.tokens
                if one.delta or (new and self._logprobs is not None):
                    data = await self.made(new, lambda one=one: self._delta(one, progress))
                    yield framed(data, "response.output_text.delta")
        except ApiError as error:
            failure = {"code": "server_error", "message": error.message}
            yield self._event("response.failed", response=self._response("failed", [], error=failure))
            return
        assert output is not None
        ended = output
        heavy = self._logprobs is not None
        response = await self._service.in_thread(lambda: self.ended(ended)) if heavy else self.ended(output)
        [message] = response["output"]
        [part] = message["content"]
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        for kind, values in (
            ("response.output_text.done", {**self._place, **text}),
            ("response.content_part.done", {**self._place, "part": part}),
            ("response.output_item.done", {"output_index": 0, "item": message}),
            (f"response.{response['status']}", {"response": response}),
        ):
            described = self._described(kind, values)
            yield framed(await self.made(output.metrics.output_tokens, lambda value=described: value), kind)

    async def made(self, tokens: int, make: Callable[[], Any]) -> bytes:
        """JSON of what is made, which has so many tokens."""
        return await self._service.made(0 if self._logprobs is None else tokens * (1 + self._logprobs), make)

    def _delta(self, one: CompletionOutput, progress: Progress) -> Object:
        _, entries = progress.news(one)
        values = {**self._place, "delta": one.delta, "logprobs": self._listed(entries)}
        return self._described("response.output_text.delta", values)

    def _described(self, kind: str, values: Object) -> Object:
        number, self._sent = self._sent, self._sent + 1
        return {"type": kind, "sequence_number": number, **values}

    def _event(self, kind: str, **values: Any) -> bytes:
        return framed(encoded(self._described(kind, values)), kind)

    def _response(self, status: str, items: list[Object], **more: Any) -> Object:
        empty = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        return {**self._head, **empty, "status": status, "output": items, **more}

    def _message(self, status: str, parts: list[Object]) -> Object:
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": parts}

    def _part(self, one: CompletionOutput) -> Object:
        return _part(one.text, self._listed([] if one.logprobs is None else one.logprobs.entries()))

    def _listed(self, entries: Sequence[Entry]) -> list[Object]:
        return [] if self._logprobs is None else list(self._service.texts.chat(entries, self._logprobs)["content"])


def _part(text: str, logprobs: list[Object]) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _status(one: CompletionOutput) -> str:
    return "completed" if one.finish_reason == "stop" else "incomplete"


def usage(output: RequestOutput) -> Object:
    """Tokens as this interface counts them."""
    metrics = output.metrics
    return {
        "input_tokens": metrics.prompt_tokens,
        "input_tokens_details": {"cached_tokens": metrics.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": metrics.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": metrics.prompt_tokens + metrics.output_tokens,
    }
