"""The sampler's contract in float64, one row at a time, written without looking at speed or at the sampler's code."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from freewheel.sampling import SamplingParams
from freewheel.sampling.rng import philox


def edited_logits(
    logits: Sequence[float] | np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    end_ids: Iterable[int] = (),
    bad_word_ids: Iterable[Sequence[int]] = (),
) -> np.ndarray:
    """Masks, bias and penalties."""
    values = np.array(logits, dtype=np.float64)
    history = [*prompt, *output]
    for token in range(len(values)):
        forbidden = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        for *before, last in bad_word_ids:
            forbidden |= token == last and (not before or history[-len(before) :] == before)
        if len(output) < params.min_tokens:
            forbidden |= token in end_ids or token in params.stop_token_ids
        if forbidden:
            values[token] = -math.inf
        values[token] += dict(params.logit_bias or ()).get(token, 0.0)
        if token in history:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        times = list(output).count(token)
        values[token] -= params.frequency_penalty * times
        values[token] -= params.presence_penalty if times else 0.0
    return values


def total_order(values: np.ndarray) -> list[int]:
    """Larger first, then smaller id."""
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def survivors(values: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """What truncation leaves: ids in the total order with their weights, the first 1; of a greedy row, one id."""
    order = [token for token in total_order(values) if values[token] > -math.inf]
    if params.temperature == 0:
        return {order[0]: 1.0}
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp((values[token] - values[order[0]]) / params.temperature) for token in order]
    if params.top_p < 1:
        target, reached = params.top_p * math.fsum(weights), 0.0
        for kept, weight in enumerate(weights, 1):
            reached += weight
            if reached >= target:
                weights = weights[:kept]
                break
    return {token: weight for token, weight in zip(order, weights) if weight >= params.min_p}


def probabilities(values: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution of the draw, float64 [vocab]."""
    kept = survivors(values, params)
    result = np.zeros(len(values))
    result[list(kept)] = np.array(list(kept.values())) / math.fsum(kept.values())
    return result


def two_level(values: np.ndarray, params: SamplingParams, seed: int, position: int) -> tuple[int, float]:
    """The two-level draw: the first attempt that truncation keeps, or the last resort.

    Returns:
        the token, and how near to a boundary a uniform number fell on the way there, or truncation drew one: a number
        within rounding of 0 may stand for another token.
    """
    kept, distance = survivors(values, params), math.inf
    weights = np.exp((values - values.max()) / (params.temperature or 1.0))
    order = np.argsort(-values, kind="stable")[: params.top_k or None]
    shares = np.append(0.0, weights[order].cumsum() / math.fsum(weights[order]))
    if params.temperature == 0:
        return next(iter(kept)), distance
    if not params.top_k:
        for attempt in range(4 if params.top_p < 1 or params.min_p > 0 else 1):
            token, near = _plain(weights, *_uniforms(seed, position, attempt)[:2])
            place = order.tolist().index(token)
            distance = min(distance, near, _to_limits(shares[place], weights[token], params))
            if token in kept:
                return token, distance
    at, near = _inverse(list(kept.values()), _uniforms(seed, position, 0)[2])
    return list(kept)[at], min(distance, near, _to_limits(shares[:-1], weights[order], params))


def _to_limits(before: np.ndarray, weights: np.ndarray, params: SamplingParams) -> float:
    """The distance of the nearest token to where top-p and min-p cut, from the mass before it and its weight."""
    to_top_p = np.min(abs(before - params.top_p)) if params.top_p < 1 else math.inf
    to_min_p = np.min(abs(weights - params.min_p)) if params.min_p > 0 else math.inf
    return float(min(to_top_p, to_min_p))


def _plain(weights: np.ndarray, first: float, second: float) -> tuple[int, float]:
    """A block of 256 tokens by its mass, then one of its tokens; the smaller distance of the two."""
    starts = range(0, len(weights), 256)
    block, near = _inverse([math.fsum(weights[at : at + 256]) for at in starts], first)
    within, other = _inverse(weights[starts[block] : starts[block] + 256], second)
    return starts[block] + within, min(near, other)


def _uniforms(seed: int, position: int, lane: int) -> list[float]:
    return [(word + 0.5) / 2**32 for word in philox(seed, position, lane)]


def _inverse(weights: Sequence[float] | np.ndarray, u: float) -> tuple[int, float]:
    """The first index at which the sum so far exceeds u times the whole; the distance of u to the nearest such sum."""
    shares = np.cumsum(weights) / math.fsum(weights)
    return int(np.argmax(shares > u)), float(abs(shares[:-1] - u).min(initial=math.inf))
