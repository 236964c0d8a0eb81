"""Runs the rows of a step: batch, forward pass, draw.

The sampling state owns tokens and the pool owns page tables, both by slot. So a step is told no more than slots and
positions: key-value places and pages are looked up on the host, tokens where their tensor is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from freewheel.cache.pool import KVPool
from freewheel.engine.masks import Constrained, MaskBuffer
from freewheel.grammar import Matcher
from freewheel.ops.rows import RowBatch
from freewheel.request import TokenLogprobs
from freewheel.sampling import Logprobs, Sampler, SampleRows, Samples, prompt_logprobs
from freewheel.speculative import DraftTree, walk


class Decoder(Protocol):
    """What the engine asks of a model."""

    def forward(self, batch: RowBatch, kv: Sequence[Tensor]) -> Tensor:
        """Logits [len(batch.logit_rows), vocab_size], any float type; keys and values go to ``kv``."""
        ...


class Span(NamedTuple):
    """The rows of one sequence, from position ``start`` on.

    Attributes:
        sample: draw the token that follows the last row; of a draft, at each row, and keep those that its walk meets.
        scored: positions in the span whose logits score the prompt token that follows.
        alternatives: most likely tokens to report for each scored position.
        draft: what the host drafted.
        nodes: most nodes that the device may draft behind the last row.
        guess: nobody drafts, and the device guesses what follows, without rows; it tells how good its last guess was.
        follows: the device alone knows where the row is: behind what steps in flight bring, and not after ``start``.
        matcher: where the sequence is in its grammar, by the tokens that the host knows: when it has caught up, at the
            last row, or the draft's root.
    """

    slot: int
    start: int
    rows: int
    sample: bool
    scored: range = range(0)
    alternatives: int = 0
    draft: DraftTree | None = None
    nodes: int = 0
    guess: bool = False
    follows: bool = False
    matcher: Matcher | None = None

    @property
    def drafts(self) -> bool:
        """Whether there is something to be told of drafts."""
        return self.draft is not None or self.nodes > 0 or self.guess


@dataclass(frozen=True)
class StepResult:
    """What a step brought, on the host.

    Attributes:
        tokens: for each sampled span in order, the token; of a draft, those of its walk. -1 where the status is not OK,
            which ends a walk.
        statuses: for each token, a :class:`freewheel.sampling.Status`.
        logprobs: for each token, if its span asked for them.
        scores: for each span with scored positions in order.
        runs: for each span that ``drafts`` in order, how many of the tokens are its.
        drafted: for each of them that drafts on the device in order, how many nodes there were, and how deep; or of a
            guess, how deep it was, as far as can be told, and how much of it was right.
    """

    tokens: list[int]
    statuses: list[int]
    logprobs: list[TokenLogprobs | None]
    scores: list[list[TokenLogprobs]]
    runs: Sequence[int] = ()
    drafted: Sequence[tuple[int, int]] = ()

    def by_span(self, spans: Sequence[Span]) -> Iterator["Brought"]:
        """The same for each span."""
        samples, scores = zip(self.tokens, self.statuses, self.logprobs), iter(self.scores)
        runs, drafted = iter(self.runs), iter(self.drafted)
        none = not self.runs
        for span in spans:
            draft, scored = span.draft, next(scores) if span.scored else None
            if none or not span.drafts:
                yield next(samples) if span.sample else None, None, scored, (0, 0)
                continue
            size = next(drafted) if draft is None else (len(draft.tokens), max(draft.depths))
            run = list(islice(samples, next(runs)))
            yield (run[0], None, scored, size) if span.guess else (None, run, scored, size)


Sampled = tuple[int, int, TokenLogprobs | None]
"""A token, its status and its log probabilities."""

Brought = tuple[Sampled | None, list[Sampled] | None, list[TokenLogprobs] | None, tuple[int, int]]
"""What a step brought a span: the token drawn for it; or, with a draft or nodes, all that the walk met; its scores; and
how many nodes there were, and how deep, or what is told of a guess."""


class InFlight(Protocol):
    """A step, or part of one, whose results may not have arrived yet."""

    def result(self) -> StepResult:
        """Wait for the results."""
        ...


class Launched:
    """A step whose results may not have arrived yet.

    Copies to the host set out at once: whoever waits for them waits for this step, and not for what came after it.
    """

    def __init__(
        self,
        samples: Samples | None,
        scores: list[tuple[Tensor, Logprobs]],
        device: torch.device,
        walks: "Walked | None" = None,
    ) -> None:
        self._walks = walks
        self.samples: Samples | None = on_its_way(samples)
        self.scores: list[tuple[Tensor, Logprobs]] = on_its_way(scores)
        self._arrived = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def result(self) -> StepResult:
        """Wait for the results."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens: list[int] = []
        statuses: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if self.samples is not None:
            tokens, statuses = self.samples.tokens.tolist(), self.samples.status.tolist()
            logprobs = by_row(self.samples.tokens, self.samples.logprobs)
        scores = [describe(*scored) for scored in self.scores]
        if self._walks is None:
            return StepResult(tokens, statuses, logprobs, scores)
        kept, runs = self._walks
        tokens, statuses = [tokens[row] for row in kept], [statuses[row] for row in kept]
        return StepResult(tokens, statuses, [logprobs[row] for row in kept], scores, runs)


class Walked(NamedTuple):
    """What became of a step's drafts: the sampled rows that are kept, and how many of each draft."""

    kept: list[int]
    runs: list[int]


def on_its_way(value: Any) -> Any:
    """The same with each CUDA tensor replaced by a copy in pinned host memory, which may arrive later."""
    if isinstance(value, Tensor) and value.is_cuda:
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
    if isinstance(value, list | tuple):
        return type(value)(map(on_its_way, value))
    if isinstance(value, Samples) and value.packed is not None:
        return Samples.unpack(on_its_way(value.packed), on_its_way(value.logprobs))
    if isinstance(value, Samples | Logprobs):
        return type(value)(*(on_its_way(getattr(value, part.name)) for part in fields(value)))
    return value


class Runner:
    """Owns no state of its own: decoder, pool and sampler have it.

    Attributes:
        seconds: what decode steps were seen to take when they were prepared, by the number of sequences, and that of
            rows if the device drafts in them, or 0.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, sampler: Sampler) -> None:
        self._decoder = decoder
        self._pool = pool
        self._sampler = sampler
        self._device = pool.device
        self._mask_buffer = MaskBuffer(sampler.state.vocab_size, pool.device)
        self.seconds: dict[tuple[int, int], float] = {}

    def preparations(self) -> list[tuple[str, Callable[[], None]]]:
        """See :meth:`Engine.preparations`."""
        return []

    @torch.inference_mode()
    def launch(self, spans: Sequence[Span], catch_up: Callable[[], None] = lambda: None) -> InFlight:
        """Run the spans' rows and draw. Tokens are appended to the sampling state.

        Args:
            spans: what to run.
            catch_up: called before masks are made, when the rows are on their way: reads all steps before this one.
        """
        batch, slots, following = self._batch(spans)
        logits = self._decoder.forward(batch, self._pool.layers)
        if any(span.sample and span.matcher for span in spans):
            catch_up()
        return self._draw(spans, logits, slots, following)

    def enter(self, slot: int) -> None:
        """Another sequence has the slot."""

    def _draw(self, spans: Sequence[Span], logits: Tensor, slots: Tensor, following: Tensor) -> Launched:
        """Draw and score from the wanted rows' logits; slots and following positions are those of :meth:`_batch`."""
        state = self._sampler.state
        drafts = any(span.draft for span in spans)
        first = sum(span.rows if span.draft else span.sample for span in spans)
        paths = _paths(spans, first) if drafts else None
        rows = SampleRows(slots[:first], following[:first], *self._masks(spans, first), paths)
        samples = self._sampler.sample(logits[:first], rows) if first else None
        scores = []
        for span in spans:
            if span.scored:
                last = first + len(span.scored)
                tokens = state.history[slots[first:last], following[first:last]]
                valid = logits[first:last, : state.valid_vocab_size]
                scores.append((tokens, prompt_logprobs(valid, tokens, span.alternatives)))
                first = last
        if samples is None or not drafts:
            if samples is not None:  # last: after an exception the state is as before
                state.append(rows.slots, rows.positions, samples.tokens)
            return Launched(samples, scores, self._device)
        walked = self._walk(spans, samples)
        state.append(rows.slots[walked.kept], rows.positions[walked.kept], samples.tokens[walked.kept])
        return Launched(samples, scores, self._device, walked)

    def _walk(self, spans: Sequence[Span], samples: Samples) -> Walked:
        """Verify the drafts, and put in place the keys and values of what they kept."""
        tokens, statuses = samples.tokens.tolist(), samples.status.tolist()
        kept: list[int] = []
        runs: list[int] = []
        moves: list[tuple[int, int]] = []
        sick: list[int] = []
        first = 0
        for span in spans:
            if span.draft is None:
                kept += [first] * span.sample
                first += span.sample
                continue
            rows = walk(span.draft, tokens[first : first + span.rows]).rows
            kept += [first + row for row in rows]
            runs.append(len(rows))
            place = self._kv_places(span)
            moves += [(place[row], place[depth]) for depth, row in enumerate(rows) if row != depth]
            if any(statuses[first : first + span.rows]):
                sick += place[len(rows) :]
            first += span.rows
        if moves:
            self._pool.move(*zip(*moves))
        if sick:  # attention may read what was rejected, with weight zero, and zero times NaN is NaN
            self._pool.clear_places(sick)
        return Walked(kept, runs)

    def _masks(self, spans: Sequence[Span], rows: int) -> tuple[Tensor | None, Tensor | None]:
        """What grammars permit at the sampled rows, as :class:`SampleRows` takes it."""
        constrained: list[Constrained] = []
        row = 0
        for span in spans:
            if span.sample:
                draft = span.draft or DraftTree()
                if span.matcher is not None:
                    constrained.append(Constrained(row, span.matcher, draft))
                row += draft.rows
        return self._mask_buffer.fill(constrained, rows)

    def _batch(self, spans: Sequence[Span]) -> tuple[RowBatch, Tensor, Tensor]:
        """The rows, and for those whose logits are wanted their slot and the position that follows: sampled ones first,
        then scored ones.

        Lists rather than arrays: between two forward passes the code of every operation has left the processor's
        cache, so that each different one costs 10 to 40 us.
        """
        slots: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        nodes: list[int] = []
        drafted: list[int] = []
        for span in spans:
            slots += [span.slot] * span.rows
            places += self._kv_places(span)
            if span.draft is None:
                positions += range(span.start, span.start + span.rows)
            else:
                nodes += range(len(positions) + 1, len(positions) + span.rows)
                drafted += span.draft.tokens
                positions += [span.start + depth for depth in span.draft.links.depths]
        wanted, next_positions = self._wanted(spans)
        row_slots, row_positions, kv_slots = self._upload(slots, positions, places)
        logit_rows, logit_slots, following = self._upload(wanted, [slots[row] for row in wanted], next_positions)
        token_ids = self._sampler.state.history[row_slots, row_positions]
        if nodes:
            token_ids[nodes] = torch.tensor(drafted, device=self._device)
        batch = RowBatch(
            token_ids=token_ids,
            positions=row_positions,
            kv_slots=kv_slots,
            logit_rows=logit_rows,
            page_table=[self._pool.page_table[span.slot] for span in spans],
            row_counts=tuple(span.rows for span in spans),
            kv_lengths=tuple(span.start + span.rows for span in spans),
            ancestors=[_ancestors(span.draft) for span in spans] if nodes else None,
        )
        return batch, logit_slots, following

    def _kv_places(self, span: Span) -> list[int]:
        """Where the keys and values of its rows go."""
        size, pages = self._pool.page_size, self._pool.page_table[span.slot]
        return [pages[i // size] * size + i % size for i in range(span.start, span.start + span.rows)]

    @staticmethod
    def _wanted(spans: Sequence[Span]) -> tuple[list[int], list[int]]:
        """Rows whose logits are wanted, first the sampled and then the scored ones, and the positions that follow."""
        sampled: list[int] = []
        scored: list[int] = []
        following: list[int] = []
        scored_following: list[int] = []
        row = 0
        for span in spans:
            scored += [row + position - span.start for position in span.scored]
            scored_following += [position + 1 for position in span.scored]
            if span.draft is not None:
                sampled += range(row, row + span.rows)
                following += [span.start + depth + 1 for depth in span.draft.links.depths]
            elif span.sample:
                sampled.append(row + span.rows - 1)
                following.append(span.start + span.rows)
            row += span.rows
        return sampled + scored, following + scored_following

    def _upload(self, *columns: list[int]) -> tuple[Tensor, ...]:
        """Lists of one length as int64, in one copy."""
        return torch.tensor(columns, dtype=torch.int64, device=self._device).unbind()


def _ancestors(draft: DraftTree | None) -> list[int] | None:
    """For a row batch, to which a chain is as any rows that follow one another."""
    return None if draft is None or draft.is_chain else draft.ancestors.tolist()


def _paths(spans: Sequence[Span], rows: int) -> Tensor:
    """What lies on the way of each sampled row of a step with drafts, as :class:`SampleRows` takes it."""
    own = [span.draft.paths if span.draft else np.empty((1, 0), np.int64) for span in spans if span.sample]
    paths = np.full((rows, max(path.shape[1] for path in own)), -1, np.int64)
    first = 0
    for path in own:
        paths[first : first + len(path), paths.shape[1] - path.shape[1] :] = path
        first += len(path)
    return torch.from_numpy(paths)


def by_row(tokens: Tensor, logprobs: Logprobs | None) -> list[TokenLogprobs | None]:
    """Log probabilities of each row's token, if the row asked for them; both on the host."""
    result: list[TokenLogprobs | None] = [None] * len(tokens)
    if logprobs is not None:
        for row, logprob in zip(logprobs.rows.tolist(), describe(tokens[logprobs.rows], logprobs)):
            if logprob.ranks[0]:  # 0: the row did not ask
                result[row] = logprob
    return result


def describe(tokens: Tensor, logprobs: Logprobs) -> list[TokenLogprobs]:
    """Log probabilities as plain lists: each token first, then its alternatives without it."""
    result = []
    columns = (logprobs.token_logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top_logprobs, logprobs.top_ranks)
    for token, own, rank, *alternatives in zip(tokens.tolist(), *(column.tolist() for column in columns)):
        entry = TokenLogprobs([token], [own], [rank])
        for alternative in zip(*alternatives):
            if alternative[0] not in (token, -1):  # -1 past what this row asked for
                for column, value in zip(entry, alternative):
                    column.append(value)
        result.append(entry)
    return result
