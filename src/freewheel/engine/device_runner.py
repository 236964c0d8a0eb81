"""Runs the rows of a step on a CUDA device: kernels, captured graphs, nothing that waits.

A row that is the only one of its sequence goes through a graph of the whole step: decoder, draw, and what moves the
rows on. There is one for each number of rows in ``BUCKETS`` and for whatever the sequences in slots demand; a demand
that is seldom met makes do with a graph of the decoder. All that they depend on, slots, positions, tokens, pages and
parameters, is data on the device: for a batch that stays as it is nothing is uploaded. The tokens it writes into host
memory itself.

Rows of prefill chunks go through a graph of the decoder, captured for each number of rows in ``CHUNKS``; the draw is
launched behind it. More rows, or more that are scored, are launched one kernel at a time.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from freewheel.cache.pool import KVPool
from freewheel.config import MOST_LOOKAHEAD, EngineConfig
from freewheel.engine.buckets import BUCKETS, CHUNKS, bucket_for, buckets, chunk_sizes, draft_rows, draft_step
from freewheel.engine.captured import Captured, capture
from freewheel.engine.draft_step import GUESSED, DeviceDrafts, Drafted, DraftStep
from freewheel.engine.engine import MAX_SCORED_ROWS
from freewheel.engine.masks import Constrained, MaskBuffer
from freewheel.engine.ring import MOST_SCATTERED, Outbox
from freewheel.engine.runner import Brought, InFlight, Launched, Runner, Span, StepResult
from freewheel.engine.scheduler import pages_for
from freewheel.engine.step import Decoded, DecodeStep, even, pinned
from freewheel.models.decoder import Decoder, kv_cache_shape
from freewheel.models.fused_decoder import FusedDecoder, Rows
from freewheel.ops.attention_gpu import plan_tiles
from freewheel.sampling import Logprobs, Sampler, SampleRows
from freewheel.speculative import DraftTree

MOST_WANTED = 32  # rows of a captured chunk that have logits
RARE = 4  # times that a demand is met before its step is captured; at least once, which compiles its kernels
TIMED = 5  # runs by which a step is timed when it is prepared
MOST_WHOLE = 64  # captured for a number of rows; that which was not needed for longest makes room

Decode = DecodeStep | DraftStep


@dataclass
class _Chunk:
    """The decoder's step for rows of prefill chunks; what is idle comes last.

    Attributes:
        slots, positions: int64 [rows]; -1 and 0 of idle rows.
        tiles: int32 [tiles, 4]; those without rows do nothing.
        wanted: int64 [MOST_WANTED], the rows that have logits; then any.
        numbers: int64, where slots, positions and wanted lie one after the other.
        decoder: from these to logits [MOST_WANTED, vocab_size], captured.
    """

    numbers: Tensor
    slots: Tensor
    positions: Tensor
    wanted: Tensor
    tiles: Tensor
    decoder: Captured[Tensor] | None = None


class DeviceRunner(Runner):
    """A runner for devices with Triton.

    Args:
        decoder: the model, not quantised.
        pool: see :class:`Runner`.
        sampler: of a state that keeps tables for kernels.
        graphs: capture steps; None: on CUDA devices.
        most_rows: of a step.
        draft_nodes, draft_width, draft_depth: most nodes of a draft that the device makes, and how wide and deep it is;
            0 nodes: it makes none.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        sampler: Sampler,
        *,
        graphs: bool | None = None,
        most_rows: int = CHUNKS[-1],
        draft_nodes: int = 0,
        draft_width: int = 1,
        draft_depth: int = 0,
    ) -> None:
        super().__init__(decoder, pool, sampler)
        state, slots = sampler.state, len(pool.page_table)
        max_pages = pages_for(state.max_length, pool.page_size)
        self._page_table = torch.zeros(slots, max_pages, dtype=torch.int32, device=pool.device)
        self._fused = FusedDecoder(decoder, state.history, self._page_table, pool.layers)
        # An engine launches one step more than it looks ahead, this one perhaps in parts, before it reads the first.
        self._places = (MOST_LOOKAHEAD + 1) * -(-slots // BUCKETS[-1])
        self._graphs = pool.device.type == "cuda" if graphs is None else graphs
        # All graphs share memory, and each may write over whatever another left there. They run one after the other, in
        # one stream, and what one leaves is used up there before the next is launched: logits by the draw that is
        # launched right after them, log probabilities by the copies to the host. What lasts was not allocated during a
        # capture: inputs, ring, cache, history, and the sampler's tables and workspace.
        self._memory = torch.cuda.graph_pool_handle() if self._graphs else None
        # Kernels and graphs are launched on the thread's current device, which is the first as a rule.
        self._here = torch.cuda.device(pool.device) if pool.device.index else nullcontext()
        self._outbox = Outbox(pool.device, graphs=self._graphs)
        self._decode_masks = MaskBuffer(state.vocab_size, pool.device)  # those of prompts have another
        self._steps: dict[int, DecodeStep] = {}
        self._draft_steps: dict[tuple[int, int], DraftStep] = {}
        self._drafts: DeviceDrafts | None = None
        if draft_nodes:
            tiles, width, depth = self._fused.tree_rows, draft_width, draft_depth
            self._drafts = DeviceDrafts(state, pool, self._page_table, rows_per_tile=tiles, width=width, depth=depth)
        self._entering = torch.full((2, BUCKETS[-1]), -1, dtype=torch.int64, device=pool.device)  # slots, lengths
        self._enter: torch.cuda.CUDAGraph | None = None
        self._most_nodes, self._most_rows = draft_nodes, most_rows
        self._lengths: dict[int, int] = {}  # of sequences, where it is certain that the device has the same
        self._entered: set[int] = set()  # slots with sequences that are not indexed
        self._chunk_sizes = chunk_sizes(most_rows)
        self._captured_chunks: dict[int, _Chunk] = {}

    def enter(self, slot: int) -> None:
        """Another sequence has the slot."""
        self._lengths.pop(slot, None)
        self._entered.add(slot)
        self._forget()  # the row of the one before may have ended by itself

    def preparations(self) -> list[tuple[str, Callable[[], None]]]:
        """Compiling kernels and capturing graphs, the largest first: what it leaves serves the others."""
        sizes = reversed(buckets(len(self._pool.page_table)))
        steps = [(f"steps of up to {rows} rows", partial(self._rehearse, rows)) for rows in sizes]
        if self._drafts is not None:
            sizes = reversed(buckets(len(self._pool.page_table)))
            steps += [
                (f"drafts of up to {sequences} sequences", partial(self._rehearse_drafts, sequences))
                for sequences in sizes
            ]
        prepared = [("prompts", self._rehearse_prompts), *steps]
        return [(name, partial(self._prepare_on_device, prepare)) for name, prepare in prepared]

    def _prepare_on_device(self, prepare: Callable[[], None]) -> None:
        with self._here:
            prepare()

    @torch.inference_mode()
    def _rehearse_prompts(self) -> None:
        self._fused(*idle_chunk(self._fused, 2, 1))
        self._outbox.scatter(self._page_table, [], [])
        if self._graphs:
            for rows in reversed(self._chunk_sizes):
                self._chunk(rows)
        self._wait()

    @torch.inference_mode()
    def _rehearse(self, rows: int) -> None:
        self._rehearse_step((rows, 0), self._step(rows))

    @torch.inference_mode()
    def _rehearse_drafts(self, sequences: int) -> None:
        assert self._drafts is not None
        if self._enter is None:
            self._index([], self._drafts)
        for rows in (*reversed(draft_rows(sequences, self._most_nodes, self._most_rows)), sequences):
            self._rehearse_step((sequences, rows), self._draft_step(sequences, rows))

    def _rehearse_step(self, key: tuple[int, int], step: Decode) -> None:
        """Prepare a step; where it is captured, note what it takes with idle rows."""
        step.forget()
        _idle(step)
        self._sample(step, self._forward(step))
        if not self._graphs:
            self._wait()
            return
        self._capture_whole(step, demand := self._sampler.demand)
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        step.graphs.whole[demand].replay()
        began.record()
        for _ in range(TIMED):
            step.graphs.whole[demand].replay()
        ended.record()
        self._wait()
        self.seconds[key] = began.elapsed_time(ended) / 1e3 / TIMED

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def launch(self, spans: Sequence[Span], catch_up: Callable[[], None] = lambda: None) -> InFlight:
        """See :class:`Runner`."""
        with self._here:
            return self._launch(spans, catch_up)

    def _launch(self, spans: Sequence[Span], catch_up: Callable[[], None]) -> InFlight:
        self._upload_pages()
        alone = [i for i, span in enumerate(spans) if span.rows == 1 and span.sample and not span.scored]
        rest = [] if len(alone) == len(spans) else sorted(set(range(len(spans))).difference(alone))
        groups: list[tuple[list[int], Callable[[list[Span], Callable[[], None]], InFlight]]] = []
        for i in range(0, len(alone), BUCKETS[-1]):
            groups.append((alone[i : i + BUCKETS[-1]], self._decode))
        if rest:
            groups.append((rest, self._chunks))
        parts: list[tuple[list[int], InFlight]] = []
        try:
            for members, run in groups:
                parts.append((members, run([spans[i] for i in members], catch_up)))
        except BaseException:
            self._take_back([part for _, part in parts])
            raise
        return parts[0][1] if len(parts) == 1 else Parts(spans, parts)

    def _take_back(self, parts: Sequence[InFlight]) -> None:
        """Let what the parts of a failed step bring go unread. Their rows have moved on, on the device."""
        for part in parts:
            if isinstance(part, (Decoded, Drafted)):
                part.take_back()
        self._forget()
        self._lengths.clear()

    def _forget(self) -> None:
        for step in (*self._steps.values(), *self._draft_steps.values()):
            step.forget()

    def _decode(self, spans: Sequence[Span], catch_up: Callable[[], None]) -> InFlight:
        slots = [span.slot for span in spans]
        if self._drafts is not None and any(span.nodes or span.follows or span.guess for span in spans):
            nodes = [span.nodes for span in spans]
            step = self._draft_step(*draft_step(len(spans), sum(nodes), self._most_nodes, self._most_rows))
            lengths = self._lengths_to_tell(spans, self._drafts)
            step.put(slots, lengths, nodes if any(nodes) else [GUESSED * span.guess for span in spans])
        else:
            step = self._step(bucket_for(len(spans)))
            step.put(slots, [span.start for span in spans])
        if any(span.matcher for span in spans):
            logprobs = self._constrained(step, spans, catch_up)
        else:
            logprobs = self._replay(step) if self._graphs else self._sample(step, self._forward(step))
        return step.launched(logprobs)

    def _constrained(self, step: Decode, spans: Sequence[Span], catch_up: Callable[[], None]) -> Logprobs | None:
        """A step with grammars. Their masks are made while the decoder runs, which does not wait for them.

        They go by the tokens of the step before, and by what is drafted, which the device tells before it goes on.
        """
        self._begin(step)
        laid_out = step.laid_out() if isinstance(step, DraftStep) else None
        logits = step.graphs.decoder.replay() if step.graphs.decoder else self._fused(step.rows)
        catch_up()
        numbers = [i for i, span in enumerate(spans) if span.matcher]
        drafts = [(i, DraftTree()) for i in numbers] if laid_out is None else laid_out.trees(numbers)
        constrained = [
            Constrained(laid[0], matcher, laid[1])
            for i, laid in zip(numbers, drafts)
            if laid is not None and (matcher := spans[i].matcher)
        ]
        masks, mask_rows = self._decode_masks.fill(constrained, len(step.rows.slots))
        return self._sample(step, logits, replace(step.sample_rows, masks=masks, mask_rows=mask_rows))

    def _lengths_to_tell(self, spans: Sequence[Span], drafts: DeviceDrafts) -> list[int]:
        """How long sequences are where the device has not made them so long itself; else -1. New ones are indexed."""
        told = [
            -1 if span.follows or self._lengths.get(span.slot) == span.start + 1 else span.start + 1 for span in spans
        ]
        if self._entered:
            new = [(span.slot, length) for span, length in zip(spans, told) if span.slot in self._entered]
            if new:
                self._index(new, drafts)
                self._entered.difference_update(slot for slot, _ in new)
        for span in spans:
            if span.nodes or span.follows:
                self._lengths.pop(span.slot, None)
            else:
                self._lengths[span.slot] = span.start + 2
        return told

    def _index(self, new: list[tuple[int, int]], drafts: DeviceDrafts) -> None:
        """Let the device index sequences: their slots and lengths, ``BUCKETS[-1]`` at most."""
        idle = [(-1, -1)] * (BUCKETS[-1] - len(new))
        self._outbox.tell(self._entering, [*zip(*new, *idle)])
        if self._enter is not None:
            self._enter.replay()
            return
        drafts.enter(*self._entering)
        if self._graphs:
            self._enter = capture(lambda: drafts.enter(*self._entering), self._device).graph

    def _forward(self, step: Decode) -> Tensor:
        step.begin()
        return self._fused(step.rows)

    def _begin(self, step: Decode) -> None:
        """By a graph, if there is one."""
        if step.graphs.begin is not None:
            step.graphs.begin.replay()
        else:
            step.begin()

    def _sample(self, step: Decode, logits: Tensor, rows: SampleRows | None = None) -> Logprobs | None:
        """Draw, and let the sequences go on. The log probabilities, if any row asks for them."""
        samples = self._sampler.sample(logits, rows or step.sample_rows)
        step.end(samples)
        return samples.logprobs

    def _step(self, rows: int) -> DecodeStep:
        """The decode step of so many rows; its decoder is captured when it is first asked for."""
        if rows not in self._steps:
            step = DecodeStep(self._sampler.state, rows, self._places, self._outbox)
            self._prepare(step)
            self._steps[rows] = step  # only now: a capture may fail
        return self._steps[rows]

    def _draft_step(self, sequences: int, rows: int) -> DraftStep:
        """The same for drafts, see :func:`freewheel.engine.buckets.draft_step`."""
        assert self._drafts is not None
        key = sequences, rows
        if key not in self._draft_steps:
            step = DraftStep(self._drafts, sequences, rows, self._most_nodes, self._places, self._outbox)
            self._prepare(step)
            self._draft_steps[key] = step
        return self._draft_steps[key]

    def _prepare(self, step: Decode) -> None:
        _idle(step)
        if self._graphs:
            self._forward(step)  # compiles kernels and picks products, which capturing must not see
            if isinstance(step, DraftStep):
                step.graphs.begin = capture(step.begin, self._device, self._memory)
            step.graphs.decoder = capture(lambda: self._fused(step.rows), self._device, self._memory)
        step.forget()

    def _replay(self, step: Decode) -> Logprobs | None:
        """A step by one graph, if the sequences in slots have asked for the same before."""
        demand, graphs = self._sampler.demand, step.graphs
        if demand not in graphs.whole and demand not in graphs.refused:
            graphs.met[demand] += 1
            if graphs.met[demand] > RARE:  # capturing stops the device
                try:
                    self._capture_whole(step, demand)
                except RuntimeError as error:  # memory may be short
                    warnings.warn(f"a step is launched in parts, as it could not be captured: {error}", stacklevel=2)
                    graphs.refused.add(demand)
        whole = graphs.whole.pop(demand, None)
        if whole is None:
            assert graphs.decoder is not None
            self._begin(step)
            return self._sample(step, graphs.decoder.replay())
        graphs.whole[demand] = whole  # the latest stands last
        return whole.replay()

    def _capture_whole(self, step: Decode, demand: Hashable) -> None:
        """Capture a step whose kernels have been launched for this demand before: compiling must not be seen."""
        graphs = step.graphs
        if len(graphs.whole) == MOST_WHOLE:
            self._wait()
            del graphs.whole[next(iter(graphs.whole))]
        graphs.whole[demand] = capture(lambda: self._sample(step, self._forward(step)), self._device, self._memory)
        graphs.met.clear()

    def _chunks(self, spans: Sequence[Span], catch_up: Callable[[], None]) -> Launched:
        slots = [span.slot for span in spans for _ in range(span.rows)]
        positions = [span.start + i for span in spans for i in range(span.rows)]
        wanted, following = self._wanted(spans)
        tiles = plan_tiles([span.rows for span in spans], [span.slot for span in spans], self._fused.tile_rows)
        rows = next((rows for rows in self._chunk_sizes if rows >= len(slots)), None)
        if self._graphs and rows and len(wanted) <= MOST_WANTED and len(tiles) <= self._most_tiles(rows):
            logits = self._replay_chunk(self._chunk(rows), slots, positions, tiles, wanted)
        else:
            row_slots, row_positions = self._upload(slots, positions)
            [logit_rows] = self._upload(wanted)
            tiles = pinned(tiles, self._device).to(self._device, non_blocking=True)
            logits = self._fused(Rows(row_slots, row_positions, tiles), logit_rows)
        logit_slots, next_positions = self._upload([slots[row] for row in wanted], following)
        if any(span.sample and span.matcher for span in spans):
            catch_up()
        return self._draw(spans, logits, logit_slots, next_positions)

    def _most_tiles(self, rows: int) -> int:
        """Of so many rows of up to MOST_WANTED sequences."""
        return rows // self._fused.tile_rows + MOST_WANTED

    def _chunk(self, rows: int) -> _Chunk:
        """The captured decoder of so many rows of prefill; captured when it is first asked for."""
        if rows not in self._captured_chunks:
            numbers = torch.zeros(2 * rows + MOST_WANTED, dtype=torch.int64, device=self._device)
            tiles = torch.zeros(self._most_tiles(rows), 4, dtype=torch.int32, device=self._device)
            slots, positions, wanted = numbers.split([rows, rows, MOST_WANTED])
            chunk = _Chunk(numbers, slots, positions, wanted, tiles)
            chunk.slots.fill_(-1)  # all idle

            def run() -> Tensor:
                return self._fused(Rows(chunk.slots, chunk.positions, chunk.tiles), chunk.wanted)

            run()  # as for steps
            chunk.decoder = capture(run, self._device, self._memory)
            self._captured_chunks[rows] = chunk
        return self._captured_chunks[rows]

    def _replay_chunk(
        self, chunk: _Chunk, slots: list[int], positions: list[int], tiles: Tensor, wanted: list[int]
    ) -> Tensor:
        """The logits of the wanted rows."""
        idle = len(chunk.slots) - len(slots)
        rows = [*slots, *[-1] * idle, *positions, *[0] * idle, *wanted, *[0] * (MOST_WANTED - len(wanted))]
        chunk.numbers.copy_(pinned(torch.tensor(rows), self._device), non_blocking=True)
        padded = torch.zeros(chunk.tiles.shape, dtype=torch.int32)
        padded[: len(tiles)] = tiles
        chunk.tiles.copy_(pinned(padded, self._device), non_blocking=True)
        assert chunk.decoder is not None
        return chunk.decoder.replay()[: len(wanted)]

    def _upload_pages(self) -> None:
        """Bring the device's page table up to date."""
        written, max_pages = self._pool.written, self._page_table.shape[1]
        places: list[int] = []
        pages: list[int] = []
        for slot, first in written.items():
            row = self._pool.page_table[slot]
            places += range(slot * max_pages + first, slot * max_pages + len(row))
            pages += row[first:]
        for first in range(0, len(places), MOST_SCATTERED):
            last = first + MOST_SCATTERED
            self._outbox.scatter(self._page_table, places[first:last], pages[first:last])
        written.clear()  # only now: an upload may fail

    def _upload(self, *columns: list[int]) -> tuple[Tensor, ...]:
        count = len(columns[0])
        padded = [column + [0] * (even(count) - count) for column in columns]
        numbers = torch.from_numpy(np.array(padded, dtype=np.int64))  # which reads lists faster
        return pinned(numbers, self._device).to(self._device, non_blocking=True)[:, :count].unbind()


def _idle(step: Decode) -> None:
    """What a rehearsal computes goes nowhere."""
    step.put(*([[], [], []] if isinstance(step, DraftStep) else [[], []]))


def idle_chunk(fused: FusedDecoder, rows: int, logit_rows: int) -> tuple[Rows, Tensor]:
    """A prompt of so many rows that leaves no trace."""
    device = fused.device
    slots, positions = torch.full((rows,), -1, device=device), torch.arange(rows, device=device)
    tiles = plan_tiles([rows], [-1], fused.tile_rows).to(device)
    return Rows(slots, positions, tiles), torch.arange(logit_rows, device=device)


@torch.inference_mode()
def working_memory(decoder: Decoder, config: EngineConfig) -> int:
    """Bytes that steps take on a CUDA device besides the cache.

    Measured for the largest chunk, and for the largest decode step and chunk that are captured, in memory of their own:
    all graphs share that, but for the logits that each graph of a decoder keeps.
    """
    device = decoder.device
    history = torch.zeros(1, 1, dtype=torch.int64, device=device)
    caches = [torch.zeros(kv_cache_shape(decoder.spec, 1, 1), dtype=decoder.dtype, device=device)]
    fused = FusedDecoder(decoder, history, history.int(), caches * decoder.spec.num_layers)

    def peak(rows: Rows, logit_rows: Tensor | None = None) -> int:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        fused(rows, logit_rows)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    rows, steps = config.most_rows(device.type), buckets(config.max_num_seqs)
    chunks, drafts = chunk_sizes(rows), list[int]()
    if config.speculation:
        for sequences in steps:
            drafts += [sequences, *draft_rows(sequences, config.draft_nodes, rows)]
    with_logits = max(min(rows, config.max_num_seqs + MAX_SCORED_ROWS), *drafts, 1)
    chunk = peak(*idle_chunk(fused, max(rows, with_logits), with_logits))
    idle = torch.full((steps[-1],), -1, device=device)
    captured = max(peak(Rows(idle, torch.zeros_like(idle))), peak(*idle_chunk(fused, chunks[-1], MOST_WANTED)))
    torch.cuda.empty_cache()  # for the pool to have it
    kept = sum(steps) + sum(drafts) + len(chunks) * MOST_WANTED
    return chunk + captured + kept * decoder.spec.vocab_size * decoder.dtype.itemsize


class Parts:
    """A step whose spans were launched in several parts."""

    def __init__(self, spans: Sequence[Span], parts: Sequence[tuple[Sequence[int], InFlight]]) -> None:
        self._spans = spans
        self._parts = parts

    def result(self) -> StepResult:
        """Wait for the results; in the order of the spans."""
        brought: dict[int, Brought] = {}
        for members, launched in self._parts:
            own = launched.result().by_span([self._spans[i] for i in members])
            brought |= dict(zip(members, own))
        ordered = [brought[i] for i in range(len(self._spans))]
        samples = [sample for one, walked, *_ in ordered for sample in walked or ([one] if one else [])]
        tokens, statuses, logprobs = zip(*samples) if samples else ((), (), ())
        drafting = [
            (len(walked or [one]), drafted)
            for span, (one, walked, _, drafted) in zip(self._spans, ordered)
            if span.drafts
        ]
        return StepResult(
            list(tokens),
            list(statuses),
            list(logprobs),
            [scores for _, _, scores, _ in ordered if scores is not None],
            [run for run, _ in drafting],
            [drafted for _, drafted in drafting],
        )
