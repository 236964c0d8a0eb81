"""Counter-based randomness: Philox4x32-10, without any generator state.

A draw is keyed by (seed, position), so it depends on nothing that happened before it and comes out the same in every
batch. The bits are those of Triton's ``tl.randint4x(seed, position)`` for a 32-bit position.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import secrets
from functools import lru_cache
from typing import TypeVar

import numpy as np
from torch import Tensor

Ints = TypeVar("Ints", int, np.ndarray, Tensor)
Words = TypeVar("Words", np.ndarray, Tensor)

_MASK = 0xFFFFFFFF
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

STRETCH = 64

# Counter word 2 separates the uses of one key from each other.
DRAW, NOISE, CHOICE = range(3)


def philox4x32(
    counter: tuple[Ints | int, Ints | int, Ints | int, Ints | int], key: tuple[Ints, Ints]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Philox4x32-10 on Python integers, NumPy int64 arrays or torch int64 tensors, which broadcast.

    Args:
        counter: four words in [0, 2**32).
        key: two words in [0, 2**32).

    Returns:
        Four random words in [0, 2**32), in the integer type of the arguments.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products need all 64 bits. As int64 they wrap, which leaves the bits right; the shift back is arithmetic,
        # so the upper half is masked.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> 32 & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32 & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = k0 + _WEYL[0] & _MASK, k1 + _WEYL[1] & _MASK
    return c0, c1, c2, c3  # pyright: ignore[reportReturnType]


def philox(seed: Ints, position: Ints, lane: Ints | int = 0, use: int = DRAW) -> tuple[Ints, Ints, Ints, Ints]:
    """Four random words in [0, 2**32) for each (seed, position).

    Args:
        seed: signed 64-bit integers [rows].
        position: absolute positions [rows], in [0, 2**32).
        lane: further counter word in [0, 2**32), such as a token id.
        use: what the words are for; uses are independent of each other.
    """
    return philox4x32((position, lane, use, 0), (seed & _MASK, seed >> 32 & _MASK))


def uniform(words: Words) -> Words:
    """Random words, int64 in NumPy or float64, in the open interval (0, 1): never 0, never 1, 2**-32 apart."""
    return (words + 0.5) * 2.0**-32


def uniforms(seed: int, position: int, lane: int = 0) -> list[float]:
    """The four uniform numbers of a draw."""
    return _stretch(seed, position // STRETCH, lane)[position % STRETCH].tolist()


@lru_cache(maxsize=1024)
def _stretch(seed: int, stretch: int, lane: int) -> np.ndarray:
    """``uniforms`` of the positions from ``STRETCH * stretch`` on, float64 [STRETCH, 4].

    A sequence asks for one position after the other, and 140 operations on arrays cost the same for one as for many.
    """
    positions = np.arange(STRETCH * stretch, STRETCH * (stretch + 1))
    return uniform(np.stack(philox(np.full(STRETCH, seed), positions, lane), 1))


def choice_seed(seed: int, index: int) -> int:
    """Signed 64-bit seed of choice number ``index`` of a request, whatever the number of choices."""
    low, high, _, _ = philox(seed, index, use=CHOICE)
    return (high << 32 | low) - 2**63


def random_seed() -> int:
    """A fresh signed 64-bit seed from the operating system."""
    return secrets.randbits(64) - 2**63
