"""Runs the rows of a step: batch, forward pass, draw.

The sampling state owns tokens and the pool owns page tables, both by slot. So a step is told no more than slots and
positions; tokens, key-value places and pages are looked up where the tensors are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
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


@dataclass(frozen=True)
class Launched:
    """A step whose results may not have arrived yet."""

    samples: Samples | None
    scores: list[tuple[Tensor, Logprobs]]

    def result(self) -> StepResult:
        """Wait for the results."""
        tokens: list[int] = []
        statuses: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if self.samples is not None:
            tokens, statuses = self.samples.tokens.tolist(), self.samples.status.tolist()
            logprobs = [None] * len(tokens)
            if self.samples.logprobs is not None:
                rows = self.samples.logprobs.rows
                described = describe(self.samples.tokens[rows], self.samples.logprobs)
                for row, logprob in zip(rows.tolist(), described):
                    logprobs[row] = logprob
        return StepResult(tokens, statuses, logprobs, [describe(*scored) for scored in self.scores])


class Runner:
    """Owns no state of its own: decoder, pool and sampler have it."""

    def __init__(self, decoder: Decoder, pool: KVPool, sampler: Sampler) -> None:
        self._decoder = decoder
        self._pool = pool
        self._sampler = sampler
        self._device = pool.page_table.device

    @torch.inference_mode()
    def launch(self, spans: Sequence[Span]) -> Launched:
        """Run the spans' rows and draw. Tokens are appended to the sampling state."""
        state = self._sampler.state
        sampled = [index for index, span in enumerate(spans) if span.sample]
        batch, slots, positions = self._batch(spans, sampled)
        logits = self._decoder.forward(batch, self._pool.layers)

        # The token to draw comes after the row that predicts it.
        rows = SampleRows(slots[: len(sampled)], positions[: len(sampled)] + 1)
        samples = None
        if sampled:
            samples = self._sampler.sample(logits[: len(sampled)], rows)
        scores = []
        first = len(sampled)
        for span in spans:
            if span.scored:
                last = first + len(span.scored)
                following = state.history[slots[first:last], positions[first:last] + 1]
                valid = logits[first:last, : state.valid_vocab_size]
                scores.append((following, prompt_logprobs(valid, following, span.alternatives)))
                first = last
        if samples is not None:  # last: after an exception the state is as before
            state.append(rows.slots, rows.positions, samples.tokens)
        return Launched(samples, scores)

    def _batch(self, spans: Sequence[Span], sampled: Sequence[int]) -> tuple[RowBatch, Tensor, Tensor]:
        """The rows, and slots and positions of those whose logits are wanted: sampled ones first, then scored ones."""
        counts = [span.rows for span in spans]
        lengths = [span.start + span.rows for span in spans]
        ends = np.cumsum(counts)
        slots = np.array([span.slot for span in spans])
        positions = np.arange(ends[-1]) + np.repeat(np.array(lengths) - ends, counts)
        wanted = ends[sampled] - 1
        if any(span.scored for span in spans):
            scored = [
                np.arange(span.scored.start, span.scored.stop) - length + end
                for span, length, end in zip(spans, lengths, ends)
            ]
            wanted = np.concatenate([wanted, *scored])

        page_size, page_table = self._pool.page_size, self._pool.page_table
        max_pages = -(-max(lengths) // page_size)
        slots_at, positions_at, wanted_at = (self._upload(array) for array in (slots, positions, wanted))
        row_slots = slots_at if len(positions) == len(slots) else self._upload(np.repeat(slots, counts))
        pages = page_table[row_slots, positions_at // page_size]
        batch = RowBatch(
            token_ids=self._sampler.state.history[row_slots, positions_at],
            positions=positions_at,
            kv_slots=pages * page_size + positions_at % page_size,
            page_table=page_table[slots_at, :max_pages],
            logit_rows=wanted_at,
            row_counts=tuple(counts),
            kv_lengths=tuple(lengths),
        )
        return batch, row_slots[wanted_at], positions_at[wanted_at]

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self._device)


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
