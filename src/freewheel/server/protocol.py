"""What clients send, and how it becomes what the engine takes. Names are OpenAI's, and vLLM's where OpenAI has none.

The models here know names and types. What values are right is checked once, where the engine's own parameters are made
(:class:`freewheel.sampling.SamplingParams`); its errors name the field, which :func:`renamed` gives the client's name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, InstanceOf, PrivateAttr, WithJsonSchema

from freewheel.engine.outputs import RequestMetrics
from freewheel.sampling import SamplingParams
from freewheel.server.bodies import Body
from freewheel.server.formats import Constrained, Format, ResponseFormat, Strings
from freewheel.server.tools import NamedChoice, Tool, Tooled

# What may be long is looked at where its values are checked: pydantic would go through it at once, holding everyone up.
_IDS = {"type": "array", "items": {"type": "integer"}}
Ids = Annotated[list[Any], WithJsonSchema(_IDS)]
_BIASES = {"type": "object", "additionalProperties": {"type": "number"}}
Biases = Annotated[InstanceOf[dict[str, Any]], WithJsonSchema(_BIASES)]


PROMPT: Any = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
PROMPT["anyOf"] += [_IDS, {"type": "array", "items": _IDS}]
MOST_PROMPTS = 256  # of a request
MOST_MESSAGES = 2048


class StreamOptions(Body):
    """Of a stream: whether its last chunk counts tokens, and whether each one does."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampled(Constrained):
    """What everyone who wants text may ask.

    A field that is null counts as one that is not given. ``user``, ``metadata`` and the like are accepted and ignored.
    """

    renames: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Biases | None = None
    min_tokens: int | None = None
    stop_token_ids: Ids | None = None
    bad_words: Strings | None = None
    allowed_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int = 0
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    _metrics: dict[int, RequestMetrics] = PrivateAttr(default_factory=dict)

    @property
    def metrics(self) -> dict[int, RequestMetrics]:
        """How far each of its prompts is, by number."""
        return self._metrics

    def sampling_params(self) -> SamplingParams:
        """ValueError names the field that is wrong."""
        return SamplingParams(**self._asked())

    def _asked(self) -> dict[str, Any]:
        """Fields of ``SamplingParams`` that were given."""
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        asked = {name: value for name in names if (value := getattr(self, name)) is not None}
        asked.pop("logprobs", None)  # it means something else in each kind of request
        asked["grammar"] = self.output_grammar()
        if "logit_bias" in asked:
            asked["logit_bias"] = {_id(token): bias for token, bias in asked["logit_bias"].items()}
        return asked


class Completed(Sampled):
    """What both kinds of completions may ask besides."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool = False

    def format(self) -> tuple[str, Format | None]:
        return "response_format", self.response_format


class CompletionRequest(Completed):
    """``POST /v1/completions``: a prompt, or several, as text or token ids."""

    renames: ClassVar[Mapping[str, str]] = {"prompt_token_ids": "prompt"}

    prompt: Annotated[str | list[Any], WithJsonSchema(PROMPT)]
    echo: bool = False
    logprobs: int | None = None
    suffix: None = None
    best_of: None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one at least.

        Raises:
            ValueError: there is none.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ValueError("prompt is empty: at least one token is needed")
        if not any(isinstance(one, str | list) for one in self.prompt):
            return [self.prompt]
        if not all(isinstance(one, str | list) for one in self.prompt):
            raise ValueError("prompt must be text, a list of token ids, or a list of either")
        if len(self.prompt) > MOST_PROMPTS:
            raise ValueError(f"prompt has {len(self.prompt)} entries, more than the limit of {MOST_PROMPTS}")
        return self.prompt

    def sampling_params(self) -> SamplingParams:
        asked = self._asked()
        if self.logprobs is not None:
            asked["logprobs"] = self.logprobs
            if self.echo:
                asked.setdefault("prompt_logprobs", self.logprobs)
        return SamplingParams(**asked)


class FunctionCall(Body):
    """A function that an assistant's message called."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation, as chat templates know it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def templated(self) -> dict[str, Any]:
        """What templates take: text in one piece, and no field that was not given."""
        given = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            given["content"] = "".join(part.text for part in self.content)
        given.setdefault("content", "")
        return given


class ChatCompletionRequest(Tooled[Tool, NamedChoice], Completed):
    """``POST /v1/chat/completions``."""

    renames: ClassVar[Mapping[str, str]] = {
        "logprobs": "top_logprobs",
        "max_tokens": "max_completion_tokens",
        "prompt": "messages",
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    store: Literal[False] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def sampling_params(self) -> SamplingParams:
        asked = self._asked()
        if self.max_completion_tokens is not None:
            asked["max_tokens"] = self.max_completion_tokens
        asked.setdefault("max_tokens", None)  # as many as fit
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        if self.logprobs:
            asked["logprobs"] = self.top_logprobs or 0
        return SamplingParams(**asked)


class TokenizeRequest(Body):
    """``POST /tokenize``: of a text, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MOST_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Ids


def _id(token: str) -> int:
    """JSON's keys are texts."""
    if not token.isascii() or not token.isdigit() or len(token) > 10 or str(int(token)) != token:
        raise ValueError(f"logit_bias must map token ids to numbers, and {token[:20]!r} is no token id")
    return int(token)


def renamed(message: str, request: Body) -> str:
    """An error with the name that the client gave the field."""
    field, space, rest = message.partition(" ")
    if field == "grammar" and isinstance(request, Constrained):
        return f"{request.constraint() or field}{space}{rest}"
    name = getattr(request, "renames", {}).get(field)
    return f"{name}{space}{rest}" if name and name in request.model_fields_set else message


def field_of(message: str, request: Body) -> str | None:
    """The field that an error begins with."""
    field = message.partition(" ")[0].rstrip(":")
    return field if field.partition(".")[0] in type(request).model_fields else None
