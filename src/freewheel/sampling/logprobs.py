"""Log probabilities of drawn tokens and of their most likely alternatives."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from freewheel.sampling.draw import weights
from freewheel.sampling.truncation import leading

CHUNK = 2**22  # logits that are scored at a time, for what is derived from them not to take much room


@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of the rows that asked for them.

    Attributes:
        rows: int64 [m], the rows of the batch, ascending. The kernels describe all of them: a row that did not ask or
            has no token then has NaN, the rank 0 and no alternatives.
        token_logprobs: float32 [m], of the tokens themselves; -inf for an id past the vocabulary, NaN for a row whose
            largest logit is not finite (no alternatives are listed for such a row).
        ranks: int64 [m], 1 plus the number of ids with a strictly larger logit.
        top_ids: int64 [m, n], the most likely ids in the total order (larger first, then smaller id), n the most that
            a row asked for; -1 past what a row asked for.
        top_logprobs: float32 [m, n]; -inf for ids that can't be drawn and past what a row asked for.
        top_ranks: int64 [m, n], ranks of the most likely ids; 0 past what a row asked for.
    """

    rows: Tensor
    token_logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    top_ranks: Tensor


def prompt_logprobs(logits: Tensor, next_tokens: Tensor, n: int) -> Logprobs:
    """The model's own log probabilities of given tokens.

    Args:
        logits: [rows, vocab], any float type, without the padding past the tokenizer's vocabulary.
        next_tokens: int64 [rows], the token that follows each row.
        n: alternatives to report.
    """
    rows = torch.arange(len(logits), device=logits.device)
    if logits.device.type == "cpu":
        return describe(rows, logits, [1.0] * len(logits), next_tokens.tolist(), [n] * len(logits))
    size = max(1, CHUNK // logits.shape[1])
    parts = [_score(*part, n) for part in zip(logits.split(size), next_tokens.split(size))]
    return Logprobs(rows, *(torch.cat(column) for column in zip(*parts)))


def _score(logits: Tensor, tokens: Tensor, n: int) -> tuple[Tensor, ...]:
    """The same without a look at the device, all but the rows."""
    vocab = logits.shape[1]
    values = logits.float() + 0.0  # no -0.0, which equals 0.0 and has other bits
    peaks = values.amax(1, keepdim=True)
    totals = peaks + (values - peaks).exp().sum(1, keepdim=True, dtype=torch.float64).log()
    known = tokens[:, None] < vocab
    own = values.gather(1, tokens[:, None].where(known, 0)).where(known, -torch.inf)
    ranks = (values > own).sum(1) + 1
    # In the total order: by value, whose bits are made to rise with it, then by id.
    bits = values.view(torch.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() * 2**32 - torch.arange(vocab, device=values.device)
    ids = keys.topk(n, 1).indices
    top = values.gather(1, ids)
    top_ranks = (top[:, None, :] > top[:, :, None]).sum(2) + 1
    fine = peaks.isfinite()
    return (
        (own - totals).float().where(fine, torch.nan)[:, 0],
        ranks.where(fine[:, 0], 0),
        ids.where(fine, -1),
        (top - totals).float().where(fine, -torch.inf),
        top_ranks.where(fine, 0),
    )


def describe(
    rows: Tensor, scores: Iterable[Tensor], temperatures: Sequence[float], tokens: Sequence[int], counts: Sequence[int]
) -> Logprobs:
    """Log probabilities under softmax.

    Args:
        rows: int64 [m], carried into the result.
        scores: for each row, logits [vocab], any float type; -inf for ids that can't be drawn.
        temperatures: for each row, above 0, what the logits are yet to be divided by.
        tokens: one for each row.
        counts: alternatives that each row asks for.
    """
    shape = len(tokens), max(counts, default=0)
    token_logprobs, top_logprobs = (np.full(size, -np.inf, np.float32) for size in (shape[0], shape))
    ranks, top_ranks, top_ids = np.zeros(shape[0], np.int64), np.zeros(shape, np.int64), np.full(shape, -1)
    for i, (row, temperature, token, count) in enumerate(zip(scores, temperatures, tokens, counts)):
        logits = row.cpu().float()
        array, peaks = logits.numpy(), logits[None].amax(1, keepdim=True)
        peak = peaks.item()
        if not isfinite(peak):
            token_logprobs[i] = np.nan
            continue
        own = array[token] if token < len(array) else -np.inf
        ids = leading(logits, count) if count else top_ids[i, :0]
        sums = weights(logits[None], peaks, [temperature]).sum(2).numpy()
        values = (np.append(array[ids], own).astype(np.float64) - peak) / temperature
        values -= np.log(sums.sum(dtype=np.float64))
        top_logprobs[i, :count], token_logprobs[i] = values[:count], values[count]
        ranks[i] = np.count_nonzero(array > own) + 1
        top_ids[i, :count] = ids
        # Whatever is larger comes before, and equal values are neighbours.
        top_ranks[i, :count] = np.searchsorted(-array[ids], -array[ids]) + 1
    found = token_logprobs, ranks, top_ids, top_logprobs, top_ranks
    return Logprobs(rows, *(torch.from_numpy(array).to(rows.device) for array in found))
