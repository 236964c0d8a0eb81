"""What clients get: OpenAI's objects, made of the engine's outputs."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from freewheel.engine.outputs import CompletionOutput, Logprob, RequestOutput
from freewheel.server.bodies import encoded

Object = dict[str, Any]


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
    """How much of a choice was sent."""

    def __init__(self) -> None:
        self.tokens = 0
        self.characters = 0

    def news(self, choice: CompletionOutput) -> tuple[list[int], Sequence[dict[int, Logprob]]]:
        """Tokens and their log probabilities since the last call."""
        start, self.tokens = self.tokens, len(choice.token_ids)
        return choice.token_ids[start:], (choice.logprobs or [])[start:]


def completion_logprobs(entries: Sequence[Mapping[int, Logprob] | None], ids: Sequence[int], offset: int) -> Object:
    """As ``/v1/completions`` lists them. ``offset`` is where in the text the first token begins."""
    tokens, logprobs, tops, offsets = [], [], [], []
    for id, entry in zip(ids, entries):
        own = None if entry is None else entry.get(id)
        text = own.decoded_token if own else ""
        tokens.append(text)
        logprobs.append(own and finite(own.logprob))
        tops.append(entry and {one.decoded_token: finite(one.logprob) for one in entry.values()})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(entries: Sequence[Mapping[int, Logprob]], ids: Sequence[int], top: int) -> Object:
    """As ``/v1/chat/completions`` lists them, with the ``top`` most likely of each place."""

    def described(one: Logprob) -> Object:
        raw = one.decoded_token.encode()
        return {"token": one.decoded_token, "logprob": finite(one.logprob), "bytes": list(raw)}

    content = []
    for id, entry in zip(ids, entries):
        likely = sorted(entry.values(), key=lambda one: one.rank)[:top]
        content.append({**described(entry[id]), "top_logprobs": [described(one) for one in likely]})
    return {"content": content}


def event(value: Object) -> bytes:
    """A server-sent event."""
    return framed(encoded(value))


def framed(data: bytes, kind: str | None = None) -> bytes:
    """JSON as a server-sent event."""
    name = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return name + b"data: " + data + b"\n\n"
