"""How many rows are drafted, in simulated decoding; and what is counted."""

from random import Random

import pytest

from freewheel.speculative import Acceptance, Budget, SpeculationMetrics, best_nodes, step_times

TABLES = {
    "free": {1: 1.0, 2: 1.0, 16: 1.0},
    "nearly free": {1: 1.0, 2: 1.02, 4: 1.05, 8: 1.08, 16: 1.15, 32: 1.4},
    "costly": {1: 5.0, 2: 6.0, 4: 8.0, 8: 12.0},
    "a threshold": {1: 1.0, 2: 1.3, 8: 1.35, 16: 1.4},
    "hardly ever": {1: 1.0, 2: 1.9, 3: 2.8},
    "never": {1: 1.0, 2: 2.5},
}


def decode(
    table: dict[int, float], acceptance: float, steps: int, *, seed: int = 0, fixed: int | None = None, late: int = 0
) -> float:
    """Tokens per time of a plain step, where every token of a chain has this probability; outcomes come late."""
    random, times, budget = Random(seed), step_times(table), Budget(table)
    tokens, time, outcomes = 0, 0.0, []
    for _ in range(steps):
        nodes = budget.nodes() if fixed is None else fixed
        accepted = 0
        while accepted < (nodes or 1) and random.random() < acceptance:
            accepted += 1
        tokens, time = tokens + (accepted if nodes else 0) + 1, time + times[nodes]
        outcomes.append((nodes or 1, accepted))  # without a draft there is a guess
        if len(outcomes) > late:
            budget.observe(*outcomes[-1 - late])
    return tokens / time


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_where_nothing_is_accepted_hardly_anything_is_lost(table: dict[int, float], late: int) -> None:
    for steps in (128, 512, 4096):
        assert decode(table, 0.0, steps, late=late) >= 0.98


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("name", ["free", "nearly free", "costly", "a threshold"])
def test_where_much_is_accepted_it_is_close_to_the_best_fixed_choice(name: str, late: int) -> None:
    table = TABLES[name]
    best = max(decode(table, 0.8, 4096, fixed=nodes) for nodes in range(max(table)))
    runs = [decode(table, 0.8, 1024, seed=seed, late=late) for seed in range(20)]
    assert sum(runs) / 20 >= 0.97 * best
    assert best > 1.5


def test_a_table_is_read_between_its_entries_relative_to_one_row() -> None:
    assert step_times({5: 6.0, 1: 2.0, 3: 4.0}) == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert step_times({1: 3.0}) == [1.0]


@pytest.mark.parametrize("table", [{}, {2: 1.0}, {0: 1.0, 1: 1.0}, {1: 0.0}, {1: 1.0, 2: float("nan")}])
def test_tables_are_checked(table: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="table"):
        step_times(table)


def test_the_best_number_of_nodes() -> None:
    times = step_times({1: 1.0, 9: 1.8})  # a tenth of a step for each
    assert best_nodes(0.0, 0.0, times) == 0
    assert best_nodes(0.1, 0.1, times) == 0
    assert best_nodes(0.11, 0.11, times) == 1
    assert best_nodes(1.0, 1.0, times) == 8
    assert best_nodes(0.5, 0.5, times) == 2  # 1.75 tokens in 1.2; 1.875 in 1.3 are fewer
    assert best_nodes(0.09, 1.0, times) == 0  # 1.72 tokens in 1.8
    assert best_nodes(0.12, 1.0, times) == 8  # 1.96


def test_acceptance_of_the_first_token_is_another_matter_than_that_of_later_ones() -> None:
    acceptance = Acceptance()
    assert (acceptance.first, acceptance.later) == (0.5, 0.5)
    for depth, accepted in [(4, 4), (4, 0), (1, 1), (3, 1)] * 50:
        acceptance.observe(depth, accepted)
    assert acceptance.first == pytest.approx(3 / 4, abs=0.1)
    assert acceptance.later == pytest.approx(3 / 4, abs=0.1)  # of (4, 4) three in three, of (3, 1) none in one
    for _ in range(50):
        acceptance.observe(9, 0)
    assert acceptance.first < 0.03
    assert acceptance.later == pytest.approx(3 / 4, abs=0.1)
    acceptance.be_open()
    acceptance.observe(1, 1)
    assert acceptance.first > 0.5


def test_a_guess_that_was_right_is_as_good_as_a_draft() -> None:
    budget = Budget({1: 1.0, 2: 1.4, 3: 1.8}, prior=0.0)
    assert budget.nodes() == 0
    budget.observe(1, 1)
    budget.observe(1, 1)
    assert budget.nodes() > 0
    for _ in range(40):
        budget.observe(1, 0)
    assert budget.nodes() == 0
    for _ in range(8):
        budget.observe(1, 1)
    assert budget.nodes() > 0, "and after many that were wrong it does not take many"


def test_what_does_not_pay_even_if_all_is_accepted_is_never_drafted() -> None:
    budget = Budget(TABLES["never"])
    for _ in range(50):
        assert not budget.nodes()
        budget.observe(1, 1)


def test_other_times_count_from_then_on() -> None:
    budget = Budget({1: 1.0, 9: 1.8})
    assert budget.nodes() == 2
    budget.price(step_times({1: 1.0, 3: 1.02}))
    assert budget.nodes() == 2
    budget.price(step_times({1: 1.0, 2: 1.6}))
    assert budget.nodes() == 0
    budget.price(step_times({1: 1.0, 2: 1.0}))
    assert budget.nodes() == 1


def test_outcomes_are_checked() -> None:
    for depth, accepted in ((1, 2), (1, -1), (-1, -1)):
        with pytest.raises(ValueError, match="accepted"):
            Budget({1: 1.0}).observe(depth, accepted)
    with pytest.raises(ValueError, match="accepted"):
        Acceptance().observe(0, 0)


def test_metrics_add_up() -> None:
    one, other = SpeculationMetrics(), SpeculationMetrics()
    assert one.acceptance_length == 0.0
    one.observe(drafted=5, accepted=3)
    one.observe(drafted=0, accepted=0)
    other.observe(drafted=4, accepted=0)
    total = one + other
    assert total == SpeculationMetrics(steps=3, drafted=9, accepted=3)
    assert total == sum([one, other], SpeculationMetrics())
    assert (total.wasted, total.acceptance_length) == (6, 2.0)
