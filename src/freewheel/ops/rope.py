"""Rotary position embedding (Su et al., arXiv 2104.09864) and its context extensions."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by ``factor`` (Chen et al., arXiv 2306.15595)."""

    factor: float

    def __call__(self, frequencies: Tensor, theta: float) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by ``factor``, short ones kept, a ramp between them (Llama 3.1, arXiv 2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __call__(self, frequencies: Tensor, theta: float) -> Tensor:
        turns = self.original_max_positions * frequencies / (2 * math.pi)  # over the original context
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class YarnScaling:
    """Interpolation by parts of the spectrum, with longer query and key vectors (Peng et al., arXiv 2309.00071).

    ``attention_factor`` multiplies cosines and sines; ``truncate`` rounds the ramp's ends outwards to whole dimensions.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __call__(self, frequencies: Tensor, theta: float) -> Tensor:
        n = len(frequencies)
        # The dimension whose wave turns beta times over the original context.
        fast, slow = (
            n * math.log(self.original_max_positions / (beta * 2 * math.pi)) / math.log(theta)
            for beta in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        fast, slow = max(fast, 0), min(slow, 2 * n - 1)
        dimension = torch.arange(n, dtype=torch.float32)
        interpolated = ((dimension - fast) / (slow - fast or 0.001)).clamp(0, 1)
        return frequencies * (1 - interpolated + interpolated / self.factor)


@dataclass(frozen=True)
class Rope:
    """Base and context extension of a rotary embedding."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians per position, float32 [head_dim / 2]."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / self.theta**exponents
        return self.scaling(frequencies, self.theta) if self.scaling else frequencies

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0


def rotation(positions: Tensor, frequencies: Tensor, attention_factor: float) -> Tensor:
    """The rotation of each row, complex64 [rows, 1, head_dim / 2].

    ``positions`` is int64 [rows], ``frequencies`` float32 [head_dim / 2].
    """
    angles = positions[:, None, None] * frequencies
    return torch.polar(angles.new_full((), attention_factor), angles)


def rotate_(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates float32 [rows, heads, head_dim] in place, each pair of neighbouring dimensions as a complex number."""
    torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)).mul_(rotation)
    return x


def paired(size: int, head_dim: int) -> Tensor:
    """The order 0, half, 1, half + 1, ... within each head, int64 [size], for ``size`` dimensions of whole heads.

    Checkpoints mean pairs of dimensions that are half a head apart; this makes them the neighbours that
    :func:`rotate_` takes. Products of queries and keys stay the same.
    """
    return torch.arange(size).view(-1, 2, head_dim // 2).transpose(1, 2).flatten()
