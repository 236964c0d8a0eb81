"""``freewheel bench sampler --bytes``: what a call of the sampler reads and writes, as the GPU itself counts it.

NVIDIA's ncu (Nsight Compute) reads the counters after each kernel, before which it empties the caches; this module runs
under it as a program of its own. They count what moves between the GPU's cores and its L2 cache, in sectors of 32
bytes: not what a core finds in its own L1 cache, and no atomic operations.
"""

import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from freewheel.bench.draws import CASES, TEMPERATURE, Fields, cases_of, freewheel_draw, workloads
from freewheel.bench.logits import random_logits, read_recording, recorded_logits

COUNTED: dict[str, Fields] = {**CASES, "log probabilities": {**TEMPERATURE, "logprobs": 5}}
SECTOR = 32
READ, WRITTEN = (f"lts__t_sectors_srcunit_tex_op_{way}.sum" for way in ("read", "write"))
MARKER = "spin_kernel"  # torch.cuda._sleep's, launched ahead of each call


@dataclass(frozen=True)
class Traffic:
    """Bytes."""

    read: float
    written: float


@dataclass(frozen=True)
class BytesResult:
    """Bytes of a call divided by its rows: of one row's logits, which is the floor, of all kernels, and of each."""

    case: str
    vocab: int
    batch: int
    logits: int
    total: Traffic
    kernels: dict[str, Traffic]


def find_ncu() -> str:
    """Where ncu is. Raises ValueError if it is nowhere."""
    ncu = shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")
    if ncu is None:
        raise ValueError(
            "bytes: NVIDIA's ncu is neither on the PATH nor in /usr/local/cuda/bin; install Nsight Compute, which is "
            "a part of the CUDA toolkit"
        )
    return ncu


def count(ncu: str, vocab: int, batch: int, dtype: str, device: str, recording: Path | None) -> list[BytesResult]:
    """One call of the sampler for each case, on random logits or those of a recording.

    Raises:
        RuntimeError: ncu could not count; its reason is in the message.
    """
    import torch

    options = ["--profile-from-start", "off", "--clock-control", "none", "--csv", "--print-units", "base"]
    program = [sys.executable, "-m", "freewheel.bench.counters", str(vocab), str(batch), dtype, device]
    command = [ncu, *options, "--metrics", f"{READ},{WRITTEN}", *program, *([str(recording)] if recording else [])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    cases, calls = [case for case, _ in cases_of(COUNTED, batch)], parse(done.stdout)
    if done.returncode or len(calls) != len(cases):
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        reasons = dict.fromkeys([line for line in lines if line.startswith("==ERROR==")] + lines[-1:])
        raise RuntimeError(f"bytes: {ncu} counted {len(calls)} of {len(cases)} calls: {' '.join(reasons)}")
    logits, results = vocab * getattr(torch, dtype).itemsize, []
    for case, call in zip(cases, calls):
        kernels = {name: Traffic(one.read / batch, one.written / batch) for name, one in call.items()}
        total = Traffic(sum(one.read for one in kernels.values()), sum(one.written for one in kernels.values()))
        results.append(BytesResult(case, vocab, batch, logits, total, kernels))
    return results


def parse(output: str) -> list[dict[str, Traffic]]:
    """What the kernels of each call read and wrote, by name, from ncu's output: lines of all kinds, then a CSV table.

    Raises:
        RuntimeError: the GPU lacks these counters.
    """
    _, header, table = output.partition('"ID",')
    calls: list[dict[str, Traffic]] = []
    rows = csv.DictReader(line for line in (header + table).splitlines() if line.startswith('"'))
    for _, kernel in groupby(rows, itemgetter("ID")):
        one, *others = kernel
        found = re.search(r"(\w+)([<(]|$)", one["Kernel Name"])  # a name in C++ has types and arguments as well
        name = found[1] if found else one["Kernel Name"]
        if name == MARKER:
            calls.append({})
        elif calls:
            sectors = {row["Metric Name"]: row["Metric Value"].replace(",", "") for row in (one, *others)}
            if not all(sectors.get(metric, "").isdecimal() for metric in (READ, WRITTEN)):
                raise RuntimeError(f"bytes: this GPU does not count {READ} and {WRITTEN}, but {sectors}")
            read, written = (SECTOR * int(sectors[metric]) for metric in (READ, WRITTEN))
            before = calls[-1].get(name, Traffic(0, 0))
            calls[-1][name] = Traffic(before.read + read, before.written + written)
    return calls


def print_counts(results: Iterable[BytesResult]) -> list[BytesResult]:
    """A table line for each result, as it comes, and below it one for each of its kernels.

    Its last column is what is read and written together over the logits.
    """
    sizes = f"{'vocab':>8}{'batch':>6}{'logits':>10}"
    print(f"{'case and its kernels':34}{sizes}{'read':>12}{'written':>10}{'x logits':>10}")
    done = []
    for result in results:
        lines = [(f"{result.case:34}{result.vocab:8}{result.batch:6}{result.logits:10}", result.total)]
        lines += [(f"  {name:56}", traffic) for name, traffic in result.kernels.items()]
        for start, traffic in lines:
            ratio = (traffic.read + traffic.written) / result.logits
            print(f"{start}{traffic.read:12.0f}{traffic.written:10.0f}{ratio:10.3f}", flush=True)
        done.append(result)
    return done


def main(vocab: str, batch: str, dtype: str, device: str, recording: str | None = None) -> None:
    """Under ncu: make a call for each case, after one on other logits that isn't counted."""
    import torch

    if recording:
        logits = recorded_logits(read_recording(Path(recording)).rows, int(batch), dtype, device)
    else:
        logits = random_logits(int(batch), int(vocab), dtype, device)
    draws = [draw for _, made in workloads({"": freewheel_draw}, logits[0], COUNTED) for draw in made.values()]
    with torch.inference_mode(), torch.cuda.device(logits.device):
        for draw in draws:
            draw(logits[0])
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            for draw in draws:
                torch.cuda._sleep(1)
                draw(logits[1])
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
