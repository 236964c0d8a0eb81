"""Three ways to draw from the same distribution."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from freewheel.sampling.rng import NOISE, philox, uniform, uniforms
from freewheel.sampling.state import Settings
from freewheel.sampling.truncation import keeps, survivors

BLOCK = 256
ATTEMPTS = 4

_LOG2_E = 1.4426950408889634
_SERIAL = 32_768  # torch gives no more than one thread to so many elements
_LANES = 32


class Draw(Protocol):
    """Draws one token a row, and does not let one row influence another."""

    def rows(self, logits: Tensor, peaks: Tensor, settings: Sequence[Settings], positions: Sequence[int]) -> list[int]:
        """Draw from whole rows.

        Args:
            logits: float32 [rows, vocab] in host memory.
            peaks: float32 [rows, 1], the largest of each row, finite.
            settings: for each row what it asks, with a temperature above 0.
            positions: for each row the absolute position of the token.

        Returns:
            a token id for each row.
        """
        ...

    def truncated(self, logits: Tensor, peaks: Tensor, settings: Settings, position: int) -> int:
        """Draw from what truncation leaves of one row: ``logits`` [1, vocab], ``peaks`` [1, 1]."""
        ...


class TwoLevel:
    """Pick a block of the vocabulary with one uniform number, then a token inside it with another.

    Exponentials are taken once per logit, and there is no noise per token.

    A row that top-p or min-p truncates, and not top-k, draws from the whole row, up to ``ATTEMPTS`` times, until the
    token is among those that are kept: whether it is takes a comparison and a sum, not a sort. Such a token has the
    distribution of the kept ones. So has the last resort, and the only way of a row with top-k: the inverse of the kept
    tokens' cumulative distribution in the total order, at a uniform number that no attempt uses. Hence the whole is
    exact, however many attempts fail.
    """

    def rows(self, logits: Tensor, peaks: Tensor, settings: Sequence[Settings], positions: Sequence[int]) -> list[int]:
        shares = weights(logits, peaks, [row.temperature for row in settings])
        parts = zip(shares.numpy(), shares.sum(2).numpy(), settings, positions)
        return [self._attempt(row, sums, asked.seed, position, 0) for row, sums, asked, position in parts]

    def truncated(self, logits: Tensor, peaks: Tensor, settings: Settings, position: int) -> int:
        if settings.top_k == logits.shape[1]:
            shares = weights(logits, peaks, [settings.temperature])
            [row], [sums], peak = shares.numpy(), shares.sum(2).numpy(), peaks.item()
            mass = float(sums.sum(dtype=np.float64))
            for attempt in range(ATTEMPTS):
                token = self._attempt(row, sums, settings.seed, position, attempt)
                if keeps(token, logits[0], peak, shares.view(-1), mass, settings):
                    return token
        ids, scores = survivors(logits[0], settings)
        return int(ids[_invert(np.exp(scores), uniforms(settings.seed, position)[2])])

    @staticmethod
    def _attempt(shares: np.ndarray, sums: np.ndarray, seed: int, position: int, attempt: int) -> int:
        """A token of the whole row, from its ``weights`` [blocks, BLOCK] and their sums [blocks]."""
        first, second, _, _ = uniforms(seed, position, attempt)
        block = _invert(sums, first)
        return block * BLOCK + _invert(shares[block], second)


class Gumbel:
    """Exponential race: the smallest Exp(1) variate over weight wins (the Gumbel-max trick).

    The noise is keyed by seed, position and token id, so a token keeps its noise whatever else is in the running.
    """

    def rows(self, logits: Tensor, peaks: Tensor, settings: Sequence[Settings], positions: Sequence[int]) -> list[int]:
        vocab = logits.shape[1]
        temperatures = torch.tensor([row.temperature for row in settings], dtype=torch.float64)
        scores = (logits.double() - peaks) / temperatures[:, None]
        seeds, places = torch.tensor([row.seed for row in settings]), torch.tensor(positions)
        words = self._words(seeds[:, None], places[:, None], torch.arange(-(-vocab // 4))).flatten(1)[:, :vocab]
        return (scores + gumbel_noise(words)).argmax(1).tolist()

    def truncated(self, logits: Tensor, peaks: Tensor, settings: Settings, position: int) -> int:
        ids, scores = map(torch.from_numpy, survivors(logits[0], settings))
        words = self._words(torch.tensor(settings.seed), torch.tensor(position), ids >> 2)
        return int(ids[(scores + gumbel_noise(words.gather(1, (ids & 3)[:, None])[:, 0])).argmax()])

    @staticmethod
    def _words(seeds: Tensor, positions: Tensor, quads: Tensor) -> Tensor:
        """The random words of four ids at a time, int64 [..., quads, 4]."""
        return torch.stack(philox(seeds, positions, quads, NOISE), -1)


class Multinomial:
    """The framework's own draw over probabilities. Slow, and not keyed: it takes torch's global generator."""

    def rows(self, logits: Tensor, peaks: Tensor, settings: Sequence[Settings], positions: Sequence[int]) -> list[int]:
        return weights(logits, peaks, [row.temperature for row in settings]).flatten(1).multinomial(1)[:, 0].tolist()

    def truncated(self, logits: Tensor, peaks: Tensor, settings: Settings, position: int) -> int:
        ids, scores = survivors(logits[0], settings)
        return int(ids[int(torch.from_numpy(np.exp(scores)).multinomial(1))])


def weights(logits: Tensor, peaks: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Exponentials of the logits at their temperature, relative to the row's largest.

    Args:
        logits: float32 [rows, vocab] in host memory.
        peaks: float32 [rows, 1], the largest of each row, finite.
        temperatures: for each row, above 0.

    Returns:
        float32 [rows, blocks, BLOCK]; 0 past the vocabulary's end. A row has the same bits in every batch.
    """
    rows, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    if vocab == blocks * BLOCK:
        result = torch.sub(logits, peaks)
    else:
        result = torch.empty(rows, blocks * BLOCK)
        result[:, vocab:] = -torch.inf
        torch.sub(logits, peaks, out=result[:, :vocab])
    # Torch's base-2 exponential is three times faster than the natural one.
    result.mul_(_scales(tuple(temperatures)))
    # What its vector loop leaves over at the end of a thread's share goes to another function, with other last bits.
    threads = min(torch.get_num_threads(), -(-result.numel() // _SERIAL))
    even = result.numel() % (threads * _LANES) == 0
    for part in (result,) if even else result.view(-1).split(_SERIAL):
        part.exp2_()
    return result.view(rows, blocks, BLOCK)


@lru_cache
def _scales(temperatures: tuple[float, ...]) -> Tensor:
    return torch.from_numpy(np.array([[_LOG2_E / temperature] for temperature in temperatures], np.float32))


def gumbel_noise(words: Tensor) -> Tensor:
    """Random words in [0, 2**32) as standard Gumbel variates, float64, finite for each of them."""
    return -(-torch.log1p(-uniform(words.double()))).log()


def _invert(shares: np.ndarray, u: float) -> int:
    """The first index whose cumulative weight exceeds u, below 1, times the total: never one of weight 0."""
    cumulative = np.add.accumulate(shares, 0, np.float64)
    return int(cumulative.searchsorted(u * cumulative[-1], "right"))
