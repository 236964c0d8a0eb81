"""Top-k, top-p and min-p on logits chosen to be hard: ties, masks, extremes, flat rows."""

import math
from typing import Any

import numpy as np
import pytest
import reference
import torch
from drawing import Draw, p_value, sample_each, sample_many
from reference import probabilities, total_order
from torch import Tensor

from freewheel.sampling import SamplingParams, Status
from freewheel.sampling.draw import BLOCK, weights
from freewheel.sampling.state import Settings
from freewheel.sampling.truncation import GROUP, keeps, leading, survivors

BELOW_ONE = math.nextafter(1.0, 0.0)


def mask_of(logits: Tensor, **fields: Any) -> list[int]:
    """The ids that can be drawn, in the total order, as the processed log probabilities show them."""
    count = min(len(logits), 1024)
    samples = sample_each(logits, [SamplingParams(logprobs=count, logprobs_mode="processed", **fields)])
    assert samples.status.tolist() == [Status.OK]
    assert samples.logprobs is not None
    kept = samples.logprobs.top_logprobs[0] > -math.inf
    ids = samples.logprobs.top_ids[0][kept].tolist()
    assert int(samples.tokens) in ids
    return ids


def same_as_reference(logits: Tensor, **fields: Any) -> None:
    expected = reference.survivors(logits.double().numpy(), SamplingParams(**fields))
    assert mask_of(logits, **fields) == list(expected)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 0.75}, [0, 1, 2]),
        ({"top_p": 0.4}, [0]),
        ({"top_p": 1e-300}, [0]),
        ({"min_p": 0.39}, [0, 1, 2]),
        ({"min_p": 0.41}, [0]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 3, "top_p": 0.75}, [0, 1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("draw", ["two_level", "gumbel"])
def test_ties_at_the_boundary_are_broken_by_id(fields: dict[str, Any], kept: list[int], draw: Draw) -> None:
    shares = np.array([0.5, 0.2, 0.2, 0.1])
    logits = torch.from_numpy(np.log(shares)).float()
    assert mask_of(logits, **fields) == kept
    expected = np.where(np.isin(np.arange(4), kept), shares, 0)
    tokens = sample_many(logits, SamplingParams(**fields), 500, draw=draw)
    assert p_value(tokens, expected / expected.sum()) > 1e-3


@pytest.mark.parametrize("draw", ["two_level", "gumbel"])
def test_ties_at_the_boundary_are_broken_by_id_in_every_row_of_a_batch(draw: Draw, fused: bool) -> None:
    shares = torch.tensor([0.5, 0.2, 0.2, 0.1])
    limits: list[tuple[dict[str, Any], int]] = [
        ({"top_k": 2}, 2),
        ({"top_p": 0.6}, 2),
        ({"top_p": 0.75}, 3),
        ({"top_k": 3, "top_p": 0.75}, 2),
        ({"min_p": 0.39}, 3),
    ]
    asked = [SamplingParams(logprobs=4, logprobs_mode="processed", **fields) for fields, _ in limits]
    samples = sample_each(shares.log(), asked, draw=draw, fused=fused)
    assert samples.logprobs is not None
    assert samples.logprobs.top_ids.tolist() == [[0, 1, 2, 3]] * len(limits)
    for token, logprobs, (_, kept) in zip(samples.tokens, samples.logprobs.top_logprobs.cpu(), limits):
        assert token < kept
        expected = torch.where(torch.arange(4) < kept, shares, 0) / shares[:kept].sum()
        torch.testing.assert_close(logprobs.exp(), expected)
    tokens = sample_each(
        shares.log(), [SamplingParams(**fields) for fields, _ in limits[:2]] * 5, draw=draw, fused=fused
    )
    assert set(tokens.tokens.tolist()) == {0, 1}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [GROUP - 1, GROUP, 7 * GROUP + 3, 1000])
def test_leading_ids_come_in_the_total_order(vocab: int, tied: bool) -> None:
    scores = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    if tied:
        scores = scores.round()
    scores[::5] = -torch.inf
    order = total_order(scores.double().numpy())
    for count in {1, 2, 5, vocab // GROUP, vocab // GROUP + 1, vocab - 1, vocab} - {0}:
        assert leading(scores, count).tolist() == order[:count]


@pytest.mark.parametrize(
    "fields", [{"top_k": 40}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 50, "top_p": 0.9}], ids=str
)
@pytest.mark.parametrize("kind", ["constant", "duplicates", "mostly masked", "large", "negative", "one peak"])
def test_survivors_of_hard_rows(kind: str, fields: dict[str, Any]) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    if kind == "constant":
        logits = torch.full_like(logits, 3.25)
    elif kind == "duplicates":
        logits = logits.round()
    elif kind == "mostly masked":
        logits[:640], logits[700:] = -math.inf, -math.inf
    elif kind == "large":
        logits *= 1e4
    elif kind == "negative":
        logits -= 1e4
    else:
        logits[777] = 50.0
    same_as_reference(logits, **fields)
    same_as_reference(logits.bfloat16(), **fields)


@pytest.mark.parametrize("temperature", [1e-30, 1e-8, 1e-3, 1e3, 1e30])
@pytest.mark.parametrize("fields", [{}, {"top_k": 9}, {"top_p": 0.6}, {"min_p": 0.5}], ids=str)
def test_extreme_temperatures(temperature: float, fields: dict[str, Any]) -> None:
    logits = torch.randn(700, generator=torch.Generator().manual_seed(6))
    params = SamplingParams(temperature=temperature, **fields)
    tokens = sample_many(logits, params, 500)
    assert p_value(tokens, probabilities(logits.double().numpy(), params)) > 1e-3
    hot = SamplingParams(temperature=temperature, logprobs=0, logprobs_mode="processed", **fields)
    samples = sample_each(logits * 1e4, [hot])
    assert samples.logprobs is not None
    assert samples.status.tolist() == [Status.OK]
    assert -math.inf < float(samples.logprobs.token_logprobs) <= 0


@pytest.mark.parametrize("vocab", [1, 2, GROUP, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 5000])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}], ids=str)
def test_one_finite_logit_is_drawn_wherever_it_is(vocab: int, fields: dict[str, Any]) -> None:
    edges = {edge for size in (GROUP, BLOCK, 2 * BLOCK) for edge in (size - 1, size)}
    places = sorted({0, *edges, vocab // 2, vocab - 2, vocab - 1} & set(range(vocab)))
    logits = torch.full((len(places), vocab), -math.inf)
    logits[range(len(places)), places] = -7.0
    for dtype in (torch.float32, torch.bfloat16):
        samples = sample_each(logits.to(dtype), [SamplingParams(logprobs=1, **fields)] * len(places))
        assert samples.status.tolist() == [Status.OK] * len(places)
        assert samples.tokens.tolist() == places
        assert samples.logprobs is not None
        assert samples.logprobs.token_logprobs.tolist() == [0.0] * len(places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_the_largest(dtype: torch.dtype) -> None:
    for first, others in ((0, [1, 999]), (3, [17, 18, 500]), (130, [131, 400]), (998, [999])):
        for largest in (5.0, 0.0, -5.0):
            logits = torch.full((1000,), largest - 1, dtype=dtype)
            logits[[first, *others]] = largest
            if largest == 0.0:
                logits[first] = -0.0  # no smaller than the others
            assert sample_each(logits, [SamplingParams(temperature=0.0)]).tokens.tolist() == [first]


@pytest.mark.parametrize("draw", ["two_level", "gumbel"])
def test_blocks_of_masked_ids_are_never_drawn(draw: Draw) -> None:
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(7))
    logits[:1500], logits[2000:4096], logits[4500:] = -math.inf, -math.inf, -math.inf
    params = SamplingParams(temperature=3.0)
    tokens = sample_many(logits, params, 1500, draw=draw)
    assert p_value(tokens, probabilities(logits.double().numpy(), params)) > 1e-3


@pytest.mark.parametrize("top_p", [0.99999, 1 - 1e-7, 1 - 1e-9, 1 - 1e-12, BELOW_ONE])
def test_top_p_just_below_one_keeps_the_mass_it_promises(top_p: float) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.stack([torch.randn(40_000, generator=generator) * spread for spread in (0.01, 3.0)])
    for row in logits:
        ids, scores = survivors(row, Settings(temperature=1.0, top_k=len(row), top_p=top_p))
        weights = np.sort(np.exp(row.double().numpy() - float(row.max())))[::-1]
        needed = int(np.searchsorted(np.cumsum(weights), top_p * np.sum(weights))) + 1
        # Rounding in the sums, 1e-15 of the whole, may be worth some of the lightest tokens.
        slack = 1 + int((weights < 1e-11).sum() if top_p == BELOW_ONE else 0)
        assert abs(len(ids) - min(needed, len(row))) <= slack
        assert len(set(ids.tolist())) == len(ids) == len(scores)


def test_top_p_just_below_one_beside_others(fused: bool) -> None:
    logits = torch.randn(3, 32_768, generator=torch.Generator().manual_seed(9)) * 0.01
    mixed = [SamplingParams(top_p=BELOW_ONE), SamplingParams(top_p=0.9), SamplingParams(top_p=0.99999)]
    together = sample_each(logits, mixed, fused=fused)
    assert together.status.tolist() == [Status.OK] * 3
    others = sample_each(logits, [SamplingParams(), *mixed[1:]], fused=fused)
    assert together.tokens.tolist() == others.tokens.tolist(), "it keeps all, and the others are as they are"
    # The row itself keeps all it has: each attempt at the whole row is the token.
    kept, _ = survivors(logits[0], Settings(temperature=1.0, top_k=logits.shape[1], top_p=BELOW_ONE))
    assert len(kept) == logits.shape[1]
    tokens, plain = (sample_many(logits[0], params, 500) for params in (mixed[0], SamplingParams()))
    assert tokens.tolist() == plain.tolist()


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"min_p": 0.99}, {"top_k": 150_000}], ids=str)
def test_mass_over_two_hundred_thousand_tokens(fields: dict[str, Any]) -> None:
    vocab = 200_000
    tokens = sample_many(torch.zeros(vocab), SamplingParams(**fields), 100).numpy()
    # Equal logits: the total order is that of the ids, so top-k and top-p keep the first of them.
    size = round(vocab * fields.get("top_p", 1.0)) if "top_k" not in fields else fields["top_k"]
    assert tokens.max() < size
    assert p_value(torch.from_numpy(tokens // (size // 10)), np.full(10, 0.1)) > 1e-3
    assert len(set(tokens.tolist())) > 95
    if "top_p" in fields:
        ids, _ = survivors(torch.zeros(vocab), Settings(temperature=1.0, top_k=vocab, top_p=0.9))
        assert abs(len(ids) - size) <= 1


def test_top_p_just_below_one_keeps_every_token_of_a_flat_row(fused: bool) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(11)) * 0.01
    asked = [{"top_p": 0.99999}, {"top_p": BELOW_ONE}, {"top_p": BELOW_ONE, "logprobs": 300}]
    asked += [{"top_p": BELOW_ONE, "top_k": 40}, {"top_p": 0.9}]
    limited = sample_each(
        logits, [SamplingParams(logprobs_mode="processed", **fields) for fields in asked], fused=fused
    )
    others = [SamplingParams(), SamplingParams(), SamplingParams(), SamplingParams(top_k=40), SamplingParams(top_p=0.9)]
    assert limited.tokens.tolist() == sample_each(logits, others, fused=fused).tokens.tolist()
    assert limited.logprobs is not None
    assert (limited.logprobs.top_logprobs[limited.logprobs.ranks > 0] > -math.inf).all()


@pytest.mark.parametrize(
    "fields", [{"top_p": 0.3}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_p": 0.8, "min_p": 0.1}], ids=str
)
@pytest.mark.parametrize("kind", ["apart", "tied", "flat", "large"])
def test_a_token_is_kept_if_it_is_among_the_survivors(kind: str, fields: dict[str, Any]) -> None:
    logits = torch.randn(400, generator=torch.Generator().manual_seed(10)) * 3
    logits = {"apart": logits, "tied": logits.round(), "flat": torch.zeros(400), "large": logits * 1e4}[kind]
    settings = Settings(temperature=0.7, top_k=len(logits), **fields)
    peaks = logits[None].amax(1, keepdim=True)
    shares = weights(logits[None], peaks, [settings.temperature]).view(-1)
    drawable, mass = shares.nonzero().flatten().tolist(), float(shares.double().sum())
    kept = [token for token in drawable if keeps(token, logits, float(peaks), shares, mass, settings)]
    assert kept == sorted(survivors(logits, settings)[0].tolist())
