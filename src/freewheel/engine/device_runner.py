"""Runs the rows of a step on a CUDA device: kernels, captured graphs, nothing that waits.

A row that is the only one of its sequence goes through a graph, captured once for each number of rows in ``BUCKETS``;
what it depends on, slots, positions, tokens, pages and parameters, is data on the device. Rows of prefill chunks are
launched one kernel at a time. Either way a row's logits do not depend on which rows go the other way.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from freewheel.cache.pool import KVPool
from freewheel.engine.runner import InFlight, Launched, Runner, Span, StepResult
from freewheel.engine.scheduler import pages_for
from freewheel.models.decoder import Decoder
from freewheel.models.fused_decoder import FusedDecoder, Rows
from freewheel.ops.attention_gpu import plan_tiles
from freewheel.sampling import Sampler

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class _Step(NamedTuple):
    """A decode step for some number of rows: its inputs int64 [3 (slots, positions, following), rows], its logits."""

    inputs: Tensor
    logits: Tensor
    graph: "torch.cuda.CUDAGraph | None"


class DeviceRunner(Runner):
    """A runner for devices with Triton.

    Args:
        decoder: the model, not quantised.
        pool, sampler: see :class:`Runner`.
        graphs: capture decode steps; None: on CUDA devices.
    """

    def __init__(self, decoder: Decoder, pool: KVPool, sampler: Sampler, *, graphs: bool | None = None) -> None:
        super().__init__(decoder, pool, sampler)
        state, slots = sampler.state, len(pool.page_table)
        max_pages = pages_for(state.max_length, pool.page_size)
        self._page_table = torch.zeros(slots, max_pages, dtype=torch.int32, device=pool.device)
        self._uploaded: list[list[int]] = [[] for _ in range(slots)]
        self._fused = FusedDecoder(decoder, state.history, self._page_table, pool.layers)
        self._graphs = pool.device.type == "cuda" if graphs is None else graphs
        self._steps: dict[int, _Step] = {}

    @torch.inference_mode()
    def launch(self, spans: Sequence[Span]) -> InFlight:
        """Run the spans' rows and draw. Tokens are appended to the sampling state."""
        self._upload_pages(spans)
        alone = [i for i, span in enumerate(spans) if span.rows == 1 and span.sample and not span.scored]
        rest = sorted(set(range(len(spans))).difference(alone))
        groups = [(alone[i : i + BUCKETS[-1]], self._decode) for i in range(0, len(alone), BUCKETS[-1])]
        if rest:
            groups.append((rest, self._chunks))
        parts = [(members, run([spans[i] for i in members])) for members, run in groups]
        return parts[0][1] if len(parts) == 1 else Parts(spans, parts)

    def _decode(self, spans: Sequence[Span]) -> Launched:
        count = len(spans)
        step = self._step(next(bucket for bucket in BUCKETS if bucket >= count))
        idle = [0] * (step.inputs.shape[1] - count)
        columns = [
            [*(span.slot for span in spans), *(-1 for _ in idle)],
            [*(span.start for span in spans), *idle],
            [*(span.start + 1 for span in spans), *idle],
        ]
        step.inputs.copy_(self._pinned(torch.tensor(columns)), non_blocking=True)
        logits = step.logits
        if step.graph is not None:
            step.graph.replay()
        else:
            logits = self._fused(Rows(step.inputs[0], step.inputs[1]))
        return self._draw(spans, logits[:count], step.inputs[0, :count], step.inputs[2, :count])

    def _step(self, rows: int) -> _Step:
        """The decode step of so many rows; captured when it is first asked for."""
        if rows not in self._steps:
            inputs = torch.zeros(3, rows, dtype=torch.int64, device=self._device)
            inputs[0] = -1  # all idle: what a rehearsal computes goes nowhere
            places, graph, logits = Rows(inputs[0], inputs[1]), None, inputs
            if self._graphs:
                self._fused(places)  # compiles kernels and picks products, which capturing must not see
                torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    logits = self._fused(places)
            self._steps[rows] = _Step(inputs, logits, graph)
        return self._steps[rows]

    def _chunks(self, spans: Sequence[Span]) -> Launched:
        slots = [span.slot for span in spans for _ in range(span.rows)]
        positions = [span.start + i for span in spans for i in range(span.rows)]
        wanted, following = self._wanted(spans)
        tiles = plan_tiles([span.rows for span in spans], [span.slot for span in spans], self._fused.tile_rows)
        row_slots, row_positions = self._upload(slots, positions)
        logit_rows, logit_slots, next_positions = self._upload(wanted, [slots[row] for row in wanted], following)
        tiles = self._pinned(tiles).to(self._device, non_blocking=True)
        logits = self._fused(Rows(row_slots, row_positions, tiles), logit_rows)
        return self._draw(spans, logits, logit_slots, next_positions)

    def _upload_pages(self, spans: Sequence[Span]) -> None:
        """Bring the device's page table up to date for these sequences."""
        changed: tuple[list[int], list[int], list[int]] = ([], [], [])
        for span in spans:
            old, new = self._uploaded[span.slot], self._pool.page_table[span.slot]
            if old != new:
                for index, page in enumerate(new):
                    if index >= len(old) or old[index] != page:
                        for column, value in zip(changed, (span.slot, index, page)):
                            column.append(value)
                self._uploaded[span.slot] = list(new)
        if changed[0]:
            slots, indices, pages = self._upload(*changed)
            self._page_table[slots, indices] = pages.int()

    def _upload(self, *columns: list[int]) -> tuple[Tensor, ...]:
        numbers = self._pinned(torch.tensor(columns, dtype=torch.int64))
        return numbers.to(self._device, non_blocking=True).unbind()

    def _pinned(self, numbers: Tensor) -> Tensor:
        """In memory from where a copy to the device does not wait for what the device has yet to do."""
        return numbers.pin_memory() if self._device.type == "cuda" else numbers


class Parts:
    """A step whose spans were launched in several parts."""

    def __init__(self, spans: Sequence[Span], parts: Sequence[tuple[Sequence[int], Launched]]) -> None:
        self._spans = spans
        self._parts = parts

    def result(self) -> StepResult:
        """Wait for the results; in the order of the spans."""
        sampled, scored = {}, {}
        for members, launched in self._parts:
            result = launched.result()
            samples, scores = zip(result.tokens, result.statuses, result.logprobs), iter(result.scores)
            sampled |= dict(zip([i for i in members if self._spans[i].sample], samples))
            scored |= dict(zip([i for i in members if self._spans[i].scored], scores))
        tokens, statuses, logprobs = zip(*(sampled[i] for i in sorted(sampled))) if sampled else ((), (), ())
        return StepResult(list(tokens), list(statuses), list(logprobs), [scored[i] for i in sorted(scored)])
