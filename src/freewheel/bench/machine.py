"""What the machine can do, measured on the spot: the floor that results are printed beside."""

import platform
import statistics
import time
from pathlib import Path


def read_bandwidth(megabytes: int = 512, repeats: int = 7) -> float:
    """Bytes per second at which all torch threads together read memory (median of ``repeats`` sums over a buffer)."""
    import torch

    buffer = torch.ones(megabytes << 18, dtype=torch.float32)
    buffer.sum()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        buffer.sum()
        seconds.append(time.perf_counter() - start)
    return buffer.nbytes / statistics.median(seconds)


def describe() -> str:
    """Processor, cores in use and software versions, in one line."""
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    threads, vectors = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    return f"{cpu}, {threads} threads, {vectors}, torch {torch.__version__}, Python {platform.python_version()}"


def resident_bytes() -> int:
    """Memory that this process holds now; 0 where /proc is missing."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)
