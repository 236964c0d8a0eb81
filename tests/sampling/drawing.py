"""Short ways to run the sampler, shared by its tests."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import chi2
from torch import Tensor

from freewheel.sampling import Sampler, SampleRows, Samples, SamplingParams, SamplingState

Draw = Literal["two_level", "gumbel", "multinomial"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where the kernels run."""

SMALLEST = [(93_850, 55_708), (343_682, 2_498), (64_310, 40_925)]
LARGEST = [(158_408, 41_257), (54_744, 36_272), (19_922, 64_083)]
"""Seeds and positions whose random word is the smallest or the largest there is: word 0, which draws a block, word 1,
which draws an id of it, and word 2, which draws from what top-k leaves."""

LOUDEST = [(9_998, 4_424, 25), (17_420, 7_436, 23), (35_604, 7_382, 9)]
QUIETEST = [(10_805, 4_925, 3), (19_079, 6_218, 2), (45_850, 2_360, 7)]
"""Seeds, positions and ids whose Gumbel noise is the largest or the smallest there is."""


def new_state(slots: int, vocab: int, length: int, *, fused: bool = False, **options: Any) -> SamplingState:
    """A state for the kernels or for the torch path."""
    return SamplingState(slots, vocab, length, device=DEVICE if fused else "cpu", fused=fused, **options)


def sample_at(
    state: SamplingState, logits: Tensor, keys: Sequence[tuple[int, int]], *, draw: Draw = "two_level", **masks: Tensor
) -> Samples:
    """One row for each slot and position in ``keys``."""
    on: Any = {name: mask.to(state.device) for name, mask in masks.items()}
    slots, positions = torch.tensor(keys, device=state.device).unbind(1)
    rows = SampleRows(slots, positions, **on)
    return Sampler(state, draw=draw).sample(logits.expand(len(keys), -1).to(state.device), rows)


def sample_each(
    logits: Tensor,
    params: Sequence[SamplingParams],
    *,
    prompt: Sequence[int] = (0,),
    draw: Draw = "two_level",
    fused: bool = False,
    **join: Any,
) -> Samples:
    """One row for each of ``params``, with seeds 0, 1, ...; ``logits`` [vocab] for all or [rows, vocab]."""
    state = new_state(len(params), logits.shape[-1], 64, fused=fused)
    for slot, row_params in enumerate(params):
        state.join(slot, row_params, prompt, seed=slot, **join)
    length = len(prompt) + len(join.get("output_ids", ()))
    return sample_at(state, logits, [(slot, length) for slot in range(len(params))], draw=draw)


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
