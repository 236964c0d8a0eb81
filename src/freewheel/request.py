"""What goes into the engine, what comes out of it, and what it remembers in between.

:class:`Request`, :class:`StepOutput` and :class:`Stats` are plain data: they can cross to another thread or process.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from freewheel.cache.radix import Node
    from freewheel.engine.drafting import Guess
    from freewheel.grammar import CompiledGrammar, Matcher
    from freewheel.sampling import SamplingParams
    from freewheel.speculative import Acceptance, Budget, NgramIndex


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # asked for by the user
    ERROR = "error"  # see the message


@dataclass(frozen=True)
class Request:
    """A prompt as token ids and how to continue it.

    Attributes:
        request_id: unique among unfinished requests.
        prompt_ids: at least one id.
        params: checked sampling parameters.
        bad_word_ids: ``params.bad_words`` as token id sequences.
        priority: smaller is more urgent.
        grammar: what ``params.grammar`` was compiled to, once that is done.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: "SamplingParams"
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    grammar: "CompiledGrammar | None" = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[type["Request"], tuple[Any, ...]]:
        """Pickled without a compiled grammar, which belongs to its process."""
        return Request, (self.request_id, self.prompt_ids, self.params, self.bad_word_ids, self.priority)


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position: the token itself first, then the most likely ones, best first.

    The token appears once even when it is among the most likely. Ranks count from 1; minus infinity is possible.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(slots=True)
class StepOutput:
    """What a step brought one sequence.

    Attributes:
        request_id: whose.
        index: which of the request's choices.
        token_ids: new tokens.
        logprobs: one for each new token, if asked for.
        prompt_logprobs: one for each prompt token, None for the first; comes once, with choice 0.
        finish_reason: set on the sequence's last output.
        stop_reason: the stop token id that ended it; None for an end-of-sequence id.
        complete: it ended as the grammar permits nothing more; its last token is none that stops.
        error: what went wrong, with ``FinishReason.ERROR``.
        cached_tokens: prompt tokens that were not computed for this sequence.
        drafted: rows that were computed for drafted tokens.
        accepted: those of them whose token is among the new ones: the first so many.
    """

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    complete: bool = False
    error: str | None = None
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def __reduce__(self) -> tuple[type["StepOutput"], tuple[Any, ...]]:
        """Pickled by position, which takes half the time and size that a dataclass takes by itself."""
        return StepOutput, _fields(self)


_fields = attrgetter(*(field.name for field in fields(StepOutput)))


class Stats(NamedTuple):
    """What an engine does at the moment, as far as those who watch it want to know.

    Attributes:
        running: sequences that hold a slot.
        waiting: sequences that wait for one.
        preemptions: how often one had to give up its slot, since the engine began.
        pages: of the key-value cache.
        pages_in_use: those of them that sequences hold; what the prefix cache alone keeps can be had at any time.
        busy_seconds: how long there was a step on its way, since the engine began.
    """

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    pages: int = 0
    pages_in_use: int = 0
    busy_seconds: float = 0.0


class Sequence:
    """A choice of a request while the engine works on it.

    ``tokens`` is prompt plus output. ``computed`` of them have their keys and values in ``pages``, of which the first
    ``node.depth`` belong to the prefix tree. ``slot`` is -1 while it waits; then it holds no pages either.

    Steps may be in flight whose results are not here yet: rows are ``launched`` up to that position, and ``pending``
    tokens more will follow; or fewer, by up to ``slack``, which a device may draft and reject. What is in flight for
    another ``stay`` than the present one is void.

    Where it speculates, ``budget`` says how much it drafts, ``ngrams`` holds its tokens while it has a slot, and
    ``guess`` is what is thought to follow where drafts do not pay; or, if the device drafts, ``acceptance`` says what
    came of it. ``forced`` tokens of its draft are the grammar's.

    With a grammar, ``matcher`` has taken in all tokens of the output, from its first admission on.
    """

    __slots__ = (
        "acceptance",
        "budget",
        "cached_tokens",
        "computed",
        "followers",
        "forced",
        "guess",
        "index",
        "key",
        "launched",
        "leader",
        "matcher",
        "max_length",
        "ngrams",
        "node",
        "pages",
        "pending",
        "preempted",
        "prompt_length",
        "prompt_logprobs",
        "rank",
        "request",
        "seed",
        "slack",
        "slot",
        "stay",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        tokens: list[int],
        key: int,
        seed: int,
        stop_ids: dict[int, int | None],
        max_length: int,
        node: "Node",
    ) -> None:
        self.request = request
        self.index = index
        self.key = key
        self.rank = (request.priority, key)
        self.seed = seed
        self.stop_ids = stop_ids  # id -> the stop_reason to report
        self.max_length = max_length
        self.tokens = tokens  # the prompt; until it is first admitted, a list that all choices have in common
        self.prompt_length = len(self.tokens)
        self.slot = -1
        self.pages: list[int] = []
        self.computed = 0
        self.launched = 0
        self.pending = 0
        self.slack = 0
        self.stay = 0  # how often it has left its slot
        self.node = node
        self.cached_tokens = 0
        self.preempted = False
        # Only choice 0 scores the prompt. The first token has no logprob.
        scores = request.params.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if scores else None
        self.acceptance: Acceptance | None = None
        self.guess: Guess | None = None
        self.forced = 0
        self.matcher: Matcher | None = None
        self.budget: Budget | None = None
        self.ngrams: NgramIndex | None = None
        self.leader: Sequence | None = None  # the choice whose prompt this one waits for
        self.followers: list[Sequence] = []  # choices that wait for this one's prompt

    @property
    def length(self) -> int:
        """Tokens known or drawn in a step in flight; what is drafted there counts as accepted."""
        return len(self.tokens) + self.pending

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def scoring(self) -> bool:
        """Whether prompt logprobs are still to be computed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

    @property
    def sound(self) -> bool:
        """Whether a token was drawn after the prompt, or all of it is scored, which tells that no value is NaN."""
        return len(self.tokens) > self.prompt_length or (self.prompt_logprobs is not None and not self.scoring)

    @property
    def reusable(self) -> int:
        """How many of its first tokens may come from someone else's pages: it needs the logits of all later rows."""
        if self.scoring and self.prompt_logprobs is not None:
            return len(self.prompt_logprobs) - 1
        return len(self.tokens) - 1
