"""Steps that draft on the device bring what plain ones do. Without a CUDA device kernels are interpreted."""

from collections import deque
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from freewheel.config import MOST_LOOKAHEAD
from freewheel.engine.runner import Span
from freewheel.sampling import SamplingParams, SamplingState

pytest.importorskip("triton", reason="Triton is made for Linux only")

from test_device_runner import DEVICE, make_engine

from freewheel.engine.device_runner import DeviceRunner
from freewheel.engine.draft_step import DeviceDrafts, Drafted, DraftStep, Run

pytestmark = pytest.mark.usefixtures("few_programs")
PROMPTS = [[5, 6, 7, 5, 6], [11, 12, 11, 12, 11, 12], [20, 21]]
PARAMS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.6, "logprobs": 2}, {"temperature": 0.3}]
NEW = 9


def prefilled(path: Path) -> tuple[DeviceRunner, SamplingState, list[Any]]:
    """Slots whose prompts have been computed, in shuffled pages, and the first token of each."""
    engine = make_engine(path, DEVICE, DeviceRunner)
    runner, state, pool = engine._runner, engine._state, engine._pool
    assert isinstance(runner, DeviceRunner)
    for layer in runner._fused._layers:  # a token depends above all on the one before, and comes again and again
        layer.output.weight.mul_(0.1)
        layer.down.weight.mul_(0.1)
    pages = Random(0).sample(range(pool.num_pages), pool.num_pages)
    each = pool.num_pages // len(PROMPTS)
    for slot, (prompt, params) in enumerate(zip(PROMPTS, PARAMS)):
        pool.set_pages(slot, 0, pages[each * slot : each * (slot + 1)])
        state.join(slot, SamplingParams(**params), prompt, seed=slot)
    return runner, state, runner.launch([Span(i, 0, len(prompt), True) for i, prompt in enumerate(PROMPTS)]).result()


def plain(path: Path) -> list[Run]:
    """What plain steps bring of each sequence."""
    runner, _, first = prefilled(path)
    runs = [Run(0, [token], [0], [logprobs]) for token, logprobs in zip(first.tokens, first.logprobs)]
    for step in range(NEW - 1):
        result = runner.launch([Span(i, len(prompt) + step, 1, True) for i, prompt in enumerate(PROMPTS)]).result()
        for run, token, logprobs in zip(runs, result.tokens, result.logprobs):
            run.tokens.append(token)
            run.logprobs.append(logprobs)
    return runs


@pytest.mark.parametrize(("width", "nodes", "rows", "late"), [(1, 4, 16, 2), (3, 7, 18, 0), (2, 3, 7, 2)])
def test_what_comes_is_what_comes_without_drafts(
    tiny_model: Path, width: int, nodes: int, rows: int, late: int
) -> None:
    expected = plain(tiny_model)
    runner, state, first = prefilled(tiny_model)
    drafts = DeviceDrafts(state, runner._pool, runner._page_table, width=width, depth=4)
    slots = [2, 0, 1]
    drafts.enter(*torch.tensor([slots, [len(PROMPTS[slot]) + 1 for slot in slots]], device=DEVICE))
    step = DraftStep(drafts, 4, rows, nodes, MOST_LOOKAHEAD + 1)
    step.put(slots, [2, nodes, nodes])
    got = {slot: Run(0, [first.tokens[slot]], [0], [first.logprobs[slot]]) for slot in slots}
    flights: deque[Drafted] = deque()
    drafted = accepted = 0
    while any(len(run.tokens) < NEW for run in got.values()):
        step.begin()
        samples = runner._sampler.sample(runner._fused(step.rows), step.sample_rows)
        step.end(samples)
        flights.append(step.launched(len(slots), samples.logprobs))
        if len(flights) <= late:
            continue
        for slot, run in zip(slots, flights.popleft().result(), strict=True):
            assert run.statuses == [0] * len(run.tokens)
            assert len(run.tokens) <= 1 + run.drafted
            drafted, accepted = drafted + run.drafted, accepted + len(run.tokens) - 1
            got[slot].tokens.extend(run.tokens)
            got[slot].logprobs.extend(run.logprobs)
    for slot, one in enumerate(expected):
        mine = got[slot]
        assert mine.tokens[:NEW] == one.tokens
        known = len(PROMPTS[slot]) + len(mine.tokens)
        assert state.history[slot, known - len(mine.tokens) : known].tolist() == mine.tokens
        for ours, theirs in zip(mine.logprobs[:NEW], one.logprobs):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.token_ids == theirs.token_ids
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
    assert 3 < accepted < drafted
