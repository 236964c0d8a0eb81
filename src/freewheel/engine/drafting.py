"""How much to draft, from what, and what came of it: on the host, which knows every token, and on a device."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Run
from functools import lru_cache
from math import log2

import numpy as np

from freewheel.config import EngineConfig
from freewheel.engine.buckets import bucket_for, draft_rows
from freewheel.request import Sequence
from freewheel.speculative import Acceptance, Budget, DraftTree, NgramIndex, SpeculationMetrics, draft
from freewheel.speculative.budget import FIRST_PAUSE, LONGEST_PAUSE, TRIAL_SHARE

LATEST = 0.05  # what the latest step counts in an average of steps
GUESS = 0.25  # what the guess counts, beside the variance of the rows
FINENESS = 4  # costs of a row that are told apart, to the double
WORTH = 1.02  # what drafts have to bring, relative to steps without
REVIEWED = 16  # sequences that are looked at, on average, in a step that drafts


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

    def __init__(self, config: EngineConfig, pace: Pace, corpus: NgramIndex | None = None) -> None:
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

    def observe(self, sequence: Sequence, depth: int, accepted: int) -> None:
        """Note what became of a draft."""
        assert sequence.budget is not None
        sequence.budget.observe(depth, accepted)


class StepTimes:
    """What captured steps take, which nobody sees begin and end: as measured when they were prepared.

    Where they were not, as on one H200 with 0.6 B weights; twice as many rows as were seen there take twice as long.

    Args:
        measured: seconds by the number of sequences, and that of rows if there are drafts, or 0.
        nodes: most of a draft.
        most_rows: of a step.
    """

    ROWS, MILLISECONDS = (1, 8, 32, 128), (0.502, 0.846, 1.054, 1.971)

    def __init__(self, measured: Mapping[tuple[int, int], float], nodes: int, most_rows: int) -> None:
        self._measured, self._nodes, self._most_rows = measured, nodes, most_rows

    def of(self, sequences: int) -> list[tuple[int, float]]:
        """Rows and time of each step there is for so many sequences, the plain one first. Times are in any one unit."""
        size = bucket_for(sequences)
        sizes = draft_rows(size, self._nodes, self._most_rows)
        measured = [self._measured.get((size, rows)) for rows in (0, *sizes)]
        times = [time for time in measured if time is not None]
        if len(times) < len(measured):
            times = [self._guess(rows) for rows in (size, *sizes)]
        return list(zip((sequences, *sizes), times))

    def _guess(self, rows: int) -> float:
        return float(np.interp(rows, self.ROWS, self.MILLISECONDS)) * max(rows / self.ROWS[-1], 1)


class DeviceDrafting:
    """Drafts on the device: how far it may go, before anyone knows whether it will find something.

    A step's time depends on the number of its rows, whosever they are. So all sequences are looked at together: they
    get as many rows as bring most tokens per time, each of them those with the best chances. A draft for which nothing
    is found costs the same, and counts as one that was rejected.

    Where no draft pays, there is a pause, then a trial with the fewest rows there are, one for each of some sequences.
    Pauses grow as those of :class:`freewheel.speculative.Budget`.

    Args:
        times: of steps.
        nodes: most of a draft.

    Attributes:
        metrics: of all requests together.
    """

    def __init__(self, times: StepTimes, nodes: int) -> None:
        self._times, self._most_nodes = times, nodes
        self._keys: list[int] = []  # of the sequences that the plan is for
        self._plan: list[int] = []  # nodes of each; all 0: a pause
        self._good_for = 0  # steps
        self._wait = self._pause = 0
        self._tried = 0  # sequences, in turn
        self.metrics = SpeculationMetrics()

    def nodes(self, sequences: list[Sequence], most: Callable[[Sequence], int]) -> list[int]:
        """How many nodes each sequence's draft may have in the next step. Called once for each step.

        Args:
            sequences: at most ``BUCKETS[-1]``.
            most: nodes that a sequence can have.
        """
        keys = [sequence.key for sequence in sequences]
        if keys != self._keys or not self._good_for:
            drafted, self._keys = any(self._plan), keys
            times = self._times.of(len(sequences))
            self._plan = self._best(sequences, [most(sequence) for sequence in sequences], times)
            # In a pause nothing is learned, and little from one step to the next of many sequences.
            self._good_for = 1 + len(keys) // REVIEWED if any(self._plan) else LONGEST_PAUSE
            if drafted and not any(self._plan):
                self._wait = self._pause = _shortest_pause(times)
        self._good_for -= 1
        if any(self._plan):
            return [nodes and min(nodes, most(sequence)) for nodes, sequence in zip(self._plan, sequences)]
        if self._wait:
            self._wait -= 1
            return self._plan
        return self._try(sequences, most)

    def observe(self, sequence: Sequence, depth: int, accepted: int) -> None:
        """Note what became of a draft; of none that was found if its depth is 0."""
        assert sequence.acceptance is not None
        sequence.acceptance.observe(max(depth, 1), accepted)
        if accepted:
            self._pause = 0
        if not any(self._plan):
            self._good_for = 0

    def _best(self, sequences: list[Sequence], most: list[int], times: list[tuple[int, float]]) -> list[int]:
        """The nodes of each sequence that bring most tokens per time."""
        for sequence in sequences:
            sequence.acceptance = sequence.acceptance or Acceptance()
        chances = [(one.acceptance.first, one.acceptance.later) for one in sequences if one.acceptance]
        first, later = np.array(chances).T[:, :, None]
        node = np.arange(self._most_nodes)
        gains = np.where(node < np.array(most)[:, None], first * later**node, 0.0).ravel()
        order = np.argsort(-gains, kind="stable")  # so that a node is never before those that lead to it
        tokens = len(sequences) + np.concatenate([[0.0], gains[order].cumsum()])
        (_, plain), *drafting = times
        best, taken = len(sequences) / plain * WORTH, 0
        for rows, time in drafting:
            spare = min(rows - len(sequences), len(order))
            if tokens[spare] / time > best:
                best, taken = tokens[spare] / time, spare
        return np.bincount(order[:taken] // self._most_nodes, minlength=len(sequences)).tolist()

    def _try(self, sequences: list[Sequence], most: Callable[[Sequence], int]) -> list[int]:
        """One node for each of some sequences, who take turns; then a pause. None if nothing could ever pay."""
        count, times = len(sequences), self._times.of(len(sequences))
        spare = next((rows - count for rows, _ in times if rows > count), 0)
        shortest = _shortest_pause(times)
        self._wait = self._pause = min(max(2 * self._pause, shortest), max(LONGEST_PAUSE, shortest))
        plain = times[0][1]
        if all(rows / time <= count / plain for rows, time in times[1:]):
            return self._plan
        nodes = [0] * count
        for turn in range(self._tried, self._tried + min(spare, count)):
            nodes[turn % count] = min(1, most(sequences[turn % count]))
        self._tried = (self._tried + min(spare, count)) % count
        return nodes


def _shortest_pause(times: list[tuple[int, float]]) -> int:
    """After a trial, and the step that follows before the outcome is known and has room for drafts as well."""
    (count, plain), *drafting = times
    trial = next((time for rows, time in drafting if rows > count), plain)
    return max(FIRST_PAUSE, round(((trial + drafting[0][1]) / plain - 2) / TRIAL_SHARE))
