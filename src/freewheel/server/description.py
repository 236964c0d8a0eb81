"""What ``/openapi.json`` says: every path, what it takes, and all that it answers."""

from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from freewheel.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    ToolCall,
)
from freewheel.server.responses import ResponsesRequest


class ErrorDetails(BaseModel):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: int


class Error(BaseModel):
    """Every answer of a status from 400 on."""

    error: ErrorDetails


class Version(BaseModel):
    """Of the server."""

    version: str


class ModelCard(BaseModel):
    """The model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class Models(BaseModel):
    """All models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class Usage(BaseModel):
    """Tokens of both kinds of completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class CompletionLogprobs(BaseModel):
    """One entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A text that continues a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    from_draft: list[bool] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(BaseModel):
    """Of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class LikelyToken(BaseModel):
    """A token and its log probability."""

    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(LikelyToken):
    """A token of the answer."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    """One entry for each token."""

    content: list[TokenLogprob]


class ChatMessage(BaseModel):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall] | None = None
    refusal: None


class ChatChoice(BaseModel):
    """An answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    from_draft: list[bool] | None = None


class ChatCompletion(BaseModel):
    """Of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class OutputPart(BaseModel):
    """The text of a response."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(BaseModel):
    """The message of a response."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputPart]


class OutputCall(BaseModel):
    """A call of a tool."""

    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class ResponseUsage(BaseModel):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(BaseModel):
    """Of ``/v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputMessage | OutputCall]
    usage: ResponseUsage


class Tokens(BaseModel):
    """Of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int


class Text(BaseModel):
    """Of ``/detokenize``."""

    prompt: str


REASONS = {
    400: "Something is wrong with the request",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    413: "The body is too large",
    415: "The body is not said to be JSON",
    429: "Too many requests run or wait",
    500: "The request failed",
    503: "The engine takes no more requests",
    504: "The request took too long",
}
POSTS: tuple[tuple[str, type[BaseModel], type[BaseModel], bool], ...] = (
    ("/v1/completions", CompletionRequest, Completion, True),
    ("/v1/chat/completions", ChatCompletionRequest, ChatCompletion, True),
    ("/v1/responses", ResponsesRequest, ResponseObject, True),
    ("/tokenize", TokenizeRequest, Tokens, False),
    ("/detokenize", DetokenizeRequest, Text, False),
)
GETS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("/v1/models", Models),
    ("/v1/models/{name}", ModelCard),
    ("/version", Version),
)
TEXTS = (("/health", "Whether the engine takes requests"), ("/metrics", "Counts for Prometheus"))


def openapi(version: str) -> dict[str, Any]:
    """The description, by OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    key = [{}, {"key": []}]
    for path, taken, given, streams in POSTS:
        answer: dict[str, Any] = {"application/json": _schema(given)}
        if streams:
            answer["text/event-stream"] = {"schema": {"description": "Events with JSON in ``data``"}}
        body = {"required": True, "content": {"application/json": _schema(taken)}}
        statuses = REASONS if streams else [status for status in REASONS if status not in (429, 500, 504)]
        answers = {"200": {"description": "The answer", "content": answer}} | _errors(*statuses)
        paths[path] = {"post": {"requestBody": body, "responses": answers, "security": key}}
    for path, given in GETS:
        answers = {"200": {"description": "The answer", "content": {"application/json": _schema(given)}}}
        paths[path] = {"get": {"responses": answers | _errors(401, 404), "security": key}}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [name]
    for path, about in TEXTS:
        answer = {"text/plain": {"schema": {"type": "string"}}}
        answers: dict[str, Any] = {"200": {"description": about, "content": answer}}
        if path == "/health":
            answers = {"200": {"description": about}, "503": {"description": "It takes none"}}
        paths[path] = {"get": {"responses": answers}}
    kinds = [Error, *(kind for _, *both, _ in POSTS for kind in both), *(kind for _, kind in GETS)]
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Freewheel", "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}


def _errors(*statuses: int) -> dict[str, Any]:
    content = {"application/json": _schema(Error)}
    return {str(status): {"description": REASONS[status], "content": content} for status in statuses}
