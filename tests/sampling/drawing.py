"""Short ways to run the sampler, shared by its tests."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from freewheel.sampling import Sampler, SampleRows, Samples, SamplingParams, SamplingState

Draw = Literal["two_level", "gumbel", "multinomial"]


def sample_each(
    logits: Tensor, params: Sequence[SamplingParams], *, prompt: Sequence[int] = (0,), **join: Any
) -> Samples:
    """One row for each of ``params``, with seeds 0, 1, ...; ``logits`` [vocab] for all or [rows, vocab]."""
    logits = logits.expand(len(params), -1)
    state = SamplingState(len(params), logits.shape[1], 64)
    for slot, row_params in enumerate(params):
        state.join(slot, row_params, prompt, seed=slot, **join)
    slots, length = torch.arange(len(params)), len(prompt) + len(join.get("output_ids", ()))
    return Sampler(state).sample(logits, SampleRows(slots, torch.full_like(slots, length)))


def sample_many(
    logits: Tensor, params: SamplingParams, count: int, *, draw: Draw = "two_level", seed: int = 7
) -> Tensor:
    """Tokens at ``count`` positions of one sequence, all with the same ``logits`` [vocab]."""
    state = SamplingState(1, len(logits), 8)
    state.join(0, params, [0], seed=seed)
    sampler = Sampler(state, draw=draw)
    chunk = max(1, 2**22 // len(logits))
    tokens = []
    for start in range(1, count + 1, chunk):
        positions = torch.arange(start, min(start + chunk, count + 1))
        rows = SampleRows(torch.zeros_like(positions), positions)
        tokens.append(sampler.sample(logits.expand(len(positions), -1), rows).tokens)
    return torch.cat(tokens)


def p_value(tokens: Tensor, probabilities: np.ndarray) -> float:
    """Chi-square test of tokens against probabilities [vocab]; rare tokens are counted together."""
    observed = np.bincount(tokens.numpy(), minlength=len(probabilities)).astype(float)
    assert not observed[probabilities == 0].any(), "a token of probability 0 was drawn"
    expected = probabilities * len(tokens)
    order = np.argsort(-expected)
    observed, expected = observed[order], expected[order]
    common = int((expected >= 8).sum())
    observed = np.append(observed[:common], observed[common:].sum())
    expected = np.append(expected[:common], expected[common:].sum())
    counted = expected > 0
    if counted.sum() == 1:
        return 1.0
    statistic = ((observed - expected)[counted] ** 2 / expected[counted]).sum()
    return float(chi2.sf(statistic, counted.sum() - 1))
