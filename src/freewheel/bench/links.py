"""``freewheel bench links``: what a step of speculation waits for, by where its drafts and their links come from.

*read back*: the host drafts, the device derives each tree's links from its ancestor mask, and the host reads them
before it launches the step. *host*: the host derives them from the trees that it made. *device*: this engine, whose
device drafts, so that the host launches the next step before it has seen the last. The first two exist here alone, and
share with the third all that a step computes: layout, decoder, draw, walk.

Weights are random, so a script says which token is drawn at which place: with a given probability that which repeats
what came ``PERIOD`` tokens before, else a random one. So all three are told the same tokens, and accept as many.

With ``--grammar`` each row of a draft has a mask, by a grammar that permits all that the script says: made while the
decoder runs. Then *read back* copies masks in a way that waits for the device, the others do not.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.bench import machine
from freewheel.bench.systems import wait_for

if TYPE_CHECKING:
    from torch import Tensor

    from freewheel.engine.engine import Engine
    from freewheel.models.load import LoadedModel
    from freewheel.sampling import Grammar
    from freewheel.speculative import DraftTree

PERIOD = 48
VARIANTS = ("read back", "host", "device")


@dataclass(frozen=True)
class LinksResult:
    """One way at one batch size, medians.

    Attributes:
        tokens_per_s, step_ms: of all sequences together.
        accepted: tokens a sequence gets in a step.
        occupancy: share of the time in which a step's graph runs; on CUDA devices.
    """

    variant: str
    batch: int
    tokens_per_s: float
    step_ms: float
    accepted: float
    occupancy: float | None


def scripts(batch: int, prompt: int, length: int, accept: float, vocab: int) -> list[list[int]]:
    """What each sequence says: its prompt is periodic, and what follows goes on like it with that probability."""
    told = []
    for number in range(batch):
        rng = random.Random(number)
        tokens = [rng.randrange(vocab) for _ in range(PERIOD)]
        while len(tokens) < length:
            repeats = len(tokens) < prompt or rng.random() < accept
            tokens.append(tokens[-PERIOD] if repeats else rng.randrange(vocab))
        told.append(tokens)
    return told


def links_on_device(ancestors: "Tensor", counts: "Tensor") -> "Tensor":
    """First child and next sibling of each row: int64 [2, trees, rows], -1 for none.

    Args:
        ancestors: int64 [trees, rows - 1], masks of the nodes' rows.
        counts: int32 [trees], of nodes.
    """
    import torch

    count, nodes = ancestors.shape
    row = torch.arange(nodes + 1, device=ancestors.device)
    sees = (ancestors[:, :, None] >> row) & 1
    parents = torch.where((sees > 0) & (row < row[1:, None]), row, -1).amax(-1)  # [trees, nodes]
    parents = torch.where(row[1:] <= counts[:, None], parents, -1)
    parents = torch.cat([parents.new_full((count, 1), -1), parents], 1)
    none = nodes + 1
    child = torch.where(parents[:, None, :] == row[:, None], row, none).amin(-1)
    after = (parents[:, None, :] == parents[:, :, None]) & (row > row[:, None]) & (parents[:, :, None] >= 0)
    sibling = torch.where(after, row, none).amin(-1)
    links = torch.stack([child, sibling])
    return torch.where(links == none, -1, links)


class NoIndex:
    """In place of the device's: the host drafts."""

    def extend(self, slots: "Tensor", *, told: "Tensor | None" = None) -> None:
        """Nothing is indexed."""

    def draft(self, *_: Any, **__: Any) -> None:
        """The trees are there."""


class HostDrafts:
    """Steps of sequences that an engine has brought to their first token, drafted by the host from then on.

    Args:
        engine: with nothing in flight; every sequence in it decodes.
        read_back: derive links on the device, and read them before each step is launched.
    """

    def __init__(self, engine: "Engine", read_back: bool) -> None:
        import torch

        from freewheel.engine.buckets import bucket_for
        from freewheel.engine.captured import capture
        from freewheel.engine.device_runner import DeviceRunner
        from freewheel.engine.draft_step import DeviceDrafts, DraftStep
        from freewheel.engine.masks import MaskBuffer
        from freewheel.speculative import NgramIndex

        runner, config = engine.runner, engine.config
        assert isinstance(runner, DeviceRunner)
        assert runner._drafts is not None
        engine._secure((one, one.max_length) for one in engine._running.values())
        runner._upload_pages()
        self._runner, self._config = runner, config
        self.sequences = list(engine._running.values())
        self._indexes = [NgramIndex(one.max_length) for one in self.sequences]
        shared = runner._drafts
        drafts: Any = DeviceDrafts(
            shared.state,
            shared.pool,
            shared.page_table,
            rows_per_tile=shared.rows_per_tile,
            width=shared.width,
            depth=shared.depth,
        )
        drafts.index = NoIndex()
        size, each = bucket_for(len(self.sequences)), 1 + config.draft_nodes
        self._step = step = DraftStep(drafts, size, size * each, config.draft_nodes, 1, runner._outbox)
        runner._prepare(step)
        self._graph = None
        self._matchers = [one.matcher for one in self.sequences]
        logits, host = engine.limits.logits, torch.device("cpu")
        self._masks = MaskBuffer(logits, host if read_back else runner._device)
        if runner._graphs and not any(self._matchers):
            runner._sample(step, runner._forward(step))
            self._graph = capture(lambda: runner._sample(step, runner._forward(step)), runner._device, runner._memory)
        self._trees = [torch.zeros_like(part, device="cpu") for part in step._trees]
        if runner._device.type == "cuda":
            self._trees = [part.pin_memory() for part in self._trees]
        self._links = None
        if read_back:
            self._links = partial(links_on_device, step._trees.ancestors, step._trees.counts)
            self._links()
            if runner._graphs:
                self._links = capture(self._links, runner._device, runner._memory).replay
        slots = [one.slot for one in self.sequences]
        for one in self.sequences:
            drafts.lengths[one.slot] = len(one.tokens)
        step.put(slots, [-1] * len(slots), [config.draft_nodes] * len(slots))

    def step(self) -> int:
        """Draft, launch, wait; the number of new tokens."""
        from freewheel.speculative import DraftTree, draft

        width, nodes = self._config.draft_width, self._config.draft_nodes
        tokens, parents, depths, ancestors, counts = (part.numpy() for part in self._trees)
        trees = []
        for row, (sequence, index) in enumerate(zip(self.sequences, self._indexes)):
            index.extend(sequence.tokens[len(index) :])
            tree = draft(index, width=width, depth=self._config.draft_depth, nodes=nodes) or DraftTree()
            count = counts[row] = len(tree.tokens)
            tokens[row, :count], parents[row, :count] = tree.tokens, tree.parents
            depths[row, :count], ancestors[row, :count] = tree.depths, tree.ancestors[1:]
            trees.append(tree)
        for part, told in zip(self._step._trees, self._trees):
            part.copy_(told, non_blocking=True)
        if self._links is not None:
            self.links = self._links().tolist()  # waits for the device
        else:
            self.links = [tree.links for tree in trees]
        if any(self._matchers):
            self._constrained(trees)
        elif self._graph is not None:
            self._graph.replay()
        else:
            self._runner._sample(self._step, self._runner._forward(self._step))
        result = self._step.launched(None).result()
        came = iter(result.tokens)
        for sequence, run, matcher in zip(self.sequences, result.runs, self._matchers):
            new = [next(came) for _ in range(run)]
            sequence.tokens += new
            if matcher is not None:
                for token in new:
                    matcher.advance(token)
        return len(result.tokens)

    def _constrained(self, trees: "list[DraftTree]") -> None:
        """The step, with a mask for each of its rows."""
        from freewheel.engine.masks import Constrained

        runner, step = self._runner, self._step
        runner._begin(step)
        logits = step.graphs.decoder.replay() if step.graphs.decoder else runner._fused(step.rows)
        constrained, row = [], 0
        for matcher, tree in zip(self._matchers, trees):
            if matcher is not None:
                constrained.append(Constrained(row, matcher, tree))
            row += tree.rows
        masks, mask_rows = self._masks.fill(constrained, len(step.rows.slots))
        if masks is not None and mask_rows is not None:  # from memory that is not pinned such a copy waits
            masks, mask_rows = masks.to(logits.device), mask_rows.to(logits.device)
        runner._sample(step, logits, replace(step.sample_rows, masks=masks, mask_rows=mask_rows))


def scripted(model: "LoadedModel", batch: int, length: int, nodes: int, width: int, told: list[list[int]]) -> "Engine":
    """An engine whose sequences say what the scripts tell."""
    from freewheel.config import EngineConfig
    from freewheel.engine.build import build_engine, runner_for

    config = EngineConfig(
        max_num_seqs=batch,
        max_model_len=length,
        enable_prefix_caching=False,
        speculation=True,
        draft_nodes=nodes,
        draft_width=width,
        draft_depth=nodes,
    )
    make = runner_for(config, model.decoder.device.type)
    return build_engine(model, config, lambda decoder, pool, sampler: make(decoder, pool, read_out(sampler, told)))


def read_out(sampler: Any, told: list[list[int]]) -> Any:
    """A sampler that reads tokens from a script, after it has drawn others. Slot ``i`` has script ``i``."""
    import torch

    from freewheel.sampling import Sampler, SampleRows, Samples

    state = sampler.state
    script = torch.zeros_like(state.history)
    for slot, tokens in enumerate(told):
        script[slot, : len(tokens)] = torch.tensor(tokens)

    class Scripted(Sampler):
        def sample(self, logits: torch.Tensor, rows: SampleRows) -> Samples:
            samples = super().sample(logits, rows)
            samples.tokens.copy_(script[rows.slots, rows.positions])
            return samples

    return Scripted(state)


def begin(engine: "Engine", told: list[list[int]], prompt: int, grammar: "Grammar | None" = None) -> None:
    """Bring each sequence to its first token, without drafts, and leave nothing in flight."""
    from freewheel.request import Request
    from freewheel.sampling import SamplingParams

    engine.lookahead = 0
    plan_nodes(engine, 0)
    count = len(told[0]) - prompt
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, grammar=grammar)
    for slot in reversed(engine._slots):  # in which order they are given away
        engine.add(Request(str(slot), tuple(told[slot][:prompt]), params))
    while engine._waiting or any(len(one.tokens) == prompt for one in engine._running.values()):
        engine.step()


def plan_nodes(engine: "Engine", nodes: int) -> None:
    """Let each sequence draft so many nodes in each step, as far as it can."""
    drafting: Any = engine._drafting

    def plan(sequences: Sequence[Any], most: Callable[[Any], int]) -> list[int]:
        return [min(nodes, most(sequence)) for sequence in sequences]

    drafting.nodes, drafting.guessing = plan, False


def run_variant(
    engine: "Engine", variant: str, told: list[list[int]], prompt: int, tokens: int, grammar: "Grammar | None" = None
) -> tuple[float, int]:
    """Seconds until so many tokens came, and steps. The engine is empty again afterwards."""
    begin(engine, told, prompt, grammar)
    device = str(engine._pool.device)
    goal, steps, came = tokens * len(told), 0, 0
    if variant == "device":
        engine.lookahead = 1
        plan_nodes(engine, engine.config.draft_nodes)

        def step() -> int:
            return sum(len(output.token_ids) for output in engine.step())

        step()
        step()
    else:
        step = HostDrafts(engine, variant == "read back").step
        step()
    wait_for(device)
    began = time.perf_counter()
    while came < goal:
        came += step()
        steps += 1
    seconds = time.perf_counter() - began
    for slot in range(len(told)):
        engine.abort(str(slot))
    while engine.has_unfinished:
        engine.step()
    return seconds * goal / came, steps


def measure(
    engine: "Engine",
    told: list[list[int]],
    prompt: int,
    tokens: int,
    repeats: int,
    grammar: "Grammar | None" = None,
) -> list[LinksResult]:
    """All variants in turn, after a round that does not count; then their occupancy, in a round of its own."""
    from freewheel.bench.steps import between_graphs, graph_events

    batch, times = len(told), {variant: list[tuple[float, int]]() for variant in VARIANTS}
    for turn in range(repeats + 1):
        for variant in VARIANTS:
            outcome = run_variant(engine, variant, told, prompt, tokens, grammar)
            if turn:
                times[variant].append(outcome)
    results = []
    for variant in VARIANTS:
        occupancy = None
        if engine._pool.device.type == "cuda":
            with graph_events() as events:
                run_variant(engine, variant, told, prompt, tokens, grammar)
                wait_for(str(engine._pool.device))
            steps = times[variant][0][1]
            each = 2 if grammar is None else 6  # around what is launched together: with masks, draft, decoder, draw
            between = between_graphs(events[-each * (steps - steps // 8) :])
            occupancy = between and between.share
        seconds = statistics.median(one for one, _ in times[variant])
        steps = times[variant][0][1]
        rate, accepted = tokens * batch / seconds, tokens / steps
        results.append(LinksResult(variant, batch, rate, seconds / steps * 1e3, accepted, occupancy))
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``freewheel bench links``."""
    parser.add_argument(
        "--shape", default="qwen2.5-7b", help="of the model, with random weights (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda", help="a CUDA device (default: %(default)s)")
    parser.add_argument("--batch", default="1,8,32", help="batch sizes, separated by commas (default: %(default)s)")
    parser.add_argument(
        "--prompt", type=int, default=128, metavar="N", help="tokens of a prompt (default: %(default)s)"
    )
    parser.add_argument("--output", type=int, default=192, metavar="N", help="tokens measured (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=7, help="of each draft, at most (default: %(default)s)")
    parser.add_argument("--width", type=int, default=2, help="leaves of each draft, at most (default: %(default)s)")
    parser.add_argument(
        "--accept", type=float, default=0.8, metavar="P", help="probability that a token repeats (default: %(default)s)"
    )
    parser.add_argument("--grammar", action="store_true", help="mask each row of each draft by a grammar")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions; the median counts (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")


def run(args: argparse.Namespace) -> None:
    """Print a line for each way and batch size, and write JSON."""
    from freewheel.bench.shapes import dummy_model
    from freewheel.sampling import Grammar

    grammar = Grammar.regex("(<[0-9]+>)*") if args.grammar else None  # all that models of random weights can say
    if not args.device.startswith("cuda"):
        raise ValueError(f"device: {args.device!r} is not a CUDA device: elsewhere the host waits for each step anyway")
    try:
        batches = [int(batch) for batch in args.batch.split(",")]
    except ValueError:
        raise ValueError(f"batch: {args.batch!r} is not a list of whole numbers") from None
    for name, value, least in (
        ("batch", min(batches), 1),
        ("prompt", args.prompt, 2 * PERIOD),
        ("output", args.output, 1),
        ("nodes", args.nodes, 1),
        ("width", args.width, 1),
        ("repeats", args.repeats, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")
    if not 0 <= args.accept <= 1:
        raise ValueError(f"accept must be from 0 to 1, not {args.accept}")
    model = dummy_model(args.shape, "bfloat16", args.device)
    print(f"machine    {machine.describe()}")
    print(f"{'links':12}{'batch':>6}{'tok/s':>10}{'ms a step':>11}{'accepted':>10}{'occupancy':>11}")
    results = []
    for batch in batches:
        length = args.prompt + 2 * args.output + 1 + args.nodes  # some get ahead of others
        told = scripts(batch, args.prompt, length, args.accept, model.spec.vocab_size)
        engine = scripted(model, batch, length, args.nodes, args.width, told)
        for result in measure(engine, told, args.prompt, args.output, args.repeats, grammar):
            results.append(asdict(result))
            print(
                f"{result.variant:12}{batch:6}{result.tokens_per_s:10.1f}{result.step_ms:11.3f}"
                f"{result.accepted:10.2f}{result.occupancy or 0:11.1%}",
                flush=True,
            )
        del engine
    if args.json:
        report = {"machine": machine.describe(), **{k: v for k, v in vars(args).items() if k not in ("run", "json")}}
        args.json.write_text(json.dumps(report | {"results": results}, indent=1, default=str) + "\n")
