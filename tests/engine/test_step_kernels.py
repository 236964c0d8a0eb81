"""How a decode step ends. Without a CUDA device the kernel runs in Triton's interpreter."""

import os
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freewheel.sampling import SamplingParams, SamplingState, tables

pytest.importorskip("triton", reason="Triton is made for Linux only")

from freewheel.engine import ring, step_kernels
from freewheel.engine.ring import MOST_SCATTERED, OUTBOX_PLACES, OUTBOX_WORDS, Outbox, Ring
from freewheel.engine.step_kernels import StepInputs
from freewheel.ops.launch import dependent_launch
from freewheel.sampling.fused import sequences_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from freewheel.engine.draft_kernels import DraftInputs, DraftRows, Guesses, compact, judge, lay_out, settle
from freewheel.engine.step_kernels import StepInputs, advance, deliver
from freewheel.sampling.fused import Sequences
from freewheel.speculative.draft_kernels import Trees

types = {name: "*i64" for name in "tokens sampled ring lengths history outbox place".split()}
types |= {
    "statuses": "*u8", "paths": "*i32", "page_table": "*i32", "storage": "*bf16",
    "sequences": Sequences("*i64", "i32", "*i64", "*i32", "*i32", "i32", "i32"),
    "trees": Trees("*i64", "*i32", "*i32", "*i64", "*i32"), "found": Trees("*i64", "*i32", "*i32", "*i64", "*i32"),
    "guesses": Guesses("*i64", "*i32", "*i64"), "rows": DraftRows(*["*i64"] * 6, "*i32", "*i32", "*i64"),
}
sizes = {"NODES": 5, "PADDED": 8, "PLACES": 9, "DEPTH": 5, "COLUMNS": 8}
for kernel, inputs, constants in [
    (advance, StepInputs(*["*i64"] * 5), {"CHAINED": True}),
    (deliver, None, {"WORDS": 2048}),
    (lay_out, DraftInputs(*["*i64"] * 4), {"SEQUENCES": 4, "ROWS": 16, "TILES": 2, "TILE_ROWS": 4}),
    (settle, DraftInputs(*["*i64"] * 4), {"DRAFTS": True}),
    (settle, DraftInputs(*["*i64"] * 4), {"NODES": 1, "PADDED": 2, "DRAFTS": False}),
    (judge, DraftInputs(*["*i64"] * 4), {"GUESSED": 8}),
    (compact, None, {"PAGE_SIZE": 16, "HEAD_DIM": 80, "DIM": 128}),
]:
    constants = {name: size for name, size in sizes.items() if name in kernel.arg_names} | constants
    given = {**types, "inputs": inputs}
    signature = {name: "constexpr" if name in constants else given.get(name, "i32") for name in kernel.arg_names}
    compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__)
"""


def test_tokens_go_to_sequences_and_host_and_rows_move_on() -> None:
    places, slots = 3, [2, 0, -1]
    state = SamplingState(4, 50, 16, device=DEVICE, fused=True)
    state.join(2, SamplingParams(frequency_penalty=1.0), [5, 6], seed=0, noticed_ids=[*range(40, 47), 12, 10])
    state.join(0, SamplingParams(), [7], seed=0, noticed_ids=[12])
    columns = torch.tensor([slots, [1, 0, 8], [2, 1, 9], [2, 0, 3], [1, 1, 0]], device=DEVICE)
    results = Ring(places, (2, 3), DEVICE)
    results.words.fill_(-7)
    results.launched()  # so that places agree
    history = state.history.clone()
    chained = dependent_launch(DEVICE)
    options: dict[str, Any] = {"launch_pdl": True} if chained else {}
    # Of many ends the last are not noticed; those of the other sequence are no end.
    drawn = [([10, 20, 30], [0, 0, 0]), ([11, 0, 31], [0, 0, 0]), ([10, 43, 32], [0, 0, 1])]
    for step, (tokens, statuses) in enumerate(drawn):
        step_kernels.advance[(3,)](
            StepInputs(*columns.unbind()), torch.tensor(tokens, device=DEVICE),
            torch.tensor(statuses, dtype=torch.uint8, device=DEVICE), results.words, sequences_of(state), 3,
            **{"PLACES": places, "CHAINED": chained}, **options,
        )  # fmt: skip
        for row, position in enumerate((2 + step, 1 + step)):
            history[slots[row], position] = tokens[row]
        number = results.launched()
        assert results.result(number).tolist() == [[*tokens[:2], -7], [*statuses[:2], -7]]
        assert torch.equal(state.history, history)
    moved = [slots, [4, 3, 8], [5, 4, 9], [2, 0, 3], [1, 1, 0]]
    assert columns.tolist() == moved, "3 steps lead around the ring"
    assert state.tables is not None
    counts = state.tables.counts[int(state.tables.settings[2, tables.EDIT_ROW])]
    assert counts.nonzero().flatten().tolist() == [10, 11]
    assert counts[[10, 11]].tolist() == [2, 1]


@pytest.mark.parametrize(("ends", "last"), [([4, 12], 12), ([0], 0), ([], -1), ([*range(20, 28)], -1)])
def test_a_row_is_idle_once_its_sequence_has_ended(ends: list[int], last: int) -> None:
    """With one of its ends, or without a token, while the host does not know it yet."""
    state = SamplingState(3, 50, 16, device=DEVICE, fused=True)
    state.join(0, SamplingParams(), [7], seed=0, noticed_ids=ends)
    state.join(1, SamplingParams(), [8], seed=0)
    columns = torch.tensor([[0, 1], [0, 0], [1, 1], [0, 1], [0, 0]], device=DEVICE)
    results = Ring(2, (2, 2), DEVICE)
    chained = dependent_launch(DEVICE)
    options: dict[str, Any] = {"launch_pdl": True} if chained else {}
    for tokens in ([last, 12], [30, 31]):
        step_kernels.advance[(2,)](
            StepInputs(*columns.unbind()), torch.tensor(tokens, device=DEVICE),
            torch.zeros(2, dtype=torch.uint8, device=DEVICE), results.words, sequences_of(state), 2,
            **{"PLACES": 2, "CHAINED": chained}, **options,
        )  # fmt: skip
        results.launched()
    assert results.result(0)[0].tolist() == [last, 12]
    assert int(results.result(1)[0, 1]) == 31
    assert columns[[0, 3]].tolist() == [[-1, 1], [2, 1]], "the draw of an idle row is of the slot that nobody has"
    assert columns[:3, 1].tolist() == [1, 2, 3]
    assert state.history[:2, 1:4].tolist() == [[max(last, 0), 0, 0], [12, 31, 0]]


@pytest.fixture(params=[False, True], ids=["launched", "captured"])
def outbox(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Outbox:
    if DEVICE.type == "cpu":
        monkeypatch.setattr(ring, "capture", lambda run, _: SimpleNamespace(graph=SimpleNamespace(replay=run)))
    return Outbox(DEVICE, graphs=request.param)


def test_messages_go_where_they_are_sent_in_their_order(outbox: Outbox) -> None:
    """More than there are places, of both kinds."""
    random_ = random.Random(0)
    table = torch.full((4, 300), -1, dtype=torch.int32, device=DEVICE)
    numbers = [torch.zeros(2, count, dtype=torch.int64, device=DEVICE) for count in (1, 10, 500)]
    pages, told = [-1] * table.numel(), [[[0] * one.shape[1]] * 2 for one in numbers]
    for turn in range(OUTBOX_PLACES + 9):
        entries = random_.sample(range(table.numel()), [0, 1, 5, 128, MOST_SCATTERED][turn % 5])
        new = [random_.randrange(2**31) for _ in entries]
        outbox.scatter(table, entries, new)
        for entry, page in zip(entries, new):
            pages[entry] = page
        told[turn % 3] = [[random_.randrange(-(2**63), 2**63) for _ in row] for row in told[turn % 3]]
        outbox.tell(numbers[turn % 3], told[turn % 3])
    assert table.flatten().tolist() == pages
    assert [one.tolist() for one in numbers] == told


@pytest.mark.parametrize("launched", [False, True])
def test_messages_after_one_that_failed_arrive(outbox: Outbox, launched: bool) -> None:
    """Whether or not the device has taken it."""
    numbers = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    outbox.tell(numbers, [[1, 2]])
    whole = outbox._deliver, outbox._delivery

    def fails() -> None:
        if launched:
            whole[0]()
        raise MemoryError

    outbox._deliver = fails
    outbox._delivery = SimpleNamespace(replay=fails) if whole[1] else None  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        outbox.tell(numbers, [[3, 4]])
    outbox._deliver, outbox._delivery = whole
    for number in range(OUTBOX_PLACES + 2):
        outbox.tell(numbers, [[number, 5]])
        assert numbers.tolist() == [number, 5]


def test_a_message_that_is_too_long_is_refused_and_the_next_one_arrives() -> None:
    outbox, numbers = Outbox(DEVICE), torch.zeros(OUTBOX_WORDS, dtype=torch.int64, device=DEVICE)
    for _ in range(2):
        with pytest.raises(ValueError, match="reshape"):
            outbox.tell(numbers, [[0] * (OUTBOX_WORDS - 2)])
        outbox.tell(numbers[:2], [[3, 4]])
        assert numbers[:3].tolist() == [3, 4, 0]


def test_kernels_compile_without_a_device() -> None:
    """The interpreter knows no types."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=COMPILED)
    names = "advance deliver lay_out settle settle judge compact"
    assert done.stdout.split() == names.split(), done.stderr
