"""How long a call on logits takes the device and the host, and what it launches."""

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import TYPE_CHECKING, Any

from freewheel.bench import machine

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[["Tensor"], Any]

CALLS = 12


def median_times(calls: Mapping[str, Call], buffers: "Tensor", rounds: int) -> dict[str, tuple[float, bool]]:
    """For each name the median over rounds, all taking turns, of what :func:`timed` measures; and its other result."""
    import torch

    with torch.inference_mode():
        timers = {name: timed(call, buffers) for name, call in calls.items()}
        seconds = [{name: timer() for name, (timer, _) in timers.items()} for _ in range(rounds)]
    return {name: (statistics.median(one[name] for one in seconds), graph) for name, (_, graph) in timers.items()}


def timed(call: Call, buffers: "Tensor") -> tuple[Callable[[], float], bool]:
    """A function that measures the seconds of one call on logits [buffers, batch, vocab], each in turn, and whether it
    replays a CUDA graph of these calls. If not, the device is waited for after each call."""
    if buffers.is_cuda and (graph := captured(call, buffers)):
        return _warm(lambda: _replay(graph) / len(buffers)), True
    turns = cycle(buffers.unbind())

    def measure() -> float:
        seconds = []
        for _ in range(CALLS):
            logits = next(turns)
            start = time.perf_counter()
            call(logits)
            _wait(logits)
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    return _warm(measure), False


def _warm(measure: Callable[[], float]) -> Callable[[], float]:
    measure()
    return measure


def captured(call: Call, buffers: "Tensor") -> Any:
    """A CUDA graph of one call on each buffer, or None for a call that waits for the device."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for logits in buffers[:8]:  # a kernel may be compiled for each alignment
            call(logits)
        torch.cuda.set_sync_debug_mode("error")  # a capture that fails would leave torch's generator unusable
        try:
            call(buffers[0])
        except RuntimeError:
            return None
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for logits in buffers:
                call(logits)
    except RuntimeError:
        return None
    return graph


def _replay(graph: Any) -> float:
    """Median seconds of a replay."""
    import torch

    milliseconds = []
    for _ in range(CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return statistics.median(milliseconds) / 1e3


def host_time(call: Call, buffers: "Tensor") -> float:
    """Seconds until an eager call returns: so few calls between two waits that the device's queue never fills."""
    import torch

    turns, seconds = cycle(buffers.unbind()), []
    with torch.inference_mode():
        for _ in range(5 * CALLS):  # the host's clock moves more than the device's
            _wait(buffers)
            start = time.perf_counter()
            for _ in range(CALLS):
                call(next(turns))
            seconds.append((time.perf_counter() - start) / CALLS)
        _wait(buffers)
    return statistics.median(seconds)


def count_launches(call: Call, logits: "Tensor") -> int:
    """Kernels that an eager call launches, copies and fills apart.

    To be used after all timings: the profiler's hooks stay in the process.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    with torch.inference_mode():
        call(logits)
        _wait(logits)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            call(logits)
            _wait(logits)
    names = [event.name for event in profiler.events() or [] if event.device_type.name == "CUDA"]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


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
    copy, _ = timed(buffers[0].copy_, buffers[1:])
    return 2 * buffers[0].nbytes / min(copy() for _ in range(5))


def device_name(device: str) -> str:
    """What a CUDA device calls itself."""
    if device == "cpu":
        return device
    import torch

    return torch.cuda.get_device_name(device)
