"""``freewheel bench decode``: decode tokens/s beside the floor and beside other systems.

The rate is ``batch * (long - 1) / (t(long) - t(1))`` with ``t(n)`` the wall time to generate ``n`` tokens for every
prompt: the prompt's own time cancels, and every system is measured by the same two calls. Each value is the median over
repetitions, and systems run one after the other in processes of their own. Where options of this engine are given
several values (ways to draw, or a switch both ways), each combination is a variant: all of them run in one process, on
the same weights, and take turns at every repetition.

On a CPU the floor is the bytes of weights that a step reads over the read bandwidth. On a CUDA device it is weights and
cached keys and values over the copy bandwidth, and how this engine's steps spend their time is measured as well (see
:mod:`freewheel.bench.steps`).
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import cycle, product
from pathlib import Path
from typing import Any

from freewheel.bench import machine
from freewheel.bench.shapes import SHAPES, shape_config
from freewheel.bench.steps import StepProfile, host_seconds, profile_steps, trace_steps
from freewheel.bench.systems import ON_CPU, SYSTEMS, Freewheel, FreewheelEngine, Reads, Setup, System, makers, wait_for

SHORT = 1
SWITCHES = {
    "fused": "let kernels compute, or torch's operations (default: kernels on CUDA devices)",
    "graphs": "launch steps as CUDA graphs, or kernel by kernel (default: graphs where there are kernels)",
    "speculation": "guess tokens, for which random prompts give little reason, or not (default)",
    "float32_logits": "copy the logits to float32 before each draw, or draw from them as they are (default)",
}
RESULT = "result: "  # marks a measuring process's lines among what the systems print


@dataclass(frozen=True)
class Loaded:
    """A system that is ready, with all its variants.

    Attributes:
        load_s: seconds until it was, imports included.
        start_s: seconds that this engine, or its variants together, took after that to build, where it runs alone.
        weight_bytes, cache_bytes: what a step reads of weights, and for each sequence of the cache, on average.
    """

    load_s: float
    start_s: float | None
    weight_bytes: int | None
    cache_bytes: float | None


@dataclass(frozen=True)
class Failed:
    """A variant that is measured no further; the others are."""

    variant: str
    error: str


@dataclass(frozen=True)
class DecodeResult:
    """One variant of a system at one batch size.

    Attributes:
        first_token_ms: until every prompt has its first token.
        resident_mb: memory of its process, of the host.
        device_mb: memory that torch has reserved on the CUDA device.
        warmup_s: the first two calls together, kernels compiled and graphs captured in them.
        host_us: the host's part of a step, the wait for results apart.
        copied_mib: MiB that a step's float32 copy of the logits takes, where there is one.
        variant: what tells it from the others; empty if there are none.
    """

    system: str
    dtype: str
    batch: int
    tokens_per_s: float
    step_ms: float
    prompt_tokens_per_s: float
    first_token_ms: float
    load_s: float
    resident_mb: float
    weight_mb: float | None = None
    device_mb: float | None = None
    warmup_s: float | None = None
    host_us: float | None = None
    copied_mib: float | None = None
    variant: str = ""


Message = Loaded | DecodeResult | StepProfile | Failed
MESSAGES: dict[str, type[Message]] = {kind.__name__: kind for kind in (Loaded, DecodeResult, StepProfile, Failed)}


def prompts(batch: int, length: int) -> list[list[int]]:
    """Reproducible prompts that share no prefix, of ids that every vocabulary of more than 10,000 tokens has."""
    import numpy as np

    return np.random.default_rng(batch).integers(1000, 10_000, (batch, length)).tolist()


def measure(
    system: str, setups: Mapping[str, Setup], batches: Sequence[int], repeats: int, trace: Path | None = None
) -> Iterator[Message]:
    """Load ``system`` in this process, and measure its variants at each batch size; then look into their steps.

    Args:
        system: its name.
        setups: of each variant, by what tells it from the others; only the options of this engine differ.
        batches: prompts at once.
        repeats: of each measurement.
        trace: a file for a trace of the first variant's steps.
    """
    start = time.perf_counter()
    setup = next(iter(setups.values()))
    cuda = setup.device != "cpu"
    if cuda:
        import torch

        torch.cuda.set_device(torch.device(setup.device).index or 0)
    variants: dict[str, System] = {}
    for variant, make in makers(system, setups).items():
        try:
            variants[variant] = make()
        except Exception as error:
            yield _failed(variant, error)
    if not variants:
        return
    load_s = time.perf_counter() - start
    starts = [one.start_s for one in variants.values() if isinstance(one, FreewheelEngine)]
    load_s -= sum(starts)
    reads = next(iter(variants.values())).reads or Reads(0)
    cache = reads.cache_bytes(setup.prompt, setup.output) if reads.cache else None
    yield Loaded(load_s, sum(starts) if starts else None, reads.weights or None, cache)

    for batch in batches:
        yield from _measure_batch(system, variants, setup, batch, repeats, load_s)
    if not cuda:
        return
    engines = {variant: one for variant, one in variants.items() if isinstance(one, FreewheelEngine)}
    for batch in batches:
        for variant, engine in list(engines.items()):
            try:
                profile = profile_steps(engine, prompts(batch, setup.prompt), setup.output)
            except Exception as error:
                del engines[variant]
                yield _failed(variant, error)
                continue
            if profile:
                yield replace(profile, variant=variant)
    if trace and engines:
        trace_steps(next(iter(engines.values())), prompts(batches[-1], setup.prompt), setup.output, trace)


def _measure_batch(
    system: str, variants: dict[str, System], setup: Setup, batch: int, repeats: int, load_s: float
) -> Iterator[DecodeResult | Failed]:
    """The variants take turns; one that fails is left out from then on."""
    batch_prompts, cuda = prompts(batch, setup.prompt), setup.device != "cpu"
    warmup: dict[str, float] = {}
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
    hosts: dict[str, float | None] = {}

    def seconds(one: System, tokens: int) -> float:
        wait_for(setup.device)
        begin = time.perf_counter()
        counts = one.generate(batch_prompts, tokens)
        if counts != [tokens] * batch:
            raise RuntimeError(f"{system} returned {counts} tokens instead of {tokens} for each prompt")
        return time.perf_counter() - begin

    def warm_up(variant: str, one: System) -> None:
        # On a CUDA device in full: kernels and graphs may depend on the length.
        tokens = (setup.output, SHORT) if cuda else (min(8, setup.output),)
        warmup[variant] = sum(seconds(one, count) for count in tokens)

    def time_once(variant: str, one: System) -> None:
        times[variant].append((seconds(one, SHORT), seconds(one, setup.output)))

    def time_host(variant: str, one: System) -> None:
        if cuda and isinstance(one, FreewheelEngine):
            hosts[variant] = host_seconds(one, batch_prompts, setup.output)

    for action in (warm_up, *[time_once] * repeats, time_host):
        for variant, one in list(variants.items()):
            try:
                action(variant, one)
            except Exception as error:
                del variants[variant]
                yield _failed(variant, error)
    for variant, one in variants.items():
        short = statistics.median(pair[0] for pair in times[variant])
        step = statistics.median((pair[1] - pair[0]) / (setup.output - SHORT) for pair in times[variant])
        host = hosts.get(variant)
        copied = batch * one.copied / 2**20 if isinstance(one, FreewheelEngine) else 0.0
        yield DecodeResult(
            system=system,
            dtype=setup.dtype,
            batch=batch,
            tokens_per_s=batch / step,
            step_ms=step * 1e3,
            prompt_tokens_per_s=batch * setup.prompt / short,
            first_token_ms=short * 1e3,
            load_s=load_s,
            resident_mb=machine.resident_bytes() / 1e6,
            weight_mb=one.reads.weights / 1e6 if isinstance(one, Freewheel | FreewheelEngine) else None,
            device_mb=_reserved_mb() if cuda else None,
            warmup_s=warmup[variant],
            host_us=None if host is None else host * 1e6,
            copied_mib=copied or None,
            variant=variant,
        )


def _failed(variant: str, error: Exception) -> Failed:
    text = str(error).strip().splitlines() or [""]
    return Failed(variant, f"{type(error).__name__}: {text[0]}")


def _reserved_mb() -> float:
    import torch

    return torch.cuda.memory_reserved() / 1e6


def measure_apart(
    system: str, setups: Mapping[str, Setup], batches: Sequence[int], repeats: int, trace: Path | None = None
) -> Iterator[Message]:
    """``measure`` in a fresh process, results as they come; RuntimeError with its last line if it fails."""
    request = {"system": system, "batches": batches, "repeats": repeats, "trace": str(trace) if trace else None}
    request["setups"] = {variant: asdict(setup) for variant, setup in setups.items()}
    command = [sys.executable, "-m", "freewheel.bench.decode", json.dumps(request)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout
        for line in process.stdout:
            if line.startswith(RESULT):
                kind, fields = json.loads(line.removeprefix(RESULT))
                yield MESSAGES[kind](**fields)
        if process.wait():
            errors.seek(0)
            raise RuntimeError((errors.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1])


def main(text: str) -> None:
    """The measuring process."""
    request = json.loads(text)
    request["setups"] = {variant: Setup(**setup) for variant, setup in request["setups"].items()}
    request["trace"] = Path(request["trace"]) if request["trace"] else None
    for message in measure(**request):
        print(RESULT + json.dumps([type(message).__name__, asdict(message)]), flush=True)


class _BothWays(argparse.BooleanOptionalAction):
    """A switch that may be given both ways: a list of what was given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        given = getattr(namespace, self.dest) or []
        setattr(namespace, self.dest, [*given, not option_string.startswith("--no-")])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``freewheel bench decode``."""
    parser.add_argument("--model", help="built-in name, folder or .gguf file (default: smollm2)")
    parser.add_argument(
        "--shape",
        metavar="NAME",
        help=f"in place of a model: random weights of a known shape, {', '.join(SHAPES)}, or of a config.json",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--batch", default="1,8,32", help="batch sizes, separated by commas (default: 1,8,32)")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of each request (default: 128)")
    parser.add_argument("--output", type=int, help="output tokens of each request (default: 64; on CUDA devices 256)")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions; the median counts (default: 3)")
    parser.add_argument(
        "--systems",
        help=f"SYSTEM[:DTYPE], separated by commas; systems: {', '.join(SYSTEMS)} (default: freewheel:auto,"
        "freewheel:float32; on CUDA devices, and for random weights, freewheel)",
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the draws (default: 0, greedy)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="of the draws (default: 0, off)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="of the draws (default: 1, off)")
    engine = parser.add_argument_group(
        "options of this engine",
        "Several draws, or a switch both ways, are measured side by side, in all combinations; the first is what the "
        "others are compared with.",
    )
    engine.add_argument(
        "--draw", help="any of two_level, gumbel and multinomial, separated by commas (default: two_level)"
    )
    engine.add_argument("--lookahead", type=int, metavar="N", help="steps launched ahead (default: the engine's)")
    for name, text in SWITCHES.items():
        engine.add_argument(f"--{name.replace('_', '-')}", action=_BothWays, help=text)
    engine.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="most rows of a step (default: the engine's)"
    )
    engine.add_argument("--kv-cache-memory", type=int, metavar="BYTES", help="for keys and values (default: as needed)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens/s by batch as a PNG; needs matplotlib")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="on CUDA devices: write a Chrome trace of some of this engine's steps at the last batch size",
    )


def run(args: argparse.Namespace) -> None:
    """Measure every system at every batch size, print a table line for each, and write JSON."""
    cuda, systems, batches = _check(args)
    output = args.output or (256 if cuda else 64)
    name = args.shape or args.model or "smollm2"
    model = ""
    if not args.shape:
        from freewheel.models.store import resolve

        model = str(resolve(name))
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    variants = _variants(args, max(batches))
    bandwidth = device_bandwidth(args.device) if cuda else machine.read_bandwidth()
    print(f"machine    {machine.describe()}")
    if cuda:
        print(f"device     {_device_name(args.device)}")
    print(f"bandwidth  {bandwidth / 1e9:.1f} GB/s {'copied, read and written bytes' if cuda else 'read'}, measured now")
    draws = "greedy" if not args.temperature else ", ".join(f"{key} {value:g}" for key, value in sampling.items())
    weights = "random weights of " if args.shape else ""
    print(f"model      {weights}{name}, prompt {args.prompt}, output {output}, {draws}, median of {args.repeats}")
    if not cuda:
        print(f"{'system':24}{'batch':>6}{'tok/s':>9}{'ms/step':>9}{'floor ms':>9}", end="")
        print(f"{'prompt tok/s':>14}{'load s':>8}{'MB now':>8}", flush=True)
    results: list[dict[str, Any]] = []
    for system, dtype in systems:
        label = f"{system}:{dtype}"
        setup = Setup(
            model=model,
            shape=args.shape or "",
            dtype=dtype,
            device=args.device,
            batch=max(batches),
            prompt=args.prompt,
            output=output,
            sampling=sampling,
            engine={},
        )
        setups = {"": setup}
        if system == "freewheel":
            setups = {variant: replace(setup, **options) for variant, options in variants.items()}
        trace = args.trace if system == "freewheel" and not any(r["system"] == "freewheel" for r in results) else None
        mine: dict[tuple[str, int], dict[str, Any]] = {}
        loaded, profiled = None, False
        try:
            for message in measure_apart(system, setups, batches, args.repeats, trace):
                if isinstance(message, Loaded):
                    loaded = message
                    if cuda:
                        print_loaded(label, loaded, batches, bandwidth)
                elif isinstance(message, Failed):
                    print(f"{_named(label, message.variant):24}  failed: {message.error}", flush=True)
                    results.append({"system": system, "dtype": dtype, **asdict(message)})
                elif isinstance(message, DecodeResult):
                    key = message.variant, message.batch
                    floor = floor_seconds(loaded, message.batch, bandwidth, cache=cuda) if loaded else None
                    mine[key] = asdict(message) | {"floor_ms": floor * 1e3 if floor else None}
                    if cuda and loaded:
                        ceiling = message.batch / floor if floor else None
                        share = message.tokens_per_s / ceiling if ceiling else None
                        mine[key] |= asdict(loaded) | {"ceiling_tokens_per_s": ceiling, "share": share}
                    results.append(mine[key])
                    line = _cuda_line(mine[key]) if cuda else _cpu_line(label, mine[key])
                    print(_named(line, message.variant), flush=True)
                else:
                    mine[message.variant, message.batch]["steps"] = asdict(message)
                    if not profiled:
                        print(STEPS_HEADER)
                    profiled = True
                    print(_named(_steps_line(message), message.variant), flush=True)
        except RuntimeError as error:
            print(f"{label:24}  failed: {error}", flush=True)
            results.append({"system": system, "dtype": dtype, "error": str(error)})
        if len(setups) > 1 and mine:
            print_variants(label, list(mine.values()))
    if args.plot:
        plot(results, f"{name}, prompt {args.prompt}, output {output}, {draws}", args.plot)
    if args.json:
        report: dict[str, Any] = {"machine": machine.describe(), "prompt": args.prompt}
        report["copy_bytes_per_s" if cuda else "read_bytes_per_s"] = bandwidth
        report |= {"model": name, "output": output, "repeats": args.repeats, "results": results}
        report |= {"device": _device_name(args.device), "sampling": sampling, "variants": variants}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


CUDA_HEADER = (
    f"{'batch':>7}{'tok/s':>10}{'ms/step':>10}{'floor ms':>10}{'of ceiling':>12}"
    f"{'host us':>9}{'first ms':>10}{'prompt tok/s':>14}{'warm-up s':>11}{'MB':>9}"
)
STEPS_HEADER = (
    f"{'batch':>7}{'kernels':>10}{'copies':>10}{'inside':>9}{'between':>9}{'occupancy':>11}{'longest gap us':>16}"
    f"{'profiled ms/step':>18}"
)


def floor_seconds(loaded: Loaded, batch: int, bandwidth: float, *, cache: bool) -> float | None:
    """Seconds that a step needs to read its weights, and with ``cache`` its cache, at ``bandwidth`` bytes a second."""
    if loaded.weight_bytes is None:
        return None
    return (loaded.weight_bytes + (batch * (loaded.cache_bytes or 0.0) if cache else 0.0)) / bandwidth


def print_loaded(label: str, loaded: Loaded, batches: Sequence[int], bandwidth: float) -> None:
    """The floor, and what heads the lines of a system on a CUDA device."""
    started = "" if loaded.start_s is None else f", engine built in {loaded.start_s:.2f} s"
    print(f"\n{label}  loaded in {loaded.load_s:.2f} s{started}")
    if loaded.weight_bytes is not None and loaded.cache_bytes is not None:
        print(
            f"floor      a step reads {loaded.weight_bytes / 1e6:.1f} MB of weights, and for each token "
            f"{loaded.cache_bytes / 1e6:.2f} MB of keys and values on average"
        )
        for batch in batches:
            floor = floor_seconds(loaded, batch, bandwidth, cache=True)
            assert floor is not None
            print(f"           batch {batch}: {floor * 1e3:.3f} ms a step, at most {batch / floor:.1f} tok/s")
    print(CUDA_HEADER, flush=True)


def _cpu_line(label: str, result: dict[str, Any]) -> str:
    return (
        f"{label:24}{result['batch']:6}{result['tokens_per_s']:9.1f}{result['step_ms']:9.2f}"
        f"{_shown(result['floor_ms'], '.2f'):>9}{result['prompt_tokens_per_s']:14.0f}"
        f"{result['load_s']:8.2f}{result['resident_mb']:8.0f}"
    )


def _cuda_line(result: dict[str, Any]) -> str:
    return (
        f"{result['batch']:7}{result['tokens_per_s']:10.1f}{result['step_ms']:10.3f}"
        f"{_shown(result['floor_ms'], '.3f'):>10}{_shown(result['share'], '.1%'):>12}"
        f"{_shown(result['host_us'], '.0f'):>9}{result['first_token_ms']:10.2f}{result['prompt_tokens_per_s']:14.0f}"
        f"{result['warmup_s']:11.2f}{result['device_mb']:9.0f}"
    )


def _steps_line(steps: StepProfile) -> str:
    return (
        f"{steps.batch:7}{steps.kernels:10.1f}{steps.copies:10.1f}{steps.inside:9.1%}"
        f"{_shown(steps.between, '.1%'):>9}{steps.occupancy:11.1%}"
        f"{steps.longest_gap_us:16.1f}{steps.step_ms:18.3f}"
    )


def _named(line: str, variant: str) -> str:
    return f"{line}  {variant}" if variant else line


def print_variants(label: str, results: Sequence[dict[str, Any]]) -> None:
    """The variants of a system side by side, and each figure over that of the first one of its batch size."""
    print(f"\n{label}, side by side")
    print(
        f"{'batch':>7}{'tok/s':>10}{'times':>8}{'ms/step':>10}{'times':>8}{'first ms':>10}{'times':>8}"
        f"{'copied MiB':>12}  variant"
    )
    firsts: dict[int, dict[str, Any]] = {}
    for result in results:
        first = firsts.setdefault(result["batch"], result)
        columns = ("tokens_per_s", 10, ".1f"), ("step_ms", 10, ".3f"), ("first_token_ms", 10, ".2f")
        figures = "".join(
            f"{result[name]:{width}{form}}{result[name] / first[name]:8.3f}" for name, width, form in columns
        )
        copied = _shown(result["copied_mib"], ".1f")
        print(f"{result['batch']:7}{figures}{copied:>12}  {result['variant']}", flush=True)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def device_bandwidth(device: str) -> float:
    """Bytes a second that a copy on a CUDA device reads and writes; leaves no memory taken."""
    import torch

    from freewheel.bench.timing import bandwidth

    with torch.cuda.device(device):
        try:
            return bandwidth(device)
        finally:
            torch.cuda.empty_cache()


def _device_name(device: str) -> str:
    from freewheel.bench.timing import device_name

    return device_name(device)


def plot(results: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Tokens/s over the batch size, a line for each variant of a system, and the ceiling of each dtype that has one."""
    figure: Any = import_module("matplotlib.figure").Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    done = [result for result in results if "error" not in result]
    ceilings: dict[str, dict[int, float]] = {}
    for label in dict.fromkeys(_label(result) for result in done):
        own = [result for result in done if _label(result) == label]
        points = [(result["batch"], result["tokens_per_s"]) for result in own]
        axes.plot(*zip(*points), marker="o", markersize=4, label=_named(":".join(label[:2]), label[2]))
        limits = {result["batch"]: result["batch"] / result["floor_ms"] * 1e3 for result in own if result["floor_ms"]}
        if limits:
            ceilings.setdefault(label[1], limits)
    for (dtype, limits), style in zip(ceilings.items(), cycle(("--", ":", "-."))):
        axes.plot(list(limits), list(limits.values()), color="grey", ls=style, label=f"ceiling, {dtype}")
    batches = sorted({result["batch"] for result in done})
    axes.set(title=title, xlabel="batch", ylabel="tokens a second", xscale="log", yscale="log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if done:
        axes.legend()
    figure.savefig(path, dpi=150)


def _label(result: dict[str, Any]) -> tuple[str, str, str]:
    return result["system"], result["dtype"], result.get("variant", "")


def _check(args: argparse.Namespace) -> tuple[bool, list[tuple[str, str]], list[int]]:
    """Whether the device is a CUDA device, the systems with their dtypes, and the batch sizes.

    Raises:
        ValueError: options that are wrong, alone or together.
    """
    import torch

    from freewheel.sampling import SamplingParams

    found = re.fullmatch("cuda(?::([0-9]{1,3}))?", args.device)
    if args.device != "cpu" and not (found and int(found[1] or 0) < torch.cuda.device_count()):
        raise ValueError(f"device: {args.device!r} is neither cpu nor a CUDA device that torch can use")
    cuda = args.device != "cpu"
    if args.shape and args.model:
        raise ValueError("shape: random weights take the place of --model")
    if args.shape:
        shape_config(args.shape)
    default = "freewheel" if cuda or args.shape else "freewheel:auto,freewheel:float32"
    systems = []
    for text in (args.systems or default).split(","):
        name, _, dtype = text.partition(":")
        if name not in SYSTEMS:
            raise ValueError(f"systems: unknown system {name!r} (known: {', '.join(SYSTEMS)})")
        if name in ON_CPU and (cuda or args.shape or args.temperature):
            raise ValueError(f"systems: {name} is measured on the CPU, with a model, at temperature 0")
        systems.append((name, dtype or _default_dtype(name, cuda, bool(args.shape))))
    try:
        batches = [int(batch) for batch in args.batch.split(",")]
    except ValueError:
        raise ValueError(f"batch: {args.batch!r} is not a list of whole numbers") from None
    output = SHORT + 1 if args.output is None else args.output
    counts = {"batch": (min(batches), 1), "prompt": (args.prompt, 1), "output": (output, SHORT + 1)}
    for option, (value, least) in {**counts, "repeats": (args.repeats, 1)}.items():
        if value < least:
            raise ValueError(f"{option} must be at least {least}, not {value}")
    SamplingParams(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    if args.trace and not (cuda and any(name == "freewheel" for name, _ in systems)):
        raise ValueError("trace: it shows freewheel's steps on a CUDA device")
    return cuda, systems, batches


def _default_dtype(system: str, cuda: bool, random: bool) -> str:
    if system == "llamacpp":
        return "file"
    if system == "freewheel" and not random:
        return "auto"
    return "bfloat16" if cuda else "float32"


def _variants(args: argparse.Namespace, batch: int) -> dict[str, dict[str, Any]]:
    """The variants of this engine, by what tells each from the others: the fields of :class:`Setup` that were given.

    Raises:
        ValueError: naming the field.
    """
    from freewheel.config import EngineConfig

    single = "lookahead", "max_num_batched_tokens", "kv_cache_memory"
    common = {name: getattr(args, name) for name in single if getattr(args, name) is not None}
    several = {"draw": None if args.draw is None else args.draw.split(",")}
    several |= {name: getattr(args, name) for name in SWITCHES}
    given = {name: list(dict.fromkeys(values)) for name, values in several.items() if values is not None}
    if len(given.get("draw", ())) > 1 and not args.temperature:
        raise ValueError("draw: at temperature 0 nothing is drawn, so there is nothing to compare")
    variants = {}
    for values in product(*given.values()):
        options = dict(zip(given, values))
        varied = [_option(name, value) for name, value in options.items() if len(given[name]) > 1]
        copies = options.pop("float32_logits", False)
        EngineConfig(max_num_seqs=batch, **common, **options)
        variants[", ".join(varied)] = {"engine": common | options, "float32_logits": copies}
    return variants


def _option(name: str, value: str | bool) -> str:
    return value if isinstance(value, str) else f"{'' if value else 'no '}{name.replace('_', ' ')}"


if __name__ == "__main__":
    main(sys.argv[1])
