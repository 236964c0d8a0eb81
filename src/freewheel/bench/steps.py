"""What the decode steps of an engine on a CUDA device take, seen from both sides.

From the host: the time of ``Engine.step()``, the wait for results apart. From the device: how many kernels it runs, and
for which part of the time it runs any. Torch's profiler tells that of a step, but makes launches take three times as
long: how long the device waits between steps is told by events around each graph, without a profiler.
"""

import gc
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from freewheel.bench.systems import FreewheelEngine, wait_for

STEPS = 50
REHEARSED = 5  # steps under a profiler before the one that counts, which then finds itself set up
TRACED = 10
COPIES = ("Memcpy", "Memset")  # how the profiler's names of copies and fills begin
MARK = "spin_kernel"  # in the name of the kernel of :func:`mark`
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")  # calls of the host


@dataclass(frozen=True)
class StepProfile:
    """What the device did in some early steps of decoding.

    Attributes:
        batch: sequences that decode.
        steps: how many steps this is the mean of.
        kernels: launched, a step; copies and fills apart.
        copies: copies and fills, a step.
        occupancy: share of the time in which the device runs anything: ``inside`` times ``between``.
        inside: share of the time in which anything ran: of that in graphs, from the first start of each to its last
            end, or without graphs of all.
        between: share of the time in which a graph ran, or was about to, of other steps, without the profiler; None
            without graphs.
        step_ms: the time from the first start to the last end over the number of steps; the profiler's own cost is in
            it.
        longest_gap_us: in which nothing ran inside a step, or between steps without the profiler.
        kernel_us: microseconds a step by kernel, those that take longest first; side by side they add up to more than
            passes.
        kernel_counts: runs of each a step.
        waits: see :func:`waits_of`.
        variant: of the engine, if there are several.
    """

    batch: int
    steps: int
    kernels: float
    copies: float
    occupancy: float
    inside: float
    between: float | None
    step_ms: float
    longest_gap_us: float
    kernel_us: dict[str, float]
    kernel_counts: dict[str, float]
    waits: float | None = None
    variant: str = ""


@dataclass(frozen=True)
class Activity:
    """A kernel, copy or fill on the device, in nanoseconds; those of a graph have one ``launch`` together."""

    name: str
    start: int
    end: int
    launch: int = 0


@dataclass
class Recorded:
    """What the profiler saw: all that ran on the device, and see :func:`waits_of`."""

    activities: list[Activity] = field(default_factory=list)
    waits: float | None = None


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same points as ``intervals`` (start, end) cover, in intervals that neither touch nor overlap, in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


@dataclass(frozen=True)
class Between:
    """How a series of graphs was fed: share of the time in which one ran or was about to, and the longest gap."""

    share: float
    longest_gap_us: float
    seconds: float = 0.0

    @classmethod
    def over(cls, series: Sequence["Between"]) -> "Between":
        """That of several series together."""
        seconds = sum(one.seconds for one in series)
        share = sum(one.share * one.seconds for one in series) / seconds
        return cls(share, max(one.longest_gap_us for one in series), seconds)


@contextmanager
def graph_events() -> Iterator[list[Any]]:
    """Events before and after each graph of a step that is replayed meanwhile, in turn, and each draw that is in none.

    Graphs that bring messages are no steps.
    """
    import torch

    from freewheel.engine.captured import Captured
    from freewheel.engine.device_runner import DeviceRunner

    events: list[Any] = []

    def marked(launch: Callable[..., Any]) -> Callable[..., Any]:
        def launched(*args: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                return launch(*args)
            around = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            around[0].record()
            left = launch(*args)
            around[1].record()
            events.extend(around)
            return left

        return launched

    replayed = patch.object(Captured, "replay", marked(Captured.replay))
    collects = gc.isenabled()
    gc.disable()  # for events, which are kept, it would look for garbage again and again
    try:
        with replayed, patch.object(DeviceRunner, "_sample", marked(DeviceRunner._sample)):
            yield events
    finally:
        if collects:
            gc.enable()


def between_graphs(events: Sequence[Any]) -> Between | None:
    """What the events around several graphs tell; None if there were not several. The device must have passed them."""
    if len(events) < 4:
        return None
    gaps = [ended.elapsed_time(began) for ended, began in zip(events[1:-1:2], events[2::2], strict=True)]
    milliseconds = events[0].elapsed_time(events[-1])
    return Between(1 - sum(gaps) / milliseconds, max(gaps) * 1e3, milliseconds / 1e3)


@contextmanager
def profiled(device: str) -> Iterator[Recorded]:
    """What happens meanwhile, known at the end."""
    from torch.profiler import ProfilerActivity, profile

    wait_for(device)
    recorded = Recorded()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield recorded
        wait_for(device)
    results = profiler.profiler and profiler.profiler.kineto_results
    assert results is not None
    recorded.activities, recorded.waits = activities_of(results.events()), waits_of(results.events())


def mark(device: str) -> None:
    """Let the profiler see when the device gets here: see :func:`since_mark`."""
    import torch

    with torch.cuda.device(device):
        torch.cuda._sleep(1)  # a kernel that nothing else launches


def since_mark(recorded: Recorded) -> Recorded:
    """Without what ran on the device before the last :func:`mark`; the waits are those of the whole time.

    Raises:
        RuntimeError: there is none.
    """
    marks = [one.start for one in recorded.activities if MARK in one.name]
    if not marks:
        raise RuntimeError("torch's profiler did not see the mark")
    return replace(recorded, activities=[one for one in recorded.activities if one.start > marks[-1]])


def summarise(recorded: Recorded, batch: int, steps: int, between: Between | None = None) -> StepProfile:
    """What ``steps`` steps did on the device, and how others were fed if they are graphs.

    Raises:
        RuntimeError: nothing at all.
    """
    activities = recorded.activities
    if not activities:
        raise RuntimeError("torch's profiler saw nothing on the device")
    launches: dict[int, list[Activity]] = defaultdict(list)
    for one in activities:
        launches[one.launch if between else 0].append(one)
    graphs = [launch for launch in launches.values() if len(launch) > 1] or [list(activities)]
    busy = [union((one.start, one.end) for one in launch) for launch in graphs]
    gaps = [later[0] - earlier[1] for launch in busy for earlier, later in pairwise(launch)]
    inside = 1 - sum(gaps) / sum(launch[-1][1] - launch[0][0] for launch in busy)
    times, counts = Counter[str](), Counter[str]()
    for one in activities:
        times[one.name] += one.end - one.start
        counts[one.name] += 1
    copies = sum(count for name, count in counts.items() if name.startswith(COPIES))
    return StepProfile(
        batch=batch,
        steps=steps,
        kernels=(len(activities) - copies) / steps,
        copies=copies / steps,
        occupancy=inside * (between.share if between else 1.0),
        inside=inside,
        between=between and between.share,
        step_ms=(max(one.end for one in activities) - min(one.start for one in activities)) / steps / 1e6,
        longest_gap_us=max(max(gaps, default=0) / 1e3, between.longest_gap_us if between else 0.0),
        kernel_us={name: time / steps / 1e3 for name, time in times.most_common()},
        kernel_counts={name: counts[name] / steps for name, _ in times.most_common()},
        waits=recorded.waits,
    )


def host_seconds(system: FreewheelEngine, prompts: Sequence[list[int]], output: int) -> float | None:
    """Median seconds that the host takes for a step, the device's work apart.

    Before each step the device is waited for, so that the results which the step reads are there already. That is how
    it can be told from the wait: None where a step reads its own results, without look-ahead, or if ``output`` tokens
    leave no step in which all prompts decode.
    """
    if system.engine.config.lookahead == 0:
        return None
    seconds = []
    for _ in range(min(STEPS, system.start(prompts, output))):
        wait_for(system.device)
        begin = time.perf_counter()
        system.engine.step()
        seconds.append(time.perf_counter() - begin)
    system.drain()
    return statistics.median(seconds) if seconds else None


def profile_steps(system: FreewheelEngine, prompts: Sequence[list[int]], output: int) -> StepProfile | None:
    """Early steps of decoding, or None if ``output`` tokens leave none in which all prompts decode.

    To be used after all timings: the profiler's hooks stay in the process.
    """
    steps = min(STEPS, (system.start(prompts, output) - REHEARSED) // 2)
    if steps < 1:
        system.drain()
        return None
    with graph_events() as events:
        for _ in range(steps):
            system.engine.step()
        wait_for(system.device)
    between = between_graphs(events)
    with profiled(system.device):
        for _ in range(REHEARSED):
            system.engine.step()
    with profiled(system.device) as recorded:
        for _ in range(steps):
            system.engine.step()
    system.drain()
    return summarise(recorded, len(prompts), steps, between)


def activities_of(events: Iterable[Any]) -> list[Activity]:
    """What ran on the device, of the profiler's events."""
    return [
        Activity(event.name(), event.start_ns(), event.start_ns() + event.duration_ns(), event.correlation_id())
        for event in events
        if event.device_type().name == "CUDA" and not event.is_user_annotation()
    ]


def waits_of(events: Iterable[Any]) -> float | None:
    """How often the host called what waits for the device, for each graph that it launched; None if it launched none.

    What came after the last graph does not count, nor do graphs of one kernel, which bring a message.
    """
    events = list(events)
    kernels = Counter(event.correlation_id() for event in events if event.device_type().name == "CUDA")
    launches = [
        event.start_ns()
        for event in events
        if event.name() == "cudaGraphLaunch" and kernels[event.correlation_id()] > 1
    ]
    waits = [event.start_ns() for event in events if event.name() in WAITS]
    return sum(wait < max(launches) for wait in waits) / len(launches) if launches else None


@contextmanager
def traced(device: str, path: Path) -> Iterator[None]:
    """Write a Chrome trace of what happens meanwhile, on host and device."""
    from torch.profiler import ProfilerActivity, profile

    wait_for(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield
        wait_for(device)
    profiler.export_chrome_trace(str(path))


def trace_steps(system: FreewheelEngine, prompts: Sequence[list[int]], output: int, path: Path) -> None:
    """Write a Chrome trace of early steps of decoding, host and device.

    Raises:
        ValueError: ``output`` tokens leave no step in which all prompts decode.
    """
    from torch.profiler import record_function

    steps = min(TRACED, system.start(prompts, output))
    if steps < 1:
        raise ValueError(f"trace: {output} output tokens leave no step in which all prompts decode")
    with traced(system.device, path):
        for _ in range(steps):
            with record_function("Engine.step"):
                system.engine.step()
    system.drain()
