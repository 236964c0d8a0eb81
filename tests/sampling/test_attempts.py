"""The two-level draw of a truncated row: attempts at the whole row first, then what is left, by one more number."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from drawing import p_value, sample_many
from reference import probabilities, survivors, two_level
from torch import Tensor

from freewheel.sampling import SamplingParams, draw
from freewheel.sampling.draw import ATTEMPTS, BLOCK
from freewheel.sampling.rng import uniforms

SEED = 7
COUNT = 400
LIMITS: list[dict[str, Any]] = [
    {"top_p": 0.95},
    {"top_p": 0.5},
    {"top_p": 0.01},
    {"min_p": 0.02},
    {"min_p": 0.9},
    {"top_p": 0.6, "min_p": 0.1},
    {"top_k": 3},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 40, "min_p": 0.05},
]


def row(dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of three blocks and a bit, with ties."""
    logits = torch.randn(3 * BLOCK + 77, generator=torch.Generator().manual_seed(0)) * 2
    logits[5::50] = logits[5]
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, *LIMITS], ids=str)
def test_tokens_are_those_of_the_rule(fields: dict[str, Any], dtype: torch.dtype) -> None:
    logits, params = row(dtype), SamplingParams(temperature=0.8, **fields)
    tokens = sample_many(logits, params, COUNT, seed=SEED)
    values = logits.double().numpy()
    assert tokens.tolist() == [two_level(values, params, SEED, position)[0] for position in range(1, COUNT + 1)]


@pytest.mark.parametrize("off", [-5e-7, 5e-7])
def test_the_rule_says_how_near_a_draw_is_to_another(off: float) -> None:
    """Of two tokens, whose boundary is where the number falls that draws one of them."""
    share = uniforms(SEED, 3)[1] + off
    cases: list[dict[str, Any]] = [{}, {"top_p": 0.9999}, {"min_p": 1e-4}]
    for fields in cases:
        token, distance = two_level(np.log([share, 1 - share]), SamplingParams(**fields), SEED, 3)
        assert token == (off < 0)
        assert distance == pytest.approx(5e-7, rel=1e-3)
    half = two_level(np.log([0.4, 0.6]), SamplingParams(top_p=0.6 + off), SEED, 3)
    assert half[1] == pytest.approx(5e-7, rel=1e-3)


@pytest.mark.parametrize("fields", LIMITS, ids=str)
def test_tokens_follow_the_distribution_whichever_way_they_came(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    tokens = sample_many(row(), params, 3000)
    assert p_value(tokens, probabilities(row().double().numpy(), params)) > 1e-3


def test_a_limit_without_top_k_leaves_the_plain_draw_wherever_it_keeps_it() -> None:
    plain = sample_many(row(), SamplingParams(), COUNT)
    limited = SamplingParams(top_p=0.7)
    kept = torch.isin(plain, torch.tensor(list(survivors(row().double().numpy(), limited))))
    assert 0.6 < kept.double().mean() < 0.8
    assert torch.equal(sample_many(row(), limited, COUNT)[kept], plain[kept])
    assert not torch.equal(
        sample_many(row(), SamplingParams(top_k=len(row()) - 1, top_p=0.7), COUNT)[kept], plain[kept]
    )


def test_attempts_end_with_the_first_token_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[int] = []

    def counted(seed: int, position: int, lane: int = 0) -> list[float]:
        lanes.append(lane)
        return uniforms(seed, position, lane)

    monkeypatch.setattr(draw, "uniforms", counted)
    logits = torch.tensor([0.0, math.log(3)])

    def attempts(count: int = 1, **fields: Any) -> list[int]:
        lanes.clear()
        tokens = sample_many(logits, SamplingParams(**fields), count, seed=SEED)
        assert set(tokens.tolist()) <= set(survivors(logits.numpy(), SamplingParams(**fields)))
        return lanes.copy()

    assert attempts(top_p=0.99) == [0]
    assert attempts(top_k=2, min_p=0.1) == [0]  # top-k keeps the whole vocabulary
    # One token of mass 3/4 is kept. The last resort takes a number of lane 0 again.
    made = np.bincount(attempts(COUNT, top_p=0.5)) / COUNT
    np.testing.assert_allclose(made, [1 + 0.25**ATTEMPTS, *(0.25**lane for lane in range(1, ATTEMPTS))], atol=0.05)
