"""Rotary embedding: what a rotation must do, and how each scaling changes the frequencies."""

import math

import pytest
import torch

from freewheel.ops.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling, paired, rotate_, rotation

THETA = 10_000.0
PLAIN = Rope(THETA).frequencies(64)


def test_each_pair_turns_by_position_times_frequency() -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(5, 3, 64), torch.tensor([0, 1, 7, 100, 2047])
    angles = positions[:, None, None].double() * PLAIN.double()
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    rotated = rotate_(x.clone(), rotation(positions, PLAIN, 1.0))
    torch.testing.assert_close(rotated.double(), torch.view_as_real(pairs).flatten(-2), rtol=1e-3, atol=3e-4)


def test_halves_of_each_head_become_pairs() -> None:
    assert paired(12, 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_products_depend_on_distance_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 64)

    def product(query_position: int, key_position: int) -> float:
        cos_sin = [rotation(torch.tensor([p]), PLAIN, 1.0) for p in (query_position, key_position)]
        return (rotate_(query.clone(), cos_sin[0]) * rotate_(key.clone(), cos_sin[1])).sum().item()

    assert product(9, 4) == pytest.approx(product(105, 100), rel=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 3), rel=1e-2)


def test_rotation_is_in_place_and_its_factor_stretches() -> None:
    x = torch.randn(2, 3, 8)
    turn = rotation(torch.tensor([0, 5]), Rope(THETA).frequencies(8), 1.5)
    before = x.clone()
    assert rotate_(x, turn).data_ptr() == x.data_ptr()
    torch.testing.assert_close(x.norm(dim=-1), 1.5 * before.norm(dim=-1))


def test_plain_frequencies() -> None:
    assert PLAIN[0] == 1.0
    torch.testing.assert_close(PLAIN[-1].item(), THETA ** (-62 / 64))


def test_linear_scaling_divides_all() -> None:
    torch.testing.assert_close(Rope(THETA, LinearScaling(4.0)).frequencies(64), PLAIN / 4)


def test_llama3_scaling_keeps_short_waves_and_divides_long_ones() -> None:
    scaled = Rope(THETA, Llama3Scaling(8.0, 1.0, 4.0, 8192)).frequencies(64)
    wavelengths = 2 * math.pi / PLAIN
    torch.testing.assert_close(scaled[wavelengths < 8192 / 4], PLAIN[wavelengths < 8192 / 4])
    torch.testing.assert_close(scaled[wavelengths > 8192], PLAIN[wavelengths > 8192] / 8)
    assert (scaled.diff() < 0).all()


def test_yarn_scaling_keeps_fast_waves_and_interpolates_slow_ones() -> None:
    yarn = YarnScaling(4.0, 2048, attention_factor=1.1)
    rope = Rope(THETA, yarn)
    ratio = rope.frequencies(64) / PLAIN
    assert rope.attention_factor == 1.1
    assert ratio[0] == 1.0
    torch.testing.assert_close(ratio[-1].item(), 0.25)
    assert (ratio.diff() <= 0).all()
