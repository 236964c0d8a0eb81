"""``freewheel bench speculation``: what drafts bring, beside the same engine without them.

Five workloads. *edit* and *extract* are copy-heavy: the model is asked for code with a name changed, and for a text
again. Both come from Python's own library, and as many tokens are generated as they have. *chat* answers questions at
temperature 0.8. *random* and *noise* are adversaries: draws
from a few tokens that are all about as likely, so that drafts are found often and are nearly always wrong. The tokens
are the same at each step, or those that the model likes best there: to allow certain tokens only is an edit of the
logits, with which devices do not draft.

Both engines share the model and take turns, the first one changing with each repetition. The rate counts tokens from
the moment when every prompt has its first, so the prompts' own time is left out.
"""

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freewheel.bench import machine

if TYPE_CHECKING:
    from freewheel.bench.steps import StepProfile
    from freewheel.engine.engine import Engine
    from freewheel.models.load import LoadedModel
    from freewheel.request import Request

QUESTIONS = [
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Write a short poem about a lighthouse.",
    "What is the difference between a list and a tuple in Python?",
    "Name three rivers of Europe and the cities that they flow through.",
    "Explain to a child how a bicycle stays upright.",
    "What should I pack for a week in the mountains?",
    "Tell me a story about a robot that learns to swim.",
]
FEW = 32  # tokens of which random text is made: as good as all pairs of them have been seen before
CODE = [
    ("textwrap", "TextWrapper._wrap_chunks", "chunks", "pieces"),
    ("heapq", "merge", "iterables", "sources"),
    ("shlex", "shlex.read_token", "nextchar", "symbol"),
    ("fnmatch", "translate", "pat", "glob"),
    ("string", "Formatter._vformat", "result", "parts"),
    ("configparser", "RawConfigParser._read", "optname", "option"),
    ("difflib", "SequenceMatcher.find_longest_match", "besti", "best"),
    ("statistics", "quantiles", "data", "values"),
]
TEXTS = ["random", "decimal", "difflib", "heapq", "statistics", "argparse", "tarfile", "dis"]


@dataclass(frozen=True)
class SpeculationResult:
    """A workload at a batch size.

    Attributes:
        plain, drafted: tokens a second without and with speculation, medians.
        ratio: the median of the repetitions' own.
        acceptance_length: tokens a request gets in a step, with speculation.
        draft_rows: rows a token that were computed for drafts; wasted: those of them that were rejected.
        equal: share of the requests that got the same tokens both ways.
        steps: on CUDA devices with graphs, what the device did with speculation once each prompt had its first token.
        plain_waits: what ``steps.waits`` is without speculation.
    """

    workload: str
    batch: int
    tokens: int
    plain: float
    drafted: float
    ratio: float
    acceptance_length: float
    draft_rows: float
    wasted: float
    equal: float
    steps: "StepProfile | None" = None
    plain_waits: float | None = None


def workload(name: str, model: "LoadedModel", batch: int, longest: int) -> "list[Request]":
    """Requests of one kind, at most eight different ones."""
    from freewheel.engine.inputs import make_request
    from freewheel.sampling import SamplingParams

    tokenizer = model.tokenizer
    prompts: list[Any] = []
    params: list[SamplingParams] = []
    for number in range(batch):
        plain = SamplingParams(temperature=0.0, max_tokens=longest, seed=number)
        if name in ("edit", "extract"):
            prompt, again = edit_prompt(number % len(CODE)) if name == "edit" else extract_prompt(number % len(TEXTS))
            params.append(replace(plain, max_tokens=min(longest, len(tokenizer.encode(again))), ignore_eos=True))
        elif name == "chat":
            prompt = QUESTIONS[number % len(QUESTIONS)]
            if tokenizer.chat_template is not None:
                ids, _ = tokenizer.encode_chat([{"role": "user", "content": prompt}], add_generation_prompt=True)
                prompt = ids
            params.append(replace(plain, temperature=0.8, ignore_eos=True))
        else:
            import numpy as np

            first = min(1000, tokenizer.vocab_size - FEW)
            prompt = np.random.default_rng(number).integers(first, first + FEW, 128).tolist()
            hot = replace(plain, temperature=100.0, ignore_eos=True)
            if name == "random":
                params.append(replace(hot, allowed_token_ids=list(range(first, first + FEW))))
            else:
                params.append(replace(hot, top_k=FEW // 4))
        prompts.append(prompt)
    pairs = enumerate(zip(prompts, params))
    return [make_request(tokenizer, str(number), prompt, asked)[0] for number, (prompt, asked) in pairs]


def edit_prompt(number: int) -> tuple[str, str]:
    """A prompt, and the code that it asks for again, by and large."""
    module, path, old, new = CODE[number]
    value: Any = __import__(module)
    for part in path.split("."):
        value = getattr(value, part)
    code = inspect.cleandoc("\n" + inspect.getsource(value))
    code = "\n".join(line for line in code.splitlines() if line.strip())[:2000]
    asked = f"# The code:\n\n{code}\n\n# The same code, with {old} renamed to {new}:\n\n"
    return asked, code.replace(old, new)


def extract_prompt(number: int) -> tuple[str, str]:
    text = inspect.cleandoc(__import__(TEXTS[number]).__doc__ or "")[:1200].strip()
    return f"The text:\n\n{text}\n\nThe end of the text. Here is the text again, word for word:\n\n", text


def generate(
    engine: "Engine", requests: "Sequence[Request]", begin: Callable[[], None] = lambda: None
) -> tuple[float, int, dict[str, list[int]]]:
    """Run requests to their end; call ``begin`` when each has its first token.

    Returns:
        Seconds from that moment on, the tokens that came after it, and each one's tokens.
    """
    told: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    began, before = 0.0, 0
    while engine.has_unfinished:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            told[output.request_id] += output.token_ids
        if not began and all(told.values()):
            begin()
            began, before = time.perf_counter(), sum(map(len, told.values()))
    return time.perf_counter() - began, sum(map(len, told.values())) - before, told


def profile_steps(engine: "Engine", device: str, requests: "Sequence[Request]") -> "StepProfile | None":
    """What the device did in the steps that follow when each request has its first token; None where no graphs are.

    What lies inside steps is seen in a run of its own.
    """
    from freewheel.bench.steps import Between, between_graphs, graph_events, mark, profiled, since_mark, summarise
    from freewheel.bench.systems import wait_for

    fed: list[Between] = []
    with graph_events() as events:
        for _ in range(FED):  # one is over in some milliseconds where drafts are good
            events.clear()
            generate(engine, requests, events.clear)
            wait_for(device)
            if between := between_graphs(events):
                fed.append(between)
    if not fed:
        return None
    with profiled(device) as recorded:
        generate(engine, requests, lambda: mark(device))
    return summarise(since_mark(recorded), len(requests), 1, Between.over(fed))


def host_waits(engine: "Engine", device: str, requests: "Sequence[Request]") -> float | None:
    """See :func:`freewheel.bench.steps.waits_of`."""
    from freewheel.bench.steps import profiled

    with profiled(device) as recorded:
        generate(engine, requests)
    return recorded.waits


def measure(
    engines: "dict[bool, Engine]", name: str, requests: "Sequence[Request]", repeats: int, device: str = "cpu"
) -> SpeculationResult:
    """Let both engines take turns on the same requests, after one turn that does not count."""
    from freewheel.speculative import SpeculationMetrics

    drafting = engines[True]
    rates: dict[bool, list[float]] = {False: [], True: []}
    told: dict[bool, dict[str, list[int]]] = {}
    counted, tokens = SpeculationMetrics(), 0
    for turn in range(repeats + 1):
        for speculation in (turn % 2 == 0, turn % 2 == 1):
            before = replace(drafting.speculation or counted)
            seconds, tokens, told[speculation] = generate(engines[speculation], requests)
            if turn:
                rates[speculation].append(tokens / seconds)
            if speculation and drafting.speculation is not None:
                now = drafting.speculation
                counted = SpeculationMetrics(
                    now.steps - before.steps, now.drafted - before.drafted, now.accepted - before.accepted
                )
    generated = sum(map(len, told[True].values()))
    steps = profile_steps(drafting, device, requests) if device != "cpu" else None
    return SpeculationResult(
        workload=name,
        batch=len(requests),
        tokens=tokens,
        plain=statistics.median(rates[False]),
        drafted=statistics.median(rates[True]),
        ratio=statistics.median(drafted / plain for plain, drafted in zip(rates[False], rates[True])),
        acceptance_length=counted.acceptance_length,
        draft_rows=counted.drafted / generated,
        wasted=counted.wasted / generated,
        equal=statistics.mean(told[False][key] == told[True][key] for key in told[True]),
        steps=steps,
        plain_waits=host_waits(engines[False], device, requests) if steps else None,
    )


def steps_line(steps: "StepProfile", plain_waits: float | None) -> str:
    """How the device was fed, and how often the host waited for each graph, with drafts and without."""
    waits = f"{steps.waits or 0:.2f} / {plain_waits or 0:.2f}"
    return f"{steps.inside:9.1%}{steps.between or 0:9.1%}{steps.occupancy:11.1%}{waits:>12}"


def steps_of(seconds: Mapping[tuple[int, int], float], batch: int) -> str:
    """What captured steps of so many sequences take, without drafts and with so many rows."""
    times = {rows: time for (sequences, rows), time in sorted(seconds.items()) if sequences == batch}
    drafts = ", ".join(f"{rows} rows {time * 1e3:.3f}" for rows, time in times.items() if rows)
    return f"plain {times[0] * 1e3:.3f} ms, with drafts {drafts}" if times else ""


FED = 5  # runs by which it is seen how the device is fed
WORKLOADS = ("edit", "extract", "chat", "random", "noise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``freewheel bench speculation``."""
    parser.add_argument("--model", default="smollm2", help="built-in name, folder or .gguf file (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="of weights and activations (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--batch", default="1,4,8", help="batch sizes, separated by commas (default: %(default)s)")
    parser.add_argument(
        "--workloads", default=",".join(WORKLOADS), help="any of these, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=int, default=256, metavar="N", help="most output tokens (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="repetitions; the median counts (default: %(default)s)")
    for name, text in (("width", "most leaves"), ("depth", "most tokens ahead"), ("nodes", "most rows")):
        parser.add_argument(
            f"--draft-{name}", type=int, metavar="N", help=f"of a draft, {text} (default: the engine's)"
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to FILE")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="on CUDA devices: write a Chrome trace of one more run of the last line",
    )


def run(args: argparse.Namespace) -> None:
    """Measure each workload at each batch size, print a line for each, and write JSON."""
    from freewheel.bench.steps import traced
    from freewheel.config import EngineConfig
    from freewheel.engine.build import build_engine
    from freewheel.models.load import load

    try:
        batches = [int(batch) for batch in args.batch.split(",")]
    except ValueError:
        raise ValueError(f"batch: {args.batch!r} is not a list of whole numbers") from None
    for name, value in (("batch", min(batches)), ("output", args.output - 1), ("repeats", args.repeats)):
        if value < 1:
            raise ValueError(f"{name} is too small")
    workloads = args.workloads.split(",")
    if unknown := [name for name in workloads if name not in WORKLOADS]:
        raise ValueError(f"workloads: unknown workload {unknown[0]!r} (known: {', '.join(WORKLOADS)})")
    if args.trace and args.device == "cpu":
        raise ValueError("trace: needs a CUDA device")
    drafts = {name: getattr(args, name) for name in ("draft_width", "draft_depth", "draft_nodes")}
    drafts = {name: value for name, value in drafts.items() if value is not None}
    model = load(args.model, dtype=args.dtype, device=args.device)
    # Prefix cache off: repetitions measure the same work.
    length = min(2048, model.spec.max_positions)
    config = EngineConfig(max_num_seqs=max(batches), max_model_len=length, enable_prefix_caching=False, **drafts)
    engines = {flag: build_engine(model, replace(config, speculation=flag)) for flag in (False, True)}
    for engine in engines.values():
        for _, prepare in engine.preparations():
            prepare()
    print(f"machine    {machine.describe()}")
    print(
        f"model      {args.model}, {args.dtype}, on {args.device}, up to {args.output} tokens, median of {args.repeats}"
    )
    for batch in batches:
        if times := steps_of(engines[True].runner.seconds, batch):
            print(f"steps      of {batch}: {times}")
    print(
        f"{'workload':10}{'batch':>6}{'plain tok/s':>13}{'drafted tok/s':>15}{'ratio':>7}{'accepted':>10}"
        f"{'draft rows':>12}{'wasted':>8}{'equal':>7}"
        + (f"{'inside':>9}{'between':>9}{'occupancy':>11}{'waits':>12}" if args.device != "cpu" else "")
    )
    results = []
    for name in workloads:
        for batch in batches:
            asked = workload(name, model, batch, args.output)
            result = measure(engines, name, asked, args.repeats, args.device)
            results.append(asdict(result))
            steps = result.steps
            print(
                f"{name:10}{batch:6}{result.plain:13.1f}{result.drafted:15.1f}{result.ratio:7.2f}"
                f"{result.acceptance_length:10.2f}{result.draft_rows:12.2f}{result.wasted:8.2f}{result.equal:7.0%}"
                + (steps_line(steps, result.plain_waits) if steps else ""),
                flush=True,
            )
    print("accepted: tokens a request and step. Draft rows, and those wasted, for each token of the output.")
    if args.device != "cpu":
        print("waits: calls by which the host waits, for each graph that it launches, with drafts and without.")
    if args.json:
        report = {"machine": machine.describe(), "model": args.model, "dtype": args.dtype, "output": args.output}
        report |= {"device": args.device, "repeats": args.repeats, "drafts": drafts, "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.trace:
        with traced(args.device, args.trace):
            generate(engines[True], workload(workloads[-1], model, batches[-1], args.output))
