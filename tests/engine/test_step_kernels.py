"""How a decode step ends. Without a CUDA device the kernel runs in Triton's interpreter."""

import os
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from freewheel.sampling import SamplingParams, SamplingState, tables

pytest.importorskip("triton", reason="Triton is made for Linux only")

from freewheel.engine import step_kernels
from freewheel.engine.ring import OUTBOX_PLACES, OUTBOX_WORDS, Outbox, Ring
from freewheel.engine.step_kernels import StepInputs
from freewheel.ops.launch import dependent_launch, launch
from freewheel.sampling.fused import sequences_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from freewheel.engine.draft_kernels import DraftInputs, DraftRows, Guesses, compact, judge, lay_out, settle
from freewheel.engine.step_kernels import StepInputs, advance, tell, write_pages
from freewheel.sampling.fused import Sequences
from freewheel.speculative.draft_kernels import Trees

types = {name: "*i64" for name in "tokens sampled ring lengths history changes told numbers".split()}
types |= {
    "statuses": "*u8", "paths": "*i32", "page_table": "*i32", "storage": "*bf16",
    "sequences": Sequences("*i64", "i32", "*i64", "*i32", "*i32", "i32", "i32"),
    "trees": Trees("*i64", "*i32", "*i32", "*i64", "*i32"), "found": Trees("*i64", "*i32", "*i32", "*i64", "*i32"),
    "guesses": Guesses("*i64", "*i32", "*i64"), "rows": DraftRows(*["*i64"] * 6, "*i32", "*i32", "*i64"),
}
sizes = {"NODES": 5, "PADDED": 8, "PLACES": 9, "DEPTH": 5, "COLUMNS": 8}
for kernel, inputs, constants in [
    (advance, StepInputs(*["*i64"] * 5), {"CHAINED": True}),
    (write_pages, None, {"TILE": 128}),
    (tell, None, {"TILE": 128}),
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
    ring = Ring(places, (2, 3), DEVICE)
    ring.words.fill_(-7)
    ring.launched()  # so that places agree
    history = state.history.clone()
    chained = dependent_launch(DEVICE)
    options: dict[str, Any] = {"launch_pdl": True} if chained else {}
    # Of many ends the last are not noticed; those of the other sequence are no end.
    drawn = [([10, 20, 30], [0, 0, 0]), ([11, 0, 31], [0, 0, 0]), ([10, 43, 32], [0, 0, 1])]
    for step, (tokens, statuses) in enumerate(drawn):
        step_kernels.advance[(3,)](
            StepInputs(*columns.unbind()), torch.tensor(tokens, device=DEVICE),
            torch.tensor(statuses, dtype=torch.uint8, device=DEVICE), ring.words, sequences_of(state), 3,
            **{"PLACES": places, "CHAINED": chained}, **options,
        )  # fmt: skip
        for row, position in enumerate((2 + step, 1 + step)):
            history[slots[row], position] = tokens[row]
        number = ring.launched()
        assert ring.result(number).tolist() == [[*tokens[:2], -7], [*statuses[:2], -7]]
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
    ring = Ring(2, (2, 2), DEVICE)
    chained = dependent_launch(DEVICE)
    options: dict[str, Any] = {"launch_pdl": True} if chained else {}
    for tokens in ([last, 12], [30, 31]):
        step_kernels.advance[(2,)](
            StepInputs(*columns.unbind()), torch.tensor(tokens, device=DEVICE),
            torch.zeros(2, dtype=torch.uint8, device=DEVICE), ring.words, sequences_of(state), 2,
            **{"PLACES": 2, "CHAINED": chained}, **options,
        )  # fmt: skip
        ring.launched()
    assert ring.result(0)[0].tolist() == [last, 12]
    assert int(ring.result(1)[0, 1]) == 31
    assert columns[[0, 3]].tolist() == [[-1, 1], [2, 1]], "the draw of an idle row is of the slot that nobody has"
    assert columns[:3, 1].tolist() == [1, 2, 3]
    assert state.history[:2, 1:4].tolist() == [[max(last, 0), 0, 0], [12, 31, 0]]


@pytest.mark.parametrize("count", [0, 1, 5, 8, 16])
def test_pages_go_to_their_entries(count: int) -> None:
    table = torch.full((4, 8), -1, dtype=torch.int32, device=DEVICE)
    entries, pages = random.Random(count).sample(range(32), count), [7 * i + 1 for i in range(count)]
    outbox = Outbox(DEVICE)
    launch(step_kernels.write_pages, (3,), 1, outbox.write([entries, pages]), table, count, 8)
    outbox.sent()
    expected = [-1] * 32
    for entry, page in zip(entries, pages):
        expected[entry] = page
    assert table.flatten().tolist() == expected


def test_what_was_written_stays_until_all_places_were_taken() -> None:
    outbox, written = Outbox(DEVICE), []
    for number in range(OUTBOX_PLACES):
        written.append(outbox.write([[number, 1], [2, 3]]))
        outbox.sent()
    assert [numbers.tolist() for numbers in written] == [[[number, 1], [2, 3]] for number in range(OUTBOX_PLACES)]
    assert outbox.write([[9]]).data_ptr() == written[0].data_ptr()
    numbers = torch.zeros(2, 100, dtype=torch.int64, device=DEVICE)
    for first in (0, 7):  # the second time by the kernel's handle
        outbox.tell(numbers, [range(first, first + 100), range(100)])
        assert numbers.tolist() == [[*range(first, first + 100)], [*range(100)]]
    with pytest.raises(ValueError, match="reshape"):
        outbox.write([[0] * (OUTBOX_WORDS + 1)])


def test_kernels_compile_without_a_device() -> None:
    """The interpreter knows no types."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=COMPILED)
    names = "advance write_pages tell lay_out settle settle judge compact"
    assert done.stdout.split() == names.split(), done.stderr
