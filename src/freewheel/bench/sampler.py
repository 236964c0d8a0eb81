"""``freewheel bench sampler``: the time from a batch's logits to its tokens, beside torch's ways and the floor.

All systems run in one process, in turn, on the same logits: normal, three wide, with a few peaks. The floor is one read
of the logits at the speed at which this machine reads or copies memory. A figure is the median over rounds of the
median call. On a GPU a call is what it takes inside a CUDA graph, over so many logits that they don't fit its cache.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.bench import machine

if TYPE_CHECKING:
    from torch import Tensor

Draw = Callable[["Tensor"], "Tensor"]

TEMPERATURE = {"temperature": 0.8}
TRUNCATED = {**TEMPERATURE, "top_k": 50, "top_p": 0.95}
EVERYTHING = {
    **TRUNCATED,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "logit_bias": dict.fromkeys(range(0, 200, 10), 1.0),
}
ONE = "one with everything"
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": TEMPERATURE,
    "top-k, top-p": TRUNCATED,
    "top-p": {**TEMPERATURE, "top_p": 0.95},
    "everything": EVERYTHING,
    ONE: TEMPERATURE,  # but the first row
}
PROMPT, OUTPUT = range(100, 200), range(150, 250)
POSITIONS = 64
CALLS = 12
CACHE_BYTES = 60 << 20  # the largest cache of a GPU


@dataclass(frozen=True)
class SamplerResult:
    """Seconds a call, by system; None for what a system is not measured at."""

    case: str
    vocab: int
    batch: int
    floor: float
    torch: float
    gumbel: float | None
    freewheel: float


def torch_draw(fields: dict[str, Any], logits: "Tensor") -> Draw:
    """How a program in torch draws: for every row of the batch all that one of them asks."""
    scale, top_k, top_p, min_p = (fields.get(name, 0) for name in ("temperature", "top_k", "top_p", "min_p"))
    seen, counts, bias = (logits.new_zeros(logits.shape[1]).float() for _ in range(3))
    seen[[*PROMPT, *OUTPUT]], counts[OUTPUT] = 1.0, 1.0
    for token, value in fields.get("logit_bias", {}).items():
        bias[token] = value

    def edited(logits: "Tensor") -> "Tensor":
        values = logits.float() + bias
        repetition = seen * (fields["repetition_penalty"] - 1.0) + 1.0
        values = (values / repetition).where(values > 0, values * repetition)
        return values - fields["frequency_penalty"] * counts - fields["presence_penalty"] * (counts > 0)

    def draw(logits: "Tensor") -> "Tensor":
        if not scale:
            return logits.argmax(-1)
        values = (edited(logits) if "logit_bias" in fields else logits.float()) / scale
        if not top_p:
            return values.softmax(-1).multinomial(1)
        values, ids = values.sort(-1, descending=True)
        if top_k:
            values[:, top_k:] = -float("inf")
        shares = values.softmax(-1)
        shares[(shares.cumsum(-1) - shares >= top_p) | (shares < min_p * shares[:, :1])] = 0.0
        return ids.gather(1, shares.multinomial(1))

    return draw


def gumbel_draw(logits: "Tensor") -> "Tensor":
    """Temperature and softmax, then the largest share over exponential noise."""
    shares = (logits.float() / TEMPERATURE["temperature"]).softmax(-1)
    return shares.div_(shares.new_empty(shares.shape).exponential_()).argmax(-1)


def freewheel_draw(requests: Sequence[dict[str, Any]], logits: "Tensor") -> Draw:
    """This engine's sampler, one request a row; each call is at the next position."""
    import torch

    from freewheel.sampling import Sampler, SampleRows, SamplingParams, SamplingState

    state = SamplingState(len(requests), logits.shape[1], 512, device=logits.device)
    for slot, fields in enumerate(requests):
        state.join(slot, SamplingParams(**fields), PROMPT, seed=slot, output_ids=OUTPUT)
    slots, length = torch.arange(len(requests), device=logits.device), len(PROMPT) + len(OUTPUT)
    rows = cycle([SampleRows(slots, torch.full_like(slots, length + step)) for step in range(POSITIONS)])
    sampler = Sampler(state)
    return lambda logits: sampler.sample(logits, next(rows)).tokens


def timed(draw: Draw, buffers: "Tensor", graph: bool) -> Callable[[], float]:
    """A function that measures the seconds of one call of ``draw`` on logits [buffers, batch, vocab], each in turn.

    With ``graph``, the calls are captured in a CUDA graph, once, and replayed.
    """
    if graph:
        return _replayed(draw, buffers)
    turns = cycle(buffers.unbind())

    def measure() -> float:
        seconds = []
        for _ in range(CALLS):
            logits = next(turns)
            start = time.perf_counter()
            draw(logits)
            _wait(logits)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    measure()
    return measure


def _replayed(draw: Draw, buffers: "Tensor") -> Callable[[], float]:
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            draw(buffers[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for logits in buffers:
            draw(logits)

    def measure() -> float:
        milliseconds = []
        for _ in range(CALLS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            milliseconds.append(start.elapsed_time(end))
        return statistics.median(milliseconds) / 1e3 / len(buffers)

    measure()
    return measure


def _wait(logits: "Tensor") -> None:
    if logits.is_cuda:
        import torch

        torch.cuda.synchronize(logits.device)


def bandwidth(device: str) -> float:
    """Bytes a second: reading, on a CPU; copying, read and written bytes together, on a GPU."""
    if device == "cpu":
        return machine.read_bandwidth()
    import torch

    buffers = torch.ones(9, 1, 1 << 26, device=device)
    copy = timed(buffers[0].copy_, buffers[1:], graph=True)
    return 2 * buffers[0].nbytes / min(copy() for _ in range(5))


def random_logits(batch: int, vocab: int, dtype: str, device: str) -> "Tensor":
    """Logits [buffers, batch, vocab], as many as a GPU's cache can't hold; four on a CPU."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    kind = getattr(torch, dtype)
    buffers = 4 if device == "cpu" else max(4, -(-CACHE_BYTES // (batch * vocab * kind.itemsize)))
    logits = torch.empty(buffers, batch, vocab, dtype=kind, device=device)
    for one in logits:
        values = torch.randn(batch, vocab, generator=generator, device=device) * 3
        peaks = torch.randint(vocab, (batch, 5), generator=generator, device=device)
        one.copy_(values.scatter_add_(1, peaks, torch.full((batch, 5), 12.0, device=device)))
    return logits


def measure(
    batches: Sequence[int], vocabs: Sequence[int], dtype: str, device: str, rounds: int, bytes_per_s: float
) -> Iterator[SamplerResult]:
    """Every case at every size."""
    import torch

    for vocab in vocabs:
        for batch in batches:
            logits, on_gpu = random_logits(batch, vocab, dtype, device), device != "cpu"
            for case, fields in CASES.items():
                if case == ONE and batch == 1:
                    continue
                requests = [EVERYTHING if case == ONE and not row else fields for row in range(batch)]
                draws = {"torch": torch_draw(requests[0], logits[0]), "freewheel": freewheel_draw(requests, logits[0])}
                if case == "temperature":
                    draws["gumbel"] = gumbel_draw
                with torch.inference_mode():
                    timers = {name: timed(draw, logits, graph=on_gpu) for name, draw in draws.items()}
                    seconds = [{name: timer() for name, timer in timers.items()} for _ in range(rounds)]
                medians = {name: statistics.median(one[name] for one in seconds) for name in draws}
                yield SamplerResult(
                    case=case,
                    vocab=vocab,
                    batch=batch,
                    floor=logits[0].nbytes / bytes_per_s,
                    gumbel=medians.pop("gumbel", None),
                    **medians,
                )


def plot(results: Sequence[SamplerResult], path: Path) -> None:
    """One panel for each case: microseconds over the batch size, a line for each system and vocabulary."""
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(13, 7), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    batches = sorted({result.batch for result in results})
    styles = ["-", "--", ":", "-."]
    for panel, case in zip(panels.flat, CASES):
        for index, vocab in enumerate(sorted({result.vocab for result in results})):
            points = [result for result in results if (result.case, result.vocab) == (case, vocab)]
            for system, colour in (("torch", "C0"), ("gumbel", "C1"), ("freewheel", "C3"), ("floor", "grey")):
                line = [(result.batch, getattr(result, system)) for result in points if getattr(result, system)]
                xs, ys = [batch for batch, _ in line], [seconds * 1e6 for _, seconds in line]
                label = f"{system}, {vocab:,}"
                panel.plot(xs, ys, styles[index % 4], color=colour, marker="o", markersize=3, label=label)
        panel.set(title=case, xscale="log", yscale="log", xlabel="batch", ylabel="µs")
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.set_xticks([], minor=True)
    panels.flat[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``freewheel bench sampler``."""
    parser.add_argument("--batch", default="1,8", help="batch sizes, separated by commas (default: %(default)s)")
    parser.add_argument("--vocab", default="49152,151936", help="vocabulary sizes, likewise (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="of the logits")
    parser.add_argument("--device", default="cpu", help="device of the logits (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help=f"rounds of {CALLS} calls (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them into a PNG file; needs matplotlib")


def run(args: argparse.Namespace) -> None:
    """Measure, print one table line for each case and size, write JSON and draw."""
    sizes = {}
    for name in ("batch", "vocab"):
        try:
            sizes[name] = [int(size) for size in getattr(args, name).split(",")]
        except ValueError:
            raise ValueError(f"{name}: {getattr(args, name)!r} is not a list of whole numbers") from None
    if min(sizes["batch"]) < 1 or min(sizes["vocab"]) < 256 or args.rounds < 1:
        raise ValueError("batch and rounds must be at least 1, vocab at least 256")
    bytes_per_s = bandwidth(args.device)
    print(f"machine    {machine.describe()}")
    print(f"bandwidth  {bytes_per_s / 1e9:.1f} GB/s, measured now on {args.device}")
    print(f"logits     {args.dtype}, microseconds a call, median of {args.rounds} rounds")
    print(f"{'case':20}{'vocab':>8}{'batch':>6}{'floor':>9}{'torch':>11}{'gumbel':>11}{'freewheel':>11}{'x torch':>9}")
    results = []
    for result in measure(sizes["batch"], sizes["vocab"], args.dtype, args.device, args.rounds, bytes_per_s):
        gumbel = f"{result.gumbel * 1e6:.1f}" if result.gumbel else "-"
        print(
            f"{result.case:20}{result.vocab:8}{result.batch:6}{result.floor * 1e6:9.1f}{result.torch * 1e6:11.1f}"
            f"{gumbel:>11}{result.freewheel * 1e6:11.1f}{result.torch / result.freewheel:9.1f}",
            flush=True,
        )
        results.append(result)
    if args.plot:
        plot(results, args.plot)
    if args.json:
        report = {"machine": machine.describe(), "bytes_per_s": bytes_per_s, "dtype": args.dtype}
        report |= {"device": args.device, "results": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
