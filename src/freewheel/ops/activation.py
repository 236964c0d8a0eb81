"""Gated activations (Shazeer, arXiv 2002.05202)."""

from typing import Literal

from torch import Tensor
from torch.nn import functional

Activation = Literal["silu", "gelu_tanh"]


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """``act(gate) * up`` for rows [rows, 2n] that hold gate and up side by side; returns [rows, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    hidden = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return hidden.mul_(up)
