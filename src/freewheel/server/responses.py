"""``/v1/responses``: OpenAI's other interface to the same answers, with items, parts, and events that have types.

Nothing is stored here, so each request brings its whole conversation.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from uuid import uuid4

from fastapi.responses import Response
from pydantic import Field, Tag

from freewheel.engine.outputs import CompletionOutput, RequestOutput
from freewheel.sampling import SamplingParams
from freewheel.server.bodies import Body, by_type, encoded
from freewheel.server.errors import ApiError
from freewheel.server.formats import FlatFormat, Format
from freewheel.server.protocol import MOST_MESSAGES, Sampled
from freewheel.server.replies import Entry, Object, Progress, framed, listed
from freewheel.server.streams import Stream, begun, following, last
from freewheel.server.tools import Call, FlatChoice, FlatTool, Tooled

if TYPE_CHECKING:
    from freewheel.server.app import Service

Status = Literal["in_progress", "completed", "incomplete"]
LOGPROBS = "message.output_text.logprobs"  # what ``include`` calls them
ITEM_DONE = "response.output_item.done"
Event = tuple[str, Object]  # its type, and what it says


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
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None

    def templated(self) -> Object:
        """What templates take."""
        return {"role": self.role, "content": _text(self.content)}


class InputCall(Body):
    """A call of a tool in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None

    def templated(self) -> Object:
        """What templates take."""
        call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class InputCallOutput(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: Status | None = None

    def templated(self) -> Object:
        """What templates take."""
        return {"role": "tool", "content": _text(self.output), "tool_call_id": self.call_id}


Item = Annotated[
    Annotated[InputMessage, Tag("[message]")]
    | Annotated[InputCall, Tag("[function_call]")]
    | Annotated[InputCallOutput, Tag("[function_call_output]")],
    by_type("message", "function_call", "function_call_output", default="message"),
]


class TextOptions(Body):
    """What the text has to look like."""

    format: FlatFormat | None = None


class ResponsesRequest(Tooled[FlatTool, FlatChoice], Sampled):
    """``POST /v1/responses``."""

    renames: ClassVar[Mapping[str, str]] = {
        "logprobs": "top_logprobs",
        "max_tokens": "max_output_tokens",
        "prompt": "input",
    }

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES)]
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
        turns: list[Object] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        for item in self.input:
            turn = item.templated()
            if isinstance(item, InputCall) and turns and turns[-1]["role"] == "assistant":  # of the same answer
                turns[-1].setdefault("tool_calls", []).extend(turn["tool_calls"])
            else:
                turns.append(turn)
        return turns

    def sampling_params(self) -> SamplingParams:
        asked = self._asked()
        asked["max_tokens"] = self.max_output_tokens  # None: as many as fit
        if self.include and self.offered:
            raise ValueError("include cannot be combined with tools, unless tool_choice is none")
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
    prompt = await service.templated("input", request.turns, request.offered, variables)
    reply = _Reply(service, request, params)
    outputs = service.run([prompt], params, request)
    if not request.stream:
        [output] = await last(outputs)
        made = await service.made(listed(params, output.metrics.output_tokens), lambda: reply.whole(output))
        return Response(made, media_type="application/json")
    first = await begun(outputs)
    return Stream(reply.events(following(first, outputs)), outputs)


class _Message:
    """The text of a response, or what there is of it between calls; ``index`` is its place in the output."""

    def __init__(self, index: int) -> None:
        self._id = f"msg_{uuid4().hex}"
        self._index = {"output_index": index}
        self._place = {"item_id": self._id, **self._index, "content_index": 0}
        self._text = ""

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {**self._index, "item": self._item("in_progress", [])}
        yield "response.content_part.added", {**self._place, "part": _part("", [])}

    def more(self, text: str, logprobs: list[Object]) -> Event:
        self._text += text
        return "response.output_text.delta", {**self._place, "delta": text, "logprobs": logprobs}

    def end(self, status: str, logprobs: list[Object]) -> Iterator[Event]:
        part = _part(self._text, logprobs)
        yield "response.output_text.done", {**self._place, "text": self._text, "logprobs": logprobs}
        yield "response.content_part.done", {**self._place, "part": part}
        yield ITEM_DONE, {**self._index, "item": self._item(status, [part])}

    def _item(self, status: str, parts: list[Object]) -> Object:
        return {"id": self._id, "type": "message", "role": "assistant", "status": status, "content": parts}


class _Called:
    """A call in a response; ``index`` is its place in the output."""

    def __init__(self, index: int, call: Call) -> None:
        self._id = f"fc_{uuid4().hex}"
        self._index = {"output_index": index}
        self._place = {"item_id": self._id, **self._index}
        self._call = call

    def begin(self) -> Iterator[Event]:
        yield "response.output_item.added", {**self._index, "item": self._item("in_progress", "")}

    def more(self, text: str) -> Event:
        return "response.function_call_arguments.delta", {**self._place, "delta": text}

    def end(self) -> Iterator[Event]:
        arguments, status = self._call.arguments, "completed" if self._call.whole else "incomplete"
        yield "response.function_call_arguments.done", {**self._place, "arguments": arguments}
        yield ITEM_DONE, {**self._index, "item": self._item(status, arguments)}

    def _item(self, status: str, arguments: str) -> Object:
        about = {"call_id": self._call.id, "name": self._call.name, "arguments": arguments}
        return {"id": self._id, "type": "function_call", "status": status, **about}


class _Reply:
    """One response: the object, its items, and the events that tell how they come about."""

    def __init__(self, service: "Service", request: ResponsesRequest, params: SamplingParams) -> None:
        self._service, self._params = service, params
        self._reader = request.reader()
        form = request.text and request.text.format
        choice = request.tool_choice or "auto"
        self._head: Object = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": params.max_tokens,
            "metadata": request.metadata or {},
            "model": service.config.name,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": request.user,
        }
        self._item: _Message | _Called | None = None  # the one that is being written
        self._items: list[Object] = []  # those that have ended
        self._sent = 0

    def whole(self, output: RequestOutput) -> Object:
        """The response, when its text has ended: what the last of all events says."""
        [one] = output.outputs
        *_, (_, values) = [*self._news(one, one.text, []), *self._end_of_all(output)]
        return values["response"]

    async def events(self, outputs: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncIterator[bytes]:
        """Server-sent events, as the text comes."""
        for kind in ("response.created", "response.in_progress"):
            yield framed(encoded(self._described(kind, {"response": self._response("in_progress")})), kind)
        progress = Progress()
        output = None
        try:
            async for _, output in outputs:
                [one] = output.outputs
                new = len(one.token_ids) - progress.tokens
                if one.delta or one.finish_reason or (new and self._params.logprobs is not None):
                    async for event in self._framed(
                        new, lambda one=one: self._news(one, one.delta, progress.news(one)[1])
                    ):
                        yield event
        except ApiError as error:
            failure = {"code": "server_error", "message": error.message}
            failed = {"response": self._response("failed", error=failure)}
            yield framed(encoded(self._described("response.failed", failed)), "response.failed")
            return
        assert output is not None
        ended = output
        async for event in self._framed(output.metrics.output_tokens, lambda: self._end_of_all(ended)):
            yield event

    async def _framed(self, tokens: int, make: Callable[[], Iterator[Event]]) -> AsyncIterator[bytes]:
        """Server-sent events of what is made of so many tokens."""
        entries = listed(self._params, tokens)
        for kind, values in await self._service.worked(entries, lambda _: list(make())):
            described = self._described(kind, values)
            yield framed(await self._service.made(entries, lambda value=described: value), kind)

    def _news(self, one: CompletionOutput, text: str, entries: Sequence[Entry]) -> Iterator[Event]:
        """What new text, or new log probabilities, are to the items."""
        reader, last = self._reader, one.finish_reason is not None
        for kind, number, value in reader.events(text, last=last) if reader else [("content", 0, text)]:
            if kind == "content":
                if not isinstance(self._item, _Message):
                    yield from self._begin(_Message(self._next))
                assert isinstance(self._item, _Message)
                if value or entries:
                    yield self._item.more(value, self._listed(entries))
            elif kind == "call":
                assert reader is not None
                yield from self._begin(_Called(self._next, reader.calls[number]))
            else:
                assert isinstance(self._item, _Called)
                yield self._item.more(value)

    @property
    def _next(self) -> int:
        return len(self._items) + (self._item is not None)

    def _begin(self, item: _Message | _Called) -> Iterator[Event]:
        yield from self._end("completed", [])
        self._item = item
        yield from item.begin()

    def _end(self, status: str, logprobs: list[Object]) -> Iterator[Event]:
        """Of the item that is being written."""
        item, self._item = self._item, None
        if item is not None:
            for kind, values in item.end(status, logprobs) if isinstance(item, _Message) else item.end():
                if kind == ITEM_DONE:
                    self._items.append(values["item"])
                yield kind, values

    def _end_of_all(self, output: RequestOutput) -> Iterator[Event]:
        [one] = output.outputs
        status = "completed" if one.finish_reason == "stop" else "incomplete"
        if not self._next:  # an answer that says nothing is an empty text
            yield from self._begin(_Message(0))
        yield from self._end(status, self._listed([] if one.logprobs is None else one.logprobs.entries()))
        more: Object = {"usage": usage(output)}
        if status == "completed":
            more["completed_at"] = int(time.time())
        else:
            more["incomplete_details"] = {"reason": "max_output_tokens"}
        yield f"response.{status}", {"response": self._response(status, **more)}

    def _described(self, kind: str, values: Object) -> Object:
        number, self._sent = self._sent, self._sent + 1
        return {"type": kind, "sequence_number": number, **values}

    def _response(self, status: str, **more: Any) -> Object:
        empty = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        return {**self._head, **empty, "status": status, "output": self._items.copy(), **more}

    def _listed(self, entries: Sequence[Entry]) -> list[Object]:
        top = self._params.logprobs
        return [] if top is None else list(self._service.texts.chat(entries, top)["content"])


def _text(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _part(text: str, logprobs: list[Object]) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


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
