"""How much a device drafts, in simulated decoding: what became of a draft is known a step later."""

import random
from collections.abc import Sequence as Run
from dataclasses import dataclass

import pytest
from mock_model import make_request

from freewheel.cache.radix import PrefixCache
from freewheel.engine.buckets import bucket_for, draft_rows, draft_step
from freewheel.engine.drafting import GUESSED, DeviceDrafting, StepTimes
from freewheel.engine.runner import Span
from freewheel.request import Sequence

NODES = 32
SIZES = (1, 2, 4, 8, 16, 32, 64)


def sequence(key: int, tokens: list[int] | None = None) -> Sequence:
    tokens = tokens or [1, 2, 3]
    request = make_request(f"r{key}", tokens)
    root = PrefixCache(1, 16).root
    return Sequence(request, 0, tokens=[*tokens], key=key, seed=0, stop_ids={}, max_length=2000, node=root)


def measured(jump: float, row: float) -> dict[tuple[int, int], float]:
    """A step with drafts takes longer by the jump, and by each of its rows."""
    times = {}
    for size in SIZES:
        times[size, 0] = times[size, size] = plain = 0.001 * (1 + row * size)
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


class Simulated(DeviceDrafting):
    """The host's guesses are simulated as well."""

    def __init__(self, times: dict[tuple[int, int], float], texts: Run[Text], rng: random.Random) -> None:
        super().__init__(StepTimes(times, NODES, 512), NODES)
        self.texts, self.rng = texts, rng

    def _guess(self, sequence: Sequence) -> None:
        self.observe(sequence, *self.texts[sequence.key].draft(self.rng, GUESSED))


def decode(texts: Run[Text], steps: int, times: dict[tuple[int, int], float], seed: int = 0) -> float:
    """Tokens per time, relative to plain steps."""
    rng = random.Random(seed)
    drafting = Simulated(times, texts, rng)
    sequences = [sequence(key) for key in range(len(texts))]
    tokens, seconds, late, slack = 0, 0.0, list[list[tuple[int, int] | None]](), False
    plain = times[bucket_for(len(texts)), 0]
    for _ in range(steps):
        nodes = drafting.nodes(sequences, lambda _: NODES)
        outcomes = [text.draft(rng, count) if count else None for text, count in zip(texts, nodes)]
        # After drafts the next step has to find out where it is.
        seconds += times[draft_step(len(texts), sum(nodes), NODES, 512)] if sum(nodes) or slack else plain
        slack = sum(nodes) > 0
        tokens += len(texts) + sum(outcome[1] for outcome in outcomes if outcome)
        late.append(outcomes)
        if len(late) > 1:
            for one, outcome in zip(sequences, late.pop(0)):
                if outcome is not None:
                    drafting.observe(one, *outcome)
    return tokens / seconds / (len(texts) / plain)


@pytest.mark.parametrize("text", [Text(0.0, 0.0), Text(1.0, 0.0), Text(1.0, 0.03), Text(0.3, 0.1)])
@pytest.mark.parametrize("count", [1, 3, 8, 32])
@pytest.mark.parametrize(("jump", "row"), [(0.05, 0.001), (0.3, 0.01), (0.7, 0.03)])
def test_where_nothing_is_accepted_hardly_anything_is_lost(text: Text, count: int, jump: float, row: float) -> None:
    assert decode([text] * count, 256, measured(jump, row)) >= 0.98


@pytest.mark.parametrize("count", [1, 3, 8, 32])
def test_where_much_is_accepted_much_is_won(count: int) -> None:
    times = measured(0.3, 0.01)
    assert decode([Text(0.9, 0.95)] * count, 512, times) > {1: 6.0, 3: 5.0, 8: 3.5, 32: 2.0}[count]


def test_rows_go_to_those_who_gain_by_them() -> None:
    times = measured(0.1, 0.01)
    texts = [Text(0.3, 0.1)] * 7 + [Text(1.0, 0.97)]
    assert decode(texts, 512, times) > 1.5
    drafting = Simulated(times, texts, random.Random(0))
    sequences, nodes = [sequence(key) for key in range(8)], [0] * 8
    for _ in range(40):
        nodes = drafting.nodes(sequences, lambda _: NODES)
        for one, count in zip(sequences, nodes):
            if count:
                drafting.observe(one, count, count if one.key == 7 else 0)
    assert nodes[7] > 15
    assert max(nodes[:7]) < 5


def test_one_who_gains_is_no_reason_to_slow_down_all() -> None:
    """One of 32 can't make up for steps that take twice as long."""
    assert decode([Text(1.0, 0.9), *[Text(1.0, 0.0)] * 31], 512, measured(1.0, 0.01)) >= 0.98


def test_a_trial_comes_first_then_what_it_taught() -> None:
    drafting = DeviceDrafting(StepTimes(measured(0.3, 0.01), NODES, 512), NODES)
    one = sequence(0)
    assert drafting.nodes([one], lambda _: NODES) == [7], "what costs hardly more than a single one"
    assert drafting.nodes([one], lambda _: NODES) == [0]
    drafting.observe(one, 3, 3)
    assert drafting.nodes([one], lambda _: NODES)[0] > 3
    assert drafting.nodes([one], lambda _: 0) == [0], "it can have none"
    for _ in range(9):
        drafting.observe(one, 7, 0)
        drafting.nodes([one], lambda _: NODES)
    paused = [drafting.nodes([one], lambda _: NODES)[0] for _ in range(300)]
    assert not any(paused[:20])
    assert sum(map(bool, paused)) in (1, 2, 3)


def test_a_new_sequence_does_not_wait_for_the_end_of_a_long_pause() -> None:
    drafting = DeviceDrafting(StepTimes(measured(0.3, 0.01), NODES, 512), NODES)
    sequences = [sequence(key) for key in range(8)]
    for _ in range(2000):
        for one, count in zip(sequences, drafting.nodes(sequences, lambda _: NODES)):
            if count:
                drafting.observe(one, count, 0)
    steps = [drafting.nodes([*sequences, sequence(8)], lambda _: NODES)[8] > 0 for _ in range(60)]
    assert any(steps)


def test_nothing_is_tried_that_could_never_pay() -> None:
    drafting = DeviceDrafting(StepTimes(measured(100.0, 1.0), NODES, 512), NODES)
    assert not any(drafting.nodes([sequence(0)], lambda _: NODES)[0] for _ in range(2000))


@pytest.mark.parametrize(
    ("came", "first", "later"),
    [
        ([], 1 / 2, 1 / 2),
        ([9], 0.0, 0.0),  # and for 9 nothing is found, which counts as well
        ([7, 5], 0.42, 0.61),
        ([7, 5, 6, 9], 0.29, 0.52),
        ([7, 5, 6, 7, 5, 6, 7, 5, 9], 0.29, 0.84),
    ],
)
def test_guesses_tell_how_good_drafts_would_be(came: list[int], first: float, later: float) -> None:
    drafting = DeviceDrafting(StepTimes(measured(9.0, 9.0), NODES, 512), NODES)
    one = sequence(0, [5, 6, 7, 5, 6])
    drafting._guess(one)
    assert one.guess == (5, (7, 5, 6, 7, 5, 6, 7, 5))
    one.tokens += came
    drafting._guess(one)
    if not came:
        assert one.acceptance is None
        return
    assert one.acceptance is not None
    assert (one.guess is None) == (came[-1] == 9)
    assert (one.acceptance.first, one.acceptance.later) == pytest.approx((first, later), abs=0.01)


def test_few_sequences_take_turns_at_guesses() -> None:
    drafting = DeviceDrafting(StepTimes(measured(9.0, 9.0), NODES, 512), NODES)
    sequences = [sequence(key, [5, 6, 7, 5, 6]) for key in range(4)]
    guessed = []
    for _ in range(6):
        drafting.nodes(sequences, lambda one: one.key != 2)
        guessed.append([one.key for one in sequences if one.guess])
    assert guessed[0] == []  # a trial
    assert guessed[-1] == [0, 1, 3]
    many = [sequence(key, [5, 6, 7, 5, 6]) for key in range(9)]
    for _ in range(20):
        drafting.nodes(many, lambda _: NODES)
    assert not any(one.guess for one in many)


def test_a_long_text_is_indexed_bit_by_bit_before_a_guess() -> None:
    drafting = DeviceDrafting(StepTimes(measured(9.0, 9.0), NODES, 512), NODES)
    one = sequence(0, [5, 6, 7] * 200)
    indexed = []
    while one.guess is None:
        drafting._guess(one)
        assert one.ngrams is not None
        indexed.append(len(one.ngrams))
    assert indexed == [256, 512, 600]


@pytest.mark.parametrize(("count", "tokens"), [(1, 4), (1, 40), (8, 8), (32, 8), (32, 40)])
def test_requests_that_come_and_go_lose_no_more(count: int, tokens: int) -> None:
    """The trials of those that ended are not made anew for those that follow."""
    times, seconds = measured(0.3, 0.01), 0.0
    drafting = Simulated(times, [Text(1.0, 0.0)] * 50_000, random.Random(0))
    sequences, ages, slack, steps = [sequence(key) for key in range(count)], [*range(count)], False, 1500
    for step in range(steps):
        for i in range(count):
            ages[i] += 1
            if ages[i] >= tokens:
                sequences[i], ages[i] = sequence(count * (step + 1) + i), 0
        nodes = drafting.nodes(sequences, lambda _: NODES)
        plain = times[bucket_for(count), 0]
        seconds += times[draft_step(count, sum(nodes), NODES, 512)] if sum(nodes) or slack else plain
        slack = sum(nodes) > 0
        for one, count_of_it in zip(sequences, nodes):
            if count_of_it:
                drafting.observe(one, count_of_it, 0)
    assert steps * times[bucket_for(count), 0] / seconds >= 0.98


def test_trials_go_on_where_a_plan_comes_to_nothing() -> None:
    drafting = Simulated(measured(0.0, 0.0), [Text(1.0, 1.0)] * 2, random.Random(0))
    sequences = [sequence(key) for key in range(2)]
    drafting.nodes(sequences, lambda _: NODES)
    drafting.observe(sequences[0], 3, 3)
    drafting.nodes(sequences, lambda one: NODES * (1 - one.key))  # a plan for one
    later = [drafting.nodes(sequences, lambda one: NODES * one.key)[1] > 0 for _ in range(20)]
    assert any(later)


def test_no_trial_exceeds_a_draft() -> None:
    drafting = DeviceDrafting(StepTimes(measured(0.0, 0.0), 5, 512), 5)
    sequences = [sequence(key) for key in range(3)]
    assert drafting.nodes(sequences, lambda _: NODES) == [5, 5, 5]


def test_a_host_that_has_no_time_does_not_guess() -> None:
    drafting = DeviceDrafting(StepTimes(measured(9.0, 9.0), NODES, 512), NODES)
    one = sequence(0, [5, 6, 7, 5, 6])
    drafting.landed([Span(0, 4, 1, True)], host=1.0, waited=0.0, arrived=1.0)
    for _ in range(5):
        drafting.nodes([one], lambda _: NODES)
    assert one.guess is None
    drafting.landed([Span(0, 5, 1, True)], host=1.0, waited=0.5, arrived=3.0)
    drafting.nodes([one], lambda _: NODES)
    assert one.guess is not None


def test_nobody_gets_more_than_it_can_have() -> None:
    texts = [Text(1.0, 1.0)] * 5
    drafting = Simulated(measured(0.0, 0.0), texts, random.Random(0))
    sequences = [sequence(key) for key in range(5)]
    for _ in range(5):
        nodes = drafting.nodes(sequences, lambda one: one.key)
        assert all(nodes[key] <= key for key in range(5))
        for one, count in zip(sequences, nodes):
            drafting.observe(one, count, count)
    assert drafting.nodes(sequences[::-1], lambda one: 2 * one.key) == [8, 6, 4, 2, 0]


class TestTimes:
    def test_are_those_measured_or_else_a_guess(self) -> None:
        times = {(4, 0): 0.5, (4, 4): 0.6, (4, 8): 0.7, (4, 16): 0.8}
        assert StepTimes(times, 3, 512).of(3) == [(3, 0.5), (3, 0.6), (8, 0.7), (16, 0.8)]
        guess = StepTimes(times, 3, 512).of(2)
        assert [rows for rows, _ in guess] == [2, 2, 4, 8]
        assert guess[0][1] == guess[1][1] < guess[2][1] < guess[3][1] == pytest.approx(0.000846)
        assert StepTimes({}, 32, 512).of(256)[-1] == (512, pytest.approx(4 * 0.001971))

    def test_follow_what_steps_take(self) -> None:
        times = StepTimes({(4, 0): 0.5, (4, 4): 0.6, (4, 8): 0.7, (4, 16): 0.8}, 3, 512)
        for _ in range(200):
            times.observe(3, 0, False, 1.0, 0.1)
        assert [seconds for _, seconds in times.of(3)] == pytest.approx([1.0, 1.2, 1.4, 1.6], rel=0.01)
        for _ in range(200):
            times.observe(4, 3, True, 2.0, 0.1)
            times.observe(4, 0, True, 1.1, 0.1)
        assert [seconds for _, seconds in times.of(3)] == pytest.approx([1.0, 1.1, 2.0, 1.6], rel=0.01)

    def test_are_those_of_the_host_if_it_is_slower(self) -> None:
        times = StepTimes({(4, 0): 0.5, (4, 4): 0.6, (4, 8): 0.7, (4, 16): 0.8}, 3, 512)
        times.observe(3, 0, False, None, 0.65)
        assert [seconds for _, seconds in times.of(3)] == [0.65, 0.65, 0.7, 0.8], "no less with drafts"
        times.observe(4, 4, True, None, 0.9)
        assert [seconds for _, seconds in times.of(3)] == [0.65, 0.65, 0.9, 0.8]

    def test_a_step_that_was_held_up_changes_little(self) -> None:
        times = StepTimes({(4, 0): 0.5}, 3, 512)
        times.observe(3, 0, False, 100.0, 0.1)
        times.observe(3, 0, False, None, 100.0)
        assert times.of(3)[0][1] < 0.53

    def test_come_from_results_that_had_to_be_waited_for(self) -> None:
        def landed(spans: list[Span], waited: float, arrived: float) -> None:
            drafting.landed(spans, host=0.001, waited=waited, arrived=arrived)

        drafting = DeviceDrafting(times := StepTimes({(2, 0): 0.010, (2, 4): 0.010}, NODES, 512), NODES)
        plain, prompt = [Span(slot, 9, 1, True) for slot in range(2)], [Span(0, 0, 9, True)]
        landed(plain, 0.010, 0.110)
        landed(plain, 0.015, 0.130)  # 20 ms
        assert times.of(2)[0][1] == pytest.approx(0.0105)
        landed(plain, 0.0, 0.150)  # they were there
        landed(plain, 0.005, 0.160)
        landed(prompt, 0.095, 0.260)
        assert times.of(2)[0][1] == pytest.approx(0.0105)
        landed([plain[0]._replace(nodes=2), plain[1]], 0.005, 0.280)
        assert times.of(2)[2] == (4, pytest.approx(0.0105 + 0.05 * (0.020 - 0.0105)))
