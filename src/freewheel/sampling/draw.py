"""Three ways to draw from the same distribution."""

from typing import Protocol

import torch
from torch import Tensor

from freewheel.sampling.rng import NOISE, philox, uniform, uniforms
from freewheel.sampling.truncation import Limits, keeps, survivors

BLOCK = 256
ATTEMPTS = 4


class Draw(Protocol):
    """Draws one token a row, and does not let one row influence another."""

    def rows(self, logits: Tensor, maxima: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """Draw from whole rows.

        Args:
            logits: [rows, vocab], any float type; every row has a finite maximum.
            maxima: float32 [rows, blocks], from ``block_maxima``.
            temperatures: float64 [rows], above 0.
            seeds, positions: int64 [rows].

        Returns:
            token ids, int64 [rows].
        """
        ...

    def truncated(self, logits: Tensor, maxima: Tensor, limits: Limits, seed: Tensor, position: Tensor) -> Tensor:
        """Draw from what truncation leaves of one row.

        Args:
            logits: [1, vocab], any float type, with a finite maximum.
            maxima: float32 [1, blocks], from ``block_maxima``.
            limits: temperature above 0, and a limit that may drop tokens.
            seed, position: int64 [1].

        Returns:
            the token id, int64 [].
        """
        ...


class TwoLevel:
    """Pick a block of the vocabulary with one uniform number, then a token inside it with another.

    Reads the logits once, and one block of them again; no noise per token.

    A row that top-p or min-p truncates, and not top-k, draws from the whole row, up to ``ATTEMPTS`` times, until the
    token is among those that are kept: whether it is takes a comparison and a sum, not a sort. Such a token has the
    distribution of the kept ones. So has the last resort, and the only way of a row with top-k: the inverse of the kept
    tokens' cumulative distribution in the total order, at a uniform number that no attempt uses. Hence the whole is
    exact, however many attempts fail.
    """

    def rows(self, logits: Tensor, maxima: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        return self._attempt(logits, maxima, temperatures, seeds, positions, 0)

    def truncated(self, logits: Tensor, maxima: Tensor, limits: Limits, seed: Tensor, position: Tensor) -> Tensor:
        if limits.top_k == logits.shape[1]:
            temperature = maxima.new_tensor([limits.temperature], dtype=torch.float64)
            for attempt in range(ATTEMPTS):
                [token] = self._attempt(logits, maxima, temperature, seed, position, attempt)
                if keeps(logits[0], token, limits):
                    return token
        ids, scores = survivors(logits[0], limits)
        _, _, third, _ = philox(seed, position)
        return ids[_invert(scores.exp()[None], uniform(third))[0]]

    @staticmethod
    def _attempt(
        logits: Tensor, maxima: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, attempt: int
    ) -> Tensor:
        first, second = uniforms(seeds, positions, attempt)
        peaks = maxima.amax(1, keepdim=True)
        sums = _block_sums(logits, maxima, temperatures).double()
        weights = sums * ((maxima.double() - peaks) / temperatures[:, None]).exp()
        blocks = _invert(weights, first)
        inside = block_values(logits, blocks).double() - maxima.gather(1, blocks[:, None])
        return blocks * BLOCK + _invert((inside / temperatures[:, None]).exp(), second)


class Gumbel:
    """Exponential race: the smallest Exp(1) variate over weight wins (the Gumbel-max trick).

    The noise is keyed by seed, position and token id, so a token keeps its noise whatever else is in the running.
    """

    def rows(self, logits: Tensor, maxima: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        quads = torch.arange(-(-logits.shape[1] // 4), device=logits.device)
        words = self._words(seeds[:, None], positions[:, None], quads).flatten(1)[:, : logits.shape[1]]
        scores = (logits.double() - maxima.amax(1, keepdim=True)) / temperatures[:, None]
        return (scores + gumbel_noise(words)).argmax(1)

    def truncated(self, logits: Tensor, maxima: Tensor, limits: Limits, seed: Tensor, position: Tensor) -> Tensor:
        ids, scores = survivors(logits[0], limits)
        words = self._words(seed, position, ids >> 2)
        return ids[(scores + gumbel_noise(words.gather(1, (ids & 3)[:, None])[:, 0])).argmax()]

    @staticmethod
    def _words(seeds: Tensor, positions: Tensor, quads: Tensor) -> Tensor:
        """The random words of four ids at a time, int64 [..., quads, 4]."""
        return torch.stack(philox(seeds, positions, quads, NOISE), -1)


class Multinomial:
    """The framework's own draw over probabilities. Slow, and not keyed: it takes torch's global generator."""

    def rows(self, logits: Tensor, maxima: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        scores = (logits.float() - maxima.amax(1, keepdim=True)) / temperatures[:, None].float()
        return scores.softmax(1).multinomial(1)[:, 0]

    def truncated(self, logits: Tensor, maxima: Tensor, limits: Limits, seed: Tensor, position: Tensor) -> Tensor:
        ids, scores = survivors(logits[0], limits)
        return ids[scores.exp().multinomial(1)[0]]


def gumbel_noise(words: Tensor) -> Tensor:
    """Random words in [0, 2**32) as standard Gumbel variates, float64, finite for each of them."""
    return -(-torch.log1p(-uniform(words))).log()


def block_maxima(logits: Tensor) -> Tensor:
    """The largest logit of each block, float32 [rows, blocks]; NaN where a block holds one."""
    return torch.cat([part.amax(2) for part in _blocks(logits)], 1).float()


def block_values(logits: Tensor, blocks: Tensor) -> Tensor:
    """One block of each row, [rows, BLOCK] for blocks int64 [rows]; -inf past the vocabulary's end."""
    ids = blocks[:, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
    return logits.gather(1, ids.clamp(max=logits.shape[1] - 1)).where(ids < logits.shape[1], -torch.inf)


def greedy(logits: Tensor, maxima: Tensor) -> Tensor:
    """The first id in the total order of each row, int64 [rows]."""
    blocks = maxima.argmax(1)
    return blocks * BLOCK + block_values(logits, blocks).argmax(1)


def _block_sums(logits: Tensor, maxima: Tensor, temperatures: Tensor) -> Tensor:
    """Sum of exponentials relative to each block's own maximum, float32 [rows, blocks]; 0 for a block of -inf."""
    peaks = maxima.clamp(min=torch.finfo(torch.float32).min)[:, :, None]
    inverse = temperatures.reciprocal().float()[:, None, None]
    sums, start = [], 0
    for part in _blocks(logits):
        here = peaks[:, start : start + part.shape[1]]
        sums.append((part - here).mul_(inverse).exp_().sum(2))
        start += part.shape[1]
    return torch.cat(sums, 1)


def _blocks(logits: Tensor) -> list[Tensor]:
    """Views [rows, blocks, BLOCK] of the whole blocks and [rows, 1, rest] of the last, shorter one."""
    whole = logits.shape[1] // BLOCK * BLOCK
    parts = [logits[:, :whole].unflatten(1, (-1, BLOCK)), logits[:, None, whole:]]
    return [part for part in parts if part.numel()]


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """Per row the first index whose cumulative weight exceeds u times the total: never one of weight 0.

    Weights float64 [rows, n], u float64 [rows] below 1; int64 [rows].
    """
    cumulative = weights.cumsum(1)
    return torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True)[:, 0]
