"""Top-k, top-p and min-p without sorting the vocabulary.

One total order holds everywhere: larger logit first, then smaller id. A bound that the first tokens reach leaves a few
candidates, and only these are sorted.
"""

import numpy as np
from torch import Tensor
from torch.nn.functional import threshold

from freewheel.sampling.state import Settings

GROUP = 64
FEW = 64

# Weights are float32. They keep the order of the logits but for SLACK, and their sums are right but for UNSURE.
SLACK = 2.0**-20
UNSURE = 2.0**-15


def leading(logits: Tensor, count: int) -> np.ndarray:
    """The first ``count`` ids in the total order, int64 [count], of ``logits`` float32 [vocab] without NaN."""
    array, groups = logits.numpy(), len(logits) // GROUP
    # The maxima of `count` groups reach the smallest of these maxima, so the count-th largest logit does too.
    reached = logits[: groups * GROUP].view(groups, GROUP).amax(1).numpy() if count <= groups else array
    ids = np.flatnonzero(array >= np.partition(reached, -count)[-count])
    return ids[np.argsort(-array[ids], kind="stable")[:count]]


def survivors(logits: Tensor, settings: Settings) -> tuple[np.ndarray, np.ndarray]:
    """What top-k, then top-p, then min-p leave of one row.

    Args:
        logits: float32 [vocab], without NaN and +inf, at least one finite.
        settings: what the row asks, with a temperature above 0.

    Returns:
        ids int64 [n] in the total order, n at least 1, and their logits divided by the temperature, relative to the
        largest: float64 [n], 0 first.
    """
    temperature, top_k, top_p, min_p = settings.temperature, settings.top_k, settings.top_p, settings.min_p
    array, mass = logits.numpy(), None
    vocab, peak = len(array), float(array.max())
    count = top_k
    if top_k == vocab:
        count = min(FEW, vocab)
        if top_p < 1.0:
            mass = np.exp((array.astype(np.float64) - peak) / temperature).sum()
    while True:
        ids = leading(logits, count)
        scaled = (array[ids].astype(np.float64) - peak) / temperature
        weights = np.exp(scaled)
        kept = np.count_nonzero(scaled > -np.inf)
        if top_p < 1.0:
            target = top_p * (weights.sum() if mass is None else mass)
            kept = min(kept, int(weights.cumsum().searchsorted(target)) + 1)
        if min_p > 0.0:
            kept = min(kept, np.count_nonzero(weights >= min_p))
        if kept < count or count == top_k:
            return ids[:kept], scaled[:kept]
        count = min(16 * count, vocab)


def keeps(token: int, logits: Tensor, peak: float, weights: Tensor, mass: float, settings: Settings) -> bool:
    """Whether the token is among the ``survivors`` of a row without top-k.

    Top-p keeps the tokens before which less than its share of the mass lies, in the total order. That takes a
    comparison with the row and a sum, but no sort, unless they come out too close to tell.

    Args:
        token: an id that has some weight.
        logits: float32 [vocab], without NaN and +inf.
        peak: the largest of them.
        weights: float32 [n], the logits' exponentials at the temperature, 1 for the largest; zeros may follow.
        mass: their sum.
        settings: what the row asks.
    """
    top_p = settings.top_p
    if settings.min_p > 0.0 and np.exp((logits[token].item() - peak) / settings.temperature) < settings.min_p:
        return False
    if top_p == 1.0:
        return True
    own = weights[token].item()
    if threshold(weights, own * (1.0 - SLACK), 0.0).sum().item() - own < (top_p - UNSURE) * mass:
        return True
    if threshold(weights, own * (1.0 + SLACK), 0.0).sum().item() > (top_p + UNSURE) * mass:
        return False
    return token in survivors(logits, settings)[0]
