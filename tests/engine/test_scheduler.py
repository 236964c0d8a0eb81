"""The scheduler as a pure function, and over whole random lives of simulated sequences."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from freewheel.engine.scheduler import Capacity, Entry, Plan, pages_for, plan

SIZE = 4


def entry(key: int, length: int, computed: int = 0, *, priority: int = 0, held: bool = True, **more: int) -> Entry:
    """A sequence that holds exactly the pages it needs, or a waiting one that holds none."""
    pages = pages_for(length if length - computed > 1 else computed, SIZE) if held else 0
    return Entry(key, (priority, key), length, computed, pages, **{"private": pages, **more})  # type: ignore[arg-type]


def capacity(rows: int = 16, slots: int = 4, pages: int = 100, scored_rows: int = 8) -> Capacity:
    return Capacity(rows, slots, pages, SIZE, scored_rows)


def test_nothing_to_do() -> None:
    assert plan([], [], capacity()) == Plan()


def test_decoding_comes_first_whatever_its_rank() -> None:
    running = [entry(0, 30, 10), entry(1, 9, 8), entry(2, 5, 4)]
    assert plan(running, [], capacity(rows=6)).rows == [(1, 1), (2, 1), (0, 4)]


def test_prefill_shares_the_rest_of_the_budget_by_rank_and_in_chunks() -> None:
    waiting = [entry(1, 10, held=False), entry(2, 10, held=False)]
    assert plan([entry(0, 9, 5)], waiting, capacity(rows=10)).rows == [(0, 4), (1, 6)]


def test_an_urgent_newcomer_gets_rows_before_a_long_prefill() -> None:
    waiting = [entry(9, 3, priority=-1, held=False)]
    assert plan([entry(0, 100, 5)], waiting, capacity(rows=8)).rows == [(9, 3), (0, 5)]


def test_scored_rows_are_bounded_over_the_whole_step() -> None:
    running = [entry(0, 6, 0, scoring=True), entry(1, 30, 20, scoring=True), entry(2, 30, 20, scoring=True)]
    waiting = [entry(3, 9, held=False)]
    assert plan(running, waiting, capacity(rows=40)).rows == [(0, 6), (1, 2), (3, 9)]
    assert plan([], [entry(0, 50, held=False, scoring=True)], capacity(rows=40)).rows == [(0, 8)]


def test_a_waiting_sequence_for_which_no_scored_row_is_left_is_not_overtaken() -> None:
    waiting = [entry(key, 8, held=False, scoring=key < 2) for key in range(3)]
    assert plan([], waiting, capacity(rows=40)).rows == [(0, 8)]


def test_admission_leaves_a_page_for_each_sequence_that_runs() -> None:
    running = [entry(0, 6, 5), entry(1, 6, 5)]
    waiting = [entry(2, 8, held=False)]
    assert (2, 8) in plan(running, waiting, capacity(pages=4)).rows
    assert (2, 8) not in plan(running, waiting, capacity(pages=3)).rows


def test_shared_pages_cost_nothing_but_idle_ones_do() -> None:
    shared = Entry(0, (0, 0), 9, 8, pages=2)
    assert plan([], [shared], capacity(pages=1)).rows == [(0, 1)]
    assert plan([], [shared._replace(idle=2)], capacity(pages=2)).rows == []


def test_nobody_overtakes_a_waiting_sequence_and_nobody_reads_on() -> None:
    read: list[int] = []

    def waiting() -> Iterator[Entry]:
        for candidate in (entry(1, 40, held=False), entry(2, 2, held=False), entry(3, 2, held=False)):
            read.append(candidate.key)
            yield candidate

    assert plan([entry(0, 5, 4)], waiting(), capacity(pages=5)).rows == [(0, 1)]
    assert read == [1]


def test_want_of_a_page_preempts_the_lowest_priority_then_the_youngest() -> None:
    running = [entry(0, 5, 4), entry(1, 6, 5, priority=2), entry(2, 6, 5), entry(3, 6, 5, priority=2)]
    assert plan(running, [], capacity(pages=0)).preempt == 3
    assert plan(running[:1] + running[2:3], [], capacity(pages=0)).preempt == 2


def test_the_last_in_rank_sits_out_rather_than_lose_its_pages() -> None:
    running = [entry(0, 6, 5), entry(1, 5, 4)]
    assert plan(running, [entry(2, 2, held=False)], capacity(pages=0)) == Plan(rows=[(0, 1)])


def test_a_slot_or_page_is_taken_from_strictly_lower_priorities_only() -> None:
    running = [entry(0, 6, 5, priority=1), entry(1, 6, 5, priority=1)]
    assert plan(running, [entry(2, 4, held=False)], capacity(slots=0)).preempt == 1
    assert plan(running, [entry(2, 4, priority=1, held=False)], capacity(slots=0)).preempt is None
    assert plan(running, [entry(2, 4, held=False)], capacity(pages=0)).preempt == 1


def test_no_preemption_that_would_not_suffice() -> None:
    running = [entry(0, 6, 5), entry(1, 6, 5, priority=1)]
    outcome = plan(running, [entry(2, 40, held=False)], capacity(pages=2))
    assert outcome == Plan(rows=[(0, 1), (1, 1)])


def test_no_preemption_for_pages_that_others_share() -> None:
    running = [entry(0, 6, 5), entry(1, 6, 5, priority=1, private=0)]
    assert plan(running, [entry(2, 8, held=False)], capacity(pages=2)).preempt is None
    assert plan([running[0], running[1]._replace(private=1)], [entry(2, 8, held=False)], capacity(pages=2)).preempt == 1


def test_no_preemption_for_pages_that_the_newcomer_would_take_over_from_it() -> None:
    running = [entry(0, 6, 5), entry(1, 6, 5, priority=1)]
    newcomer = Entry(2, (0, 2), 12, 8, pages=2, private=2)
    assert plan(running, [newcomer], capacity(pages=1)).preempt is None
    assert plan(running, [newcomer._replace(private=0)], capacity(pages=1)).preempt == 1


@dataclass
class Life:
    """A simulated sequence: a prompt, then outputs up to a final length. Pages are shared along a stem."""

    key: int
    priority: int
    length: int
    final: int
    stem: int
    shared: int
    computed: int = 0
    pages: int = 0
    running: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        return (self.priority, self.key)

    def table(self) -> list[tuple[int, int]]:
        """Names of its pages: those of the stem are everybody's who has it."""
        return [(self.stem if index < self.shared else 100 + self.key, index) for index in range(self.pages)]

    def entry(self, holders: Counter[tuple[int, int]]) -> Entry:
        table = self.table()
        if not self.running:
            table = [(self.stem, index) for index in range(self.shared) if holders[self.stem, index]]
        computed = self.computed if self.running else len(table) * SIZE
        private = sum(holders[page] == 1 for page in table)
        return Entry(self.key, self.rank, self.length, computed, len(table), private)


@pytest.mark.parametrize("seed", range(60))
def test_random_lives(seed: int) -> None:
    """Every step keeps its budget and capacity; all sequences finish; priorities and arrival decide who waits."""
    rng = random.Random(seed)
    longest = rng.randint(8, 40)
    num_pages = pages_for(longest, SIZE) + rng.randint(0, 12)
    slots = rng.randint(1, 6)
    budget = rng.randint(slots, 24)
    levels = rng.choice([1, 3])
    lives: dict[int, Life] = {}
    arrivals = 40
    steps = 0
    while arrivals or lives:
        if arrivals and rng.random() < 0.3:
            prompt = rng.randint(1, longest - 1)
            key = 40 - arrivals
            shared = rng.randint(0, (prompt - 1) // SIZE)
            final = rng.randint(prompt + 1, longest)
            lives[key] = Life(key, rng.randrange(levels), prompt, final, rng.randrange(2), shared)
            arrivals -= 1
        claimed = None
        while True:
            running = [life for life in lives.values() if life.running]
            waiting = sorted((life for life in lives.values() if not life.running), key=lambda life: life.rank)
            holders = Counter(page for life in running for page in life.table())
            free = num_pages - len(holders)
            room = Capacity(budget, slots - len(running), free, SIZE, budget)
            outcome = plan([life.entry(holders) for life in running], (life.entry(holders) for life in waiting), room)
            if outcome.preempt is None:
                assert not claimed or claimed in {key for key, _ in outcome.rows}, "preempted in vain"
                break
            victim = lives[outcome.preempt]
            assert victim.running
            assert victim.rank == max(life.rank for life in running)
            urgent = bool(waiting) and waiting[0].priority < victim.priority
            short = free < sum(pages_for(life.length, SIZE) > life.pages for life in running)
            assert urgent or short, "preempted without need"
            if not short:
                claimed = waiting[0].key
            victim.running, victim.computed, victim.pages = False, 0, 0

        assert sum(count for _, count in outcome.rows) <= budget
        assert len({key for key, _ in outcome.rows}) == len(outcome.rows)
        planned = {key for key, _ in outcome.rows}
        admitted = [life for life in waiting if life.key in planned]
        assert admitted == waiting[: len(admitted)], "somebody overtook"
        decoding = [life for life in running if life.length - life.computed == 1]
        left_out = [life for life in decoding if life.key not in planned]
        for life in left_out:
            assert pages_for(life.length, SIZE) > life.pages, "decoding stalled without need"
            assert life is max(running, key=lambda other: other.rank)
        assert not (left_out and admitted)
        if running:
            best = min(running, key=lambda life: life.rank)
            # Prefill may have to leave the budget to decoding, but one row always remains for the best of each kind.
            assert best.key in planned or best.length - best.computed > 1
        assert outcome.rows or not lives, "no progress"

        for key, count in outcome.rows:
            life = lives[key]
            if not life.running:
                life.computed = life.entry(holders).computed
                life.running, life.pages = True, pages_for(life.length, SIZE)
            life.computed += count
            life.pages = max(life.pages, pages_for(life.computed, SIZE))
            if life.computed == life.length:
                life.length += 1
                if life.length > life.final:
                    del lives[key]
        assert sum(life.running for life in lives.values()) <= slots
        assert len({page for life in lives.values() for page in life.table()}) <= num_pages
        steps += 1
        assert steps < 20_000, "somebody starves"


def test_equal_priorities_never_starve_under_a_steady_stream() -> None:
    """A long prompt is admitted although short ones keep coming."""
    running: list[Entry] = [entry(0, 5, 4)]
    for newcomer in range(2, 50):
        waiting = [entry(1, 60, held=False), *(entry(key, 2, held=False) for key in range(2, newcomer))]
        assert all(key == 0 for key, _ in plan(running, waiting, capacity(pages=15)).rows)
    assert (1, 15) in plan([], [entry(1, 60, held=False)], capacity(pages=15, rows=15)).rows
