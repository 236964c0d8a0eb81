"""How much to draft, from what, and what came of it: on the host, which knows every token, and on a device."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Run
from functools import lru_cache
from math import log2
from typing import NamedTuple

import numpy as np

from freewheel.config import EngineConfig
from freewheel.engine.buckets import BUCKETS, bucket_for, draft_rows, draft_step
from freewheel.engine.runner import Span
from freewheel.request import Sequence
from freewheel.speculative import Acceptance, Budget, DraftTree, NgramIndex, SpeculationMetrics, draft

LATEST = 0.05  # what the latest step counts in an average of steps
GUESS = 0.25  # what the guess counts, beside the variance of the rows
FINENESS = 4  # costs of a row that are told apart, to the double
WORTH = 1.02  # what drafts have to bring, relative to steps without
REVIEWED = 8  # sequences that are looked at again, on average, in a step
FIRST_PAUSE, LONGEST_PAUSE = 8, 1024  # in steps
TRIAL_SHARE = 0.01  # of the time until the next trial that a trial may cost
OPEN = 0.001  # acceptance that all are believed to have: enough for a row that nobody else needs
TRIAL = 1.05  # what a trial may take, relative to the quickest step with drafts
GUESSED, GUESSED_FOR = 8, 4  # tokens that the host guesses, and the most sequences for which it does
INDEXED = 256  # tokens that the host indexes in a step
GUESSING = 100e-6  # seconds: who waits for less has no time for that
WAIT = 20e-6  # seconds: who waits for less finds the results there


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


class Guess(NamedTuple):
    """What is thought to follow the first ``length`` tokens of a sequence: a draft without rows, to see if it pays."""

    length: int
    tokens: tuple[int, ...]


def judged(sequence: Sequence) -> tuple[int, int] | None:
    """The depth of the sequence's guess, as far as it can be judged, and how much of it was right.

    None if there is no guess, or nothing came since. A guess is judged once.
    """
    if sequence.guess is None:
        return None
    length, tokens = sequence.guess
    came = sequence.tokens[length : length + len(tokens)]
    if not came:
        return None
    sequence.guess = None
    right = next((i for i, pair in enumerate(zip(tokens, came)) if pair[0] != pair[1]), len(came))
    return len(tokens) if right < len(came) else right, right


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
        if outcome := judged(sequence):
            sequence.budget.observe(*outcome)
        return min(sequence.budget.nodes(), most)

    def draft(self, sequence: Sequence, most: int) -> DraftTree | None:
        """What may follow a sequence's last token; None if it does not pay or nothing is found.

        Where it does not pay it is a guess, which takes next to no time, and may turn out to have been right.

        Args:
            most: nodes, at least 1.
        """
        depth = min(self._depth, sequence.max_length - len(sequence.tokens) - 1)
        if depth < 1:
            return None
        nodes = self.nodes(sequence, most)
        if sequence.ngrams is None:
            sequence.ngrams = NgramIndex(sequence.max_length)
        sequence.ngrams.extend(sequence.tokens[len(sequence.ngrams) :])
        found = draft(sequence.ngrams, width=self._width, depth=depth, nodes=nodes or 1, corpus=self._corpus)
        if nodes or found is None:
            return found
        sequence.guess = Guess(len(sequence.tokens), found.tokens)
        return None

    def budget(self) -> Budget:
        """That of a new sequence, which has to be guessed right before it drafts."""
        return Budget(dict(enumerate(self._prices, 1)), prior=0.0)

    def observe(self, sequence: Sequence, depth: int, accepted: int) -> None:
        """Note what became of a draft."""
        assert sequence.budget is not None
        sequence.budget.observe(depth, accepted)


@lru_cache
def _guessed_seconds(rows: int) -> float:
    known, milliseconds = (1, 8, 32, 128), (0.502, 0.846, 1.054, 1.971)
    return float(np.interp(rows, known, milliseconds)) * max(rows / known[-1], 1) / 1e3


class StepTimes:
    """What captured steps take: as measured when they were prepared, then as steps of late took.

    That is what device or host takes, whichever is slower, as they work side by side.

    Where nothing was measured, as on one H200 with 0.6 B weights; twice as many rows as were seen there take twice as
    long. A step is known by the sequences it is made for, and its rows: 0 if it is plain, or see
    :func:`freewheel.engine.buckets.draft_step`.

    Args:
        measured: seconds by step, with idle rows.
        nodes: most of a draft.
        most_rows: of a step.
    """

    def __init__(self, measured: Mapping[tuple[int, int], float], nodes: int, most_rows: int) -> None:
        self._measured, self._nodes, self._most_rows = measured, nodes, most_rows
        self._device: dict[tuple[int, int], float] = {}
        self._host: dict[tuple[int, int], float] = {}

    def of(self, sequences: int) -> list[tuple[int, float]]:
        """Rows and seconds of each step there is for so many sequences.

        First the plain one, then that in which nobody drafts, but some have yet to learn how long they are.
        """
        size = bucket_for(sequences)
        keys = [(size, rows) for rows in (0, size, *draft_rows(size, self._nodes, self._most_rows))]
        return list(zip((sequences, sequences, *(rows for _, rows in keys[2:])), map(self._seconds, keys)))

    def observe(self, sequences: int, nodes: int, drafts: bool, device: float | None, host: float) -> None:
        """Note what a step took for so many sequences, with so many nodes in all if any of them ``drafts``.

        Args:
            device: seconds; None if that is not known.
            host: seconds.
        """
        key = draft_step(sequences, nodes, self._nodes, self._most_rows) if drafts else (bucket_for(sequences), 0)
        # Anything may hold up a step. And a context that grows lets its time grow slowly.
        for times, known, seconds in (
            (self._device, self._device_seconds(key), device),
            (self._host, self._host.get(key, host), host),
        ):
            if seconds is not None:
                times[key] = known + LATEST * (min(max(seconds, known / 2), 2 * known) - known)

    def _seconds(self, key: tuple[int, int]) -> float:
        return max(self._device_seconds(key), self._host.get(key, self._host.get((key[0], 0), 0.0)))

    def _device_seconds(self, key: tuple[int, int]) -> float:
        """What it was seen to take; or what was measured, if plain steps take what was measured."""
        if key in self._device:
            return self._device[key]
        plain = key[0], 0
        return self._idle(key) * self._device.get(plain, self._idle(plain)) / self._idle(plain)

    def _idle(self, key: tuple[int, int]) -> float:
        return self._measured[key] if key in self._measured else _guessed_seconds(key[1] or key[0])


class DeviceDrafting:
    """Drafts on the device: how far it may go, before anyone knows whether it will find something.

    A step's time depends on the number of its rows, whosever they are. So all sequences are looked at together: they
    get as many rows as bring most tokens per time, each of them those with the best chances. A draft for which nothing
    is found costs the same, and counts as one that was rejected.

    Where no draft pays, there is a pause, then a trial, for which all together get few rows. A pause is long
    enough for the trial not to cost more than ``TRIAL_SHARE`` of it, and doubles until something is accepted. Where few
    sequences decode, for which a trial costs most, the host guesses meanwhile, as on a CPU.

    Args:
        times: of steps.
        nodes: most of a draft.

    Attributes:
        metrics: of all requests together.
    """

    def __init__(self, times: StepTimes, nodes: int) -> None:
        self._times, self._most_nodes = times, nodes
        self._plan: dict[int, int] = {}  # nodes by a sequence's key; all 0: a pause
        self._good_for = 0  # steps
        self._changed = True  # something was learned since
        self._wait = self._pause = 0  # steps until the next trial
        self._since = LONGEST_PAUSE  # steps since the last draft
        self._turn = 0  # of a sequence to try, or to guess for
        self._arrived = 0.0
        self._spare = 1.0  # seconds that the host waited for the latest step
        self.metrics = SpeculationMetrics()

    def nodes(self, sequences: list[Sequence], most: Callable[[Sequence], int]) -> list[int]:
        """How many nodes each sequence's draft may have in the next step. Called once for each step.

        Args:
            sequences: at most ``BUCKETS[-1]``.
            most: nodes that a sequence can have.
        """
        others = any(sequence.key not in self._plan for sequence in sequences) or len(self._plan) > len(sequences)
        if self._good_for <= 0 and (self._changed or others):
            self._renew(sequences, most)
        self._good_for -= 1
        self._since += 1
        planned = [self._plan.get(sequence.key, 0) for sequence in sequences]
        nodes = [count and min(count, most(sequence)) for count, sequence in zip(planned, sequences)]
        if any(nodes):
            self._since = 0
            return nodes
        if not self._wait:
            return self._try(sequences, most)
        self._wait -= 1
        if len(sequences) <= GUESSED_FOR and self._spare > GUESSING:
            self._turn = (self._turn + 1) % len(sequences)
            if most(sequences[self._turn]):
                self._guess(sequences[self._turn])
        return nodes

    def observe(self, sequence: Sequence, depth: int, accepted: int) -> None:
        """Note what became of a draft; of none that was found if its depth is 0."""
        sequence.acceptance = sequence.acceptance or Acceptance(prior=0.0)
        sequence.acceptance.observe(max(depth, 1), accepted)
        self._changed = True
        if accepted:
            self._pause = 0

    def landed(self, spans: list[Span], *, host: float, waited: float, arrived: float) -> None:
        """Note what a step took, in seconds.

        Args:
            spans: of the step.
            host: that the host had to do for it, from planning to handing out what it brought.
            waited: for its results; next to nothing: they were there before, who knows since when.
            arrived: when they were there, by ``perf_counter``.
        """
        known, self._spare = waited > WAIT, waited
        if len(spans) <= BUCKETS[-1] and all(span.rows == 1 and span.sample and not span.scored for span in spans):
            device = arrived - self._arrived if known and self._arrived else None
            nodes, drafts = sum(span.nodes for span in spans), any(span.nodes or span.follows for span in spans)
            self._times.observe(len(spans), nodes, drafts, device, host)
        self._arrived = arrived if known else 0.0

    def _renew(self, sequences: list[Sequence], most: Callable[[Sequence], int]) -> None:
        """Make a plan, and see when the next trial is due."""
        drafted = any(self._plan.values())
        room = [most(sequence) for sequence in sequences]
        best = self._best(sequences, room)
        left_out = [i for i, nodes in enumerate(best) if not nodes and room[i]]
        if left_out and max(best) > 1:  # one in turn gets another chance
            best[best.index(max(best))] -= 1
            self._turn += 1
            chosen = left_out[self._turn % len(left_out)]
            best[chosen] = 1
            if acceptance := sequences[chosen].acceptance:
                acceptance.be_open()
        self._plan = {sequence.key: nodes for sequence, nodes in zip(sequences, best)}
        self._good_for, self._changed = 1 + len(sequences) // REVIEWED, False
        if any(best):
            return
        shortest = self._trial(len(sequences))[1]
        if drafted:
            self._wait = self._pause = shortest
        elif not all(sequence.acceptance for sequence in sequences):  # new ones do not wait for long
            self._wait, self._pause = min(self._wait, max(shortest - self._since, 0)), min(self._pause, shortest)

    def _best(self, sequences: list[Sequence], most: list[int]) -> list[int]:
        """The nodes of each sequence that bring most tokens per time."""
        chances = [(one.acceptance.first, one.acceptance.later) if one.acceptance else (0, 0) for one in sequences]
        first, later = np.array(chances, dtype=float).T[:, :, None]
        first = np.maximum(first, OPEN)
        node = np.arange(self._most_nodes)
        gains = np.where(node < np.array(most)[:, None], first * later**node, 0.0).ravel()
        order = np.argsort(-gains, kind="stable")  # so that a node is never before those that lead to it
        tokens = len(sequences) + np.concatenate([[0.0], gains[order].cumsum()])
        useful = np.count_nonzero(gains)
        (_, plain), *drafting = self._times.of(len(sequences))
        best, taken = len(sequences) / plain * WORTH, 0
        for rows, seconds in drafting:
            spare = min(rows - len(sequences), useful)
            if spare and tokens[spare] / seconds > best:
                best, taken = tokens[spare] / seconds, spare
        return np.bincount(order[:taken] // self._most_nodes, minlength=len(sequences)).tolist()

    def _try(self, sequences: list[Sequence], most: Callable[[Sequence], int]) -> list[int]:
        """Some nodes for each sequence, or one for each of some, who take turns; then a pause."""
        count = len(sequences)
        spare, shortest = self._trial(count)
        each, tried, nodes = max(spare // count, 1), min(spare, count), [0] * count
        for turn in range(self._turn, self._turn + tried):
            sequence = sequences[turn % count]
            nodes[turn % count] = min(each, self._most_nodes, most(sequence))
            if sequence.acceptance:
                sequence.acceptance.be_open()
        self._turn = (self._turn + tried) % count
        if any(nodes):
            self._pause, self._since = min(max(2 * self._pause, shortest), max(LONGEST_PAUSE, shortest)), 0
        self._wait = max(self._pause, shortest)
        return nodes

    def _trial(self, count: int) -> tuple[int, int]:
        """Rows to spare in a trial of so many sequences, 0 if no draft could ever pay; and the shortest pause after it.

        It costs the step itself, and the one that follows before the outcome is known.
        """
        (_, plain), (_, follow), *drafting = self._times.of(count)
        cheapest = min(seconds for _, seconds in drafting)
        rows, seconds = max(step for step in drafting if step[1] <= TRIAL * cheapest)
        pays = any(rows / seconds > count / plain for rows, seconds in drafting)
        pause = max(FIRST_PAUSE, round(((seconds + follow) / plain - 2) / TRIAL_SHARE))
        return (rows - count if pays else 0), pause

    def _guess(self, sequence: Sequence) -> None:
        """Judge the sequence's guess, if anything came since, and make another one."""
        if outcome := judged(sequence):
            self.observe(sequence, *outcome)
        if sequence.guess is not None:
            return
        if sequence.ngrams is None:
            sequence.ngrams = NgramIndex(sequence.max_length)
        known = len(sequence.ngrams)
        sequence.ngrams.extend(sequence.tokens[known : known + INDEXED])
        if len(sequence.ngrams) < len(sequence.tokens):
            return
        found = draft(sequence.ngrams, width=1, depth=GUESSED, nodes=GUESSED)
        if found is None:
            self.observe(sequence, 0, 0)
            return
        sequence.guess = Guess(len(sequence.tokens), found.tokens)
