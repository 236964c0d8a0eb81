"""``freewheel bench serve``: how fast a server with OpenAI's interface answers a load.

It aims at any server (``--url``), or starts one of this engine. Clients send requests in turn (``--concurrency``) or at
random times (``--request-rate``), in processes of their own; what they can do themselves is measured beforehand, by a
server that answers at once, and printed with the result: no latency is better than that.

Terms: TTFT, time to the first token, connecting included. TPOT, time per output token: of one request, from its first
token to its last, over the tokens that came after the first arrival. ITL, inter-token latency: k tokens that arrive
together after a gap g count as k latencies of g / k. Gap: between arrivals, whatever came. E2EL: until a reply's end.
Throughput is that of requests that ended well, from when the first is sent until the last has ended.

``--compare`` and ``--compare-body`` measure two sides by the same load in turns, the first one changing, after a turn
of each that does not count. What is told of them is the median over turns, and of their ratio the median over pairs.
"""

import argparse
import http.client
import json
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from freewheel.bench import machine
from freewheel.bench.client import UNFINISHED, Address, Load, Outcome, Traffic, drive
from freewheel.bench.served import Options, instant_server, offline_engine, own_server
from freewheel.bench.shapes import SHAPES, shape_config
from freewheel.bench.timing import device_name
from freewheel.bench.workloads import WORKLOADS, Body, Shape, bodies, fitted

PERCENTILES = (50, 90, 99)
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "gap": "gap", "e2el": "E2EL"}
LIMITED = ("ttft", "tpot", "e2el")
SAMPLING: dict[str, tuple[type, str]] = {
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "1 is off"),
    "top_k": (int, "0 is off"),
    "min_p": (float, "0 is off"),
    "seed": (int, "of the first request, one more for each that follows"),
}
# Optimisation 4 of those that other engines published: no float32 copy of the logits where no request needs one.
PUBLISHED = {"request_rate": 11.3, "ttft": -8.7, "tpot": -7.4, "e2el": -8.6}
PUBLISHED_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
CALIBRATION_TOKENS = 64


@dataclass(frozen=True)
class Latency:
    """Milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True)
class Failure:
    """How often a kind of failure was met, and what was said the first time."""

    count: int
    message: str


@dataclass(frozen=True)
class Pulse:
    """Of ``/health``, asked at fixed times: how long after its time each answer came."""

    pings: int
    failed: int
    latency: Latency | None


@dataclass(frozen=True)
class Result:
    """A load's figures. Rates and latencies are of the requests that ended well.

    Attributes:
        seconds: from when the first request is sent until the last has ended.
        completed, unfinished: requests that ended well, and that nobody waited for.
        failures: by kind.
        input_tokens, cached_tokens: None where the server counts none.
        counted: share of the requests of which the server told how many tokens a chunk has; else each counts as one.
        streams: requests at a time, on average.
        goodput: requests a second within the limits, if there are any.
        latencies: by their short names.
        busy: share of its time that the busiest client process was at work.
        late_ms: most that a request was sent after its time.
        pulse: of the server's health, if it was asked.
        outcomes: of all requests, failed ones among them: seconds from the beginning, tokens, failure.
    """

    seconds: float
    completed: int
    unfinished: int
    failures: dict[str, Failure]
    request_rate: float
    input_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    input_token_rate: float | None
    output_token_rate: float
    counted: float
    streams: float
    goodput: float | None
    latencies: dict[str, Latency | None]
    busy: float
    late_ms: float
    pulse: Pulse | None = None
    outcomes: list[dict[str, Any]] = field(default_factory=list, repr=False)


def latency(seconds: Sequence[float], counts: Sequence[int] | None = None) -> Latency | None:
    """Of values, each as often as it counts; None if there are none. Percentiles are interpolated linearly."""
    import numpy as np

    values = np.asarray(seconds, dtype=float) * 1e3
    if counts is not None:
        values = np.repeat(values, counts)
    if not len(values):
        return None
    middle, p90, p99 = (float(value) for value in np.percentile(values, PERCENTILES))
    return Latency(float(values.mean()), middle, p90, p99, float(values.max()))


def gaps(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """Seconds before each arrival after a request's first, and the tokens that came then."""
    return [
        (now - before, count)
        for outcome in outcomes
        for (before, _), (now, count) in zip(outcome.arrivals, outcome.arrivals[1:])
    ]


def samples(outcomes: Sequence[Outcome]) -> dict[str, tuple[list[float], list[int] | None]]:
    """Seconds of each kind of latency, and how often each of them counts."""
    between = gaps(outcomes)
    return {
        "ttft": ([outcome.ttft for outcome in outcomes], None),
        "tpot": ([outcome.tpot for outcome in outcomes if outcome.tpot is not None], None),
        "itl": ([gap / count for gap, count in between], [count for _, count in between]),
        "gap": ([gap for gap, _ in between], None),
        "e2el": ([outcome.e2el for outcome in outcomes], None),
    }


def summarise(traffic: Traffic, limits: Mapping[str, float] | None = None, pulse: Pulse | None = None) -> Result:
    """The figures of a load.

    Args:
        traffic: what came of it.
        limits: milliseconds by the names of latencies, for the goodput.
        pulse: of the server meanwhile.
    """
    outcomes = sorted(traffic.outcomes, key=lambda outcome: outcome.start)
    done = [outcome for outcome in outcomes if outcome.failure is None]
    begin = min((outcome.start for outcome in outcomes), default=0.0)
    seconds = max((outcome.end for outcome in outcomes), default=0.0) - begin or 1e-9  # of none
    failures: dict[str, Failure] = {}
    for outcome in outcomes:
        if outcome.failure not in (None, UNFINISHED):
            known = failures.get(outcome.failure, Failure(0, outcome.message))
            failures[outcome.failure] = replace(known, count=known.count + 1)

    def total(name: str) -> int | None:
        counts = [getattr(outcome, name) for outcome in done]
        return None if None in counts or not counts else sum(counts)

    def fits(outcome: Outcome) -> bool:
        values = ((getattr(outcome, name), limit) for name, limit in (limits or {}).items())
        return all(value is None or value * 1e3 <= limit for value, limit in values)

    tokens, prompts = sum(outcome.tokens for outcome in done), total("input_tokens")
    return Result(
        seconds=seconds,
        completed=len(done),
        unfinished=sum(outcome.failure == UNFINISHED for outcome in outcomes),
        failures=failures,
        request_rate=len(done) / seconds,
        input_tokens=prompts,
        cached_tokens=total("cached_tokens"),
        output_tokens=tokens,
        input_token_rate=None if prompts is None else prompts / seconds,
        output_token_rate=tokens / seconds,
        counted=sum(outcome.counted for outcome in done) / len(done) if done else 0.0,
        streams=sum(outcome.e2el for outcome in outcomes) / seconds,
        goodput=sum(map(fits, done)) / seconds if limits else None,
        latencies={name: latency(*values) for name, values in samples(done).items()},
        busy=traffic.busy,
        late_ms=traffic.late * 1e3,
        pulse=pulse,
        outcomes=[_described(outcome, begin) for outcome in outcomes],
    )


def _described(outcome: Outcome, begin: float) -> dict[str, Any]:
    """An outcome for the report."""
    return {
        "start": outcome.start - begin,
        "ttft": outcome.ttft if outcome.arrivals else None,
        "e2el": outcome.e2el,
        "input_tokens": outcome.input_tokens,
        "output_tokens": outcome.tokens,
        "failure": outcome.failure,
    }


class Heartbeat:
    """Asks a server for its health at fixed times, in a thread. An answer's latency counts from when it was due, so
    that one that takes long shows in all that should have been asked meanwhile.

    Args:
        address: of the server.
        every: seconds.
    """

    def __init__(self, address: Address, every: float) -> None:
        self._address, self._every = address, every
        self._latencies: list[float] = []
        self._failed = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def result(self) -> Pulse:
        """What was seen."""
        return Pulse(len(self._latencies) + self._failed, self._failed, latency(self._latencies))

    def _run(self) -> None:
        kind = http.client.HTTPSConnection if self._address.secure else http.client.HTTPConnection
        connection = kind(self._address.host, self._address.port, timeout=60)
        due = time.perf_counter()
        while not self._stop.wait(max(0.0, due - time.perf_counter())):
            try:
                connection.request("GET", self._address.path.removesuffix("/v1") + "/health")
                reply = connection.getresponse()
                reply.read()
                well = reply.status == 200
            except (OSError, http.client.HTTPException):
                connection.close()
                well = False
            if well:
                self._latencies.append(time.perf_counter() - due)
            else:
                self._failed += 1
            due += self._every
        connection.close()


@dataclass(frozen=True)
class Calibration:
    """What the clients take by themselves.

    Attributes:
        first_ms: until the first token of a request that is alone, median.
        chunks_per_s: that all of them together took in, at full load.
        chunk_us: of a client process for each.
    """

    first_ms: float
    chunks_per_s: float
    chunk_us: float


def calibrate(processes: int, concurrency: int) -> Calibration:
    """Let the clients read from a server that answers at once."""
    with instant_server() as url:
        address = Address.of(url)
        request = address.post("/completions", {"max_tokens": CALIBRATION_TOKENS}, None)
        alone = summarise(drive(Load(address, [request] * 50)))
        traffic = drive(Load(address, [request] * max(256, 4 * concurrency), concurrency), processes)
    full = summarise(traffic)
    first = alone.latencies["ttft"]
    if alone.failures or full.failures or first is None:
        raise RuntimeError(f"the clients do not work: {full.failures or alone.failures}")
    rate = full.output_token_rate
    return Calibration(first.median, rate, traffic.busy * processes / rate * 1e6)


@dataclass(frozen=True)
class Side:
    """One of what is compared: a name, and what runs bodies there, under a title, to be counted or not."""

    name: str
    run: Callable[[Sequence[Body], str, bool], tuple[Traffic, Pulse | None]]


@dataclass(frozen=True)
class Plan:
    """How bodies are sent; see :func:`add_arguments`.

    Attributes:
        common: what bodies have that have none of their own.
        extra: what all of them have, whatever their own is.
        due: when each is sent; None: by ``concurrency``.
        heartbeat: seconds between questions for the server's health; None: none.
    """

    endpoint: str
    common: Body
    extra: Body
    key: str | None
    concurrency: int
    due: list[float] | None
    duration: float | None
    timeout: float
    processes: int
    seed: int | None
    heartbeat: float | None

    def body(self, number: int, body: Body) -> Body:
        """The whole body of a request."""
        seeds = {} if self.seed is None else {"seed": self.seed + number}
        return {**self.common, **seeds, **body, **self.extra}

    def send(self, address: Address, several: Sequence[Body], title: str, counts: bool) -> tuple[Traffic, Pulse | None]:
        """Send bodies to a server. What does not count is sent in turn, once."""
        path = "/chat/completions" if self.endpoint == "chat" else "/completions"
        requests = [address.post(path, self.body(number, body), self.key) for number, body in enumerate(several)]
        due, duration = (self.due, self.duration) if counts else (None, None)
        load = Load(address, requests, self.concurrency, due, duration, self.timeout)
        if self.heartbeat is None or not counts:
            return drive(load, self.processes, title), None
        with Heartbeat(address, self.heartbeat) as heartbeat:
            traffic = drive(load, self.processes, title)
        return traffic, heartbeat.result()


def arrivals(rate: float, burstiness: float, seed: int, count: int, duration: float | None) -> list[float]:
    """Seconds at which requests are due: intervals are gamma distributed, of shape ``burstiness`` and mean 1 / rate. 1
    makes a Poisson process, less makes bursts.

    So many, or as many as the duration holds.
    """
    rng = random.Random(seed)
    gap: Iterator[float] = iter(lambda: rng.gammavariate(burstiness, 1 / (rate * burstiness)), None)
    times = accumulate(gap, initial=0.0)
    if duration is None:
        return [next(times) for _ in range(count)]
    made = []
    for due in times:
        if due >= duration:
            break
        made.append(due)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``freewheel bench serve``, apart from those of models and of speculation."""
    server = parser.add_argument_group(
        "server", "With --url any server; else one of this engine is started and stopped."
    )
    server.add_argument("--url", help="where a server is, like http://127.0.0.1:8000/v1")
    server.add_argument("--api-key", metavar="KEY", help="to send with each request")
    server.add_argument("--served-model-name", metavar="NAME", help="of the model (default: the first that there is)")
    server.add_argument(
        "--shape", metavar="NAME",
        help=f"in place of a model: random weights of {', '.join(SHAPES)}, or of a config.json",
    )  # fmt: skip
    server.add_argument(
        "--max-num-seqs", type=int, metavar="N",
        help="most sequences at once (default: --concurrency; 32 with --request-rate)",
    )  # fmt: skip
    server.add_argument(
        "--prefix-caching", action=argparse.BooleanOptionalAction,
        help="reuse what prompts share (default: on, but off where sides are compared: turns measure the same work)",
    )  # fmt: skip
    server.add_argument("--float32-logits", action="store_true", help="copy the logits to float32 before each draw")

    load = parser.add_argument_group("load")
    load.add_argument(
        "--endpoint", choices=["completions", "chat"], default="completions", help="(default: %(default)s)"
    )
    load.add_argument(
        "--workload", choices=WORKLOADS, default="random",
        help="random prompts; with few beginnings; bodies from --dataset; or prompts whose answers repeat them",
    )  # fmt: skip
    load.add_argument("--dataset", type=Path, metavar="FILE", help="a body a line, with a prompt or messages, and more")
    for name, default, text in (
        ("input-len", 128, "tokens (or words) of a prompt"),
        ("output-len", 128, "tokens of an answer, at most"),
        ("prefix-groups", 8, "beginnings that prompts share"),
        ("prefix-len", 512, "tokens of these, beside those of the rest"),
        ("vocab-size", 10_000, "token ids are below N"),
        ("load-seed", 0, "of prompts, lengths and times"),
        ("num-requests", 128, "requests to send"),
    ):
        load.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    load.add_argument(
        "--range-ratio", type=float, default=0.0, metavar="R",
        help="lengths are as likely to be up to this share shorter or longer (default: %(default)s)",
    )  # fmt: skip
    load.add_argument("--words", action="store_true", help="random prompts are words, not token ids; so in chats")
    load.add_argument("--concurrency", type=int, default=8, metavar="N", help="clients at once (default: %(default)s)")
    load.add_argument("--request-rate", type=float, metavar="R", help="instead: requests a second, at random times")
    load.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X", help="of these: 1 is Poisson, less is burstier"
    )
    load.add_argument("--duration", type=float, metavar="S", help="send for S seconds, from the first again if need be")
    load.add_argument(
        "--warmup", type=int, metavar="N", help="requests before, uncounted (default: as clients at once)"
    )
    load.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for a reply (default: %(default)s)")
    load.add_argument("--processes", type=int, default=1, metavar="N", help="of clients (default: %(default)s)")
    load.add_argument(
        "--calibrate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the clients first (default: on)",
    )

    body = parser.add_argument_group("requests", "What is not given is left to the server.")
    for name, (kind, text) in SAMPLING.items():
        body.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text)
    body.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    body.add_argument("--extra-body", type=_object, metavar="JSON", default={}, help="more fields of every request")
    body.add_argument(
        "--continuous-usage", action="store_true",
        help="have the server tell how many tokens each chunk has; else each counts as one",
    )  # fmt: skip

    report = parser.add_argument_group("report")
    report.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS", default=[],
        help=f"count requests within these limits; names: {', '.join(LIMITED)}",
    )  # fmt: skip
    report.add_argument(
        "--heartbeat", type=float, nargs="?", const=50.0, metavar="MS", help="ask for /health meanwhile (every 50 ms)"
    )
    report.add_argument(
        "--compare", choices=["float32-logits", "offline"],
        help="this engine's server with one that copies the logits, or with the engine offline",
    )  # fmt: skip
    report.add_argument(
        "--compare-body", type=_object, metavar="JSON", help="compare with requests that have these fields as well"
    )
    report.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="turns of a comparison (default: %(default)s)"
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    report.add_argument("--plot", type=Path, metavar="FILE", help="draw latencies as a PNG; needs matplotlib")


def _object(text: str) -> Body:
    value = json.loads(text)  # argparse names the option of a ValueError
    if not isinstance(value, dict):
        raise ValueError
    return value


def run(args: argparse.Namespace, engine_options: dict[str, Any]) -> None:
    """Measure, print a table, and write JSON and a plot. After Ctrl-C all that there is by then.

    Args:
        args: the options that :func:`add_arguments` knows, and the model's.
        engine_options: fields of :class:`freewheel.config.EngineConfig`, of speculation.
    """
    limits = check(args)
    compares = args.compare or args.compare_body is not None
    if args.compare == "float32-logits":
        for name, value in PUBLISHED_SAMPLING.items():
            setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    warmup = 0 if compares else args.concurrency if args.warmup is None else args.warmup
    shape = Shape(
        args.input_len, args.output_len, args.range_ratio, args.words or args.endpoint == "chat", args.vocab_size,
        args.prefix_groups, args.prefix_len,
    )  # fmt: skip
    due = None
    if args.request_rate is not None:
        due = arrivals(args.request_rate, args.burstiness, args.load_seed, args.num_requests, args.duration)
    count = args.num_requests if due is None else len(due)
    made = bodies(args.workload, warmup + count, shape, args.load_seed, args.dataset)
    several = [fitted(body, args.endpoint) for body in made]
    several, first = several[warmup:], several[:warmup]
    told: dict[str, list[tuple[Result, Traffic]]] = {}
    floor, interrupted = None, False
    with ExitStack() as stack:
        print(f"machine    {machine.describe()}")
        device = None if args.url else device_name(args.device)
        if device not in (None, "cpu"):
            print(f"device     {device}")
        if args.calibrate:
            floor = calibrate(args.processes, args.concurrency)
            print(
                f"floor      of {args.processes} client process{'es' * (args.processes > 1)}: first token after "
                f"{floor.first_ms:.2f} ms, {floor.chunks_per_s:.0f} chunks/s, {floor.chunk_us:.1f} us of work each"
            )
        sides, where, name = make_sides(args, engine_options, stack, several, due)
        print(f"server     {where}, model {name}")
        print(f"load       {describe_load(args, len(several))}", flush=True)
        try:
            for side in sides:
                if side.run(several if compares else first, f"{side.name}, before", False)[0].interrupted:
                    raise KeyboardInterrupt
            for side, traffic, pulse in take_turns(sides, several, args.repeats if compares else 1):
                if compares and traffic.interrupted:  # half a turn is like no other
                    raise KeyboardInterrupt
                result = summarise(traffic, limits, pulse)
                if compares:
                    print(compare_line(side.name, result, header=not told), flush=True)
                else:
                    print_result(result, limits)
                told.setdefault(side.name, []).append((result, traffic))
                if traffic.interrupted:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            interrupted = True
            print("interrupted: that is what there was by then")
    results = {name: [result for result, _ in turns] for name, turns in told.items()}
    comparison = None
    if len(results) == 2:
        comparison = compare(*(results[side.name] for side in sides))
        print_comparison(args, sides, comparison)
    load = describe_load(args, len(several))
    report: dict[str, Any] = {"machine": machine.describe(), "device": device, "server": where, "model": name}
    report |= {"load": load, "arguments": _plain(args, engine_options), "interrupted": interrupted}
    report |= {"clients": floor and asdict(floor), "limits_ms": limits, "comparison": comparison}
    report |= {"results": {name: [asdict(result) for result in turns] for name, turns in results.items()}}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot({name: turns[-1][1] for name, turns in told.items()}, load, args.plot)
    if interrupted:
        raise KeyboardInterrupt
    if not all(result.completed for turns in results.values() for result in turns):
        raise RuntimeError("no request ended well: see the failures above")


def take_turns(
    sides: Sequence[Side], several: Sequence[Body], turns: int
) -> Iterator[tuple[Side, Traffic, Pulse | None]]:
    """What comes of the load on each side, the first one changing with each turn."""
    for turn in range(turns):
        for side in sides[:: 1 if turn % 2 == 0 else -1]:
            yield side, *side.run(several, f"{side.name}, turn {turn + 1}" if turns > 1 else side.name, True)


def check(args: argparse.Namespace) -> dict[str, float]:
    """The limits of the goodput.

    Raises:
        ValueError: options that are wrong, alone or together, by name.
    """
    least = {"input_len": 1, "output_len": 1, "prefix_groups": 1, "prefix_len": 1, "vocab_size": 2, "repeats": 1}
    least |= {"num_requests": 1, "concurrency": 1, "processes": 1, "warmup": 0, "max_num_seqs": 1}
    for name, value in least.items():
        given = getattr(args, name)
        if given is not None and given < value:
            raise ValueError(f"{name} must be at least {value}, not {given}")
    for name in ("request_rate", "burstiness", "duration", "timeout", "heartbeat"):
        given = getattr(args, name)
        if given is not None and not 0 < given < math.inf:
            raise ValueError(f"{name} must be above 0, not {given}")
    if not 0 <= args.range_ratio < 1:
        raise ValueError(f"range_ratio must be from 0 to below 1, not {args.range_ratio}")
    if (args.workload == "jsonl") != (args.dataset is not None):
        raise ValueError("dataset: the workload jsonl takes its prompts from there, and only that")
    if args.shape:
        shape_config(args.shape)
        if args.words or args.endpoint == "chat" or args.workload == "copy":
            raise ValueError("shape: random weights know token ids and no text")
    ours = {"shape": args.shape, "compare": args.compare, "float32_logits": args.float32_logits}
    ours |= {"prefix_caching": args.prefix_caching, "max_num_seqs": args.max_num_seqs}
    for name, value in ours.items():
        if args.url and value not in (None, False):
            raise ValueError(f"{name} is of a server that is started here, without --url")
    if args.url:
        Address.of(args.url)
    if args.compare and args.compare_body is not None:
        raise ValueError("compare_body: --compare compares already")
    if args.compare and args.float32_logits:
        raise ValueError("float32_logits: --compare float32-logits measures both ways")
    if args.compare == "offline" and (args.request_rate or args.duration or args.endpoint == "chat"):
        raise ValueError("compare: the engine offline is given completions, all of them at once")
    for name in ("extra_body", "compare_body"):
        if (getattr(args, name) or {}).keys() & {"n", "stream", "prompt", "messages"}:
            raise ValueError(f"{name} must not have n, stream, prompt or messages")
    if args.api_key is not None and not (args.api_key.isascii() and args.api_key.isprintable() and args.api_key):
        raise ValueError("api_key must be of printable ASCII characters")
    limits = {}
    for text in args.goodput:
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in LIMITED or not limits[name] > 0:
            raise ValueError(f"goodput: {text!r} is not like ttft:200 (names: {', '.join(LIMITED)})")
    return limits


def make_sides(
    args: argparse.Namespace,
    engine_options: Mapping[str, Any],
    stack: ExitStack,
    several: Sequence[Body],
    due: list[float] | None,
) -> tuple[list[Side], str, str]:
    """What is measured, started where it has to be; where that is, and what the model is called."""
    key = args.api_key if args.url or args.api_key else os.environ.get("FREEWHEEL_API_KEY")
    lengths = [_length(body) for body in several]
    compares = args.compare or args.compare_body is not None
    caching = not compares if args.prefix_caching is None else args.prefix_caching
    options = Options(
        model=args.model,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        max_model_len=args.max_model_len or (None if None in lengths else max(filter(None, lengths))),
        max_num_seqs=args.max_num_seqs or (32 if due else args.concurrency),
        shape=args.shape,
        engine={**engine_options, "enable_prefix_caching": caching},
        float32_logits=args.float32_logits,
        api_key=key,
        served_model_name=args.served_model_name,
    )
    if args.url:
        url = where = args.url
        name = args.served_model_name or first_model(Address.of(url), key)
    else:
        url = stack.enter_context(own_server(options))
        where = f"started here: {args.dtype} on {args.device}, up to {options.max_num_seqs} sequences"
        name = args.served_model_name or args.shape or args.model
    asked = {name: getattr(args, name) for name in SAMPLING if name != "seed" and getattr(args, name) is not None}
    if args.ignore_eos:
        asked["ignore_eos"] = True
    usage = {"include_usage": True} | ({"continuous_usage_stats": True} if args.continuous_usage else {})
    plan = Plan(
        endpoint=args.endpoint,
        common={"model": name, "stream": True, "stream_options": usage, **asked},
        extra=args.extra_body,
        key=key,
        concurrency=args.concurrency,
        due=due,
        duration=args.duration,
        timeout=args.timeout,
        processes=args.processes,
        seed=args.seed,
        heartbeat=None if args.heartbeat is None else args.heartbeat / 1e3,
    )

    def served(label: str, url: str, plan: Plan = plan) -> Side:
        return Side(label, lambda *load: plan.send(Address.of(url), *load))

    if args.compare == "float32-logits":
        copying = stack.enter_context(own_server(replace(options, float32_logits=True)))
        return [served("with the copy", copying), served("without", url)], where, name
    if args.compare == "offline":
        engine = stack.enter_context(offline_engine(options))

        def answer(several: Sequence[Body], title: str, counts: bool) -> tuple[Traffic, None]:
            return engine.run([plan.body(number, body) for number, body in enumerate(several)]), None

        return [Side("offline", answer), served("served", url)], where, name
    if args.compare_body is not None:
        more = replace(plan, extra={**plan.extra, **args.compare_body})
        return [served("without", url), served("with the fields", url, more)], where, name
    return [served("served", url)], where, name


def _length(body: Body) -> int | None:
    """Tokens of prompt and answer together, where they are known."""
    prompt = body.get("prompt")
    return len(prompt) + body["max_tokens"] if isinstance(prompt, list) and prompt else None


def first_model(address: Address, key: str | None) -> str:
    """What a server calls its first model. ValueError if it does not say."""
    kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
    connection = kind(address.host, address.port, timeout=30)
    try:
        connection.request("GET", f"{address.path}/models", headers={"Authorization": f"Bearer {key}"} if key else {})
        reply = connection.getresponse()
        body = reply.read()
        return str(json.loads(body)["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"url: no model is listed at {address.path}/models: {error!r}; or give its name") from None
    finally:
        connection.close()


def describe_load(args: argparse.Namespace, count: int) -> str:
    """In a line."""
    many = f"{count} requests" if args.duration is None else f"{args.duration:g} s"
    what = f"{many}, {args.workload}"
    if args.workload in ("random", "shared-prefix"):
        spread = f" (to {args.range_ratio:.0%} around)" if args.range_ratio else ""
        what += f", input {args.input_len}, output {args.output_len}{spread}"
    if args.workload == "shared-prefix":
        what += f", {args.prefix_groups} beginnings of {args.prefix_len}"
    pace = f"{args.concurrency} clients"
    if args.request_rate is not None:
        pace = f"{args.request_rate:g} requests/s (burstiness {args.burstiness:g})"
    given = [f"{name} {getattr(args, name):g}" for name in SAMPLING if getattr(args, name) is not None]
    given += ["ignore_eos"] * args.ignore_eos
    return ", ".join([what, f"{args.endpoint}, {pace}", *given])


def _plain(args: argparse.Namespace, engine_options: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments that JSON can tell, apart from the key."""
    told = {**vars(args), **engine_options}
    told = {name: str(value) if isinstance(value, Path) else value for name, value in told.items()}
    return {name: value for name, value in told.items() if name != "api_key" and not callable(value)}


def print_result(result: Result, limits: Mapping[str, float]) -> None:
    """The table of one load."""
    failed = sum(failure.count for failure in result.failures.values())
    left = f", {result.unfinished} unfinished" if result.unfinished else ""
    print(f"requests   {result.completed} done, {failed} failed{left}, in {result.seconds:.2f} s; ", end="")
    print(f"{result.streams:.1f} at a time; clients {result.busy:.0%} busy, up to {result.late_ms:.1f} ms late")
    prompts = "" if result.input_token_rate is None else f"input {result.input_token_rate:.1f} tok/s, "
    print(
        f"rates      {result.request_rate:.3f} requests/s, {prompts}output {result.output_token_rate:.1f} tok/s", end=""
    )
    if result.goodput is not None:
        print(f"; goodput {result.goodput:.3f} requests/s", end="")
        print(f" within {', '.join(f'{name} {limit:g} ms' for name, limit in limits.items())}", end="")
    cached = f", {result.cached_tokens} of them cached" if result.cached_tokens else ""
    inputs = "uncounted" if result.input_tokens is None else f"{result.input_tokens}{cached}"
    chunks = "as the server tells" if result.counted == 1 else "one each, as the server tells only sums"
    print(f"\ntokens     input {inputs}; output {result.output_tokens}; of chunks: {chunks}")
    print(f"{'ms':8}" + "".join(f"{name:>10}" for name in ("mean", "median", "p90", "p99", "max")))
    rows: list[tuple[str, Latency | None]] = [(LATENCIES[name], value) for name, value in result.latencies.items()]
    if result.pulse:
        rows.append(("/health", result.pulse.latency))
    for label, value in rows:
        if value:
            print(f"{label:8}" + "".join(f"{number:10.2f}" for number in asdict(value).values()))
    if result.pulse:
        print(f"/health    asked {result.pulse.pings} times, {result.pulse.failed} without an answer of 200")
    for kind, failure in result.failures.items():
        print(f"failed     {failure.count} x {kind}: {failure.message}")


COMPARED = {
    "request_rate": ("requests/s", 12, ".3f"),
    "output_token_rate": ("output tok/s", 14, ".1f"),
    "ttft": ("TTFT ms", 10, ".2f"),
    "tpot": ("TPOT ms", 10, ".3f"),
    "e2el": ("E2EL ms", 11, ".2f"),
}


def compare_line(name: str, result: Result, *, header: bool) -> str:
    """A turn of a side; latencies are means."""
    head = f"{'side':18}" + "".join(f"{label:>{width}}" for label, width, _ in COMPARED.values()) + "\n"
    values = figures(result)
    line = "".join(
        f"{'-' if values[key] is None else format(values[key], form):>{width}}"
        for key, (_, width, form) in COMPARED.items()
    )
    failed = "".join(f"; {failure.count} x {kind}: {failure.message}" for kind, failure in result.failures.items())
    return f"{head * header}{name:18}{line}{failed}"


def figures(result: Result) -> dict[str, float | None]:
    """What comparisons tell of a load."""
    means = {name: value and value.mean for name, value in result.latencies.items()}
    rates = {"request_rate": result.request_rate, "output_token_rate": result.output_token_rate}
    return {name: {**rates, **means}[name] for name in COMPARED}


def compare(first: Sequence[Result], second: Sequence[Result]) -> dict[str, dict[str, float]]:
    """For each figure the medians of both sides, and the median, least and most of the second over the first."""
    made = {}
    for name in COMPARED:
        pairs = [(figures(one)[name], figures(other)[name]) for one, other in zip(first, second)]
        known = [(one, other) for one, other in pairs if one and other]
        if known:
            ratios = [other / one for one, other in known]
            made[name] = {
                "first": statistics.median(one for one, _ in known),
                "second": statistics.median(other for _, other in known),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
    return made


def print_comparison(
    args: argparse.Namespace, sides: Sequence[Side], comparison: Mapping[str, Mapping[str, float]]
) -> None:
    """The second side over the first; beside what was published, where that is what was measured."""
    first, second = (side.name for side in sides)
    published = args.compare == "float32-logits"
    print(f"\n{second!r} over {first!r}, medians" + (", and what another engine had at batch 128" if published else ""))
    for name, row in comparison.items():
        if args.compare == "offline" and name in ("ttft", "e2el"):  # there all are given at once, and most wait
            continue
        label, _, form = COMPARED[name]
        beside = f"   published {PUBLISHED[name]:+.1f} %" if published and name in PUBLISHED else ""
        change = f"{row['ratio'] - 1:+8.2%} ({row['least'] - 1:+.2%} to {row['most'] - 1:+.2%})"
        print(f"{label:14}{format(row['first'], form):>12}{format(row['second'], form):>12}{change}{beside}")


def plot(traffics: Mapping[str, Traffic], title: str, path: Path) -> None:
    """How latencies are distributed: a panel for each kind, a line for each side."""
    import numpy as np

    figure: Any = import_module("matplotlib.figure").Figure(figsize=(12, 4.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3, sharey=True), ("ttft", "itl", "e2el")):
        for side, traffic in traffics.items():
            done = [outcome for outcome in traffic.outcomes if outcome.failure is None]
            values, counts = samples(done)[name]
            if not values or (side == "offline" and name == "itl"):  # its tokens have no times
                continue
            order = np.argsort(values)
            shares = np.cumsum(np.asarray(counts if counts is not None else [1] * len(values))[order])
            axes.step(np.asarray(values)[order] * 1e3, shares / shares[-1], where="post", label=side)
        axes.set(title=LATENCIES[name], xlabel="ms", xscale="log")
        axes.grid(alpha=0.3)
    figure.axes[0].set(ylabel="share of requests, or of tokens")
    if len(traffics) > 1:
        figure.axes[0].legend()
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
