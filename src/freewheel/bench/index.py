"""``freewheel bench index``: what it takes to index a step's token and to draft, by the length of the context.

The text is the worst that can be: of so few tokens that every pair has been seen often, and candidates are always
found, as many as are ever looked at. On a device a step is a captured graph, as a part of which it runs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from freewheel.bench import machine

ALPHABET = 32
STEPS = 200
NODES = 8  # of a draft


@dataclass(frozen=True)
class IndexResult:
    """An index of ``length`` tokens.

    Attributes:
        device: what it lies on, "cpu" for the host's.
        fill_us: to index one of the first tokens, many at a time.
        step_us: to index one more and draft ``NODES`` tokens, median on the host, mean on a device.
        bytes_per_token: of memory.
    """

    device: str
    length: int
    fill_us: float
    step_us: float
    bytes_per_token: float


def measure_host(length: int) -> IndexResult:
    """One sequence's index on the host."""
    import numpy as np

    from freewheel.speculative import NgramIndex, draft

    tokens = np.random.default_rng(0).integers(0, ALPHABET, length).tolist()
    index, seconds = NgramIndex(length), []
    begin = time.perf_counter()
    index.extend(tokens[:-STEPS])
    fill = time.perf_counter() - begin
    for token in tokens[-STEPS:]:
        begin = time.perf_counter()
        index.extend([token])
        draft(index, width=1, depth=NODES, nodes=NODES)
        seconds.append(time.perf_counter() - begin)
    held = sum(array.nbytes for array in (index.tokens, index.heads, index.previous))
    return IndexResult("cpu", length, fill / (length - STEPS) * 1e6, statistics.median(seconds) * 1e6, held / length)


def measure_device(device: str, length: int) -> IndexResult:
    """One slot's index on a CUDA device; the tokens are there anyhow, and do not count as its memory."""
    import torch

    from freewheel.speculative.device import DeviceIndex, make_trees

    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, ALPHABET, (1, length), generator=generator).to(device)
    lengths = torch.zeros(1, dtype=torch.int64, device=device)
    index, trees = DeviceIndex(history, lengths), make_trees(1, NODES, device)
    slots, nodes = (torch.full((1,), value, dtype=torch.int64, device=device) for value in (0, NODES))

    def step() -> None:
        lengths.add_(1)
        index.extend(slots)
        index.draft(slots, nodes, nodes, trees, width=1)

    began, filled, ended = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    lengths.fill_(10)
    index.extend(slots, many=True)
    step()  # compiles the kernels
    graph, warm = torch.cuda.CUDAGraph(), 11
    torch.cuda.synchronize(device)
    with torch.cuda.graph(graph):
        step()
    began.record()
    lengths.fill_(length - NODES - STEPS)
    index.extend(slots, many=True)
    filled.record()
    for _ in range(STEPS):
        graph.replay()
    ended.record()
    torch.cuda.synchronize(device)
    held = index.tables.heads.nbytes + index.tables.previous.nbytes
    fill = began.elapsed_time(filled) / (length - NODES - STEPS - warm)
    return IndexResult(device, length, fill * 1e3, filled.elapsed_time(ended) / STEPS * 1e3, held / length)


def results(device: str, lengths: list[int]) -> Iterator[IndexResult]:
    """For each length that of the host, then that of the device."""
    for length in lengths:
        yield measure_host(length)
        if device != "cpu":
            yield measure_device(device, length)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``freewheel bench index``."""
    parser.add_argument("--device", default="cpu", help="cpu, or cuda or cuda:N as well (default: %(default)s)")
    parser.add_argument(
        "--lengths", default="1024,8192,32768,131072", help="tokens, separated by commas (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")


def run(args: argparse.Namespace) -> None:
    """Print a line for each length and device, and write JSON."""
    try:
        lengths = [int(length) for length in args.lengths.split(",")]
    except ValueError:
        raise ValueError(f"lengths: {args.lengths!r} is not a list of whole numbers") from None
    if min(lengths) < 2 * STEPS:
        raise ValueError(f"lengths: {min(lengths)} is less than {2 * STEPS}")
    print(f"machine    {machine.describe()}")
    print(f"{'device':10}{'length':>9}{'fill us/token':>15}{'step us':>10}{'bytes/token':>13}")
    told = []
    for result in results(args.device, lengths):
        told.append(asdict(result))
        print(
            f"{result.device:10}{result.length:9}{result.fill_us:15.3f}{result.step_us:10.1f}"
            f"{result.bytes_per_token:13.1f}",
            flush=True,
        )
    if args.json:
        report = {"machine": machine.describe(), "alphabet": ALPHABET, "nodes": NODES, "results": told}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
