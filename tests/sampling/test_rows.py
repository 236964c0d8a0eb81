"""A row's result is its own: the same bits alone and in any batch, whatever the neighbours ask or suffer."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from drawing import LARGEST, LOUDEST, QUIETEST, SMALLEST, Draw, new_state, sample_at, sample_each
from torch import Tensor

from freewheel.sampling import Sampler, SampleRows, Samples, SamplingParams, SamplingState, Status
from freewheel.sampling.draw import BLOCK, Gumbel, gumbel_noise, weights
from freewheel.sampling.rng import NOISE, philox

VOCAB = 3 * 1024 + 77
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "all limits": {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "biased": {"logit_bias": {5: 3.0, 1024: -2.0}},
    "masked": {"allowed_token_ids": range(0, VOCAB, 3)},
    "min tokens": {"min_tokens": 5},
    "raw logprobs": {"logprobs": 3},
    "processed logprobs": {"logprobs": 12, "logprobs_mode": "processed", "top_k": 9},
}
NAN, EMPTY = len(KINDS), len(KINDS) + 1


@pytest.fixture(scope="module")
def state() -> SamplingState:
    """One slot for each kind, one whose row gets NaN, one that has nothing to draw."""
    state = SamplingState(len(KINDS) + 2, VOCAB, 16)
    requests = [*KINDS.values(), {}, {"top_p": 0.5}]
    for slot, fields in enumerate(requests):
        state.join(slot, SamplingParams(**fields), [5, 1024, 9], seed=slot + 1, output_ids=[5, 5], end_ids=[7])
    return state


def logits_of(dtype: torch.dtype) -> Tensor:
    logits = (torch.randn(NAN + 2, VOCAB, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    logits[:, ::9] = logits[:, :1]
    tied = logits.float().topk(60).indices[:, 5:]  # across the k-th place of every top-k
    logits.scatter_(1, tied, logits.gather(1, tied)[:, :1].expand_as(tied))
    logits[NAN, 2000] = math.nan
    logits[EMPTY] = -math.inf
    return logits


def results(samples: Samples) -> list[tuple[Any, ...]]:
    """Everything that was returned about each row, bit by bit."""
    about: list[tuple[Any, ...]] = [()] * len(samples.tokens)
    if samples.logprobs is not None:
        for row, *values, ids, top in zip(
            samples.logprobs.rows.tolist(),
            samples.logprobs.token_logprobs.tolist(),
            samples.logprobs.ranks.tolist(),
            samples.logprobs.top_ids.tolist(),
            samples.logprobs.top_logprobs.tolist(),
        ):
            asked_for = sum(id >= 0 for id in ids)
            about[row] = (*values, *ids[:asked_for], *top[:asked_for])
    return list(zip(samples.tokens.tolist(), samples.status.tolist(), about))


@pytest.mark.parametrize("draw", ["two_level", "gumbel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_bit_identical_in_every_batch(
    state: SamplingState, dtype: torch.dtype, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A large batch is worked on in parts.
    monkeypatch.setattr("freewheel.sampling.sampler.CHUNK", 10 * VOCAB)
    sampler, logits = Sampler(state, draw=draw), logits_of(dtype)
    generator = torch.Generator().manual_seed(1)

    def sample(slots: Tensor, offset: int) -> list[tuple[Any, ...]]:
        return results(sampler.sample(logits[slots], SampleRows(slots, torch.full_like(slots, 5 + offset))))

    offsets = range(2 if draw == "gumbel" else 4)
    alone = {offset: [sample(torch.tensor([slot]), offset)[0] for slot in range(NAN + 2)] for offset in offsets}
    assert [status for _, status, _ in alone[0]] == [Status.OK] * NAN + [Status.NAN, Status.EMPTY]
    for offset, size in ((offset, size) for offset in offsets for size in (2, 7, 8, 9, 64, 256)):
        slots = torch.randint(NAN + 2, (size,), generator=generator)
        assert sample(slots, offset) == [alone[offset][slot] for slot in slots.tolist()]
    for kind in range(NAN):
        for neighbour in range(NAN + 2):
            pair = torch.tensor([kind, neighbour])
            assert sample(pair, 0)[0] == alone[0][kind], f"row {kind} beside row {neighbour}"


@pytest.mark.parametrize("draw", ["two_level", "gumbel"])
def test_a_seeded_token_is_the_same_beside_any_neighbour(draw: Draw, fused: bool) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(4))
    plain = SamplingParams()
    alone = sample_each(logits[:1], [plain], draw=draw, fused=fused).tokens
    limits: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}]
    for fields in limits:
        beside = sample_each(logits, [plain, SamplingParams(**fields)], draw=draw, fused=fused).tokens
        assert beside[0] == alone[0], f"beside {fields}"


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_weights_have_the_same_bits_in_every_batch(threads: int) -> None:
    logits = torch.randn(64, 36 * BLOCK + 77, generator=torch.Generator().manual_seed(2)) * 3
    peaks, temperatures = logits.amax(1, keepdim=True), [0.8] * 64
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = weights(logits, peaks, temperatures)
        for first, size in ((0, 1), (63, 1), (5, 2), (11, 7), (3, 8), (50, 9)):
            rows = slice(first, first + size)
            alone = weights(logits[rows], peaks[rows], temperatures[rows])
            assert torch.equal(alone, together[rows])
            assert torch.equal(alone.sum(2), together.sum(2)[rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_are_reported_even_under_a_mask(kind: str, bad: float) -> None:
    # Id 1 is outside the allow-list of the masked row.
    state = SamplingState(1, VOCAB, 16)
    state.join(0, SamplingParams(**KINDS[kind]), [0, 1, 2], seed=0)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[0, 1] = bad
    samples = Sampler(state).sample(logits, SampleRows(torch.tensor([0]), torch.tensor([3])))
    assert samples.status.tolist() == [Status.NAN]
    assert samples.tokens.tolist() == [-1]
    state.append(torch.tensor([0]), torch.tensor([3]), samples.tokens)
    assert state.history[0, :4].tolist() == [0, 1, 2, 0]


def test_nan_among_padding_ids_is_not_read() -> None:
    state = SamplingState(1, 100, 16, valid_vocab_size=90)
    state.join(0, SamplingParams(), [0], seed=0)
    logits = torch.zeros(1, 100)
    logits[0, 95] = math.nan
    samples = Sampler(state).sample(logits, SampleRows(torch.tensor([0]), torch.tensor([1])))
    assert samples.status.tolist() == [Status.OK]


def test_no_rows_give_no_samples() -> None:
    state = SamplingState(1, 100, 16)
    none = torch.zeros(0, dtype=torch.int64)
    samples = Sampler(state).sample(torch.zeros(0, 100), SampleRows(none, none))
    assert samples.tokens.shape == samples.status.shape == (0,)
    assert samples.logprobs is None


@pytest.mark.parametrize("shape", [(2, 200), (2, 301), (1, 300), (3, 300), (300,), (1, 2, 300)], ids=str)
def test_logits_of_another_shape_are_refused(shape: tuple[int, ...], fused: bool) -> None:
    """A row would read its neighbour."""
    state = new_state(2, 300, 8, fused=fused)
    rows = SampleRows(*torch.tensor([[0, 1], [1, 1]], device=state.device))
    with pytest.raises(ValueError, match=re.escape("must have the shape (2, 300), of 2 slots and a vocabulary of 300")):
        Sampler(state).sample(torch.zeros(shape, device=state.device), rows)
    with pytest.raises(ValueError, match=r"must be as many positions: here are \(2, 300\) and \(1,\)"):
        Sampler(state).sample(torch.zeros(2, 300, device=state.device), replace(rows, positions=rows.positions[:1]))


def test_an_unknown_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="draw must be one of two_level, gumbel, multinomial"):
        Sampler(SamplingState(1, 100, 16), draw="other")  # pyright: ignore[reportArgumentType]


def test_gumbel_noise_is_finite_and_in_line_at_both_ends() -> None:
    ends = torch.tensor([0, 1, 2, 2**32 - 3, 2**32 - 2, 2**32 - 1])
    noise = gumbel_noise(ends)
    assert torch.isfinite(noise).all()
    assert (noise.diff() < 0).all()
    # The largest variate of 2**32 is about ln(2**33), and its neighbours are not far below.
    assert 22 < noise[0] < 23
    assert noise[0] - noise[1] < 1.2
    assert -4 < noise[5] < -3


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}], ids=str)
def test_the_most_extreme_noise_does_not_draw_a_masked_id(
    limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def words(seeds: Tensor, positions: Tensor, quads: Tensor) -> Tensor:
        extreme = torch.full((*torch.broadcast_shapes(seeds.shape, quads.shape), 4), 2**32 - 1)
        extreme[..., 1] = 0
        return extreme

    monkeypatch.setattr(Gumbel, "_words", staticmethod(words))
    for unlikely, expected in ((-math.inf, 2), (-100.0, 2), (5.0, 1)):
        state = SamplingState(1, 4, 4)
        state.join(0, SamplingParams(**limits), [0], seed=0)
        logits = torch.tensor([[0.0, unlikely, 1.0, -math.inf]])
        samples = Sampler(state, draw="gumbel").sample(logits, SampleRows(torch.tensor([0]), torch.tensor([1])))
        assert samples.tokens.tolist() == [expected]


def test_extreme_words_draw_neither_masked_nor_hopeless_ids(fused: bool) -> None:
    for keys, extreme in ((SMALLEST, 0), (LARGEST, 2**32 - 1)):
        assert [philox(seed, position)[word] for word, (seed, position) in enumerate(keys)] == [extreme] * 3
    logits = torch.tensor([-math.inf, -100.0]).repeat(350)  # of three blocks, of which the second has likely ids
    logits[[300, 301, 400]] = torch.tensor([0.5, 0.0, 0.3])
    plain, nucleus, few = SamplingParams(), SamplingParams(top_p=0.999), SamplingParams(top_k=7)
    cases = [
        (plain, SMALLEST[0], {300, 301, 400}),
        (plain, LARGEST[0], {300, 301, 400}),
        (plain, SMALLEST[1], {300}),
        (plain, LARGEST[1], {400}),
        (nucleus, SMALLEST[1], {300}),
        (nucleus, LARGEST[1], {400}),
        (few, SMALLEST[2], {300}),
        (few, LARGEST[2], {301}),
    ]
    state = new_state(len(cases), len(logits), 8, fused=fused)
    for slot, (params, (seed, _), _) in enumerate(cases):
        state.join(slot, params, [0], seed=seed)
    tokens = sample_at(state, logits, [(slot, position) for slot, (_, (_, position), _) in enumerate(cases)]).tokens
    assert all(token in expected for token, (_, _, expected) in zip(tokens.tolist(), cases)), tokens


@pytest.mark.parametrize(
    "limits",
    [{}, {"top_k": 20}, {"allowed_token_ids": [0, *range(7, 32)]}],
    ids=["no limits", "top-k", "allowed ids"],
)
def test_the_largest_gumbel_noise_draws_neither_masked_nor_hopeless_ids(limits: dict[str, Any], fused: bool) -> None:
    state = new_state(len(LOUDEST), 32, 8, fused=fused)
    for slot, (seed, position, id) in enumerate(LOUDEST):
        assert philox(seed, position, id // 4, NOISE)[id % 4] == 0
        state.join(slot, SamplingParams(**limits), [0], seed=seed)
    keys, loudest = zip(*(((slot, position), id) for slot, (_, position, id) in enumerate(LOUDEST)))
    drawn = []
    for logit in (-math.inf, -100.0, 1.0):
        logits = torch.zeros(len(LOUDEST), 32)
        logits[range(len(LOUDEST)), loudest] = logit
        drawn.append(sample_at(state, logits, keys, draw="gumbel").tokens.tolist())
    assert drawn[0] == drawn[1]
    assert not any(token == id for token, id in zip(drawn[0], loudest))
    assert drawn[2] == list(loudest)


def test_the_smallest_gumbel_noise_draws_the_only_id_that_is_left(fused: bool) -> None:
    state = new_state(len(QUIETEST), 32, 8, fused=fused)
    logits = torch.full((len(QUIETEST), 32), -math.inf)
    for slot, (seed, position, id) in enumerate(QUIETEST):
        assert philox(seed, position, id // 4, NOISE)[id % 4] == 2**32 - 1
        state.join(slot, SamplingParams(), [0], seed=seed)
        logits[slot, id] = 0.0
    keys = [(slot, position) for slot, (_, position, _) in enumerate(QUIETEST)]
    assert sample_at(state, logits, keys, draw="gumbel").tokens.tolist() == [id for _, _, id in QUIETEST]
