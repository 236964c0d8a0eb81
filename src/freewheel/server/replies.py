"""What clients get: OpenAI's objects, made of the engine's outputs."""

import math
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from uuid import uuid4

from freewheel.engine.outputs import CompletionOutput, RequestOutput
from freewheel.models.tokenizer import Tokenizer
from freewheel.request import TokenLogprobs
from freewheel.sampling import SamplingParams
from freewheel.server.bodies import encoded
from freewheel.server.tools import CallReader

Object = dict[str, Any]
Entry = TokenLogprobs | None  # None for a prompt's first token


def finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None


def usage(outputs: Sequence[RequestOutput]) -> Object:
    """Tokens of requests that are one for the client."""
    prompt = sum(output.metrics.prompt_tokens for output in outputs)
    made = sum(output.metrics.output_tokens for output in outputs)
    cached = sum(output.metrics.cached_tokens for output in outputs)
    drafted = sum(output.metrics.speculation.drafted for output in outputs)
    accepted = sum(output.metrics.speculation.accepted for output in outputs)
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": details,
    }


class Answer:
    """What all replies to one request have.

    Args:
        kind: "text_completion" or "chat.completion".
        prefix: of its id.
        model: its name.
    """

    def __init__(self, kind: str, prefix: str, model: str) -> None:
        self._head = {"id": f"{prefix}-{uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}

    def whole(self, choices: list[Object], outputs: Sequence[RequestOutput]) -> Object:
        """The reply that is no stream."""
        return {**self._head, "choices": choices, "usage": usage(outputs)}

    def chunk(self, choices: list[Object], **more: Any) -> Object:
        """A part of a stream."""
        head = self._head
        if head["object"] == "chat.completion":
            head = head | {"object": "chat.completion.chunk"}
        return {**head, "choices": choices, **more}


class Progress:
    """How much of a choice was sent, and the reader of its tool calls, if there are tools."""

    def __init__(self) -> None:
        self.tokens = 0
        self.characters = 0
        self.reader: CallReader | None = None

    def news(self, choice: CompletionOutput) -> tuple[list[int], list[Entry]]:
        """Tokens and their log probabilities since the last call."""
        start, self.tokens = self.tokens, len(choice.token_ids)
        return choice.token_ids[start:], [] if choice.logprobs is None else choice.logprobs.entries(start)


class Texts:
    """What tokens stand for, where log probabilities name them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes

    def __call__(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", "replace")

    def completion(self, entries: Sequence[Entry], ids: Sequence[int], offset: int) -> Object:
        """As ``/v1/completions`` lists them. ``offset`` is where in the text the first token begins."""
        texts = [self(id) for id in ids]
        return {
            "tokens": texts,
            "token_logprobs": [entry and finite(entry.logprobs[0]) for entry in entries],
            "top_logprobs": (
                entry and {self(id): finite(value) for id, value in zip(entry.token_ids, entry.logprobs)}
                for entry in entries
            ),
            "text_offset": list(accumulate(map(len, texts), initial=offset))[:-1],
        }

    def chat(self, entries: Sequence[Entry], top: int) -> Object:
        """As ``/v1/chat/completions`` lists them, with the ``top`` most likely of each place."""
        return {"content": (self._token(entry, top) for entry in entries if entry is not None)}

    def _token(self, entry: TokenLogprobs, top: int) -> Object:
        ids, values = entry.token_ids, entry.logprobs
        likely = sorted(range(len(ids)), key=entry.ranks.__getitem__)[:top]
        described = [self._described(ids[place], values[place]) for place in likely]
        return {**self._described(ids[0], values[0]), "top_logprobs": described}

    def _described(self, id: int, value: float) -> Object:
        raw = self._bytes(id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": finite(value), "bytes": list(raw)}


def listed(params: SamplingParams, tokens: int, prompt_tokens: int = 0) -> int:
    """How many log probabilities these have."""
    entries = 0 if params.logprobs is None else tokens * (1 + params.logprobs)
    return entries + prompt_tokens * (1 + (params.prompt_logprobs or 0))


def token_fields(choice: CompletionOutput, ids: list[int]) -> Object:
    """What ``return_token_ids`` adds, of the last tokens: their ids, and whether drafts had them."""
    return {"token_ids": ids, "from_draft": choice.from_draft[len(choice.from_draft) - len(ids) :]}


def event(value: Object) -> bytes:
    """A server-sent event."""
    return framed(encoded(value))


def framed(data: bytes, kind: str | None = None) -> bytes:
    """JSON as a server-sent event."""
    name = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return name + b"data: " + data + b"\n\n"
