"""Top-k, top-p and min-p without sorting the vocabulary.

One total order holds everywhere: larger logit first, then smaller id. A bound that no survivor can lie below leaves a
few candidates, and only these are sorted.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 64


class Limits(NamedTuple):
    """What one row asks.

    Attributes:
        temperature: above 0.
        top_k: 1 to vocab; vocab keeps all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: 0 to 1; 0 keeps all.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def leading(scores: Tensor, count: int) -> Tensor:
    """The first ``count`` ids in the total order, int64 [count], of ``scores`` [vocab], any float type, without NaN."""
    groups = len(scores) // GROUP
    if count > groups:
        return _ordered(scores, -math.inf)[:count]
    # The maxima of `count` groups reach the smallest of these maxima, so the count-th largest score does too.
    maxima = scores[: groups * GROUP].view(groups, GROUP).amax(1)
    return _ordered(scores, maxima.topk(count).values[-1])[:count]


def keeps(logits: Tensor, token: Tensor, limits: Limits) -> bool:
    """Whether top-p and min-p keep the token: it is among the ``survivors`` of limits without top-k.

    Top-p keeps the tokens before which less than its share of the mass lies, in the total order. That takes a sum over
    the row, but no sort.

    Args:
        logits: [vocab], any float type, without NaN and +inf.
        token: int64 [], an id with a finite logit.
        limits: with ``top_k`` vocab.
    """
    score = logits[token]
    weights = ((logits.double() - logits.max()) / limits.temperature).exp_()
    before = (logits > score) | ((logits == score) & (torch.arange(len(logits), device=logits.device) < token))
    in_nucleus = limits.top_p == 1.0 or bool(weights[before].sum() < limits.top_p * weights.sum())
    return in_nucleus and bool(weights[token] >= limits.min_p)


def survivors(logits: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """What top-k, then top-p, then min-p leave of one row.

    Args:
        logits: [vocab], any float type, without NaN and +inf, at least one finite.
        limits: what the row asks.

    Returns:
        ids int64 [n] in the total order, n at least 1, and their logits divided by the temperature, relative to the
        largest: float64 [n], 0 first.
    """
    temperature, top_k, top_p, min_p = limits
    vocab, peak = len(logits), logits.max().double()
    mass = None
    if top_k < vocab:
        ids = leading(logits, top_k)
    else:
        bound = -math.inf
        if top_p < 1.0:
            mass = ((logits.double() - peak) / temperature).exp_().sum()
            # A token below this has less than (1 - p) mass / vocab, and all of these together too little to matter.
            bound = float(peak + temperature * math.log((1.0 - top_p) * float(mass) / vocab))
        if min_p > 0.0:
            bound = max(bound, float(peak + temperature * math.log(min_p)))
        ids = _ordered(logits, bound)
    scores = logits[ids].double()
    scaled = (scores - peak) / temperature
    weights = scaled.exp()
    count = int((scores > -math.inf).sum())
    if top_p < 1.0:
        target = top_p * (weights.sum() if mass is None else mass)
        count = min(count, int(torch.searchsorted(weights.cumsum(0), target)) + 1)
    if min_p > 0.0:
        count = min(count, int((weights >= min_p).sum()))
    return ids[:count], scaled[:count]


def _ordered(scores: Tensor, bound: float | Tensor) -> Tensor:
    """The ids whose score reaches the bound, in the total order.

    The comparison rounds the bound to the nearest number of the scores' type, which moves no score to its other side.
    """
    ids = (scores >= bound).nonzero().flatten()
    return ids[scores[ids].sort(descending=True, stable=True).indices]
