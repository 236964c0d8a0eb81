"""How much to draft, from what, and what came of it: on the host, which knows every token, and on a device."""

from collections import Counter
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
WORTH = 1.05  # what drafts have to bring, relative to steps without: of many plans the best looks better than it is
REVIEWED = 8  # sequences that are looked at again, on average, in a step
FORGOTTEN = 1 / 256  # of how much slower a step was than others, with each of those
SHORTEST_PAUSE, LONGEST_PAUSE = 4, 64  # between guesses, in steps
GUESS_SHARE = 0.01  # of the time until the next guess that a guess may cost
OPEN = 0.001  # acceptance that all are believed to have: enough for a row that nobody else needs
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

        What the grammar forces is drafted whether or not other drafts pay, and nothing that it forbids. Where these do
        not pay they are a guess, which takes next to no time, and may turn out to have been right.

        Args:
            most: nodes, at least 1.
        """
        depth = min(self._depth, sequence.max_length - len(sequence.tokens) - 1)
        if depth < 1:
            return None
        matcher = sequence.matcher
        forced = [] if matcher is None else matcher.forced(min(depth, most, self._nodes))
        nodes = min(self.nodes(sequence, most) + len(forced), most, self._nodes)
        if sequence.ngrams is None:
            sequence.ngrams = NgramIndex(sequence.max_length)
        sequence.ngrams.extend(sequence.tokens[len(sequence.ngrams) :])
        found = draft(
            sequence.ngrams, width=self._width, depth=depth, nodes=nodes or 1, corpus=self._corpus, first=forced
        )
        if found is not None and matcher is not None:
            found = matcher.prune(found)
            sequence.forced = len(forced)
        if nodes or found is None or not found.tokens:
            return found if found and found.tokens else None
        sequence.guess = Guess(len(sequence.tokens), found.tokens)
        return None

    def budget(self) -> Budget:
        """That of a new sequence, which has to be guessed right before it drafts."""
        return Budget(dict(enumerate(self._prices, 1)), prior=0.0)

    def observe(self, sequence: Sequence, depth: int, accepted: int) -> None:
        """Note what became of a draft; the part that a grammar forces tells nothing of others."""
        assert sequence.budget is not None
        if depth > sequence.forced:
            sequence.budget.observe(depth - sequence.forced, max(accepted - sequence.forced, 0))


@lru_cache
def _guessed_seconds(rows: int) -> float:
    known, milliseconds = (1, 8, 32, 128), (0.502, 0.846, 1.054, 1.971)
    return float(np.interp(rows, known, milliseconds)) * max(rows / known[-1], 1) / 1e3


class StepTimes:
    """What captured steps take: as measured when they were prepared, and as much slower as steps of late were.

    That is what device or host takes, whichever is slower, as they work side by side. That others were slower than the
    steps of late is forgotten bit by bit; or a kind of step that was slow for once would never be tried again.

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
        self._keys: dict[int, list[tuple[int, int]]] = {}  # of steps, by the sequences they are made for
        self._slowness: dict[tuple[int, int], float] = {}  # relative to what was measured
        self._seen: Counter[tuple[int, int]] = Counter()  # how many times told of it
        self._host: dict[tuple[int, int], float] = {}

    def of(self, sequences: int) -> list[tuple[int, float]]:
        """Rows and seconds of each step there is for so many sequences.

        First the plain one, then that in which nobody drafts, but some have yet to learn how long they are.
        """
        size = bucket_for(sequences)
        if size not in self._keys:
            self._keys[size] = [(size, rows) for rows in (0, size, *draft_rows(size, self._nodes, self._most_rows))]
        return [(rows if rows > size else sequences, self._seconds((size, rows))) for _, rows in self._keys[size]]

    def observe(self, sequences: int, nodes: int, drafts: bool, device: float | None, host: float) -> None:
        """Note what a step took for so many sequences, with so many nodes in all if any of them ``drafts``.

        Args:
            device: seconds; None if that is not known.
            host: seconds.
        """
        key = draft_step(sequences, nodes, self._nodes, self._most_rows) if drafts else (bucket_for(sequences), 0)
        slowness = self._slow(key)
        self._slowness[key] = slowness
        if device is not None:  # what idle rows took counts as three such steps, and the first are believed the least
            self._seen[key] += 1
            share = max(LATEST, 1 / (3 + self._seen[key]))
            self._slowness[key] = _toward(slowness, device / self._idle(key), share, 2.0 if share == LATEST else 1.2)
        self._host[key] = _toward(self._host.get(key, min(host, slowness * self._idle(key))), host)
        for times in (self._slowness, self._host):
            for other in times:
                if other[0] == key[0]:
                    times[other] -= FORGOTTEN * max(times[other] - times[key], 0.0)

    def _seconds(self, key: tuple[int, int]) -> float:
        return max(self._idle(key) * self._slow(key), self._host.get(key, self._host.get((key[0], 0), 0.0)))

    def _slow(self, key: tuple[int, int]) -> float:
        return self._slowness.get(key, self._slowness.get((key[0], 0), 1.0))

    def _idle(self, key: tuple[int, int]) -> float:
        return self._measured[key] if key in self._measured else _guessed_seconds(key[1] or key[0])


def _toward(known: float, seen: float, share: float = LATEST, most: float = 2.0) -> float:
    """Anything may hold up a step. And a context that grows lets its time grow slowly."""
    return known + share * (min(max(seen, known / most), most * known) - known)


class DeviceDrafting:
    """Drafts on the device: how far it may go, before anyone knows whether it will find something.

    A step's time depends on the number of its rows, whosever they are. So all sequences are looked at together: they
    get as many rows as bring most tokens per time, each of them those with the best chances. A draft for which nothing
    is found costs the same, and counts as one that was rejected.

    Where no draft pays, the device guesses now and then what follows each sequence, without a row, and is told later
    how much of that was right. The pauses between are long enough for a guess not to cost more than ``GUESS_SHARE`` of
    them, and double as long as less than half of what it takes is right.

    Args:
        times: of steps.
        nodes: most of a draft.

    Attributes:
        guessing: whether the device is to guess in the next step, in which nobody drafts.
        metrics: of all requests together.
    """

    def __init__(self, times: StepTimes, nodes: int) -> None:
        self._times, self._most_nodes = times, nodes
        self._keys: list[int] = []  # of the sequences that the plan is for
        self._plan: dict[int, int] = {}  # nodes by key; empty if nobody has any
        self._good_for = 0  # steps
        self._changed = True  # something was learned since
        self._wait = self._pause = 0  # steps until the next guess
        self._since = LONGEST_PAUSE  # steps since the last guess or draft
        self._turn = 0  # of a sequence to try
        self._arrived, self._waited = 0.0, False
        self.guessing = False
        self.metrics = SpeculationMetrics()

    @property
    def planned(self) -> bool:
        """Whether anybody is to draft."""
        return bool(self._plan)

    def nodes(self, sequences: list[Sequence], most: Callable[[Sequence], int]) -> list[int]:
        """How many nodes each sequence's draft may have in the next step. Called once for each step.

        Args:
            sequences: at most ``BUCKETS[-1]``.
            most: nodes that a sequence can have.
        """
        if not self._plan:
            self.review(sequences, most)  # who begins to draft does so at once
        self._good_for -= 1
        self._since += 1
        nodes = [0] * len(sequences)
        if self._plan:
            planned = [self._plan.get(sequence.key, 0) for sequence in sequences]
            nodes = [count and min(count, most(sequence)) for count, sequence in zip(planned, sequences)]
        self.guessing = not any(nodes) and self._is_time_to_guess(len(sequences))
        if self.guessing or any(nodes):
            self._since = 0
        return nodes

    def review(self, sequences: list[Sequence], most: Callable[[Sequence], int]) -> None:
        """Make a new plan if it is time: when the step for which ``nodes`` was asked with the same is on its way.

        To plan takes as long as to launch a step or longer, and while one runs that is no loss.
        """
        if self._good_for > 0:
            return
        if self._changed or [sequence.key for sequence in sequences] != self._keys:
            self._renew(sequences, most)

    def observe(self, sequence: Sequence, depth: int, accepted: int) -> None:
        """Note what became of a draft or a guess; of a draft for which nothing was found if its depth is 0."""
        sequence.acceptance = sequence.acceptance or Acceptance(prior=0.0)
        sequence.acceptance.observe(max(depth, 1), accepted)
        self._changed = True

    def landed(self, spans: list[Span], launched: float, asked: float, arrived: float) -> None:
        """Note what a step took, if it was launched before the results of the one before were there.

        All counts that the host does from one step's results until it asks for the next, its callers' work as well.

        Args:
            spans: of the step.
            launched, asked, arrived: when it was launched, its results were asked for and they were there, in seconds.
                Who did not have to wait knows nothing of the device.
        """
        before, waited_before = self._arrived, self._waited
        self._arrived, self._waited = arrived, arrived - asked > WAIT
        if launched > before or len(spans) > BUCKETS[-1]:
            return
        nodes, drafts = 0, False
        for span in spans:
            if span.rows > 1 or not span.sample or span.scored:
                return
            nodes += span.nodes
            drafts = drafts or span.nodes > 0 or span.guess or span.follows
        device = arrived - before if self._waited and waited_before else None
        self._times.observe(len(spans), nodes, drafts, device, asked - before)

    def _renew(self, sequences: list[Sequence], most: Callable[[Sequence], int]) -> None:
        """Make a plan, and see when the next guess is due."""
        drafted = bool(self._plan)
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
        self._keys = [sequence.key for sequence in sequences]
        self._plan = dict(zip(self._keys, best)) if any(best) else {}
        self._good_for, self._changed = 2 + len(sequences) // REVIEWED, False
        if self._plan:
            return
        shortest = self._shortest_pause(len(sequences))
        if drafted or not all(sequence.acceptance for sequence in sequences):  # new ones do not wait for long
            self._wait, self._pause = min(self._wait, max(shortest - self._since, 0)), min(self._pause, shortest)

    def _best(self, sequences: list[Sequence], most: list[int]) -> list[int]:
        """The nodes of each sequence that bring most tokens per time."""
        chances = [
            (max(one.acceptance.first, OPEN), one.acceptance.later) if one.acceptance else (OPEN, 0.0)
            for one in sequences
        ]
        (_, plain), *drafting = self._times.of(len(sequences))
        best, taken = len(sequences) / plain * WORTH, 0
        # What long drafts of all would bring at most, and what it takes for the quickest step to pay: soon seen.
        most_gained = sum(first * min(1 / max(1 - later, 1e-9), self._most_nodes) for first, later in chances)
        needed = best * min(seconds for rows, seconds in drafting if rows > len(sequences)) - len(sequences)
        if most_gained > needed / 2:
            self._pause = 0
        if most_gained <= needed:
            return [0] * len(sequences)
        first, later = np.array(chances).T[:, :, None]
        node = np.arange(self._most_nodes)
        gains = np.where(node < np.array(most)[:, None], first * later**node, 0.0).ravel()
        order = np.argsort(-gains, kind="stable")  # so that a node is never before those that lead to it
        tokens = len(sequences) + np.concatenate([[0.0], gains[order].cumsum()])
        useful = np.count_nonzero(gains)
        for rows, seconds in drafting:
            spare = min(rows - len(sequences), useful)
            if spare and tokens[spare] / seconds > best:
                best, taken = tokens[spare] / seconds, spare
        return np.bincount(order[:taken] // self._most_nodes, minlength=len(sequences)).tolist()

    def _is_time_to_guess(self, count: int) -> bool:
        """Whether so many sequences have waited long enough; the next pause begins."""
        if self._wait:
            self._wait -= 1
            return False
        (_, plain), _, *drafting = self._times.of(count)
        shortest = self._shortest_pause(count)
        self._wait = self._pause = min(max(2 * self._pause, shortest), max(LONGEST_PAUSE, shortest))
        return any(rows / seconds > count / plain for rows, seconds in drafting)  # else no draft could ever pay

    def _shortest_pause(self, count: int) -> int:
        """Steps for so many sequences between one with guesses and the next."""
        (_, plain), (_, guess), *_ = self._times.of(count)
        return max(SHORTEST_PAUSE, round((guess / plain - 1) / GUESS_SHARE))
