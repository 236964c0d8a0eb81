"""How many draft rows a request should get.

Rows cost time, and a draft that is rejected brings nothing. What a request's drafts have brought so far decides how
long the next ones are, or that there are none.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

DECAY = 0.93  # of what earlier drafts count, with each further one


def step_times(table: Mapping[int, float]) -> list[float]:
    """The time of a step with 0, 1, 2... draft rows, relative to one without, between entries on a straight line.

    Args:
        table: rows of a request in a step, the root included, and the step's time in any unit. 1 is among them; the
            largest is the most rows there can be.

    Raises:
        ValueError: the table has no entry for 1 row, or a time that is not positive.
    """
    if 1 not in table or min(table) < 1 or not all(time > 0 for time in table.values()):
        raise ValueError(f"the table needs a time for 1 row, and positive times and rows, not {dict(table)}")
    known = sorted(table)
    times = [1.0]
    for a, b in pairwise(known):
        slope = (table[b] - table[a]) / (b - a)
        times += [(table[a] + slope * (rows - a)) / table[1] for rows in range(a + 1, b + 1)]
    return times


def best_nodes(first: float, later: float, times: Sequence[float]) -> int:
    """The length of a chain that brings most tokens per time; the shortest of equals.

    Args:
        first, later: as :class:`Acceptance` has them.
        times: from :func:`step_times`.
    """
    best, most, tokens, reached = 0, 1.0, 1.0, first
    for nodes, time in enumerate(times[1:], 1):
        tokens += reached
        reached *= later
        if tokens > most * time:
            best, most = nodes, tokens / time
    return best


class Acceptance:
    """How likely the tokens of a request's drafts are accepted: averages that recent drafts dominate.

    Whether a draft is any good shows in its first token, and is another matter than how long a good one is.
    """

    def __init__(self, prior: float = 0.5) -> None:
        """Start as if the ``prior`` were the probability for any token, with little weight."""
        self._accepted, self._tried = [1.5 * prior, 0.0], [1.5, 0.0]

    @property
    def first(self) -> float:
        """The probability that a draft's first token is accepted."""
        return self._accepted[0] / self._tried[0]

    @property
    def later(self) -> float:
        """That of any other, if those before it are."""
        return (self._accepted[1] + 2 * self.first) / (self._tried[1] + 2)

    def observe(self, depth: int, accepted: int) -> None:
        """Note what became of a draft.

        Args:
            depth: of the draft, at least 1.
            accepted: tokens of it that were accepted. The next one was tried as well; what is deeper was not.

        Raises:
            ValueError: more accepted than drafted, or nothing drafted.
        """
        if not 0 <= accepted <= depth or not depth:
            raise ValueError(f"{accepted} tokens can't be accepted of a draft {depth} deep")
        self._count(0, min(accepted, 1), 1)
        if accepted and depth > 1:
            self._count(1, accepted - 1, min(accepted, depth - 1))

    def be_open(self) -> None:
        """Let the next draft count as much for the first token as all before it."""
        self._accepted[0], self._tried[0] = self.first, 1.0

    def _count(self, kind: int, accepted: int, tried: int) -> None:
        self._accepted[kind] = DECAY * self._accepted[kind] + accepted
        self._tried[kind] = DECAY * self._tried[kind] + tried


class Budget:
    """A request's draft rows, by what it accepted.

    Nodes count as one chain. Further branches show in the acceptance, which is counted by depth.

    Where no draft pays, a draft may be made nevertheless, without a row: what comes then tells whether it was right.
    """

    def __init__(self, table: Mapping[int, float], prior: float = 0.5) -> None:
        """Begin with a table as for :func:`step_times`, and the ``prior`` of :class:`Acceptance`."""
        self.acceptance = Acceptance(prior)
        self.price(step_times(table))

    def price(self, times: Sequence[float]) -> None:
        """Go by other times from now on, such as :func:`step_times` gives: what else is in a step has changed."""
        self.times = times
        self._best = self._choose()

    def nodes(self) -> int:
        """Most nodes of the draft of the next step."""
        return self._best

    def observe(self, depth: int, accepted: int) -> None:
        """Note what became of a draft; as :meth:`Acceptance.observe`."""
        self.acceptance.observe(depth, accepted)
        self._best = self._choose()

    def _choose(self) -> int:
        return best_nodes(self.acceptance.first, self.acceptance.later, self.times)
