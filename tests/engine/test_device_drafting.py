"""How much a device drafts, in simulated decoding: what became of a draft is known a step later."""

import random
from collections.abc import Sequence as Run
from dataclasses import dataclass
from itertools import pairwise

import pytest
from mock_model import make_request

from freewheel.cache.radix import PrefixCache
from freewheel.config import EngineConfig
from freewheel.engine.buckets import bucket_for, buckets, draft_rows, draft_step, most_drawn
from freewheel.engine.draft_step import GUESSED
from freewheel.engine.drafting import DeviceDrafting, StepTimes
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
        times[size, 0] = plain = 0.001 * (1 + row * size)
        times[size, size] = 1.05 * plain  # with guesses
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


class Decoding:
    """Steps of sequences whose texts are given. What a step brings is known when the next has been launched.

    Attributes:
        tokens, seconds: so far, all sequences together.
    """

    def __init__(self, times: dict[tuple[int, int], float], texts: Run[Text], seed: int = 0) -> None:
        self.drafting = DeviceDrafting(StepTimes(times, NODES, 512), NODES)
        self.sequences = [sequence(key) for key in range(len(texts))]
        self.texts = list(texts)
        self.tokens, self.seconds = 0, 0.0
        self._times, self._rng = times, random.Random(seed)
        self._late: list[tuple[Sequence, int, int]] = []
        self._guessed: set[int] = set()  # whose next guess judges one
        self._slack = False

    def step(self, most: int = NODES) -> list[int]:
        """Nodes of each sequence."""
        drafting, count = self.drafting, len(self.texts)
        nodes = drafting.nodes(self.sequences, lambda _: most)
        brought: list[tuple[Sequence, int, int]] = []
        for one, text, room in zip(self.sequences, self.texts, nodes):
            if room:
                brought.append((one, *text.draft(self._rng, room)))
                self.tokens += brought[-1][2]
            elif drafting.guessing:
                if one.key in self._guessed:
                    depth, right = text.draft(self._rng, GUESSED)
                    brought.append((one, max(depth, 1), right))
                self._guessed.add(one.key)
        self.tokens += count
        # After drafts the next step has to find out where it is.
        special = any(nodes) or drafting.guessing or self._slack
        size = bucket_for(count)
        self.seconds += self._times[draft_step(count, sum(nodes), NODES, 512) if special else (size, 0)]
        self._slack = any(nodes)
        drafting.review(self.sequences, lambda _: most)
        for outcome in self._late:
            drafting.observe(*outcome)
        self._late = brought
        return nodes


def decode(texts: Run[Text], steps: int, times: dict[tuple[int, int], float], seed: int = 0) -> float:
    """Tokens per time, relative to plain steps."""
    decoding = Decoding(times, texts, seed)
    for _ in range(steps):
        decoding.step()
    return decoding.tokens / decoding.seconds / (len(texts) / times[bucket_for(len(texts)), 0])


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
    decoding, nodes = Decoding(times, texts), [0]
    for _ in range(100):
        nodes = decoding.step()
    assert nodes[7] > 15
    assert max(nodes[:7]) < 5


def test_one_who_gains_is_no_reason_to_slow_down_all() -> None:
    """One of 32 can't make up for steps that take twice as long."""
    assert decode([Text(1.0, 0.9), *[Text(1.0, 0.0)] * 31], 512, measured(1.0, 0.01)) >= 0.98


def test_guesses_come_first_then_what_they_taught() -> None:
    decoding = Decoding(measured(0.3, 0.01), [Text(1.0, 1.0)])
    guesses = 0
    while not any(nodes := decoding.step()):
        guesses += decoding.drafting.guessing
    assert guesses == 2, "the second says what became of the first"
    assert nodes[0] > 3
    assert not decoding.drafting.guessing, "not beside drafts"
    assert decoding.step(most=0) == [0], "it can have none"


def test_guesses_that_are_never_right_get_rarer() -> None:
    decoding = Decoding(measured(0.3, 0.01), [Text(1.0, 0.0)] * 3)
    guessed = [step for step in range(1000) if not any(decoding.step()) and decoding.drafting.guessing]
    pauses = [b - a for a, b in pairwise(guessed)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (6, 65)


def test_a_text_that_begins_to_repeat_is_noticed() -> None:
    decoding = Decoding(measured(0.3, 0.01), [Text(1.0, 0.0)] * 4)
    for _ in range(1000):
        decoding.step()
    decoding.texts = [Text(1.0, 0.95)] * 4
    assert any(any(decoding.step()) for _ in range(200))


def test_a_new_sequence_does_not_wait_for_the_end_of_a_long_pause() -> None:
    decoding = Decoding(measured(0.3, 0.01), [Text(1.0, 0.0)] * 8)
    for _ in range(1000):
        decoding.step()
    decoding.sequences[3], decoding.texts[3] = sequence(8), Text(1.0, 1.0)
    guesses = 0
    for _ in range(16):
        decoding.step()
        guesses += decoding.drafting.guessing
    assert guesses > 1


def test_nothing_is_tried_that_could_never_pay() -> None:
    decoding = Decoding(measured(100.0, 1.0), [Text(1.0, 1.0)])
    assert not any(any(decoding.step()) or decoding.drafting.guessing for _ in range(500))


@pytest.mark.parametrize(("count", "tokens"), [(1, 4), (1, 40), (8, 8), (32, 8), (32, 40)])
def test_requests_that_come_and_go_lose_no_more(count: int, tokens: int) -> None:
    """The guesses for those that ended are not made anew for those that follow."""
    times = measured(0.3, 0.01)
    decoding, ages, steps = Decoding(times, [Text(1.0, 0.0)] * count), [*range(count)], 1500
    for step in range(steps):
        for i in range(count):
            ages[i] += 1
            if ages[i] >= tokens:
                decoding.sequences[i], ages[i] = sequence(count * (step + 1) + i), 0
        decoding.step()
    assert steps * times[bucket_for(count), 0] / decoding.seconds >= 0.98


def test_guesses_go_on_where_a_plan_comes_to_nothing() -> None:
    decoding = Decoding(measured(0.0, 0.0), [Text(1.0, 1.0)] * 2)
    while not any(decoding.step()):
        pass
    guessed = [decoding.step(most=0) and decoding.drafting.guessing for _ in range(20)]
    assert any(guessed)


def test_nobody_gets_more_than_it_can_have() -> None:
    texts = [Text(1.0, 1.0)] * 5
    drafting = Decoding(measured(0.0, 0.0), texts).drafting
    sequences = [sequence(key) for key in range(5)]
    for one in sequences:
        drafting.observe(one, 8, 8)
    for _ in range(5):
        nodes = drafting.nodes(sequences, lambda one: one.key)
        assert all(nodes[key] <= key for key in range(5))
        drafting.review(sequences, lambda one: one.key)
        for one, count in zip(sequences, nodes):
            drafting.observe(one, count, count)
    later = []
    for _ in range(3):
        later.append(drafting.nodes(sequences[::-1], lambda one: 2 * one.key))
        drafting.review(sequences[::-1], lambda one: 2 * one.key)
    assert later[-1] == [8, 6, 4, 2, 0]


@pytest.mark.parametrize("slots", [1, 32, 33, 100, 200])
@pytest.mark.parametrize("speculation", [False, True])
def test_there_is_room_for_the_rows_of_every_step(slots: int, speculation: bool) -> None:
    config = EngineConfig(max_num_seqs=slots, speculation=speculation)
    steps = [*buckets(slots)]
    if speculation:
        steps += [rows for size in steps for rows in draft_rows(size, config.draft_nodes, config.most_rows("cuda"))]
    assert most_drawn(config) == max(steps)


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
        assert [seconds for _, seconds in times.of(3)] == pytest.approx([1.0, 1.1, 2.0, 1.6], rel=0.05)

    def test_of_steps_that_were_not_seen_before_are_learned_quickly(self) -> None:
        times = StepTimes({(4, 0): 0.5, (4, 8): 0.6}, 3, 512)
        for _ in range(4):
            times.observe(4, 4, True, 0.72, 0.1)
        assert times.of(4)[2][1] > 0.65

    def test_are_those_of_the_host_if_it_is_slower(self) -> None:
        times = StepTimes({(4, 0): 0.5, (4, 4): 0.6, (4, 8): 0.7, (4, 16): 0.8}, 3, 512)
        for _ in range(50):
            times.observe(3, 0, False, None, 0.65)
        assert [seconds for _, seconds in times.of(3)] == pytest.approx([0.64, 0.64, 0.7, 0.8], abs=0.01)
        for _ in range(50):
            times.observe(4, 4, True, None, 0.9)
        assert [seconds for _, seconds in times.of(3)] == pytest.approx([0.64, 0.64, 0.88, 0.8], abs=0.01)

    def test_a_step_that_was_held_up_changes_little(self) -> None:
        times = StepTimes({(4, 0): 0.5}, 3, 512)
        times.observe(3, 0, False, 100.0, 0.1)
        times.observe(3, 0, False, None, 100.0)
        assert times.of(3)[0][1] < 0.53

    def test_a_step_that_was_slow_for_once_is_not_avoided_for_ever(self) -> None:
        times = StepTimes({(4, 0): 0.5, (4, 4): 0.5, (4, 8): 0.7, (4, 16): 0.8}, 3, 512)
        for _ in range(30):
            times.observe(3, 0, False, 2.0, 3.0)
        assert times.of(3)[0][1] > 1.0
        for _ in range(1000):
            times.observe(3, 4, True, 0.7, 0.1)
        assert times.of(3)[0][1] == pytest.approx(0.5, rel=0.05)

    def test_come_from_results_that_had_to_be_waited_for(self) -> None:
        drafting = DeviceDrafting(times := StepTimes({(2, 0): 0.010, (2, 4): 0.010}, NODES, 512), NODES)
        plain, prompt = [Span(slot, 9, 1, True) for slot in range(2)], [Span(0, 0, 9, True)]

        def landed(spans: list[Span], waited: float, arrived: float, launched: float = 0.0) -> None:
            drafting.landed(spans, launched, arrived - waited, arrived)

        landed(plain, 0.010, 0.110)
        landed(plain, 0.015, 0.130)  # 20 ms
        assert times.of(2)[0][1] == pytest.approx(0.0105)
        landed(plain, 0.0, 0.137)  # they were there
        landed(plain, 0.005, 0.160)
        landed(prompt, 0.095, 0.260)
        landed(plain, 0.010, 9.000, launched=8.0)  # nobody was there for a while
        assert times.of(2)[0][1] == pytest.approx(0.0105)
        landed([plain[0]._replace(nodes=2), plain[1]], 0.018, 9.020)
        assert times.of(2)[2] == (4, pytest.approx(0.0105 + 0.2 * 0.0105 / 4))

    def test_tell_what_the_host_and_its_callers_do(self) -> None:
        drafting = DeviceDrafting(times := StepTimes({(2, 0): 0.010}, NODES, 512), NODES)
        for step in range(1, 200):
            drafting.landed([Span(slot, 9, 1, True) for slot in range(2)], step - 1.5, step + 0.0, step + 1e-6)
        assert times.of(2)[0][1] == pytest.approx(1.0, rel=0.01)
