"""``freewheel bench decode``: decode tokens/s beside the floor and beside other systems.

The rate is ``batch * (long - 1) / (t(long) - t(1))`` with ``t(n)`` the wall time to generate ``n`` tokens for every
prompt: the prompt's own time cancels, and every system is measured by the same two calls. Each value is the median over
repetitions, and systems run one after the other in processes of their own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from freewheel.bench import machine
from freewheel.bench.systems import SYSTEMS, Freewheel

SHORT = 1
RESULT = "result: "  # marks a measuring process's lines among what the systems print


@dataclass(frozen=True)
class DecodeResult:
    """One system at one batch size."""

    system: str
    dtype: str
    batch: int
    tokens_per_s: float
    step_ms: float
    prompt_tokens_per_s: float
    load_s: float
    resident_mb: float
    weight_mb: float | None = None


def prompts(batch: int, length: int) -> list[list[int]]:
    """Reproducible prompts that share no prefix, of ids that every vocabulary of more than 10,000 tokens has."""
    import numpy as np

    return np.random.default_rng(batch).integers(1000, 10_000, (batch, length)).tolist()


def measure(
    system: str, model: Path, dtype: str, batches: Sequence[int], prompt: int, output: int, repeats: int
) -> Iterator[DecodeResult]:
    """Load ``system`` in this process, once, and measure it at each batch size."""
    start = time.perf_counter()
    loaded = SYSTEMS[system](model, dtype, max(batches), prompt + output)
    load_s = time.perf_counter() - start
    weights = loaded.llm.weight_bytes / 1e6 if isinstance(loaded, Freewheel) else None

    for batch in batches:
        batch_prompts = prompts(batch, prompt)

        def seconds(tokens: int, batch_prompts: list[list[int]] = batch_prompts) -> float:
            begin = time.perf_counter()
            counts = loaded.generate(batch_prompts, tokens)
            if counts != [tokens] * len(batch_prompts):
                raise RuntimeError(f"{system} returned {counts} tokens instead of {tokens} for each prompt")
            return time.perf_counter() - begin

        seconds(min(8, output))
        times = [(seconds(SHORT), seconds(output)) for _ in range(repeats)]
        short = statistics.median(pair[0] for pair in times)
        step = statistics.median((pair[1] - pair[0]) / (output - SHORT) for pair in times)
        yield DecodeResult(
            system=system,
            dtype=dtype,
            batch=batch,
            tokens_per_s=batch / step,
            step_ms=step * 1e3,
            prompt_tokens_per_s=batch * prompt / short,
            load_s=load_s,
            resident_mb=machine.resident_bytes() / 1e6,
            weight_mb=weights,
        )


def measure_apart(request: dict[str, Any]) -> Iterator[DecodeResult]:
    """``measure`` in a fresh process, results as they come; RuntimeError with its last line if it fails."""
    command = [sys.executable, "-m", "freewheel.bench.decode", json.dumps(request)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout
        for line in process.stdout:
            if line.startswith(RESULT):
                yield DecodeResult(**json.loads(line.removeprefix(RESULT)))
        if process.wait():
            errors.seek(0)
            raise RuntimeError((errors.read().strip().splitlines() or [f"exit status {process.returncode}"])[-1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``freewheel bench decode``."""
    parser.add_argument("--model", default="smollm2", help="built-in name, folder or .gguf file (default: smollm2)")
    parser.add_argument("--batch", default="1,8,32", help="batch sizes, separated by commas (default: 1,8,32)")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of each request (default: 128)")
    parser.add_argument("--output", type=int, default=64, help="output tokens of each request (default: 64)")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions; the median counts (default: 3)")
    parser.add_argument(
        "--systems",
        default="freewheel:auto,freewheel:float32",
        help=f"SYSTEM[:DTYPE], separated by commas; systems: {', '.join(SYSTEMS)} (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")


def run(args: argparse.Namespace) -> None:
    """Measure every system at every batch size, print one table line each, and write JSON."""
    from freewheel.models.store import resolve

    systems = [tuple(name.partition(":")[::2]) for name in args.systems.split(",")]
    for name, _ in systems:
        if name not in SYSTEMS:
            raise ValueError(f"systems: unknown system {name!r} (known: {', '.join(SYSTEMS)})")
    try:
        batches = [int(batch) for batch in args.batch.split(",")]
    except ValueError:
        raise ValueError(f"batch: {args.batch!r} is not a list of whole numbers") from None
    if min(batches) < 1 or args.prompt < 1 or args.output <= SHORT or args.repeats < 1:
        raise ValueError(f"batch, prompt and repeats must be at least 1, output at least {SHORT + 1}")
    model = resolve(args.model)
    bandwidth = machine.read_bandwidth()
    print(f"machine    {machine.describe()}")
    print(f"bandwidth  {bandwidth / 1e9:.1f} GB/s read, measured now")
    print(f"model      {args.model}, prompt {args.prompt}, output {args.output}, greedy, median of {args.repeats}")
    print(f"{'system':24}{'batch':>6}{'tok/s':>9}{'ms/step':>9}{'floor ms':>9}", end="")
    print(f"{'prompt tok/s':>14}{'load s':>8}{'MB now':>8}")
    results: list[dict[str, Any]] = []
    for name, dtype in systems:
        dtype = dtype or ("file" if name == "llamacpp" else "auto" if name == "freewheel" else "float32")
        label = f"{name}:{dtype}"
        request = {"system": name, "model": str(model), "dtype": dtype, "batches": batches}
        request |= {"prompt": args.prompt, "output": args.output, "repeats": args.repeats}
        try:
            for result in measure_apart(request):
                floor = result.weight_mb * 1e9 / bandwidth if result.weight_mb else None
                print(
                    f"{label:24}{result.batch:6}{result.tokens_per_s:9.1f}{result.step_ms:9.2f}"
                    f"{f'{floor:.2f}' if floor else '-':>9}{result.prompt_tokens_per_s:14.0f}"
                    f"{result.load_s:8.2f}{result.resident_mb:8.0f}",
                    flush=True,
                )
                results.append(asdict(result) | {"floor_ms": floor})
        except RuntimeError as error:
            print(f"{label:24}  failed: {error}", flush=True)
            results.append({"system": name, "dtype": dtype, "error": str(error)})
    if args.json:
        report = {"machine": machine.describe(), "read_bytes_per_s": bandwidth, "prompt": args.prompt}
        report |= {"model": args.model, "output": args.output, "repeats": args.repeats, "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given["model"] = Path(given["model"])
    for measured in measure(**given):
        print(RESULT + json.dumps(asdict(measured)), flush=True)
