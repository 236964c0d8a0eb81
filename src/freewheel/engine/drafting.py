"""Drafts on the host, which knows every token: how much to draft, from what, and what came of it."""

from collections.abc import Sequence as Run
from functools import lru_cache
from math import log2

import numpy as np

from freewheel.config import EngineConfig
from freewheel.request import Sequence
from freewheel.speculative import Budget, DraftTree, NgramIndex, SpeculationMetrics, draft

LATEST = 0.05  # what the latest step counts in an average of steps
GUESS = 0.25  # what the guess counts, beside the variance of the rows
FINENESS = 4  # costs of a row that are told apart, to the double


class Pace:
    """How a step's time grows with its rows: a straight line through the steps of late.

    Where these had the same number of rows, it tells as much as they did before, and in the end a guess: that a first
    row takes as long as seven more.
    """

    def __init__(self) -> None:
        self._rows = self._seconds = 0.0  # averages
        self._variance = self._covariance = 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Note a step."""
        if not self._seconds:
            self._rows, self._seconds = rows, seconds
            return
        away, expected = rows - self._rows, self._seconds + self._row() * (rows - self._rows)
        # Anything may hold up a step: what it is early or late counts for no more than an average step.
        late = expected - self._seconds + min(max(seconds - expected, -self._seconds), self._seconds)
        self._rows += LATEST * away
        self._seconds += LATEST * late
        self._variance = (1 - LATEST) * (self._variance + LATEST * away * away)
        self._covariance = (1 - LATEST) * (self._covariance + LATEST * away * late)

    def _row(self) -> float:
        """Seconds that a row adds."""
        return (self._covariance + GUESS * self._seconds / (self._rows + 6)) / (self._variance + GUESS)

    def cost(self, sequences: int) -> float:
        """What a row more of each sequence adds to a step in which each has one, relative to that step's time."""
        if not self._seconds:
            return sequences / (sequences + 6)
        row = self._row()
        step = self._seconds + row * (sequences - self._rows)
        return min(max(sequences * row / step, 0.01), 2.0) if step > 0 else 2.0


class Table:
    """The same for captured steps, which nobody sees begin and end: as measured on one H200, a model of 0.6 B weights.

    Twice as many rows as it has are taken to last twice as long.
    """

    ROWS, MILLISECONDS = (1, 8, 32, 128), (0.502, 0.846, 1.054, 1.971)

    @staticmethod
    @lru_cache
    def cost(sequences: int) -> float:
        """As :meth:`Pace.cost`, for eight rows of each sequence."""

        def time(rows: int) -> float:
            return float(np.interp(rows, Table.ROWS, Table.MILLISECONDS)) * max(rows / Table.ROWS[-1], 1)

        return (time(8 * sequences) - time(sequences)) / 7 / time(sequences)


@lru_cache(128)
def _times(cost: int, nodes: int) -> list[float]:
    """Of a step with 0, 1, 2... draft rows a sequence, for costs of a row on a scale of powers."""
    return [1 + node * 2 ** (cost / FINENESS) for node in range(nodes + 1)]


class Drafting:
    """Drafts for the sequences of an engine.

    Args:
        config: how wide, deep and large drafts may be.
        corpus: tokens to draft from beside a sequence's own.
        pace: what rows cost.

    Attributes:
        metrics: of all requests together.
    """

    def __init__(self, config: EngineConfig, pace: Pace | Table, corpus: NgramIndex | None = None) -> None:
        self._width, self._depth, self._nodes = config.draft_width, config.draft_depth, config.draft_nodes
        self._corpus = corpus
        self._prices: Run[float] = [1.0]
        self.pace = pace
        self.metrics = SpeculationMetrics()

    def price(self, sequences: int) -> None:
        """Let drafts cost what they do in a step of so many sequences that decode."""
        self._prices = _times(round(FINENESS * log2(self.pace.cost(sequences))), self._nodes)

    def nodes(self, sequence: Sequence, most: int) -> int:
        """How many nodes a draft for the sequence should have, up to ``most``; 0 if it does not pay."""
        if sequence.budget is None:
            sequence.budget = self.budget()
        if sequence.budget.times is not self._prices:
            sequence.budget.price(self._prices)
        return min(sequence.budget.nodes(), most)

    def draft(self, sequence: Sequence, most: int) -> DraftTree | None:
        """What may follow a sequence's last token; None if it does not pay or nothing is found.

        Args:
            most: nodes, at least 1.
        """
        depth = min(self._depth, sequence.max_length - len(sequence.tokens) - 1)
        nodes = self.nodes(sequence, most) if depth > 0 else 0
        if not nodes:
            return None
        if sequence.ngrams is None:
            sequence.ngrams = NgramIndex(sequence.max_length)
        sequence.ngrams.extend(sequence.tokens[len(sequence.ngrams) :])
        found = draft(sequence.ngrams, width=self._width, depth=depth, nodes=nodes, corpus=self._corpus)
        if found is None and sequence.budget is not None:
            sequence.budget.observe(0, 0)
        return found

    def budget(self) -> Budget:
        """That of a new sequence."""
        return Budget(dict(enumerate(self._prices, 1)))
