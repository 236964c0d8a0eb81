"""``freewheel bench sampler``: the time from a batch's logits to its tokens, beside other ways and the floor.

All systems run in one process, in turn, on the same logits: random ones, or a model's own that ``--record`` has kept.
The floor is one read of the logits at the speed at which this machine reads or copies memory. A figure is the median
over rounds of the median call. On a GPU a call is what it takes inside a CUDA graph, over so many logits that they
don't fit its cache; beside it stands the time that the host needs for an eager call. ``--bytes`` counts what this
engine's sampler reads and writes, in place of time.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.bench import machine
from freewheel.bench.counters import count, find_ncu, print_counts
from freewheel.bench.draws import CASES, SYSTEMS, TEMPERATURE, Maker, usable_systems, workloads
from freewheel.bench.logits import MIN_VOCAB, random_logits, read_recording, record, recorded_logits
from freewheel.bench.timing import CALLS, bandwidth, count_launches, device_name, host_time, median_times

if TYPE_CHECKING:
    from torch import Tensor

Source = Callable[[int, int], "Tensor"]  # from vocabulary and batch to logits [buffers, batch, vocab]

BATCHES, VOCABS = "1,8", "49152,151936"
SOFTMAX_VOCABS = "8192,16384,32768,49152,65536,131072,151936"
MOST_ONE_PASS = 131_072  # entries; a wider row is far from fitting into registers, and takes long to compile
SOFTMAX_BATCHES = "1,32,128,256"
BYTES_BATCHES = "32"


@dataclass(frozen=True)
class Timing:
    """One system's time.

    Attributes:
        seconds: of a call.
        captured: whether calls ran in a CUDA graph; otherwise the device is waited for after each.
        host: seconds until an eager call returns, on a GPU that has not fallen behind.
    """

    seconds: float
    captured: bool
    host: float | None


@dataclass(frozen=True)
class SamplerResult:
    """What the systems take for one case at one size, and the floor in seconds."""

    case: str
    vocab: int
    batch: int
    floor: float
    systems: dict[str, Timing]


@dataclass(frozen=True)
class SoftmaxResult:
    """Seconds of temperature and softmax.

    Attributes:
        floor: of a read of the logits and a write of float32 probabilities.
        apart: of a float32 copy, its division and softmax, as torch's operations.
        fused: of this engine's operation, which chooses between the kernels of the two that follow.
        one_pass: None above ``MOST_ONE_PASS`` entries.
    """

    vocab: int
    batch: int
    floor: float
    apart: float
    fused: float
    two_pass: float
    one_pass: float | None = None


def measure(
    systems: Mapping[str, Maker], sizes: Sequence[tuple[int, int]], source: Source, rounds: int, bytes_per_s: float
) -> Iterator[SamplerResult]:
    """Every case at every size, a pair of vocabulary and batch."""
    for vocab, batch in sizes:
        logits = source(vocab, batch)
        for case, draws in workloads(systems, logits[0]):
            times = median_times(draws, logits, rounds)
            hosts = {name: host_time(draw, logits) for name, draw in draws.items() if logits.is_cuda}
            timings = {name: Timing(*time, hosts.get(name)) for name, time in times.items()}
            yield SamplerResult(case, vocab, batch, logits[0].nbytes / bytes_per_s, timings)


def measure_softmax(
    sizes: Sequence[tuple[int, int]], source: Source, rounds: int, bytes_per_s: float
) -> Iterator[SoftmaxResult]:
    """Temperature and softmax apart, fused, and by the kernels in one pass and in two, all in turn."""
    import torch

    from freewheel.sampling.probabilities import softmax, softmax_into

    temperature = TEMPERATURE["temperature"]
    for vocab, batch in sizes:
        logits = source(vocab, batch)
        out = torch.empty(batch, vocab, device=logits.device)
        ways = {
            "apart": lambda logits: logits.to(torch.float32, copy=True).div_(temperature).softmax(-1),
            "fused": partial(softmax, temperature=temperature, out=out, fused=True),
            "two_pass": partial(softmax_into, out, temperature=temperature, one_pass=False),
        }
        if vocab <= MOST_ONE_PASS:
            ways["one_pass"] = partial(softmax_into, out, temperature=temperature, one_pass=True)
        seconds = {name: time for name, (time, _) in median_times(ways, logits, rounds).items()}
        yield SoftmaxResult(vocab, batch, (logits[0].nbytes + out.nbytes) / bytes_per_s, **seconds)


def plot(results: Sequence[SamplerResult], title: str, path: Path) -> None:
    """One panel for each case: microseconds over the batch size, a line for each system and vocabulary."""
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(11, 7.5), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    batches, vocabs = (sorted({getattr(result, size) for result in results}) for size in ("batch", "vocab"))
    systems = [name for name in SYSTEMS if any(name in result.systems for result in results)]
    lines: dict[str, Any] = {}
    for panel, case in zip(panels.flat, CASES):
        for vocab, marker in zip(vocabs, cycle("os^Dvx")):
            points = [result for result in results if (result.case, result.vocab) == (case, vocab)]
            times = {
                name: [(point.batch, point.systems[name].seconds) for point in points if name in point.systems]
                for name in systems
            }
            times["floor"] = [(point.batch, point.floor) for point in points]
            for name, line in times.items():
                style = {"color": f"C{list(SYSTEMS).index(name)}"} if name != "floor" else {"color": "grey", "ls": "--"}
                xs, ys = [batch for batch, _ in line], [seconds * 1e6 for _, seconds in line]
                label = f"{name}, {vocab:,} logits" if len(vocabs) > 1 else name
                [lines[label]] = panel.plot(xs, ys, marker=marker, markersize=4, **style)
        panel.set(title=case, xscale="log", yscale="log")
        panel.set_xticks(batches, [str(batch) for batch in batches])
        panel.set_xticks([], minor=True)
        panel.grid(alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("batch")
    for panel in panels[:, 0]:
        panel.set_ylabel("µs a call")
    figure.suptitle(title if len(vocabs) > 1 else f"{title}, vocabulary {vocabs[0]:,}")
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``freewheel bench sampler``."""
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--logits", type=Path, metavar="FILE", help="recorded logits instead of random ones")
    mode.add_argument("--record", type=Path, metavar="FILE", help="write a model's logits to FILE, and measure nothing")
    mode.add_argument(
        "--softmax", action="store_true", help="measure temperature and softmax, apart and fused, not the sampler"
    )
    parser.add_argument(
        "--bytes",
        action="store_true",
        help="count what freewheel reads and writes, in place of time; needs NVIDIA's ncu",
    )
    parser.add_argument("--model", default="smollm2", help="of --record: name, folder or file (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=256, help="of --record: rows (default: %(default)s)")
    parser.add_argument(
        "--batch",
        help=f"batch sizes, separated by commas (default: {BATCHES}; of --softmax {SOFTMAX_BATCHES}; of --bytes "
        f"{BYTES_BATCHES})",
    )
    parser.add_argument(
        "--vocab", help=f"vocabulary sizes, likewise (default: {VOCABS}; of --softmax {SOFTMAX_VOCABS})"
    )
    parser.add_argument("--systems", help=f"any of {','.join(SYSTEMS)} (default: all that are installed)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the logits (default: float32, or the file's)"
    )
    parser.add_argument("--device", default="cpu", help="device of the logits (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help=f"rounds of {CALLS} calls (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them into a PNG file; needs matplotlib")


def run(args: argparse.Namespace) -> None:
    """Record; or measure or count, print one table line for each case and size, write JSON and draw."""
    if args.bytes and (args.record or args.softmax):
        raise ValueError("bytes: not together with --record or --softmax")
    if args.record:
        run_record(args)
        return
    _check(args)
    ncu = find_ncu() if args.bytes else ""
    recording = read_recording(args.logits) if args.logits else None
    if recording:
        vocabs = [recording.rows.shape[1]]
        dtype = args.dtype or str(recording.rows.dtype).removeprefix("torch.")
        origin = f"{len(recording.rows)} recorded rows of {recording.model}, repeated, buffers begin at different rows"
    else:
        vocabs = _numbers("vocab", args.vocab or (SOFTMAX_VOCABS if args.softmax else VOCABS), MIN_VOCAB)
        dtype, origin = args.dtype or "float32", "random"
    default = SOFTMAX_BATCHES if args.softmax else BYTES_BATCHES if args.bytes else BATCHES
    batches = _numbers("batch", args.batch or default, 1)
    systems = {} if args.softmax or args.bytes else usable_systems(args.systems, args.device)

    def source(vocab: int, batch: int) -> "Tensor":
        if recording:
            return recorded_logits(recording.rows, batch, dtype, args.device)
        return random_logits(batch, vocab, dtype, args.device)

    device, sizes = device_name(args.device), [(vocab, batch) for vocab in vocabs for batch in batches]
    report: dict[str, Any] = {"machine": machine.describe(), "device": device, "dtype": dtype, "logits": origin}
    print(f"machine    {machine.describe()}")
    if args.bytes:
        bytes_per_s, figures = 0.0, f"bytes a row, counted by {device} between its cores and its L2 cache"
    else:
        bytes_per_s, figures = bandwidth(args.device), f"microseconds a call, median of {args.rounds} rounds"
        report["bytes_per_s"] = bytes_per_s
        print(f"bandwidth  {bytes_per_s / 1e9:.1f} GB/s, measured now on {device}")
    print(f"logits     {dtype}, {origin}")
    print(f"figures    {figures}", flush=True)
    if args.bytes:
        results = print_counts(one for size in sizes for one in count(ncu, *size, dtype, args.device, args.logits))
    elif args.softmax:
        results = print_softmax(measure_softmax(sizes, source, args.rounds, bytes_per_s))
    else:
        results = print_results(measure(systems, sizes, source, args.rounds, bytes_per_s), systems)
        if args.plot:
            plot(results, f"{device}, {dtype} logits, {origin}", args.plot)
        if args.device != "cpu":
            report["launches"] = print_launches(systems, source(*sizes[-1])[0])
    if args.json:
        report["results"] = [asdict(result) for result in results]
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def run_record(args: argparse.Namespace) -> None:
    """Record, and print what the model wrote."""
    if args.positions < 1:
        raise ValueError("positions must be at least 1")
    for text in record(args.record, args.model, args.positions):
        print(repr(text))
    print(f"{args.record}: {args.record.stat().st_size / 1e6:.1f} MB")


def print_results(results: Iterable[SamplerResult], systems: Iterable[str]) -> list[SamplerResult]:
    """A table line for each result, as it comes."""
    print("           *: in no CUDA graph, the device waited for; host: until an eager call of freewheel returns")
    names, done = "".join(f"{name:>13}" for name in systems), []
    print(f"{'case':20}{'vocab':>8}{'batch':>6}{'floor':>9}{names}{'x torch':>9}{'host':>8}")
    for result in results:
        ours, torch = result.systems.get("freewheel"), result.systems.get("torch")
        times = "".join(f"{_shown(result.systems.get(name)):>13}" for name in systems)
        ratio = f"{torch.seconds / ours.seconds:.1f}" if ours and torch else "-"
        host = f"{ours.host * 1e6:.1f}" if ours and ours.host else "-"
        sizes = f"{result.vocab:8}{result.batch:6}{result.floor * 1e6:9.1f}"
        print(f"{result.case:20}{sizes}{times}{ratio:>9}{host:>8}", flush=True)
        done.append(result)
    return done


def _shown(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    return f"{timing.seconds * 1e6:.1f}{'*' if timing.host and not timing.captured else ''}"


def print_launches(systems: Mapping[str, Maker], logits: "Tensor") -> dict[str, dict[str, int]]:
    """A table line for each case: how many kernels a call on logits [batch, vocab] launches."""
    names, counts = "".join(f"{name:>13}" for name in systems), {}
    print(f"\n{f'kernels of a call, batch {len(logits)}':43}{names}")
    for case, draws in workloads(systems, logits):
        counts[case] = {name: count_launches(draw, logits) for name, draw in draws.items()}
        columns = "".join(f"{counts[case].get(name, '-'):>13}" for name in systems)
        print(f"{case:43}{columns}", flush=True)
    return counts


def print_softmax(results: Iterable[SoftmaxResult]) -> list[SoftmaxResult]:
    """A table line for each result, as it comes."""
    print(f"{'softmax of':>10}{'batch':>6}{'floor':>9}{'apart':>11}{'fused':>11}{'x apart':>9}", end="")
    print(f"{'one pass':>11}{'two passes':>11}")
    done = []
    for result in results:
        floor, apart, fused, two = (time * 1e6 for time in (result.floor, result.apart, result.fused, result.two_pass))
        one = "-" if result.one_pass is None else f"{result.one_pass * 1e6:.1f}"
        times = f"{floor:9.1f}{apart:11.1f}{fused:11.1f}{apart / fused:9.1f}{one:>11}{two:11.1f}"
        print(f"{result.vocab:10}{result.batch:6}{times}", flush=True)
        done.append(result)
    return done


def _check(args: argparse.Namespace) -> None:
    """Raises ValueError for options that are wrong alone or together."""
    import torch

    if args.rounds < 1:
        raise ValueError("rounds must be at least 1")
    if args.device != "cpu" and not (args.device.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError(f"device: {args.device!r} is neither cpu nor a CUDA device that torch can use")
    if args.logits and args.vocab:
        raise ValueError("vocab: the file of --logits has its own")
    if args.softmax and args.device == "cpu":
        raise ValueError("softmax: the kernels need --device cuda")
    if args.bytes and args.device == "cpu":
        raise ValueError("bytes: a GPU counts them; add --device cuda")
    if args.bytes and args.systems:
        raise ValueError("systems: --bytes counts freewheel's alone")
    if args.plot and (args.softmax or args.bytes):
        raise ValueError("plot: --softmax and --bytes have none")


def _numbers(name: str, text: str, least: int) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not a list of whole numbers") from None
    if min(numbers) < least:
        raise ValueError(f"{name} must be at least {least}, not {min(numbers)}")
    return numbers
