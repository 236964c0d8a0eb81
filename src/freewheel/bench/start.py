"""``freewheel bench start``: from a cold process to the first token, and where the time goes.

Every measurement is a fresh process with a warm model cache and a warm page cache (one run is thrown away first).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from freewheel.bench import machine

FREEWHEEL = [sys.executable, "-m", "freewheel"]


def timed_run(arguments: list[str]) -> tuple[float, str]:
    """Wall seconds and standard output of one ``freewheel`` process; RuntimeError with its last line if it fails."""
    start = time.perf_counter()
    done = subprocess.run([*FREEWHEEL, *arguments], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return seconds, done.stdout


def first_token(model: str, dtype: str) -> dict[str, float]:
    """Seconds of one ``generate`` that stops after its first token, by phase."""
    arguments = ["generate", "Why is the sky blue?", "--model", model, "--dtype", dtype, "--json", "--max-tokens", "1"]
    wall, output = timed_run(arguments)
    spent = json.loads(output)["timings"]
    phases = {"imports": spent["import_s"], "load": spent["load_s"], "prefill": spent["first_token_s"]}
    return phases | {"interpreter and exit": wall - sum(phases.values()), "total": wall}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``freewheel bench start``."""
    parser.add_argument("--models", default="smollm2,gemma3-270m", help="separated by commas (default: %(default)s)")
    parser.add_argument("--dtypes", default="auto,float32", help="separated by commas (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="processes for each figure (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")


def run(args: argparse.Namespace) -> None:
    """Print the medians in milliseconds and write JSON."""
    if args.repeats < 1:
        raise ValueError(f"repeats: {args.repeats} is not at least 1")
    help_s = statistics.median(timed_run(["--help"])[0] for _ in range(args.repeats))
    print(f"machine         {machine.describe()}")
    print(f"freewheel --help  {help_s * 1e3:.0f} ms")
    results: list[dict[str, Any]] = []
    for model in args.models.split(","):
        for dtype in args.dtypes.split(","):
            runs = [first_token(model, dtype) for _ in range(args.repeats + 1)][1:]
            medians = {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
            results.append({"model": model, "dtype": dtype} | medians)
            parts = ", ".join(f"{phase} {seconds * 1e3:.0f}" for phase, seconds in medians.items())
            print(f"{model:12} {dtype:9} ms: {parts}", flush=True)
    if args.json:
        report = {"machine": machine.describe(), "help_s": help_s, "repeats": args.repeats, "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
