"""Slots: joining, appending, leaving, coming back; lists of any length in one pool."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from drawing import new_state, sample_at
from hypothesis import example, given

from freewheel.sampling import Sampler, SampleRows, SamplingParams, SamplingState
from freewheel.sampling.pool import ListPool
from freewheel.sampling.tables import most_bytes

VOCAB = 50
DEMANDING: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.7,
    "presence_penalty": 0.4,
    "logit_bias": {3: 2.0},
    "bad_words": ["x"],
    "min_tokens": 4,
    "top_p": 0.9,
}


def join(state: SamplingState, slot: int, fields: dict[str, Any], seed: int, output: list[int]) -> None:
    words = [[5, 6], [7]] if "bad_words" in fields else []
    state.join(slot, SamplingParams(**fields), [1, 2, 3], seed=seed, output_ids=output, bad_word_ids=words, end_ids=[0])


def run(state: SamplingState, lengths: dict[int, int], steps: int) -> list[list[int]]:
    """Tokens of each slot, of some length, over some steps; each position of each sequence has logits of its own."""
    rows, tokens = torch.tensor(list(lengths), device=state.device), []
    for step in range(steps):
        positions = torch.tensor(list(lengths.values()), device=state.device) + step
        logits = torch.stack(
            [torch.randn(VOCAB, generator=torch.Generator().manual_seed(int(position))) * 2 for position in positions]
        )
        drawn = Sampler(state).sample(logits.to(state.device), SampleRows(rows, positions)).tokens
        state.append(rows, positions, drawn)
        tokens.append(drawn.tolist())
    return [list(column) for column in zip(*tokens)]


@pytest.mark.parametrize("fields", [{}, DEMANDING], ids=["plain", "demanding"])
@pytest.mark.parametrize("made", [0, 1, 3, 7])
def test_a_preempted_sequence_comes_back_as_it_was(fields: dict[str, Any], made: int) -> None:
    state = SamplingState(4, VOCAB, 32)
    join(state, 2, fields, 9, [])
    [whole] = run(state, {2: 3}, 10)
    join(state, 0, DEMANDING, 1, [])
    state.leave(2)
    join(state, 1, DEMANDING, 5, [8])
    join(state, 3, fields, 9, whole[:made])
    assert run(state, {3: 3 + made}, 10 - made) == [whole[made:]]


def test_a_demanding_sequence_that_joins_a_running_batch_is_as_it_is_alone() -> None:
    alone = SamplingState(1, VOCAB, 64)
    join(alone, 0, DEMANDING, 9, [])
    [expected] = run(alone, {0: 3}, 12)

    state = SamplingState(5, VOCAB, 64)
    for slot in range(4):
        join(state, slot, {}, slot, [])
    run(state, dict.fromkeys(range(4), 3), 5)
    join(state, 4, DEMANDING, 9, [])
    first = run(state, {3: 8, 4: 3, 0: 8, 1: 8, 2: 8}, 6)[1]
    state.leave(1)
    assert first + run(state, {4: 9, 2: 14}, 6)[0] == expected


def test_a_slot_keeps_nothing_of_the_one_before(fused: bool) -> None:
    state = new_state(2, VOCAB, 32, fused=fused)
    for _ in range(3):
        join(state, 0, {**DEMANDING, "allowed_token_ids": range(9), "logprobs": 3, "temperature": 0.0}, 3, [4, 4, 4])
        run(state, {0: 6}, 3)
        state.leave(0)
    join(state, 0, {}, 7, [])
    fresh = new_state(2, VOCAB, 32, fused=fused)
    join(fresh, 1, {}, 7, [])
    assert not state.settings[0].edited(3)
    assert run(state, {0: 3}, 8) == run(fresh, {1: 3}, 8)


def test_a_slot_that_was_left_shares_nothing_with_the_one_that_joins(fused: bool) -> None:
    """A row may still name it: it is greedy, and changes neither what others draw nor what they have made."""
    state, asked = new_state(3, VOCAB, 32, fused=fused), {**DEMANDING, "temperature": 0.0, "frequency_penalty": 2.0}
    join(state, 0, {**asked, "logit_bias": {7: 50.0}, "allowed_token_ids": [7, 8]}, 0, [])
    state.leave(0)
    join(state, 1, asked, 1, [])
    join(state, 2, {}, 2, [])
    alone = new_state(2, VOCAB, 32, fused=fused)
    join(alone, 1, asked, 1, [])
    logits = torch.arange(VOCAB).float().sin()
    logits[9] = 1.5
    for position in range(3, 6):
        [expected] = sample_at(alone, logits, [(1, position)]).tokens.tolist()
        for order in ([1, 0, 2], [0, 1, 2]):
            tokens = sample_at(state, logits, [(slot, position) for slot in order]).tokens.tolist()
            assert tokens[order.index(1)] == expected
            assert tokens[order.index(0)] == 9
        for which, slots in ((alone, [1]), (state, [0, 1])):
            rows = torch.tensor([slots, [position] * len(slots), [expected] * len(slots)], device=which.device)
            which.append(*rows)


def test_a_demanding_sequence_takes_over_in_a_running_batch(fused: bool) -> None:
    """All that its logits become is what they become in a state of its own, step after step."""
    asked = {**DEMANDING, "top_p": 1.0, "logprobs": VOCAB, "logprobs_mode": "processed"}
    state, alone = new_state(2, VOCAB, 32, fused=fused), SamplingState(1, VOCAB, 32)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    join(state, 0, {}, 0, [])
    join(state, 1, {**asked, "allowed_token_ids": range(9), "logit_bias": {8: 9.0}}, 1, [2, 2, 8])
    state.append(*torch.tensor([[0, 1], [3, 6], [8, 8]], device=state.device))
    state.leave(1)
    join(state, 1, asked, 9, [])
    join(alone, 0, asked, 9, [])
    for position in range(3, 6):
        beside = sample_at(state, logits, [(0, position + 1), (1, position)])
        expected = sample_at(alone, logits, [(0, position)])
        assert beside.tokens[1] == expected.tokens[0]
        assert beside.logprobs is not None
        assert expected.logprobs is not None
        assert beside.logprobs.top_ids[-1].tolist() == expected.logprobs.top_ids[0].tolist()
        torch.testing.assert_close(
            beside.logprobs.top_logprobs[-1].cpu(), expected.logprobs.top_logprobs[0], atol=1e-5, rtol=1e-5
        )
        slots, positions = torch.tensor([[0, 1], [position + 1, position]], device=state.device)
        state.append(slots, positions, beside.tokens)
        alone.append(torch.tensor([0]), torch.tensor([position]), expected.tokens)


def test_count_rows_exist_only_for_slots_with_penalties(fused: bool) -> None:
    state = new_state(8, VOCAB, 16, fused=fused)
    for slot in range(8):
        fields = {"presence_penalty": 0.5} if slot in (2, 5) else {"logit_bias": {slot: 1.0}, "min_tokens": 3}
        join(state, slot, {} if slot == 0 else fields, slot, [])
    rows = [settings.count_row for settings in state.settings]
    assert [slot for slot, row in enumerate(rows) if row >= 0] == [2, 5]
    state.leave(2)
    join(state, 7, {"repetition_penalty": 1.2}, 0, [])
    assert sorted(settings.count_row for settings in state.settings) == [-1] * 6 + [0, 1]
    if state.tables is None:
        assert state.count_rows.tolist() == [settings.count_row for settings in state.settings]
    else:
        assert state.tables.counts.shape == (2, VOCAB)
        assert state.tables.values.shape == (8, VOCAB)


def test_a_row_without_a_token_is_not_appended(fused: bool) -> None:
    state = new_state(3, VOCAB, 16, fused=fused)
    for slot in range(3):
        join(state, slot, {"frequency_penalty": 1.0}, slot, [])
    before = state.history.clone()
    state.append(*torch.tensor([[2, 0, 1], [3, 3, 3], [7, -1, 9]], device=state.device))
    assert state.history[:, 3].tolist() == [0, 9, 7]
    assert torch.equal(state.history[0], before[0])
    rows, tokens, counts = state.seen_tokens(*torch.tensor([[0, 2], [3, 4]], device=state.device))
    assert rows.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert tokens.tolist() == [1, 2, 3, 1, 2, 3, 7]
    assert counts.tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_a_token_past_the_longest_sequence_is_not_appended(fused: bool) -> None:
    """The next slot's history begins there."""
    state = new_state(2, VOCAB, 4, fused=fused)
    for slot in range(2):
        join(state, slot, {"frequency_penalty": 1.0}, slot, [])
    columns = torch.tensor([[0, 1], [4, 3], [9, 8]], device=state.device)
    if state.device.type == "cuda":
        state.append(*columns)
    else:
        with pytest.raises(IndexError):
            state.append(*columns)
        if fused:
            from freewheel.sampling import edit_kernels
            from freewheel.sampling.fused import sequences_of

            slots, positions, tokens = columns
            edit_kernels.append[(2,)](slots, positions, tokens, sequences_of(state))
    assert state.history.tolist() == [[1, 2, 3, 0], [1, 2, 3, 8 if fused else 0]]
    if state.tables is not None:
        assert state.tables.counts.nonzero()[:, 1].tolist() == [8]
    state.append(*torch.tensor([[0], [7], [-1]], device=state.device))


@pytest.mark.parametrize("prompt", [[VOCAB], [-1], [2**31]])
def test_prompts_outside_the_vocabulary_are_refused(prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        SamplingState(1, VOCAB, 16).join(0, SamplingParams(), prompt, seed=0)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.0, None])
def test_a_seed_of_more_bits_is_refused_before_anything_is_written(seed: Any, fused: bool) -> None:
    state = new_state(1, VOCAB, 16, fused=fused)
    join(state, 0, DEMANDING, -(2**63), [4])
    before, history = state.settings[0], state.history.clone()
    with pytest.raises(ValueError, match="seed must be an integer from -9223372036854775808 to 9223372036854775807"):
        state.join(0, SamplingParams(), [9], seed=seed)
    assert state.settings[0] == before
    assert state.history.equal(history)


def test_sequences_that_are_too_long_are_refused() -> None:
    state = SamplingState(1, VOCAB, 4)
    state.join(0, SamplingParams(), [1, 2], seed=0, output_ids=[3, 4])
    with pytest.raises(ValueError, match="5 tokens"):
        state.join(0, SamplingParams(), [1, 2, 3], seed=0, output_ids=[3, 4])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=40))
@example([(0, 3), (1, 1), (2, 3), (0, 0), (2, 0), (3, 5)])
def test_the_pool_keeps_every_list_through_any_sequence_of_changes(changes: list[tuple[int, int]]) -> None:
    pool, expected = ListPool(6, torch.int64, "cpu"), {}
    for step, (slot, length) in enumerate(changes):
        pool.drop(slot)
        expected[slot] = [1000 * step + i for i in range(length)]
        pool.put(slot, torch.tensor(expected[slot], dtype=torch.int64))
        for other, values in expected.items():
            assert pool.get(other).tolist() == values
            assert int(pool.lengths[other]) == len(values)
    slots = [5, 0, 3, 3, 1]
    rows, entries = pool.gather(torch.tensor(slots))
    pairs = [(row, value) for row, slot in enumerate(slots) for value in expected.get(slot, [])]
    assert list(zip(rows.tolist(), entries.tolist())) == pairs
    assert len(pool.entries) <= 4 * 6 * 40


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_the_memory_of_edits_is_known_before_anyone_asks_for_them(slots: int) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    state = new_state(slots, 1000, 16, drawn=20, fused=True)
    assert state.tables is not None
    for slot in range(slots):
        state.join(slot, SamplingParams(frequency_penalty=0.5), [1, 2], seed=0)
    growing = state.tables.bits.nbytes + state.tables.counts.nbytes
    assert most_bytes(slots, 20, 1000) == growing * 3 // 2 + state.tables.values.nbytes
