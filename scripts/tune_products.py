"""Times the products of a decode step on a CUDA device, for several ways to divide them; see ops/products.py.

    PYTHONPATH=src python scripts/tune_products.py [--shapes qkv,down] [--rows 1,2,4] [--all]

Prints for each shape and number of rows the µs that a product takes in a captured graph, launches chained, beside
cuBLAS alone (without norm, gate and addition) and the time in which its weight is read at 4.2 TB/s; then the best
tiles. Weights take turns, so that none is still in the L2 cache. Kernels are compiled by several processes first.
"""

import argparse
import multiprocessing
from collections.abc import Callable
from itertools import product as combinations
from statistics import median

import torch

from freewheel.ops import products
from freewheel.ops.attention_gpu import Partials
from freewheel.ops.products import Tile

BYTES_PER_US = 4.2e6
TURNS_BYTES = 300 << 20  # of weights, five times an H200's L2 cache

# Qwen3-0.6B: outputs, inputs. "gate_up" has two weights for each output, "attended" adds up four splits of attention.
SHAPES = {
    "qkv": (4096, 1024),
    "output": (1024, 2048),
    "attended": (1024, 2048),
    "gate_up": (3072, 1024),
    "down": (1024, 3072),
    "head": (151_936, 1024),
}


def tiles(name: str, everything: bool) -> list[Tile]:
    """What to try."""
    inputs = SHAPES[name][1]
    tried: list[Tile] = []
    for outputs, (columns, warps) in combinations(
        (1, 2, 4, 8, 16) if everything else (2, 4, 8, 16),
        combinations((256, 512, 1024, 2048), (1, 2, 4, 8))
        if everything
        else ((256, 1), (512, 4), (1024, 4), (1024, 8)),
    ):
        chunks = -(-inputs // columns)
        aheads = range(1, chunks + 1) if everything else {1, chunks}
        tried += [Tile(outputs, columns, ahead, warps) for ahead in aheads]
    return tried


def case(name: str, rows: int, turns: int) -> tuple[Callable[[Tile | None], Callable[[int], object]], Callable]:
    """From a tile to a function that launches the product with the weight of a turn; and cuBLAS's such function."""
    outputs, inputs = SHAPES[name]
    gated, added, normed = name == "gate_up", name in ("output", "attended", "down"), name in ("qkv", "gate_up", "head")
    shape = outputs * (2 if gated else 1), inputs
    weights = [torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(std=0.03) for _ in range(turns)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.float32 if normed else torch.bfloat16)
    narrow = x.bfloat16()
    y = torch.zeros(rows, outputs, device="cuda", dtype=torch.float32 if added else torch.bfloat16)
    norm = torch.ones(inputs, device="cuda") if normed else None
    heads = inputs // 128
    peaks, sums = torch.rand(2, rows, heads, 4, device="cuda")
    partials = Partials(peaks, sums, torch.randn(rows, heads, 4, 128, device="cuda"))

    def ours(tile: Tile | None) -> Callable[[int], object]:
        if name == "attended":
            return lambda turn: products.combine_product(y, partials, weights[turn], add=True, chained=True, tile=tile)
        return lambda turn: products.product(
            y, x, weights[turn], norm=norm, eps=1e-6, activation="silu" if gated else None, add=added, chained=True,
            tile=tile,
        )  # fmt: skip

    return ours, lambda turn: torch.mm(narrow, weights[turn].T)


def compiled(name: str, rows: int, tile: Tile) -> str | None:
    """Launches the product once, which leaves its kernel in Triton's cache; what went wrong, if anything did."""
    try:
        case(name, rows, 1)[0](tile)(0)
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say: the others are still worth a look
        return f"{type(error).__name__}: {str(error)[:80]}"
    return None


def microseconds(launch: Callable[[int], object], turns: int) -> float:
    """Of one launch, from a graph of a launch for each turn."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(turns):
            launch(turn)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / turns)
    return median(times[1:])


def measure(name: str, rows: int, tried: list[Tile]) -> None:
    """Prints the lines of one shape."""
    outputs, inputs = SHAPES[name]
    nbytes = 2 * inputs * outputs * (2 if name == "gate_up" else 1)
    turns = max(TURNS_BYTES // nbytes, 2)
    ours, cublas = case(name, rows, turns)
    results = sorted((microseconds(ours(tile), turns), tile) for tile in tried)
    print(
        f"{name:8s} rows {rows:2d}  floor {nbytes / BYTES_PER_US:7.2f}  cuBLAS {microseconds(cublas, turns):7.2f}"
        f"  default {microseconds(ours(None), turns):7.2f}"
    )
    for taken, tile in results[:3]:
        print(f"    {taken:7.2f}  {tuple(tile)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="comma-separated")
    parser.add_argument("--rows", default="1,2,4", help="comma-separated")
    parser.add_argument("--all", action="store_true", help="many more tiles")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    options = parser.parse_args()
    chosen = [(name, int(rows)) for name in options.shapes.split(",") for rows in options.rows.split(",")]
    tried = [(name, rows, tile) for name, rows in chosen for tile in tiles(name, options.all)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        failures = dict(zip(tried, pool.starmap(compiled, tried, chunksize=4)))
    for attempt, failure in failures.items():
        if failure:
            print(*attempt[:2], tuple(attempt[2]), failure)
    print(torch.cuda.get_device_name(), "µs; tiles are (outputs, columns, ahead, warps)", flush=True)
    for name, rows in chosen:
        measure(name, rows, [tile for tile in tiles(name, options.all) if not failures[name, rows, tile]])


if __name__ == "__main__":
    main()
