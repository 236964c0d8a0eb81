"""The Triton kernels say what the torch path says. Without a CUDA device they run in Triton's interpreter."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any, Literal

import pytest
import torch
from drawing import Draw, p_value, sample_each
from reference import edited_logits, probabilities, two_level
from speculative.trees import random_tree
from torch import Tensor

from freewheel.sampling import Sampler, SampleRows, Samples, SamplingParams, SamplingState, Status
from freewheel.speculative import DraftTree, walk

pytest.importorskip("triton", reason="Triton is made for Linux only")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT, OUTPUT = [1, 2, 3, 5, 3, 640, 7], [11, 12, 11]
BAD_WORDS = [[20], [11, 21], [12, 11, 22], [9, 11, 23]]
VOCAB = 700

COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from freewheel.sampling import (
    baseline_kernels, draw_kernels, edit_kernels, finish_kernels, fused, truncation_kernels
)

inputs = "*bf16 i32 *i64 *i64 *i32 *i64 *i64 *i64 i32 *i64 *i32 *i32 *i32 *fp32 i32 i32 i32".split()
work = "*fp32 *fp32 *fp32 *fp32 *i32 *fp32 *i32 *i32 *fp32 *fp32 *i64 *i32 *fp32 *i64 *i32 *i32 *i32 *fp32".split()
work += "*i64 *fp64 *i32".split()
types = {
    "inputs": fused.Inputs(*inputs), "work": fused.Workspace(*work), "tokens": "*i64", "statuses": "*u8",
    "out": fused.Described("*fp32", "*i64", "*i64", "*fp32", "*i64"), "slots": "*i64", "positions": "*i64",
    "weights": "*fp32", "random": "*i1",
    "sequences": fused.Sequences("*i64", "i32", "*i64", "*i32", "*i32", "i32", "i32"),
}
kernels = vars(baseline_kernels) | vars(draw_kernels) | vars(edit_kernels) | vars(finish_kernels)
kernels |= vars(truncation_kernels)
everything = {"EDITS": True, "MASKED": True, "CHAINED": True, "LOGPROBS": True, "BLOCKS": 256, "IDS": 128}
drafts = {"DEPTH": 12, "PATH": 16, "EACH": 16}
for name, constants in [
    ("edit", {"DEPTH": 0, "PATH": 1, "EACH": 1}), ("edit", drafts), ("touch", drafts), ("untouch", drafts),
    ("draw", {"TILE": 8, "ROWS": 16, "ALL": False, "FINISH": True}),
    ("draw", {"TILE": 8, "ROWS": 0, "ALL": True, "FINISH": False}),
    ("draw_plain", {"TILE": 8, "DEMANDS": True}), ("check", {"TILE": 8}), ("finish", {}), ("append", {}),
    ("threshold", {}), ("race", {"TILE": 8}), ("spread", {"TILE": 8}),
]:
    kernel = kernels[name]
    constants = {key: value for key, value in {**everything, **constants}.items() if key in kernel.arg_names}
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    print(name)
"""

EVERYTHING = SamplingParams(
    temperature=0.7,
    top_k=2,
    top_p=0.95,
    min_p=0.02,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias={3: 5.0, 7: -3.0, 699: 4.0},
)
ASKED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.5, min_tokens=20, stop_token_ids=[5, 9], max_tokens=40),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1e-8),
    SamplingParams(temperature=1e30),
    SamplingParams(temperature=0.8, top_k=1),
    SamplingParams(temperature=0.8, top_k=3, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.95),
    SamplingParams(temperature=0.9, top_p=0.01),
    SamplingParams(temperature=1, min_p=0.05),
    SamplingParams(temperature=2, top_p=0.3, min_p=0.2),
    SamplingParams(temperature=1, top_k=3, logprobs=2, logprobs_mode="processed"),
    SamplingParams(temperature=1, allowed_token_ids=list(range(5, 600, 7)), top_p=0.9, logprobs=3),
    EVERYTHING,
]


def joined(asked: Sequence[SamplingParams], vocab: int = VOCAB, *, fused: bool = True, **options: Any) -> SamplingState:
    """A state with a sequence for each of ``asked``, all with the same tokens and with seeds 0, 1, ..."""
    state = SamplingState(len(asked), vocab, 64, device=DEVICE if fused else "cpu", fused=fused, **options)
    for slot, params in enumerate(asked):
        join(state, slot, params)
    return state


def join(state: SamplingState, slot: int, params: SamplingParams) -> None:
    words = bad_words(slot, params)
    state.join(slot, params, PROMPT, seed=slot, output_ids=OUTPUT, end_ids=[2], bad_word_ids=words)


def bad_words(slot: int, params: SamplingParams) -> list[list[int]]:
    """Two of three sequences that ask for more than a temperature have some."""
    plain = params in (SamplingParams(), SamplingParams(temperature=0))
    return [] if plain or slot % 3 == 0 else BAD_WORDS


def sample(
    state: SamplingState,
    logits: Tensor,
    slots: Sequence[int],
    position: int = 10,
    draw: Draw = "two_level",
    **masks: Tensor,
) -> Samples:
    on: Any = {name: mask.to(state.device) for name, mask in masks.items()}
    rows = SampleRows(*torch.tensor([list(slots), [position] * len(slots)], device=state.device), **on)
    return Sampler(state, draw=draw).sample(logits.to(state.device), rows)


def assert_same_logprobs(ours: Samples, theirs: Samples) -> None:
    """The kernels describe all rows; those that did not ask or have no token have the rank 0."""
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    asking = theirs.logprobs.rows
    assert ours.logprobs.ranks.cpu().nonzero()[:, 0].tolist() == asking.tolist()
    for name in ("token_logprobs", "ranks", "top_ids", "top_logprobs", "top_ranks"):
        mine, other = getattr(ours.logprobs, name).cpu()[asking], getattr(theirs.logprobs, name)
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_a_state_with_tables_is_drawn_for_by_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or all that follows would compare the torch path with itself."""
    from freewheel.sampling.fused import FusedSampler

    def marked(self: FusedSampler, *arguments: Tensor, **more: Any) -> None:
        arguments[-2].fill_(123)

    monkeypatch.setattr(FusedSampler, "sample", marked)
    assert sample(joined(ASKED[:2]), torch.zeros(2, VOCAB), range(2)).tokens.tolist() == [123, 123]
    assert sample(joined(ASKED[:2], fused=False), torch.zeros(2, VOCAB), range(2)).tokens.tolist() != [123, 123]


@pytest.mark.parametrize("each", [1, 6])
def test_a_slot_may_have_many_rows(each: int) -> None:
    """Of a draft, at several positions; whether or not it was said that there are so many."""
    asked = [SamplingParams(temperature=0.8, top_k=3, top_p=0.9, logprobs=2), *[SamplingParams()] * 9]
    slots, positions = [*[0] * 6, *range(1, 10)], [*range(10, 16), *[10] * 9]
    logits = torch.randn(len(slots), VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    results = []
    for state in (joined(asked), joined(asked, fused=False)):
        rows = SampleRows(*torch.tensor([slots, positions], device=state.device), each=each)
        results.append(Sampler(state).sample(logits.to(state.device), rows))
    ours, theirs = results
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert_same_logprobs(ours, theirs)


# Faults, 19 and 20: bad words begin in the history, or in the draft, or are all in it; penalties see each node's path.
@pytest.mark.parametrize("seed", range(3))
def test_each_row_of_a_draft_sees_its_own_path(seed: int) -> None:
    """Step after step, as what was drafted and not accepted must leave no trace."""
    short = SamplingParams(temperature=0.8, min_tokens=5, stop_token_ids=[5, 9], max_tokens=40, logprobs=1)
    asked = [*ASKED[seed + 1 :: 3], short]
    fused, plain = joined(asked), joined(asked, fused=False)
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    tokens = [[*PROMPT, *OUTPUT] for _ in asked]
    for _ in range(2):
        trees = [random_tree(random, 7, 5) for _ in asked]
        drafted = [12, 11, 20, 22, 640]
        trees = [DraftTree(tuple(drafted[i] for i in tree.tokens), tree.parents) for tree in trees]
        slots = [slot for slot, tree in enumerate(trees) for _ in range(tree.rows)]
        positions = [len(tokens[slot]) + depth for slot, tree in enumerate(trees) for depth in tree.links.depths]
        paths = torch.full((len(slots), 7), -1)
        first = 0
        for tree in trees:
            paths[first : first + tree.rows, 7 - tree.paths.shape[1] :] = torch.from_numpy(tree.paths)
            first += tree.rows
        logits = torch.randn(len(slots), VOCAB, generator=generator) * 2
        logits[:, [*drafted, 5, 9]] += 6
        results = []
        for state in (fused, plain):
            rows = SampleRows(
                *torch.tensor([slots, positions], device=state.device), paths=paths.to(state.device), each=8
            )
            results.append(Sampler(state).sample(logits.to(state.device), rows))
        ours, theirs = results
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.status.tolist() == theirs.status.tolist()
        assert_same_logprobs(ours, theirs)
        sampled = theirs.tokens.split([tree.rows for tree in trees])
        for slot, (tree, own) in enumerate(zip(trees, sampled)):
            for token in walk(tree, own.tolist()).tokens:
                for state in (fused, plain):
                    state.append(*torch.tensor([[slot], [len(tokens[slot])], [token]], device=state.device))
                tokens[slot].append(token)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ties", [False, True])
def test_tokens_are_those_of_the_torch_path(dtype: torch.dtype, ties: bool) -> None:
    generator = torch.Generator().manual_seed(int(ties))
    fused, plain = joined(ASKED), joined(ASKED, fused=False)
    slots = range(len(ASKED))
    for position in (10, 11):
        logits = torch.randn(len(ASKED), VOCAB, generator=generator) * 3
        if ties:
            logits[:, ::3] = logits[:, 3:4]
        ours, theirs = (sample(state, logits.to(dtype), slots, position) for state in (fused, plain))
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.status.tolist() == theirs.status.tolist()
        assert_same_logprobs(ours, theirs)
        for state, tokens in ((fused, ours.tokens), (plain, theirs.tokens)):
            index = torch.tensor([[*slots], [position] * len(slots)], device=state.device)
            state.append(index[0], index[1], tokens)
        assert fused.history.tolist() == plain.history.tolist()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_log_probabilities_are_those_of_the_torch_path(mode: Literal["raw", "processed"], ties: bool) -> None:
    """Few and many alternatives, more than the row has blocks, more than are kept, more than any short list holds."""
    asked = [
        SamplingParams(temperature=t, logprobs=n, logprobs_mode=mode, **fields)
        for t, n, fields in [
            (0, 5, {}),
            (0.7, 0, {}),
            (1.3, 20, {"frequency_penalty": 0.5, "logit_bias": {4: 30.0, 1: -100.0}}),
            (1, 3, {"top_p": 0.5}),
            (1, 9, {"top_p": 0.01}),
            (1, 4, {"top_k": 2}),
            (1, 4, {"min_p": 0.5, "top_k": 7}),
            (1, 2, {"allowed_token_ids": [3, 400, 90]}),
            (1, 6, {"allowed_token_ids": [3, 400, 90]}),
            (1e30, 4, {"top_p": 0.95}),
        ]
    ]
    logits = torch.randn(len(asked), 1400, generator=torch.Generator().manual_seed(21)) * 3
    if ties:
        logits = logits.round()
        logits[0] = 1.0
    ours, theirs = (sample(joined(asked, 1400, fused=fused), logits, range(len(asked))) for fused in (True, False))
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert_same_logprobs(ours, theirs)


def test_a_sequence_alone_is_drawn_for_after_its_demand_has_ended() -> None:
    """No kernel for plain rows is launched where none can be: here one can."""
    asked, logits = [SamplingParams(min_tokens=4)], torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5))
    fused, plain = joined(asked), joined(asked, fused=False)
    for position in range(8, 14):
        tokens = [sample(state, logits, [0], position).tokens.tolist() for state in (fused, plain)]
        assert tokens[0] == tokens[1]


def test_rows_of_slots_that_nobody_has_joined_are_greedy(fused: bool) -> None:
    """As those are that fill up a captured graph, also of slots whose edits have gone to another."""
    biased = SamplingParams(temperature=0, logit_bias={5: 1e4})
    state = joined([SamplingParams(), biased, SamplingParams()], fused=fused)
    state.leave(1)
    join(state, 2, biased)
    empty = SamplingState(2, VOCAB, 64, device=state.device, fused=fused)
    logits = torch.arange(VOCAB).float().expand(2, -1)
    assert sample(empty, logits, range(2)).tokens.tolist() == [VOCAB - 1] * 2
    logits = torch.arange(VOCAB).float().expand(3, -1)
    assert sample(state, logits, range(3)).tokens.tolist()[1:] == [VOCAB - 1, 5]


def test_more_candidates_than_a_short_list_holds_are_searched_exactly() -> None:
    asked = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=0.1) for t, k, p in ((1, 500, 0.9), (1e30, 1300, 1))]
    asked.append(SamplingParams(temperature=1e30, top_p=1e-3))
    logits = torch.randn(3, 1400, generator=torch.Generator().manual_seed(3))
    logits[:, ::3] = 0.5
    ours, theirs = (sample(joined(asked, 1400, fused=fused), logits, range(3)) for fused in (True, False))
    assert ours.tokens.tolist() == theirs.tokens.tolist()


@pytest.mark.parametrize("limit", ["logits", "allowed ids", "mask"])
@pytest.mark.parametrize(("rows", "last"), [(16, 0.0), (16, 0.3), (7, 0.0), (7, 0.3)])
def test_top_k_keeps_what_is_left_where_fewer_blocks_than_k_have_anything(limit: str, rows: int, last: float) -> None:
    """A block's second value may be among the first k though it lies below the maxima of all others that have any."""
    logits = torch.full((rows, 1024), -torch.inf if limit == "logits" else 5.0)
    left = [0, 1, 2, 300]
    logits[:, left] = torch.tensor([0.3, 0.2, 0.1, last])
    params = SamplingParams(top_k=3, allowed_token_ids=left if limit == "allowed ids" else None)
    masks: dict[str, Any] = {}
    if limit == "mask":
        words = torch.zeros(1, 32, dtype=torch.int32)
        words[0, 0], words[0, 300 // 32] = 7, 1 << 300 % 32
        masks = {"masks": words, "mask_rows": torch.zeros(rows, dtype=torch.int64)}
    drawn: set[int] = set()
    for position in range(10, 11 + 14 // rows):
        ours, theirs = (
            sample(joined([params] * rows, 1024, fused=fused), logits, range(rows), position, **masks).tokens.tolist()
            for fused in (True, False)
        )
        assert ours == theirs
        drawn.update(ours)
    assert drawn == ({0, 1, 300} if last else {0, 1, 2})


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0])
def test_a_nucleus_ends_within_equal_values_of_several_blocks(value: float) -> None:
    logits = torch.full((16, 1024), value)
    logits[:, 1::2] = -value if value == 0 else value
    asked = [SamplingParams(top_p=0.5)] * 16
    ours, theirs = (sample(joined(asked, 1024, fused=fused), logits, range(16)).tokens for fused in (True, False))
    assert ours.max() < 512
    assert ours.tolist() == theirs.tolist()


def test_grammar_masks_forbid_ids_of_their_rows_only() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4))
    masks = torch.zeros(2, -(-VOCAB // 32), dtype=torch.int32)
    masks[0, 3], masks[1, 21] = 1 << 7, -(1 << 31)  # ids 103 and 703, which lies past the vocabulary
    rows = torch.tensor([-1, 0, -1, 1])
    asked = [SamplingParams(temperature=0), SamplingParams(top_p=0.9), EVERYTHING, SamplingParams()]
    none: dict[str, Any] = {"masks": masks[:1], "mask_rows": torch.full((4,), -1)}
    for fused in (True, False):
        free = sample(joined(asked, fused=fused), logits, range(4))
        masked = sample(joined(asked, fused=fused), logits, range(4), masks=masks, mask_rows=rows)
        assert sample(joined(asked, fused=fused), logits, range(4), **none).tokens.tolist() == free.tokens.tolist()
        assert masked.tokens.tolist() == [free.tokens[0], 103, free.tokens[2], -1]
        assert masked.status.tolist() == [Status.OK, Status.OK, Status.OK, Status.EMPTY]


def test_gumbel_noise_is_the_same_in_the_kernels() -> None:
    """For rows of every kind: the noise is keyed by seed, position and id, however the rest is computed."""
    logits = torch.randn(len(ASKED), VOCAB, generator=torch.Generator().manual_seed(14)) * 2
    logits[:, ::5] = 1.0
    logits[4] = -torch.inf
    rows = range(len(ASKED))
    ours, theirs = (sample(joined(ASKED, fused=fused), logits, rows, draw="gumbel") for fused in (True, False))
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert ours.status.tolist() == theirs.status.tolist()
    assert_same_logprobs(ours, theirs)


def test_multinomial_draws_are_among_the_kept_tokens() -> None:
    asked = [
        SamplingParams(temperature=0),
        *[SamplingParams(top_k=k, top_p=p) for k, p in ((2, 1), (0, 0.2), (3, 0.5))],
    ]
    logits = torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(15)) * 2
    slots = [*range(len(asked))] * 8
    torch.manual_seed(0)
    tokens = sample(joined(asked), logits[slots], slots, draw="multinomial").tokens.tolist()
    for slot, (row, params) in enumerate(zip(logits, asked)):
        kept = set(probabilities(edited_logits(row.numpy(), params, PROMPT), params).nonzero()[0].tolist())
        drawn = set(tokens[slot :: len(asked)])
        assert drawn <= kept
        assert drawn == kept or len(kept) > 3


def test_masks_that_do_not_fit_are_refused(fused: bool) -> None:
    words, rows, state = torch.zeros(1, 22, dtype=torch.int32), torch.tensor([0]), joined(ASKED[:1], fused=fused)
    for masks in (words[:, :21], words.long(), words[:0], words[0]):
        with pytest.raises(ValueError, match="masks must have 22 words"):
            sample(state, torch.zeros(1, VOCAB), [0], masks=masks, mask_rows=rows)
    incomplete: list[dict[str, Any]] = [{"masks": words}, {"mask_rows": rows}]
    for some in [*incomplete, {"masks": words, "mask_rows": rows.expand(2)}]:
        with pytest.raises(ValueError, match="masks and mask_rows go together"):
            sample(state, torch.zeros(1, VOCAB), [0], **some)
    if not fused:
        with pytest.raises(ValueError, match="mask_rows has 1, and there are 1 masks"):
            sample(state, torch.zeros(1, VOCAB), [0], masks=words, mask_rows=rows + 1)


def test_logits_may_lie_in_memory_in_any_way() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(9))
    asked = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.9)]
    expected = sample(joined(asked), logits, range(3)).tokens.tolist()
    for width in (VOCAB + 9, VOCAB + 4, VOCAB * 16):
        padded = torch.zeros(3, width)
        padded[:, -VOCAB:] = logits
        assert sample(joined(asked), padded[:, -VOCAB:], range(3)).tokens.tolist() == expected
        assert sample(joined(asked[:1]), padded[:1, -VOCAB:], [0]).tokens.tolist() == expected[:1]
    assert sample(joined(asked), logits.t().contiguous().t(), range(3)).tokens.tolist() == expected
    assert sample(joined(asked), logits[:0], []).tokens.tolist() == []


def test_sick_and_empty_rows_are_reported_and_leave_their_neighbours_alone() -> None:
    logits = torch.randn(len(ASKED), VOCAB, generator=torch.Generator().manual_seed(5))
    healthy = sample(joined(ASKED), logits, range(len(ASKED)))
    logits[2], logits[7, 9], logits[13, 699] = -torch.inf, torch.nan, torch.inf
    # A mask does not hide that the model has failed: id 4 is not among the allowed ones of this row.
    logits[12, 4] = torch.nan
    sick = sample(joined(ASKED), logits, range(len(ASKED)))
    expected = {2: Status.EMPTY, 7: Status.NAN, 12: Status.NAN, 13: Status.NAN}
    assert {row: status for row, status in enumerate(sick.status.tolist()) if status} == expected
    assert all(token == (-1 if row in expected else healthy.tokens[row]) for row, token in enumerate(sick.tokens))


@pytest.mark.parametrize("index", [0, 255, 256, 699])
def test_one_finite_logit_is_drawn_wherever_it_lies(index: int) -> None:
    logits = torch.full((5, VOCAB), -torch.inf)
    logits[:, index] = -3.0
    asked = [SamplingParams(temperature=t, top_p=p) for t in (0, 1, 1e30) for p in (0.5, 1)][1:]
    assert sample(joined(asked), logits, range(5)).tokens.tolist() == [index] * 5


def test_a_token_does_not_depend_on_the_batch() -> None:
    logits = torch.randn(len(ASKED), VOCAB, generator=torch.Generator().manual_seed(6)).bfloat16()
    whole = sample(joined(ASKED), logits, range(len(ASKED))).tokens.tolist()
    for rows in ([2], [13], [8, 2], [7, 6, 13, 0, 12, 9, 1]):
        assert sample(joined(ASKED), logits[rows], rows).tokens.tolist() == [whole[row] for row in rows]
    # Alone in its state, too: then kernels that it does not need are not launched.
    for row in (0, 2, 6, 7):
        state = SamplingState(row + 1, VOCAB, 64, device=DEVICE, fused=True)
        join(state, row, ASKED[row])
        assert sample(state, logits[row : row + 1], [row]).tokens.tolist() == [whole[row]]


@pytest.mark.parametrize(
    ("demanding", "params"),
    [
        ([3], EVERYTHING),
        ([0, 7], SamplingParams(top_k=40, logprobs=2)),
        ([9, 9, 9], SamplingParams(top_p=0.6)),
        ([2, 5, 11], SamplingParams(min_p=0.3)),
    ],
    ids=["everything", "top-k", "one slot's nuclei", "min-p"],
)
def test_a_few_demanding_rows_among_plain_ones_change_no_token(
    demanding: list[int], params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are finished by another kernel than many are. A slot may have several rows. Memory may hold anything."""
    plain = [SamplingParams(temperature=row % 2) for row in range(12)]
    asked = [params if row in demanding else plain[row] for row in range(12)]
    slots = [row for row in range(12) if row not in demanding] + demanding
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(10)) * 3
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda *shape, **kind: torch.full(shape, 77, **kind))
        tokens = sample(joined(asked), logits[slots], slots).tokens.tolist()
    assert tokens == sample(joined(asked, fused=False), logits[slots], slots).tokens.tolist()
    others = slots[: -len(demanding)]
    assert tokens[: len(others)] == sample(joined(plain), logits[others], others).tokens.tolist()


@pytest.mark.gpu
def test_candidates_beyond_the_lists_capacity_spoil_no_other_row() -> None:
    """One id in each of 2,048 blocks reaches the bound."""
    vocab = 2**19
    logits = torch.zeros(2, vocab)
    logits[0, 7::256] = 5.0
    asked = [SamplingParams(top_k=3), SamplingParams(top_k=2)]
    logits[1, :2] = torch.tensor([9.0, 9.5])
    ours, theirs = (sample(joined(asked, vocab, fused=fused), logits, range(2)) for fused in (True, False))
    assert ours.tokens.tolist() == theirs.tokens.tolist()


def test_no_more_alternatives_are_listed_than_there_is_room_for() -> None:
    """A captured graph has the room of when it was captured."""
    state = joined([SamplingParams(logprobs=3), SamplingParams(logprobs=1)])
    state.settings[0] = state.settings[0]._replace(alternatives=1)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(16))
    samples = sample(state, logits, range(2))
    assert samples.logprobs is not None
    assert samples.logprobs.top_ids.tolist() == logits.argmax(1, keepdim=True).tolist()


@pytest.mark.parametrize(
    ("params", "logits"),
    [
        (SamplingParams(temperature=0, top_k=3, logprobs=5, logprobs_mode="processed"), torch.arange(300) % 40 / 4),
        (SamplingParams(logprobs=4), torch.tensor([0.0, -100.0, -90.0, -1.0])),
        (SamplingParams(top_k=5, logprobs=2), torch.full((300,), torch.finfo(torch.float32).min)),
    ],
    ids=["greedy rows are not truncated", "all ids are listed", "the lowest value"],
)
def test_log_probabilities_at_the_edges(params: SamplingParams, logits: Tensor) -> None:
    ours, theirs = (SamplingState(1, len(logits), 8, device=DEVICE if f else "cpu", fused=f) for f in (True, False))
    for state in (ours, theirs):
        state.join(0, params, [1], seed=5)
    mine, other = (sample(state, logits[None], [0], 1) for state in (ours, theirs))
    assert mine.tokens.tolist() == other.tokens.tolist()
    assert_same_logprobs(mine, other)


def test_tokens_to_append_may_lie_in_memory_in_any_way() -> None:
    state = joined([EVERYTHING, SamplingParams()])
    columns = torch.tensor([[1, 10, 33], [0, 11, 44]], device=DEVICE)
    state.append(*columns.T)
    assert state.history[[1, 0], [10, 11]].tolist() == [33, 44]
    assert state.tables is not None
    assert state.tables.counts[state.settings[0].count_row, 44] == 1


COMBINATIONS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in product(
        (0.0, 1e-8, 1.0, 1e30), (0, 1, 3, 100), (1.0, 0.9, 0.3, 1e-4), (0.0, 0.1, 1.0)
    )
]


@pytest.mark.parametrize("kind", ["few values", "holes", "huge", "one value", "tiny", "two blocks", "bfloat16"])
def test_no_combination_and_no_logits_confuse_the_kernels(kind: str) -> None:
    """All combinations on a GPU; the interpreter is given one in nine."""
    asked = COMBINATIONS[:: 1 if DEVICE == "cuda" else 9]
    logits = torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(30))
    if kind == "few values":
        logits = (logits * 0.7).round()
    elif kind == "holes":
        logits[:, :300], logits[:, 511:513] = -torch.inf, -torch.inf
    elif kind == "huge":
        logits = logits.sign() * 1e4
        logits[:, 256] = 1e4 + 1
    elif kind == "one value":
        logits[:] = -3.25
    elif kind == "tiny":
        logits = logits * 1e-40
    elif kind == "two blocks":
        logits[:, 5:] = -torch.inf
        logits[:, 699] = logits[:, :5].amax(1)
    else:
        logits = (logits * 3).bfloat16()
    ours, theirs = (sample(joined(asked, fused=fused), logits, range(len(asked))) for fused in (True, False))
    different = [asked[row] for row, same in enumerate(ours.tokens.cpu() == theirs.tokens) if not same]
    assert not different


def test_kernels_compile_for_a_gpu() -> None:
    """The interpreter knows no types and no registers: the compiler does, and needs no GPU."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=COMPILED, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    names = "edit edit touch untouch draw draw draw_plain check finish append threshold race spread"
    assert done.stdout.split() == names.split()


def test_ids_past_the_vocabulary_are_never_drawn() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(7))
    cut = logits.clone()
    logits[:, 500:], cut[:, 500:] = 50, -torch.inf
    asked = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5, logit_bias={2: 1.0})]
    tokens = sample(joined(asked, valid_vocab_size=500), logits, range(3)).tokens.tolist()
    assert tokens == sample(joined(asked), cut, range(3)).tokens.tolist()


@pytest.mark.parametrize("size", [2, 7, 8, 9])
def test_what_is_kept_of_a_tie_does_not_depend_on_the_batch(size: int) -> None:
    """Few rows, a few demanding ones among many, and many of them are finished by different kernels."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(12)).clamp(max=2).bfloat16()
    logits[[7, 100]], logits[3::10] = 4.0, 3.75
    kept = [7, 100, 3, 13, 23]
    limited = SamplingParams(top_k=5, logprobs=7, logprobs_mode="processed")
    alone = sample_each(logits, [limited], fused=True)
    assert alone.logprobs is not None
    for neighbours in ([SamplingParams()] * (size - 1), [SamplingParams(top_k=5)] * (size - 1)):
        samples = sample_each(logits, [limited, *neighbours], fused=True)
        assert samples.logprobs is not None
        assert samples.tokens[0] == alone.tokens[0]
        assert samples.logprobs.top_logprobs[0].equal(alone.logprobs.top_logprobs[0])
        assert samples.logprobs.top_ids[0].tolist() == [*kept, 0, 1]
        assert all(token in kept for token, asked in zip(samples.tokens.tolist(), neighbours) if asked.top_k)


def test_probabilities_never_exceed_one_at_low_temperature() -> None:
    logits = torch.full((2, 520), 0.25)
    logits[range(2), [300, 519]] = torch.tensor([0.375, 0.251])
    asked = [SamplingParams(temperature=0.001, logprobs=20, logprobs_mode="processed")] * 2
    ours, theirs = (sample_each(logits, asked, fused=fused) for fused in (True, False))
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert_same_logprobs(ours, theirs)
    assert ours.logprobs is not None
    assert ours.logprobs.top_logprobs.max() <= 0
    mass = ours.logprobs.top_logprobs.double().exp()
    assert float(mass[0].sum()) == pytest.approx(1.0, abs=1e-6)
    assert float(mass[1, 0]) == pytest.approx(math.e / (math.e + 519), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("params", ASKED[2:11], ids=range(2, 11))
@pytest.mark.parametrize("vocab", [40, 151_936])
@pytest.mark.parametrize("draw", ["two_level", "gumbel", "multinomial"])
def test_draws_have_the_distribution_of_the_contract(params: SamplingParams, vocab: int, draw: Draw) -> None:
    count = 2**16 if vocab == 40 else 2**12
    logits = (torch.randn(vocab, generator=torch.Generator().manual_seed(8)) * 2).bfloat16()
    state = SamplingState(1, vocab, 2**17, device="cuda")
    state.join(0, params, [1, 2, 3, 3], seed=11)
    sampler, drawn = Sampler(state, draw=draw), []
    for start in range(4, count, 2**10):
        positions = torch.arange(start, start + 2**10, device="cuda")
        rows = SampleRows(torch.zeros_like(positions), positions)
        drawn.append(sampler.sample(logits.expand(2**10, -1).cuda(), rows).tokens.cpu())
    expected = probabilities(edited_logits(logits.float().numpy(), params, [1, 2, 3, 3]), params)
    assert p_value(torch.cat(drawn), expected) > 1e-4


SEEDS = 8192
EDITS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {3: 2.0, 300: -3.0, 511: 1.5}},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": -0.6, "presence_penalty": 0.5},
    "mask": {},
    "everything": {**vars(EVERYTHING), "temperature": 1.2, "top_k": 50},
}


@pytest.mark.gpu
@pytest.mark.parametrize("draw", ["two_level", "gumbel", "multinomial"])
@pytest.mark.parametrize("edits", EDITS)
@pytest.mark.parametrize("kind", ["normal", "ties", "empty blocks"])
def test_edited_draws_have_the_distribution_of_the_contract(kind: str, edits: str, draw: Draw) -> None:
    """One draw for each of many seeds: an edited sequence has one row at a time."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(41)) * 1.5
    if kind == "ties":
        logits = logits.round()
    elif kind == "empty blocks":
        logits[:256], logits[300:600] = -torch.inf, -torch.inf
    count, params = SEEDS, SamplingParams(**EDITS[edits])
    state = SamplingState(count, VOCAB, 64, device=DEVICE, fused=True)
    for slot in range(count):
        state.join(slot, params, PROMPT, seed=slot, output_ids=OUTPUT)
    values = edited_logits(logits.bfloat16().float().numpy(), params, PROMPT, OUTPUT)
    masks: dict[str, Any] = {}
    if edits in ("mask", "everything"):
        permitted = torch.arange(VOCAB) % 3 > 0
        values[~permitted.numpy()] = -math.inf
        words = torch.nn.functional.pad(permitted, (0, -VOCAB % 32)).view(-1, 32).long() << torch.arange(32)
        masks = {"masks": words.sum(1).to(torch.int32)[None], "mask_rows": torch.zeros(count, dtype=torch.int64)}
    torch.manual_seed(0)
    tokens = sample(state, logits.bfloat16().expand(count, -1), range(count), draw=draw, **masks).tokens.cpu()
    assert p_value(tokens, probabilities(values, params)) > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("share", [1, 5], ids=["all rows demanding", "one in five"])
def test_nothing_waits_for_the_device_and_a_graph_serves_changing_parameters(share: int) -> None:
    asked = [params if row % share == 0 else SamplingParams() for row, params in enumerate([*ASKED, *ASKED])]
    vocab, slots = 151_936, torch.arange(len(asked), device="cuda")
    logits = torch.randn(len(asked), vocab, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    masks = torch.full((1, vocab // 32), -1, dtype=torch.int32, device="cuda")
    rows = SampleRows(slots, torch.full_like(slots, 10), masks, torch.where(slots == 1, 0, -1))
    state = joined(asked, vocab)
    sampler = Sampler(state)
    eager = sampler.sample(logits, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = sampler.sample(logits, rows)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = sampler.sample(logits, rows)
            state.append(slots, rows.positions, captured.tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    assert_equal(again, eager)
    assert_equal(captured, eager)
    # Every slot now asks what another one asked: the same graph draws what a new state would.
    turned = asked[3:] + asked[:3]
    for slot, params in enumerate(turned):
        join(state, slot, params)
    graph.replay()
    assert_equal(captured, Sampler(joined(turned, vocab)).sample(logits, rows))


def assert_equal(samples: Samples, others: Samples) -> None:
    """To the last bit."""
    assert samples.tokens.tolist() == others.tokens.tolist()
    assert samples.status.tolist() == others.status.tolist()
    assert (samples.logprobs is None) == (others.logprobs is None)
    if samples.logprobs is None:
        return
    for name in ("token_logprobs", "ranks", "top_ids", "top_logprobs", "top_ranks"):
        torch.testing.assert_close(
            getattr(samples.logprobs, name), getattr(others.logprobs, name), rtol=0, atol=0, equal_nan=True
        )


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [49_152, 50_257, 151_936, 262_144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_torch_path_at_full_size(vocab: int, dtype: torch.dtype) -> None:
    """A draw may differ where it falls within 1e-6 of a boundary: how near it comes is measured, and two of 256 may."""
    asked = [*ASKED, SamplingParams(top_k=3000, top_p=0.9), SamplingParams(temperature=0.5, top_p=0.5)] * 4
    fused, plain = joined(asked, vocab), joined(asked, vocab, fused=False)
    distances = []
    for position in range(10, 14):
        logits = torch.randn(len(asked), vocab, generator=torch.Generator().manual_seed(position)) * 3
        logits = logits.to(dtype)
        ours, theirs = (sample(state, logits, range(len(asked)), position) for state in (fused, plain))
        for row in (ours.tokens.cpu() != theirs.tokens).nonzero()[:, 0].tolist():
            output = plain.history[row, len(PROMPT) : position].tolist()
            ends: dict[str, Any] = {"end_ids": [2], "bad_word_ids": bad_words(row, asked[row])}
            values = edited_logits(logits[row].float().numpy(), asked[row], PROMPT, output, **ends)
            token, distance = two_level(values, asked[row], row, position)
            assert token in (ours.tokens[row], theirs.tokens[row])
            distances.append(distance)
        index = torch.tensor([[*range(len(asked))], [position] * len(asked)])
        fused.append(index[0].to(DEVICE), index[1].to(DEVICE), theirs.tokens.to(DEVICE))
        plain.append(index[0], index[1], theirs.tokens)
    assert max(distances, default=0.0) < 1e-6
    assert len(distances) <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("share", [1, 7], ids=["all rows demanding", "one in seven"])
def test_a_token_does_not_depend_on_the_size_of_the_batch(share: int) -> None:
    asked = [ASKED[row % len(ASKED)] if row % share == 0 else SamplingParams(temperature=row % 2) for row in range(256)]
    logits = (torch.randn(256, 151_936, generator=torch.Generator().manual_seed(2)) * 3).bfloat16()
    state = joined(asked, 151_936)
    whole = sample(state, logits, range(256)).tokens.tolist()
    for size in (1, 2, 7, 8, 9, 64):
        for start in range(0, 192, 37):
            rows = range(start, start + size)
            assert sample(state, logits[start : start + size], rows).tokens.tolist() == whole[start : start + size]
    for row in range(0, 256, 16):  # alone in its state, too: then its neighbours' kernels are not launched
        alone = SamplingState(row + 1, 151_936, 64, device=DEVICE)
        join(alone, row, asked[row])
        assert sample(alone, logits[row : row + 1], [row]).tokens.tolist() == [whole[row]]


@pytest.mark.gpu
@pytest.mark.parametrize("share", [1, 7], ids=["all rows demanding", "one in seven"])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 64, 256])
def test_a_captured_batch_draws_and_appends_what_an_eager_one_does(size: int, share: int) -> None:
    """Logits, positions and parameters change between replays."""
    vocab, slots = 151_936, torch.arange(size, device=DEVICE)
    asked = [
        ASKED[-1 - row // share % len(ASKED)] if row % share == 0 else SamplingParams(temperature=row % 2)
        for row in range(size)
    ]
    ours, theirs = joined(asked, vocab), joined(asked, vocab)
    sampler, other = Sampler(ours), Sampler(theirs)

    def rejoin(turn: int) -> None:
        for state in (ours, theirs):
            for slot in range(size):
                state.leave(slot)
            for slot in range(size):
                join(state, slot, asked[(slot + turn) % size])

    for turn in (3, 5, 0):  # lists have grown to what they need
        rejoin(turn)
    logits = torch.zeros(size, vocab, dtype=torch.bfloat16, device=DEVICE)
    rows = SampleRows(slots, torch.full_like(slots, 10))
    sampler.sample(logits, rows)
    ours.append(slots, rows.positions, torch.full_like(slots, -1))
    demand, graph = sampler.demand, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampler.sample(logits, rows)
        ours.append(slots, rows.positions, captured.tokens)
    for turn, position in enumerate((10, 11, 12, 10, 11, 10)):
        if position == 10 and turn:
            rejoin(turn)
            assert sampler.demand == demand
        logits.copy_(torch.randn(size, vocab, generator=torch.Generator().manual_seed(turn)) * 3)
        rows.positions.fill_(position)
        graph.replay()
        eager = other.sample(logits, rows)
        theirs.append(slots, rows.positions, eager.tokens)
        assert_equal(captured, eager)
        assert ours.history.equal(theirs.history)
        assert ours.tables is not None
        assert theirs.tables is not None
        assert ours.tables.counts.equal(theirs.tables.counts)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0])
def test_mass_over_hundreds_of_thousands_of_tokens(spread: float) -> None:
    """More candidates than any list holds; equal values by the thousand."""
    asked = [
        *[SamplingParams(top_p=p) for p in (0.05, 0.5, 0.95, 1 - 1e-7)],
        *[SamplingParams(top_k=k, top_p=p) for k in (1000, 2000, 200_000) for p in (1.0, 0.9)],
        SamplingParams(min_p=0.9),
        SamplingParams(temperature=1e30, top_p=0.7, min_p=1.0),
        SamplingParams(top_p=0.9, logprobs=5, logprobs_mode="processed"),
        SamplingParams(logprobs=1024),
    ]
    logits = torch.randn(len(asked), 262_144, generator=torch.Generator().manual_seed(40)) * spread
    ours, theirs = (
        sample(joined(asked, 262_144, fused=f), logits.bfloat16(), range(len(asked))) for f in (True, False)
    )
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert_same_logprobs(ours, theirs)
