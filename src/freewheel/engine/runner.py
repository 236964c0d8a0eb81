"""Runs the rows of a step: batch, forward pass, draw.

The sampling state owns tokens and the pool owns page tables, both by slot. So a step is told no more than slots and
positions: key-value places and pages are looked up on the host, tokens where their tensor is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from freewheel.cache.pool import KVPool
from freewheel.ops.rows import RowBatch
from freewheel.request import TokenLogprobs
from freewheel.sampling import Logprobs, Sampler, SampleRows, Samples, prompt_logprobs


class Decoder(Protocol):
    """What the engine asks of a model."""

    def forward(self, batch: RowBatch, kv: Sequence[Tensor]) -> Tensor:
        """Logits [len(batch.logit_rows), vocab_size], any float type; keys and values go to ``kv``."""
        ...


class Span(NamedTuple):
    """The rows of one sequence, from position ``start`` on.

    Attributes:
        sample: draw the token that follows the last row.
        scored: positions in the span whose logits score the prompt token that follows.
        alternatives: most likely tokens to report for each scored position.
    """

    slot: int
    start: int
    rows: int
    sample: bool
    scored: range = range(0)
    alternatives: int = 0


@dataclass(frozen=True)
class StepResult:
    """What a step brought, on the host.

    Attributes:
        tokens: for each sampled span in order, the token; -1 where the status is not OK.
        statuses: for each sampled span, a :class:`freewheel.sampling.Status`.
        logprobs: for each sampled span, if it asked for them.
        scores: for each span with scored positions in order.
    """

    tokens: list[int]
    statuses: list[int]
    logprobs: list[TokenLogprobs | None]
    scores: list[list[TokenLogprobs]]


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
    ) -> None:
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
        return StepResult(tokens, statuses, logprobs, [describe(*scored) for scored in self.scores])


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
    """Owns no state of its own: decoder, pool and sampler have it."""

    def __init__(self, decoder: Decoder, pool: KVPool, sampler: Sampler) -> None:
        self._decoder = decoder
        self._pool = pool
        self._sampler = sampler
        self._device = pool.device

    def preparations(self) -> list[tuple[str, Callable[[], None]]]:
        """See :meth:`Engine.preparations`."""
        return []

    @torch.inference_mode()
    def launch(self, spans: Sequence[Span]) -> InFlight:
        """Run the spans' rows and draw. Tokens are appended to the sampling state."""
        batch, slots, following = self._batch(spans)
        return self._draw(spans, self._decoder.forward(batch, self._pool.layers), slots, following)

    def _draw(self, spans: Sequence[Span], logits: Tensor, slots: Tensor, following: Tensor) -> Launched:
        """Draw and score from the wanted rows' logits; slots and following positions are those of :meth:`_batch`."""
        state = self._sampler.state
        first = sum(span.sample for span in spans)
        rows = SampleRows(slots[:first], following[:first])
        samples = self._sampler.sample(logits[:first], rows) if first else None
        scores = []
        for span in spans:
            if span.scored:
                last = first + len(span.scored)
                tokens = state.history[slots[first:last], following[first:last]]
                valid = logits[first:last, : state.valid_vocab_size]
                scores.append((tokens, prompt_logprobs(valid, tokens, span.alternatives)))
                first = last
        if samples is not None:  # last: after an exception the state is as before
            state.append(rows.slots, rows.positions, samples.tokens)
        return Launched(samples, scores, self._device)

    def _batch(self, spans: Sequence[Span]) -> tuple[RowBatch, Tensor, Tensor]:
        """The rows, and for those whose logits are wanted their slot and the position that follows: sampled ones first,
        then scored ones.

        Lists rather than arrays: between two forward passes the code of every operation has left the processor's
        cache, so that each different one costs 10 to 40 us.
        """
        size = self._pool.page_size
        slots: list[int] = []
        positions: list[int] = []
        places: list[int] = []
        for span in spans:
            pages, own = self._pool.page_table[span.slot], range(span.start, span.start + span.rows)
            slots += [span.slot] * span.rows
            positions += own
            places += [pages[position // size] * size + position % size for position in own]
        wanted, next_positions = self._wanted(spans)
        row_slots, row_positions, kv_slots = self._upload(slots, positions, places)
        logit_rows, logit_slots, following = self._upload(wanted, [slots[row] for row in wanted], next_positions)
        batch = RowBatch(
            token_ids=self._sampler.state.history[row_slots, row_positions],
            positions=row_positions,
            kv_slots=kv_slots,
            logit_rows=logit_rows,
            page_table=[self._pool.page_table[span.slot] for span in spans],
            row_counts=tuple(span.rows for span in spans),
            kv_lengths=tuple(span.start + span.rows for span in spans),
        )
        return batch, logit_slots, following

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
            row += span.rows
            if span.sample:
                sampled.append(row - 1)
                following.append(span.start + span.rows)
        return sampled + scored, following + scored_following

    def _upload(self, *columns: list[int]) -> tuple[Tensor, ...]:
        """Lists of one length as int64, in one copy."""
        return torch.tensor(columns, dtype=torch.int64, device=self._device).unbind()


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
