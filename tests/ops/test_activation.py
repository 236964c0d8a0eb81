"""Gated activations against their definitions in float64."""

import math

import torch

from freewheel.ops.activation import gated


def test_silu() -> None:
    gate, up = torch.randn(2, 5, 24)
    right = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    torch.testing.assert_close(gated(torch.cat([gate, up], dim=1), "silu").double(), right, rtol=1e-5, atol=1e-6)


def test_gelu_tanh() -> None:
    gate, up = torch.randn(2, 5, 24)
    x = gate.double()
    right = 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) * up.double()
    torch.testing.assert_close(gated(torch.cat([gate, up], dim=1), "gelu_tanh").double(), right, rtol=1e-5, atol=1e-6)


def test_inputs_stay_as_they_were() -> None:
    gate_up = torch.randn(3, 16)
    before = gate_up.clone()
    gated(gate_up, "silu")
    assert torch.equal(gate_up, before)
