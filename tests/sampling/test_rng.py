"""Philox4x32-10: known answers, the same bits everywhere, uniform numbers strictly inside (0, 1)."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from freewheel.sampling.rng import STRETCH, choice_seed, philox, philox4x32, random_seed, uniform, uniforms

# The authors' test vectors: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    c, k, words = ([int(word, 16) for word in text.split()] for text in (counter, key, expected))
    assert list(philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1]))) == words
    makers: list[Any] = [lambda word: np.array([word]), lambda word: torch.tensor([word])]
    for make in makers:
        found = philox4x32((make(c[0]), make(c[1]), make(c[2]), make(c[3])), (make(k[0]), make(k[1])))
        assert [int(word[0]) for word in found] == words


def test_integers_numpy_and_torch_give_the_same_bits() -> None:
    generator = np.random.default_rng(0)
    seeds = generator.integers(-(2**63), 2**63 - 1, 1000)
    positions = generator.integers(0, 2**31, 1000)
    seeds[:3], positions[:3] = (-1, -(2**63), 2**63 - 1), (0, 2**31 - 1, 1)
    with_numpy = np.stack(philox(seeds, positions))
    with_torch = torch.stack(philox(torch.from_numpy(seeds), torch.from_numpy(positions)))
    with_integers = np.array([philox(seed, position) for seed, position in zip(seeds.tolist(), positions.tolist())]).T
    assert np.array_equal(with_numpy, with_torch.numpy())
    assert np.array_equal(with_numpy, with_integers)
    assert with_numpy.min() >= 0
    assert with_numpy.max() < 2**32


def test_uniform_numbers_are_inside_the_open_interval_and_symmetric() -> None:
    ends = uniform(np.array([0, 2**32 - 1]))
    assert ends[0] > 0
    assert ends[1] < 1
    assert ends[0] == 1 - ends[1]


def test_the_uniform_numbers_are_uniform_and_independent() -> None:
    numbers, neighbours, others = (
        np.array([uniforms(seed, position, lane) for position in range(20_000)])
        for seed, lane in ((42, 0), (43, 0), (42, 1))
    )
    pairs = [(numbers[:, i], numbers[:, j]) for i in range(4) for j in range(i)]
    for column in (*numbers.T, *((x + y) % 1 for x, y in pairs), *((x - y) % 1 for x, y in pairs)):
        assert kstest(column, "uniform").pvalue > 1e-3
    for columns in (neighbours, others):
        assert abs(np.corrcoef(numbers[:, 0], columns[:, 0])[0, 1]) < 0.03


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_the_uniform_numbers_of_a_position_are_its_own(seed: int) -> None:
    for position in (0, 1, STRETCH - 1, STRETCH, 2**31 - 1):
        for lane in (0, 3):
            assert uniforms(seed, position, lane) == [(word + 0.5) / 2**32 for word in philox(seed, position, lane)]


def test_choices_have_seeds_of_their_own() -> None:
    seeds = [choice_seed(seed, index) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for index in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert choice_seed(5, 3) == choice_seed(5, 3)


def test_random_seeds_fit_and_differ() -> None:
    seeds = {random_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
