"""What a request may ask of the sampler, checked when the request arrives."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from freewheel.sampling.checks import check_text, shown
from freewheel.sampling.grammar import Grammar

MAX_INT = 2**31 - 1
MAX_CHOICES = 1024
MAX_IDS = 2**20
MAX_LOGPROBS = 1024
MAX_STRINGS = 1024
MAX_STRING_LENGTH = 1024
MAX_CHARACTERS = 2**14
MIN_TEMPERATURE = 1e-30
MAX_TEMPERATURE = 1e30
MAX_BIAS = 1e30
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. The names are vLLM's.

    Everything is checked on construction: a wrong type, a value out of bounds or a list that is too long raises a
    ``ValueError`` that names the field. Values are normalised, immutable, hashable and picklable.

    Masks, then ``logit_bias``, then penalties change the logits; temperature, ``top_k``, ``top_p`` (of the mass that
    ``top_k`` left) and ``min_p`` (relative to the most likely token left) shape the draw, in this order.

    Attributes:
        n: choices to generate for the prompt, 1 to 1,024.
        temperature: 0 (greedy), or 1e-30 to 1e30.
        top_k: keep exactly the k most likely tokens; 0 or -1 keeps all (stored as 0).
        top_p: keep the smallest set of most likely tokens whose mass reaches this, in (0, 1].
        min_p: drop tokens less likely than this times the most likely one, 0 to 1.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output, 0.01 to 100.
        frequency_penalty: subtracted once per occurrence in the output, -2 to 2.
        presence_penalty: subtracted from tokens that occur in the output, -2 to 2.
        logit_bias: added to the logits of these ids, a mapping or pairs (stored sorted); at most 2**20 ids, each once,
            each bias finite, at most 1e30 in magnitude.
        allowed_token_ids: the only ids that may be drawn, 1 to 2**20 of them (stored sorted).
        bad_words: texts whose last token is not drawn after the tokens before it; at most 1,024 of at most 1,024
            characters, 16,384 in all.
        min_tokens: end-of-sequence and stop ids are held back until the output has this many tokens, and a stop text
            that an earlier token completes is ignored; at most ``max_tokens``.
        max_tokens: longest output in tokens; None means up to the model's context.
        stop: texts that end the output; at most 1,024 of at most 1,024 characters, 16,384 in all (stored as a tuple).
        stop_token_ids: ids that end the output (stored sorted); a token that also completes a stop text counts as id.
        include_stop_str_in_output: whether the output keeps the stop text, or the text of the stop id, that ended it.
        ignore_eos: go on after an end-of-sequence id.
        seed: key of the draws, a signed 64-bit integer; None takes a random one for each request.
        logprobs: report the drawn token's log probability and rank, and this many most likely tokens, 0 to 1,024.
        prompt_logprobs: the same for the prompt's tokens, always the model's own ("raw").
        logprobs_mode: of ``logprobs``: "raw", the model's, before any change, or "processed", after everything.
        skip_special_tokens: leave special tokens out of the text.
        grammar: what the output has to look like. End-of-sequence and stop ids can be drawn where the grammar can end,
            and nowhere else; where nothing else can follow, the output ends. After an end that ``ignore_eos`` ignores,
            the output is free.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        normalised = {
            "n": _integer("n", self.n, 1, MAX_CHOICES),
            "temperature": _temperature(self.temperature),
            "top_k": max(_integer("top_k", self.top_k, -1, MAX_INT), 0),
            "top_p": _number("top_p", self.top_p, math.ulp(0.0), 1.0, "above 0 and at most 1"),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _number(
                "repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
            ),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "logit_bias": _bias(self.logit_bias),
            "allowed_token_ids": _allowed(self.allowed_token_ids),
            "bad_words": _strings("bad_words", self.bad_words),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, MAX_INT),
            "max_tokens": _optional_integer("max_tokens", self.max_tokens, 0, MAX_INT),
            "stop": _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop),
            "stop_token_ids": _ids("stop_token_ids", self.stop_token_ids),
            "seed": None if self.seed is None else check_seed(self.seed),
            "logprobs": _optional_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS),
            "prompt_logprobs": _optional_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS),
        }
        for name, value in normalised.items():
            object.__setattr__(self, name, value)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {shown(getattr(self, name))}")
        if self.logprobs_mode not in ("raw", "processed"):
            raise ValueError(f'logprobs_mode must be "raw" or "processed", not {shown(self.logprobs_mode)}')
        if not isinstance(self.grammar, Grammar | None):
            raise ValueError(f"grammar must be a Grammar, not {shown(self.grammar)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")

    @property
    def uses_penalties(self) -> bool:
        """Whether any penalty differs from its neutral value."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    def check_vocabulary(
        self, vocab_size: int, bad_word_ids: Sequence[Sequence[int]] = (), end_ids: Iterable[int] = ()
    ) -> None:
        """Check every id against the vocabulary, and that something allowed is left to draw at first.

        Args:
            vocab_size: number of ids that may be drawn.
            bad_word_ids: the token sequences of ``bad_words``.
            end_ids: ids that ``min_tokens`` holds back besides ``stop_token_ids``.

        Raises:
            ValueError: naming the field.
        """
        assert not isinstance(self.logit_bias, Mapping)  # normalised
        biased = [token for token, _ in self.logit_bias or ()]
        for name, ids in (
            ("logit_bias", biased),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words", {token for word in bad_word_ids for token in word}),
        ):
            foreign = [token for token in ids if not 0 <= token < vocab_size]
            if foreign:
                raise ValueError(f"{name} has id {foreign[0]}, outside the vocabulary of {vocab_size} tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValueError(f"{name} ({getattr(self, name)}) exceeds the vocabulary of {vocab_size} tokens")
        banned = {word[0] for word in bad_word_ids if len(word) == 1}
        if self.min_tokens:
            banned.update(end_ids, self.stop_token_ids)
        if self.allowed_token_ids is not None and banned.issuperset(self.allowed_token_ids):
            raise ValueError(
                "allowed_token_ids leaves no token to draw: bad_words, or min_tokens for end-of-sequence and stop ids, "
                "forbids every one"
            )


def check_seed(value: Any) -> int:
    """A key of draws.

    Raises:
        ValueError: not a signed 64-bit integer.
    """
    return _integer("seed", value, -(2**63), 2**63 - 1)


def check_temperature(value: Any) -> float:
    """A temperature that is not greedy.

    Raises:
        ValueError: out of bounds.
    """
    return _number("temperature", value, MIN_TEMPERATURE, MAX_TEMPERATURE)


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if not _is(value, Integral) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, not {shown(value)}")
    return int(value)


def _optional_integer(name: str, value: Any, low: int, high: int) -> int | None:
    return None if value is None else _integer(name, value, low, high)


def _number(name: str, value: Any, low: float, high: float, bounds: str | None = None) -> float:
    if not _is(value, Real) or not low <= value <= high:
        raise ValueError(f"{name} must be a number {bounds or f'from {low:g} to {high:g}'}, not {shown(value)}")
    return float(value)


def _temperature(value: Any) -> float:
    if _is(value, Real) and value == 0:
        return 0.0
    bounds = f"equal to 0 or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    return _number("temperature", value, MIN_TEMPERATURE, MAX_TEMPERATURE, bounds)


def _items(name: str, values: Any, limit: int, kind: str) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, (Sequence, set, frozenset)):
        raise ValueError(f"{name} must be a list of {kind}, not {shown(values)}")
    if len(values) > limit:
        raise ValueError(f"{name} has {len(values)} entries, more than the limit of {limit}")
    return tuple(values)


def _ids(name: str, values: Any) -> tuple[int, ...]:
    return tuple(sorted({_integer(name, value, 0, MAX_INT) for value in _items(name, values, MAX_IDS, "token ids")}))


def _allowed(values: Any) -> tuple[int, ...] | None:
    if values is None:
        return None
    ids = _ids("allowed_token_ids", values)
    if not ids:
        raise ValueError("allowed_token_ids must not be empty: no token would be left to draw")
    return ids


def _bias(values: Any) -> tuple[tuple[int, float], ...] | None:
    if values is None:
        return None
    pairs = values.items() if isinstance(values, Mapping) else values
    if not isinstance(values, (Mapping, tuple)) or any(not isinstance(p, tuple) or len(p) != 2 for p in pairs):
        raise ValueError(f"logit_bias must map token ids to numbers, not {shown(values)}")
    if len(values) > MAX_IDS:
        raise ValueError(f"logit_bias has {len(values)} entries, more than the limit of {MAX_IDS}")
    biases: dict[int, float] = {}
    for token, bias in pairs:
        if _integer("logit_bias", token, 0, MAX_INT) in biases:
            raise ValueError(f"logit_bias has id {token} more than once")
        biases[int(token)] = _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    return tuple((token, biases[token]) for token in sorted(biases)) or None


def _strings(name: str, values: Any) -> tuple[str, ...]:
    strings = _items(name, values, MAX_STRINGS, "strings")
    for string in strings:
        if not isinstance(string, str) or not 0 < len(string) <= MAX_STRING_LENGTH:
            raise ValueError(
                f"{name} must hold strings of 1 to {MAX_STRING_LENGTH} characters, and one entry is {shown(string)}"
            )
        check_text(name, string)
    if (total := sum(map(len, strings))) > MAX_CHARACTERS:
        raise ValueError(f"{name} has {total} characters in all, more than the limit of {MAX_CHARACTERS}")
    return strings
