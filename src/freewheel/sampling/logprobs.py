"""Log probabilities of drawn tokens and of their most likely alternatives."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freewheel.sampling.truncation import leading


@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of the rows that asked for them.

    Attributes:
        rows: int64 [m], the rows of the batch, ascending.
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
    return describe(rows, list(logits), next_tokens, [n] * len(logits))


def describe(rows: Tensor, scores: Sequence[Tensor], tokens: Tensor, counts: Sequence[int]) -> Logprobs:
    """Log probabilities under softmax.

    Args:
        rows: int64 [m], carried into the result.
        scores: for each row, [vocab], any float type; -inf for ids that can't be drawn.
        tokens: int64 [m].
        counts: alternatives that each row asks for.
    """
    width = max(counts, default=0)
    token_logprobs = torch.full((len(rows),), -torch.inf, device=rows.device)
    ranks = torch.zeros_like(rows)
    top_ids = rows.new_full((len(rows), width), -1)
    top_logprobs = torch.full((len(rows), width), -torch.inf, device=rows.device)
    top_ranks = torch.zeros_like(top_ids)
    for i, (row, count) in enumerate(zip(scores, counts)):
        peak = row.max()
        if not peak.isfinite():
            token_logprobs[i] = torch.nan
            continue
        # An exponential's relative error grows with the distance to the peak, where its share of the sum is small.
        log_sum = (row.float() - peak).exp_().sum(dtype=torch.float64).log() + peak
        own = row[tokens[i]] if tokens[i] < len(row) else row.new_tensor(-torch.inf)
        token_logprobs[i] = own - log_sum
        ranks[i] = (row > own).sum() + 1
        if count:
            top_ids[i, :count] = ids = leading(row, count)
            values = row[ids].double()
            top_logprobs[i, :count] = values - log_sum
            # Whatever is larger comes before, and equal values are neighbours.
            top_ranks[i, :count] = torch.searchsorted(-values, -values) + 1
    return Logprobs(rows, token_logprobs, ranks, top_ids, top_logprobs, top_ranks)
