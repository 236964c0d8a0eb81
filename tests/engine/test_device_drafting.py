"""How much a device drafts, in simulated decoding: what was decided before is known to have come of it a step later."""

import random
from collections.abc import Sequence as Run
from dataclasses import dataclass

import pytest
from mock_model import make_request

from freewheel.cache.radix import PrefixCache
from freewheel.engine.buckets import draft_rows
from freewheel.engine.drafting import DeviceDrafting, StepTimes
from freewheel.request import Sequence

NODES = 32


def sequence(key: int) -> Sequence:
    request = make_request(f"r{key}", [1, 2, 3])
    root = PrefixCache(1, 16).root
    return Sequence(request, 0, tokens=[1, 2, 3], key=key, seed=0, stop_ids={}, max_length=99, node=root)


def measured(jump: float, row: float) -> dict[tuple[int, int], float]:
    """A step with drafts takes longer by the jump, and by each of its rows."""
    times = {}
    for size in (1, 2, 4, 8, 16, 32, 64):
        times[size, 0] = plain = 0.001 * (1 + row * size)
        times |= {(size, rows): plain + 0.001 * (jump + row * (rows - size)) for rows in draft_rows(size, NODES, 512)}
    return times


@dataclass
class Text:
    """What becomes of drafts: with this chance one is found, and each of its tokens is accepted with another."""

    found: float
    accepted: float

    def draft(self, rng: random.Random, nodes: int) -> tuple[int, int]:
        """Depth and accepted tokens."""
        if not nodes or rng.random() >= self.found:
            return 0, 0
        accepted = 0
        while accepted < nodes and rng.random() < self.accepted:
            accepted += 1
        return nodes, accepted


def decode(texts: Run[Text], steps: int, times: dict[tuple[int, int], float], seed: int = 0) -> float:
    """Tokens per time, relative to plain steps."""
    rng, drafting = random.Random(seed), DeviceDrafting(StepTimes(times, NODES, 512), NODES)
    sequences = [sequence(key) for key in range(len(texts))]
    size = next(size for size in (1, 2, 4, 8, 16, 32, 64) if size >= len(texts))
    tokens, seconds, late, slack = 0, 0.0, list[list[tuple[int, int] | None]](), False
    for _ in range(steps):
        nodes = drafting.nodes(sequences, lambda _: NODES)
        outcomes = [text.draft(rng, count) if count else None for text, count in zip(texts, nodes)]
        needed = len(texts) + sum(nodes)
        if sum(nodes) or slack:  # as after drafts the next step has to find out where it is
            seconds += times[size, next(rows for rows in draft_rows(size, NODES, 512) if rows >= needed)]
        else:
            seconds += times[size, 0]
        slack = sum(nodes) > 0
        tokens += len(texts) + sum(outcome[1] for outcome in outcomes if outcome)
        late.append(outcomes)
        if len(late) > 1:
            for one, outcome in zip(sequences, late.pop(0)):
                if outcome is not None:
                    drafting.observe(one, *outcome)
    return tokens / seconds / (len(texts) / times[size, 0])


@pytest.mark.parametrize("text", [Text(0.0, 0.0), Text(1.0, 0.0), Text(1.0, 0.03)])
@pytest.mark.parametrize("count", [1, 3, 8, 32])
@pytest.mark.parametrize(("jump", "row"), [(0.05, 0.001), (0.3, 0.01), (0.7, 0.03)])
def test_where_nothing_is_accepted_hardly_anything_is_lost(text: Text, count: int, jump: float, row: float) -> None:
    assert decode([text] * count, 256, measured(jump, row)) >= 0.98


@pytest.mark.parametrize("count", [1, 3, 8, 32])
def test_where_much_is_accepted_much_is_won(count: int) -> None:
    """The best that is possible: rows for all, each of which is accepted."""
    times = measured(0.3, 0.01)
    assert decode([Text(0.9, 0.95)] * count, 512, times) > {1: 6.0, 3: 5.0, 8: 3.5, 32: 2.0}[count]


def test_rows_go_to_those_who_gain_by_them() -> None:
    times = measured(0.1, 0.01)
    copying, other = Text(1.0, 0.97), Text(0.3, 0.1)
    assert decode([copying, *[other] * 7], 512, times) > 1.5
    drafting = DeviceDrafting(StepTimes(times, NODES, 512), NODES)
    sequences = [sequence(key) for key in range(8)]
    nodes = [0] * 8
    for _ in range(40):
        nodes = drafting.nodes(sequences, lambda _: NODES)
        for one, count in zip(sequences, nodes):
            if count:
                drafting.observe(one, count, count if one.key == 3 else 0)
    assert nodes[3] > 15
    assert max(count for key, count in enumerate(nodes) if key != 3) < 5


def test_a_neighbour_who_gains_pays_for_others_only_if_all_gain() -> None:
    """One of 32 can't make up for a step that takes twice as long."""
    assert decode([Text(1.0, 0.9), *[Text(1.0, 0.0)] * 31], 512, measured(1.0, 0.01)) >= 0.98


def test_pauses_end_where_drafts_are_accepted_again() -> None:
    drafting = DeviceDrafting(StepTimes(measured(0.2, 0.01), NODES, 512), NODES)
    [one] = sequences = [sequence(0)]

    def drafted(steps: int, good: bool) -> int:
        count = 0
        for _ in range(steps):
            [nodes] = drafting.nodes(sequences, lambda _: NODES)
            count += nodes > 0
            if nodes:
                drafting.observe(one, nodes, nodes if good else 0)
        return count

    assert drafted(400, False) < 12
    assert drafted(400, True) > 50


def test_nothing_is_tried_that_could_never_pay() -> None:
    drafting = DeviceDrafting(StepTimes(measured(100.0, 1.0), NODES, 512), NODES)
    assert not any(drafting.nodes([sequence(0)], lambda _: NODES)[0] for _ in range(2000))


def test_nobody_gets_more_than_it_can_have() -> None:
    drafting = DeviceDrafting(StepTimes(measured(0.0, 0.0), NODES, 512), NODES)
    sequences = [sequence(key) for key in range(5)]
    assert drafting.nodes(sequences, lambda one: 2 * one.key) == [0, 2, 4, 6, 8]
    assert drafting.nodes(sequences, lambda one: one.key) == [0, 1, 2, 3, 4]


def test_times_are_those_measured_or_else_a_guess() -> None:
    times = {(4, 0): 0.5, (4, 4): 0.6, (4, 8): 0.7, (4, 16): 0.8}
    assert StepTimes(times, 3, 512).of(3) == [(3, 0.5), (4, 0.6), (8, 0.7), (16, 0.8)]
    guess = StepTimes(times, 3, 512).of(2)
    assert [rows for rows, _ in guess] == [2, 2, 4, 8]
    assert guess[0][1] < guess[2][1] < guess[3][1] == 0.846
    assert StepTimes({}, 32, 512).of(256)[-1] == (512, pytest.approx(4 * 1.971))
