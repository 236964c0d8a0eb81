"""From the engine's tokens to what a user reads: text, stop strings, log probabilities, timings.

Names and fields follow vLLM's offline API, so that code moves over easily.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Self

from freewheel.engine.detokenize import Detokenizer, StopStrings
from freewheel.request import FinishReason, Request, StepOutput, TokenLogprobs
from freewheel.sampling import SamplingParams
from freewheel.speculative import SpeculationMetrics

if TYPE_CHECKING:
    from freewheel.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """A token's natural log probability, its rank (1 plus the tokens that are strictly more likely) and its text."""

    logprob: float
    rank: int
    decoded_token: str


class LogprobList(Sequence[Any]):
    """For each token its log probabilities by id (None for a prompt's first), made when they are looked at.

    There may be a thousand for each token, and whoever brings them must not wait for their texts.

    Attributes:
        tokenizer: knows their texts.
    """

    def __init__(self, entries: list[TokenLogprobs | None], tokenizer: "Tokenizer") -> None:
        self._entries, self._length, self.tokenizer = entries, len(entries), tokenizer  # the list may grow

    def entries(self, start: int = 0) -> list[TokenLogprobs | None]:
        """As the engine brought them, from token ``start`` on."""
        return self._entries[start : self._length]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._by_id(entry) for entry in self._entries[: self._length][index]]
        return self._by_id(self._entries[range(self._length)[index]])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _by_id(self, entry: TokenLogprobs | None) -> dict[int, Logprob] | None:
        return entry and {
            token: Logprob(logprob, rank, self.tokenizer.token_bytes(token).decode("utf-8", "replace"))
            for token, logprob, rank in zip(*entry)
        }


@dataclass(frozen=True)
class CompletionOutput:
    """One choice.

    Attributes:
        index: its number.
        text: all text so far.
        token_ids: all tokens so far, with the one that ended it.
        cumulative_logprob: sum over the tokens' log probabilities, if these were asked for.
        logprobs: for each token the log probability by id: the token's own first, then the most likely ones in order.
        from_draft: for each token whether it was accepted from a draft. Outputs that differ in nothing else are equal.
        finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
        stop_reason: the stop string or stop token id that ended it.
        error: what went wrong, if the reason is "error".
        delta: the text since the last output of the same stream.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: LogprobList | None
    from_draft: list[bool] = field(compare=False)
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    delta: str


@dataclass
class RequestMetrics:
    """Counts, and times in seconds of ``time.monotonic()``, 0 until they are known.

    A request that ends without a token has its ``first_token_time`` at its end.
    ``cached_tokens`` of the ``prompt_tokens`` were not computed, as the prefix cache had them. ``speculation`` counts
    the steps that brought tokens, and what drafts brought in them.
    """

    arrival_time: float
    prompt_tokens: int
    first_token_time: float = 0.0
    finish_time: float = 0.0
    cached_tokens: int = 0
    output_tokens: int = 0
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    def snapshot(self) -> Self:
        """A copy."""
        speculation = SpeculationMetrics(**vars(self.speculation))
        return type(self)(**{**vars(self), "speculation": speculation})


@dataclass(frozen=True)
class RequestOutput:
    """A request's state: its last one, or one on the way in a stream.

    Attributes:
        request_id: its name.
        prompt: its text, if it came as text.
        prompt_token_ids: its tokens.
        prompt_logprobs: for each prompt token the log probability by id, None for the first.
        outputs: its choices.
        finished: whether all choices have ended.
        metrics: counts and times so far.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: LogprobList | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics

    @property
    def delta(self) -> str:
        """The first choice's new text."""
        return self.outputs[0].delta

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON can carry: minus infinity becomes None, and token ids of log
        probabilities become strings."""
        return _plain(self)


class Reply:
    """What comes back for one request, put together as the engine brings it.

    Args:
        request: what the engine was given.
        prompt: the prompt's text, if it came as text.
        tokenizer: makes the text.
        request_id: the user's name for the request, where the engine knows it by another one.
    """

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: "Tokenizer", *, request_id: str | None = None
    ) -> None:
        self.request = request
        self._request_id = request.request_id if request_id is None else request_id
        self.metrics = RequestMetrics(time.monotonic(), len(request.prompt_ids))
        self._prompt = prompt
        self._prompt_ids = list(request.prompt_ids)
        self._prompt_logprobs: LogprobList | None = None
        self._tokenizer = tokenizer
        params = request.params
        assert not isinstance(params.stop, str)  # normalised
        # Long prompts and many stops cost something: once, not for every choice.
        detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_ids=request.prompt_ids
        )
        stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._choices = [
            _Choice(index, params, tokenizer, detokenizer.copy(), stops.copy()) for index in range(params.n)
        ]
        self._unfinished = len(self._choices)
        self._news = False

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return self._unfinished == 0

    def add(self, output: StepOutput) -> bool:
        """Take in what a step brought. True means that the engine has to :meth:`Engine.finish` the choice, as it cannot
        know about stop strings."""
        choice = self._choices[output.index]
        if choice.finish_reason is not None:  # it has met a stop string; the engine was a step ahead
            return False
        self._news = True
        now = time.monotonic()
        if output.token_ids and not self.metrics.first_token_time:
            self.metrics.first_token_time = now
        if output.index == 0:
            self.metrics.cached_tokens = max(self.metrics.cached_tokens, output.cached_tokens)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = LogprobList(output.prompt_logprobs, self._tokenizer)
        before = len(choice.token_ids)
        choice.add(output)
        new = len(choice.token_ids) - before
        self.metrics.output_tokens += new
        if new:
            self.metrics.speculation.observe(output.drafted, min(output.accepted, new))
        if choice.finish_reason is not None:
            self._end(now)
        return choice.finish_reason is not None and output.finish_reason is None

    def fail(self, message: str) -> None:
        """End all choices that have not ended."""
        for choice in self._choices:
            if choice.finish_reason is None:
                choice.finish(FinishReason.ERROR, None, message)
                self._end(time.monotonic())
        self._news = True

    def _end(self, now: float) -> None:
        self._unfinished -= 1
        if self.finished:
            self.metrics.finish_time = now
            self.metrics.first_token_time = self.metrics.first_token_time or now

    def take(self) -> RequestOutput | None:
        """The state, with the text since the last call; None if there is nothing new."""
        if not self._news:
            return None
        self._news = False
        return RequestOutput(
            self._request_id,
            self._prompt,
            self._prompt_ids,
            self._prompt_logprobs,
            [choice.take() for choice in self._choices],
            self.finished,
            self.metrics.snapshot(),
        )


class _Choice:
    """Tokens and text of one choice."""

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: "Tokenizer", detokenizer: Detokenizer, stops: StopStrings
    ) -> None:
        self._index = index
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._stops = stops
        self._text = ""
        self._taken = 0
        self.token_ids: list[int] = []
        self._from_draft: list[bool] = []
        self._logprobs: list[TokenLogprobs | None] | None = None if params.logprobs is None else []
        self._cumulative = None if params.logprobs is None else 0.0
        self.finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None
        self._error: str | None = None

    def add(self, output: StepOutput) -> None:
        """Token by token, so that the earliest end counts (see :mod:`freewheel.engine.stopping`)."""
        stopped = output.finish_reason is FinishReason.STOP and not output.complete
        for number, token in enumerate(output.token_ids, 1):
            self.token_ids.append(token)
            self._from_draft.append(number <= output.accepted)
            if output.logprobs is not None and self._logprobs is not None and self._cumulative is not None:
                entry = output.logprobs[number - 1]
                self._logprobs.append(entry)
                self._cumulative += entry.logprobs[0]
            ends = stopped and number == len(output.token_ids)
            if not (ends and not self._include_stop) and self._push(self._detokenizer.push(token), ignore_stops=ends):
                return
        if output.finish_reason is not None and not self._push(self._detokenizer.finish(), ignore_stops=stopped):
            self._text += self._stops.flush()
            self.finish(output.finish_reason, output.stop_reason, output.error)

    def _push(self, text: str, *, ignore_stops: bool) -> bool:
        """Add text, and end with the stop string that it completes, if it does."""
        emitted, matched = self._stops.push(text, ignore=ignore_stops or len(self.token_ids) < self._min_tokens)
        self._text += emitted
        if matched is not None:
            self.finish(FinishReason.STOP, matched, None)
        return matched is not None

    def finish(self, reason: FinishReason, stop_reason: int | str | None, error: str | None) -> None:
        self.finish_reason, self._stop_reason, self._error = reason, stop_reason, error

    def take(self) -> CompletionOutput:
        delta, self._taken = self._text[self._taken :], len(self._text)
        return CompletionOutput(
            self._index,
            self._text,
            self.token_ids.copy(),
            self._cumulative,
            None if self._logprobs is None else LogprobList(self._logprobs, self._tokenizer),
            self._from_draft.copy(),
            None if self.finish_reason is None else self.finish_reason.value,
            self._stop_reason,
            self._error,
            delta,
        )


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | LogprobList):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
