"""Runs the rows of a step on a CUDA device: kernels, captured graphs, nothing that waits.

A row that is the only one of its sequence goes through two graphs, captured for each number of rows in ``BUCKETS``: the
first leads from tokens to logits; the second draws, appends and moves the rows on, and there is one for whatever the
sequences in slots demand. All that they depend on, slots, positions, tokens, pages and parameters, is data on the
device: for a batch that stays as it is nothing is uploaded. Rows of prefill chunks are launched one kernel at a time.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from freewheel.cache.pool import KVPool
from freewheel.config import EngineConfig
from freewheel.engine.engine import MAX_SCORED_ROWS
from freewheel.engine.runner import InFlight, Launched, Runner, Span, StepResult
from freewheel.engine.scheduler import pages_for
from freewheel.models.decoder import Decoder, kv_cache_shape
from freewheel.models.fused_decoder import FusedDecoder, Rows
from freewheel.ops.attention_gpu import plan_tiles
from freewheel.sampling import Sampler, SampleRows, Samples

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RARE = 4  # times that a demand is met before its draw is captured
MOST_DRAWS = 16  # captured for a step; that which was not needed for longest makes room


class _Draw(NamedTuple):
    """Draws a step's tokens, appends them, and moves its rows on by one; where the tokens are then."""

    graph: torch.cuda.CUDAGraph
    samples: Samples


@dataclass
class _Step:
    """A decode step of some number of rows.

    Attributes:
        inputs: int64 [5, rows]: slots, -1 of idle rows; positions; the positions that follow; slots for sampling; how
            far the row moves on, 1 or 0 of idle rows.
        logits: [rows, vocab_size], where the graph leaves them.
        graph: from inputs to logits.
        draws: what follows, for demands on the sampler that were met often.
        met: how often the others were, lately.
        expected: slots and positions that are in ``inputs``.
    """

    inputs: Tensor
    logits: Tensor
    graph: "torch.cuda.CUDAGraph | None" = None
    draws: dict[Hashable, _Draw] = field(default_factory=dict)
    met: Counter[Hashable] = field(default_factory=Counter)
    expected: tuple[list[int], list[int]] = ([], [])

    @property
    def rows(self) -> Rows:
        """For the decoder."""
        return Rows(self.inputs[0], self.inputs[1])

    @property
    def sample_rows(self) -> SampleRows:
        """For the sampler."""
        return SampleRows(self.inputs[3], self.inputs[2])


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
        self._versions = [0] * slots
        self._fused = FusedDecoder(decoder, state.history, self._page_table, pool.layers)
        self._spare_slot = slots
        self._graphs = pool.device.type == "cuda" if graphs is None else graphs
        self._steps: dict[int, _Step] = {}

    def preparations(self) -> list[tuple[str, Callable[[], None]]]:
        """Compiling kernels and capturing graphs, the largest first: what it leaves serves the others."""
        most = next((bucket for bucket in BUCKETS if bucket >= self._spare_slot), BUCKETS[-1])
        steps = [
            (f"steps of up to {rows} rows", partial(self._rehearse, rows)) for rows in reversed(BUCKETS) if rows <= most
        ]
        return [("prompts", self._rehearse_prompt), *steps]

    @torch.inference_mode()
    def _rehearse_prompt(self) -> None:
        self._fused(*idle_chunk(self._fused, 2, 1))
        self._wait()

    @torch.inference_mode()
    def _rehearse(self, rows: int) -> None:
        step = self._step(rows)
        if self._graphs:
            self._capture_draw(step, self._sampler.demand)
        else:
            self._fused(step.rows)
        self._wait()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

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
        step = self._step(next(bucket for bucket in BUCKETS if bucket >= len(spans)))
        slots, positions = [span.slot for span in spans], [span.start for span in spans]
        expected, step.expected = step.expected, ([], [])  # unknown, should anything below fail
        if expected != (slots, positions):
            self._place(step, slots, positions)
        if step.graph is None:
            step.logits = self._fused(step.rows)
            samples = self._sample(step)
        else:
            step.graph.replay()
            samples = self._replay_draw(step)
        step.expected = slots, [position + 1 for position in positions]
        return Launched(samples, [], self._device, len(spans))

    def _place(self, step: _Step, slots: list[int], positions: list[int]) -> None:
        """Put these rows into a step's inputs."""
        idle = [0] * (step.inputs.shape[1] - len(slots))
        columns = [
            [*slots, *(-1 for _ in idle)],
            [*positions, *idle],
            [*(position + 1 for position in positions), *idle],
            [*slots, *(self._spare_slot for _ in idle)],
            [*(1 for _ in slots), *idle],
        ]
        step.inputs.copy_(self._pinned(torch.tensor(columns)), non_blocking=True)

    def _sample(self, step: _Step) -> Samples:
        rows = step.sample_rows
        samples = self._sampler.sample(step.logits, rows)
        self._sampler.state.append(rows.slots, rows.positions, samples.tokens)
        step.inputs[1:3] += step.inputs[4]
        return samples

    def _step(self, rows: int) -> _Step:
        """The decode step of so many rows; captured when it is first asked for."""
        if rows not in self._steps:
            inputs = torch.zeros(5, rows, dtype=torch.int64, device=self._device)
            step = _Step(inputs, inputs)
            self._place(step, [], [])  # all idle: what a rehearsal computes goes nowhere
            if self._graphs:
                self._fused(step.rows)  # compiles kernels and picks products, which capturing must not see
                graph = torch.cuda.CUDAGraph()
                with self._capture(graph):
                    step.logits = self._fused(step.rows)
                step.graph = graph
            self._steps[rows] = step  # only now: a capture may fail
        return self._steps[rows]

    def _replay_draw(self, step: _Step) -> Samples:
        """What follows a step's logits, by a graph if the sequences in slots have asked for the same before."""
        demand = self._sampler.demand
        if demand not in step.draws:
            step.met[demand] += 1
            if step.met[demand] <= RARE:  # capturing stops the device
                return self._sample(step)
            self._capture_draw(step, demand)
        draw = step.draws[demand] = step.draws.pop(demand)  # the latest stands last
        draw.graph.replay()
        return draw.samples

    def _capture_draw(self, step: _Step, demand: Hashable) -> None:
        if len(step.draws) == MOST_DRAWS:
            torch.cuda.synchronize(self._device)
            del step.draws[next(iter(step.draws))]
        # As above. No token is appended yet.
        tokens, rows = self._sampler.sample(step.logits, step.sample_rows).tokens, step.sample_rows
        self._sampler.state.append(rows.slots, rows.positions, torch.full_like(tokens, -1))
        graph = torch.cuda.CUDAGraph()
        with self._capture(graph):
            samples = self._sample(step)
        step.draws[demand] = _Draw(graph, samples)
        step.met.clear()

    def _capture(self, graph: "torch.cuda.CUDAGraph") -> AbstractContextManager[None]:
        torch.cuda.synchronize(self._device)
        # Other threads may use the device meanwhile.
        return torch.cuda.graph(graph, capture_error_mode="thread_local")

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
        stale = [span.slot for span in spans if self._versions[span.slot] != self._pool.versions[span.slot]]
        changed: tuple[list[int], list[int], list[int]] = ([], [], [])
        for slot in stale:
            old, new = self._uploaded[slot], self._pool.page_table[slot]
            for index, page in enumerate(new):
                if index >= len(old) or old[index] != page:
                    for column, value in zip(changed, (slot, index, page)):
                        column.append(value)
        if changed[0]:
            slots, indices, pages = self._upload(*changed)
            self._page_table[slots, indices] = pages.int()
        for slot in stale:  # only now: an upload may fail
            self._uploaded[slot] = list(self._pool.page_table[slot])
            self._versions[slot] = self._pool.versions[slot]

    def _upload(self, *columns: list[int]) -> tuple[Tensor, ...]:
        numbers = self._pinned(torch.tensor(columns, dtype=torch.int64))
        return numbers.to(self._device, non_blocking=True).unbind()

    def _pinned(self, numbers: Tensor) -> Tensor:
        """In memory from where a copy to the device does not wait for what the device has yet to do."""
        return numbers.pin_memory() if self._device.type == "cuda" else numbers


def idle_chunk(fused: FusedDecoder, rows: int, logit_rows: int) -> tuple[Rows, Tensor]:
    """A prompt of so many rows that leaves no trace."""
    device = fused.device
    slots, positions = torch.full((rows,), -1, device=device), torch.arange(rows, device=device)
    tiles = plan_tiles([rows], [-1], fused.tile_rows).to(device)
    return Rows(slots, positions, tiles), torch.arange(logit_rows, device=device)


@torch.inference_mode()
def working_memory(decoder: Decoder, config: EngineConfig) -> int:
    """Bytes that steps take on a CUDA device besides the cache: of the largest one, measured, and of graphs' logits."""
    device = decoder.device
    history = torch.zeros(1, 1, dtype=torch.int64, device=device)
    caches = [torch.zeros(kv_cache_shape(decoder.spec, 1, 1), dtype=decoder.dtype, device=device)]
    fused = FusedDecoder(decoder, history, history.int(), caches * decoder.spec.num_layers)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    rows = config.most_rows(device.type)
    fused(*idle_chunk(fused, rows, min(rows, config.max_num_seqs + MAX_SCORED_ROWS)))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()  # for the pool to have it
    return peak + sum(BUCKETS) * decoder.spec.vocab_size * decoder.dtype.itemsize


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
