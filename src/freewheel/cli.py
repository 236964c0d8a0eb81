"""The ``freewheel`` command: generate, chat, models, bench.

Only argparse is imported until a command needs more: ``freewheel --help`` must not wait for torch.
"""

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from freewheel import __version__
from freewheel.interrupts import held_interrupts
from freewheel.models.store import DEFAULT_MODEL

if TYPE_CHECKING:
    from freewheel.engine.outputs import RequestOutput
    from freewheel.llm import LLM
    from freewheel.sampling import Grammar, SamplingParams

Type = Callable[[str], Any]

BEGAN = time.perf_counter()
DEFAULT_MAX_TOKENS = 512


def token_bias(text: str) -> tuple[int, float]:
    """``ID=BIAS``, as ``--logit-bias`` takes it."""
    token, _, bias = text.partition("=")
    return int(token), float(bias)


# Field of SamplingParams -> (type, metavar, help). A type of None is a switch; a field in REPEATED may be given again.
SAMPLING_OPTIONS: dict[str, tuple[Type | None, str, str]] = {
    "temperature": (float, "T", "0 takes the most likely token (default); higher is more varied"),
    "top_k": (int, "K", "draw among the K most likely tokens only; 0 is off"),
    "top_p": (float, "P", "draw among the most likely tokens that hold a mass of P together"),
    "min_p": (float, "P", "drop tokens less likely than P times the most likely one"),
    "repetition_penalty": (float, "X", "above 1 makes tokens of prompt and output less likely"),
    "frequency_penalty": (float, "X", "subtracted once for each time the output has the token"),
    "presence_penalty": (float, "X", "subtracted if the output has the token"),
    "logit_bias": (token_bias, "ID=BIAS", "add BIAS to a token's logit"),
    "allowed_token_ids": (int, "ID", "nothing but these tokens may be drawn"),
    "bad_words": (str, "TEXT", "words that must not appear"),
    "max_tokens": (int, "N", f"stop after N tokens (default: {DEFAULT_MAX_TOKENS}, or what the context leaves)"),
    "min_tokens": (int, "N", "no end before N tokens"),
    "stop": (str, "TEXT", "stop before this text"),
    "stop_token_ids": (int, "ID", "stop at this token"),
    "include_stop_str_in_output": (None, "", "keep the stop text in the output"),
    "ignore_eos": (None, "", "go on after an end-of-sequence token"),
    "skip_special_tokens": (None, "", "leave special tokens out of the text (default: on)"),
    "seed": (int, "N", "same seed, same tokens"),
    "n": (int, "N", "number of independent answers"),
    "logprobs": (int, "N", "log-probabilities of each token and of N alternatives"),
    "prompt_logprobs": (int, "N", "the same for the prompt's tokens, always the model's own"),
    "logprobs_mode": (str, "MODE", "of --logprobs: raw, the model's own (default), or processed, after all parameters"),
}
# What the output has to look like; one of these at most.
OUTPUT_OPTIONS: dict[str, tuple[Type | None, str, str]] = {
    "json_schema": (str, "FILE", "answer in JSON that the schema in FILE describes"),
    "regex": (str, "PATTERN", "answer with what the expression matches"),
    "choice": (str, "TEXT", "answer with one of these texts"),
    "grammar": (str, "FILE", "answer with what the context-free grammar in FILE derives, in Lark's notation or GBNF"),
}
REPEATED = {"logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "choice"}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        default=DEFAULT_MODEL,
        help="built-in name, folder, .gguf file or Hub id (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", "int8", "float32", "bfloat16", "float16"],
        help="auto keeps quantised weights small; int8 is faster for many requests at once; float32 is the exact mode",
    )
    group.add_argument("--device", default="cpu", help="device to run on (default: cpu)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt and output together, in tokens")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")


# Field of EngineConfig -> (type, metavar, help), as for SAMPLING_OPTIONS.
SPECULATION_OPTIONS: dict[str, tuple[Type | None, str, str]] = {
    "speculation": (None, "", "guess the next tokens by what followed the same ones before (default: off)"),
    "draft_width": (int, "N", "most branches of a guess (default: 1)"),
    "draft_depth": (int, "N", "most tokens that a guess goes ahead (default: 32)"),
    "draft_nodes": (int, "N", "most tokens of a guess, over all branches (default: 32)"),
    "draft_corpus": (str, "PATH", "guess by these texts as well: plain text, or .jsonl with a document a line"),
}


def add_options(parser: argparse.ArgumentParser, title: str, options: dict[str, tuple[Type | None, str, str]]) -> None:
    """A group of options that are left out of the result where they are not given."""
    group = parser.add_argument_group(title)
    for field, (kind, metavar, text) in options.items():
        name = "--" + field.replace("_", "-")
        if kind is None:
            group.add_argument(name, action=argparse.BooleanOptionalAction, help=text, default=argparse.SUPPRESS)
        elif field in REPEATED:
            text += " (may be given again)"
            group.add_argument(name, type=kind, metavar=metavar, action="append", help=text, default=argparse.SUPPRESS)
        else:
            group.add_argument(name, type=kind, metavar=metavar, help=text, default=argparse.SUPPRESS)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="freewheel", description="Run small and medium language models, fast and exactly."
    )
    parser.add_argument("--version", action="version", version=f"freewheel {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    generate = commands.add_parser("generate", help="answer one prompt, streamed as it comes")
    generate.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    generate.add_argument(
        "--raw", action="store_true", help="complete the text as it stands, without the chat template"
    )
    generate.add_argument("--system", metavar="TEXT", help="system message for the chat template")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    generate.set_defaults(run=run_generate)

    chat = commands.add_parser("chat", help="a conversation in the terminal")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    chat.set_defaults(run=run_chat)
    for command in (generate, chat):
        add_model_options(command)
        add_options(command, "sampling", SAMPLING_OPTIONS)
        add_options(command, "output", OUTPUT_OPTIONS)
        add_options(command, "speculation", SPECULATION_OPTIONS)

    serve = commands.add_parser("serve", help="answer over HTTP, with OpenAI's interface")
    serve.set_defaults(run=run_serve)
    add_model_options(serve)
    from freewheel.server import serve as server

    server.add_arguments(serve)
    add_options(serve, "speculation", SPECULATION_OPTIONS)

    models = commands.add_parser("models", help="what is built in and what is cached, where and how large")
    models.add_argument("--json", action="store_true", help="print a JSON list")
    models.set_defaults(run=run_models)

    bench = commands.add_parser("bench", help="benchmarks, each beside its floor")
    kinds = bench.add_subparsers(dest="bench", metavar="KIND", required=True)
    decode = kinds.add_parser("decode", help="decode tokens/s of this engine and of others")
    start = kinds.add_parser("start", help="from a cold process to the first token")
    divergence = kinds.add_parser("divergence", help="what a cheaper number format costs in exactness")
    sampler = kinds.add_parser("sampler", help="from logits to tokens, beside torch's ways")
    speculation = kinds.add_parser("speculation", help="with drafts and without, where they help and where they can't")
    links = kinds.add_parser("links", help="what a step of speculation waits for, by where its drafts come from")
    index = kinds.add_parser("index", help="what drafting takes by itself, by the length of the context")
    serving = kinds.add_parser("serve", help="a server under load: rates and latencies, of this engine's or any other")
    from freewheel.bench import decode as bench_decode
    from freewheel.bench import divergence as bench_divergence
    from freewheel.bench import index as bench_index
    from freewheel.bench import links as bench_links
    from freewheel.bench import sampler as bench_sampler
    from freewheel.bench import serving as bench_serving
    from freewheel.bench import speculation as bench_speculation
    from freewheel.bench import start as bench_start

    benchmarks = (
        (decode, bench_decode),
        (start, bench_start),
        (divergence, bench_divergence),
        (sampler, bench_sampler),
        (speculation, bench_speculation),
        (index, bench_index),
        (links, bench_links),
    )
    for command_parser, benchmark in benchmarks:
        benchmark.add_arguments(command_parser)
        command_parser.set_defaults(run=benchmark.run)
    bench_serving.add_arguments(serving)
    add_model_options(serving)
    add_options(serving, "speculation", SPECULATION_OPTIONS)
    serving.set_defaults(run=run_bench_serve)
    return parser


def sampling_params(args: argparse.Namespace) -> "SamplingParams":
    """The parameters that were given on the command line, checked."""
    from freewheel.sampling import SamplingParams

    given = {field: value for field, value in vars(args).items() if field in SAMPLING_OPTIONS}
    if "logit_bias" in given:
        given["logit_bias"] = tuple(given["logit_bias"])
    given["grammar"] = output_grammar({name: value for name, value in vars(args).items() if name in OUTPUT_OPTIONS})
    return SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, "temperature": 0.0, **given})


def output_grammar(given: dict[str, Any]) -> "Grammar | None":
    """What the output has to look like, by the options that were given."""
    from freewheel.sampling import Grammar

    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} cannot be combined")
    for name, value in given.items():
        if name == "regex":
            return Grammar.regex(value)
        if name == "choice":
            return Grammar.choice(value)
        try:
            text = Path(value).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name}: {value} cannot be read: {error}") from None
        return Grammar.cfg(text) if name == "grammar" else Grammar.json_schema(text)
    return None


def standard_input() -> TextIO:
    """Text from a file or terminal; bytes that are not UTF-8 get through to where they are refused by name."""
    if sys.stdin is None:
        raise ValueError("standard input is closed")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin


def standard_output() -> TextIO:
    """Where answers go; a terminal that cannot show a character must not end one."""
    if sys.stdout is None:
        raise ValueError("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return sys.stdout


def import_engine() -> None:
    """Import all that takes long, with Ctrl-C held back: an import could lose it or make another error of it."""
    with held_interrupts():
        import freewheel.llm  # noqa: F401


def check_threads(threads: int | None) -> None:
    """ValueError if there cannot be so many."""
    most = 4 * (os.cpu_count() or 1)  # thousands could not even be started
    if threads is not None and not 1 <= threads <= most:
        from freewheel.sampling.params import shown

        raise ValueError(f"threads must be an integer from 1 to {most}, not {shown(threads)}")


def load(args: argparse.Namespace) -> "tuple[LLM, dict[str, float]]":
    """The model that ``args`` names, and the seconds that imports (all since the command began) and loading took."""
    import torch

    from freewheel.llm import LLM

    check_threads(args.threads)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    given = {field: value for field, value in vars(args).items() if field in SPECULATION_OPTIONS}
    imported = time.perf_counter()
    with held_interrupts(at_once_too=True):  # a model that has to be fetched takes long
        llm = LLM(
            args.model,
            dtype=args.dtype,
            device=args.device,
            max_model_len=args.max_model_len,
            max_num_seqs=16,
            **given,
        )
    return llm, {"import_s": imported - BEGAN, "load_s": time.perf_counter() - imported}


def conversation(args: argparse.Namespace) -> list[dict[str, str]]:
    """What comes before the first question."""
    from freewheel.sampling.params import check_text

    check_text("system", args.system or "")
    return [{"role": "system", "content": args.system}] if args.system else []


def stream_text(llm: "LLM", prompt: Any, params: "SamplingParams") -> "RequestOutput":
    """Print one answer while it comes; return the finished output."""
    output = None
    for output in llm.stream(prompt, params):
        sys.stdout.write(output.delta)
        sys.stdout.flush()
    sys.stdout.write("\n")
    assert output is not None, "a request always ends with an output"
    return output


def timings(output: "RequestOutput") -> dict[str, float]:
    """Seconds and rates of one finished request."""
    metrics = output.metrics
    first, last = metrics.first_token_time - metrics.arrival_time, metrics.finish_time - metrics.first_token_time
    generated = sum(len(choice.token_ids) for choice in output.outputs)
    return {
        "first_token_s": first,
        "prompt_tokens_per_s": (metrics.prompt_tokens - metrics.cached_tokens) / first if first > 0 else 0.0,
        "decode_tokens_per_s": (generated - len(output.outputs)) / last if last > 0 else 0.0,
    }


def print_summary(output: "RequestOutput") -> None:
    spent = timings(output)
    generated = sum(len(choice.token_ids) for choice in output.outputs)
    parts: tuple[str, ...] = (
        f"prompt {len(output.prompt_token_ids)} tokens, {spent['prompt_tokens_per_s']:.0f} tok/s",
        f"first token {spent['first_token_s'] * 1e3:.0f} ms",
        f"output {generated} tokens, {spent['decode_tokens_per_s']:.1f} tok/s",
        str(output.outputs[0].finish_reason),
    )
    speculation = output.metrics.speculation
    if speculation.drafted:
        parts += (f"{speculation.accepted} of {speculation.drafted} drafted tokens accepted",)
    print(" | ".join(parts), file=sys.stderr)


def refuse_unseen_logprobs(params: "SamplingParams", shown: bool = False) -> None:
    """ValueError if log probabilities are asked for where nothing shows them."""
    for field in ("logprobs", "prompt_logprobs"):
        if getattr(params, field) is not None and not shown:
            raise ValueError(f"{field}: only freewheel generate --json shows log probabilities")


def raise_errors(output: "RequestOutput") -> None:
    """RuntimeError if a choice ended with one."""
    errors = {choice.error: None for choice in output.outputs if choice.error}
    if errors:
        raise RuntimeError("; ".join(errors))


def run_generate(args: argparse.Namespace) -> None:
    """``freewheel generate``."""
    text = standard_input().read() if args.prompt == "-" else args.prompt
    import_engine()
    from freewheel.sampling.params import check_text

    check_text("prompt", text)
    messages = [*conversation(args), {"role": "user", "content": text}]
    params = sampling_params(args)
    refuse_unseen_logprobs(params, args.json)
    llm, startup = load(args)
    with llm:
        templated = llm.tokenizer.chat_template is not None and not args.raw
        if args.system and not templated:
            raise ValueError(f"system: {args.model} has no chat template to put a system message into")
        prompt: Any = text
        if templated:
            prompt = llm.render(messages)
        if args.json or params.n > 1:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
        else:
            output = stream_text(llm, prompt, params)
    if args.json:
        print(json.dumps(output.to_dict() | {"model": args.model, "timings": startup | timings(output)}))
        raise_errors(output)
        return
    for choice in output.outputs if params.n > 1 else ():
        print(f"--- {choice.index}\n{choice.text}")
    raise_errors(output)
    print_summary(output)


def run_serve(args: argparse.Namespace) -> None:
    """``freewheel serve``."""
    from freewheel.server import serve

    check_threads(args.threads)
    serve.run(args, {field: value for field, value in vars(args).items() if field in SPECULATION_OPTIONS})


def run_bench_serve(args: argparse.Namespace) -> None:
    """``freewheel bench serve``."""
    from freewheel.bench import serving

    check_threads(args.threads)
    serving.run(args, {field: value for field, value in vars(args).items() if field in SPECULATION_OPTIONS})


def run_chat(args: argparse.Namespace) -> None:
    """``freewheel chat``: an empty line is ignored, end of input or /quit ends, /new starts over."""
    at_terminal = standard_input().isatty()
    import_engine()
    from freewheel.sampling.params import check_text

    messages = conversation(args)
    params = sampling_params(args)
    if params.n > 1:
        raise ValueError("n: a conversation goes on with one answer, so n must be 1")
    refuse_unseen_logprobs(params)
    llm, startup = load(args)
    with llm:
        if llm.tokenizer.chat_template is None:
            raise ValueError(f"model: {args.model} has no chat template; use freewheel generate --raw")
        print(
            f"{args.model}, ready in {sum(startup.values()):.1f} s. /new starts over, /quit or Ctrl-D ends.",
            file=sys.stderr,
        )
        while True:
            try:
                text = input("> " if at_terminal else "").strip()
            except EOFError:
                return
            if text == "/quit":
                return
            if text == "/new":
                messages = conversation(args)
            elif text:
                messages.append({"role": "user", "content": text})
                try:
                    check_text("message", text)
                    output = stream_text(llm, llm.render(messages), params)
                    raise_errors(output)
                except (KeyboardInterrupt, ValueError, RuntimeError) as interruption:
                    messages.pop()  # the question stays unanswered, so it is not part of what was said
                    print(f"\n[{str(interruption) or 'interrupted'}]", file=sys.stderr)
                    continue
                messages.append({"role": "assistant", "content": output.outputs[0].text})
                print_summary(output)


def run_models(args: argparse.Namespace) -> None:
    """``freewheel models``."""
    from freewheel.models.store import BUILTIN, cache_folder, cached_models

    cached = {model.name: model for model in cached_models()}
    if args.json:
        entries = [
            {"name": name, "path": str(cached[name].path), "bytes": cached[name].nbytes, "cached": True}
            if name in cached
            else {"name": name, "path": None, "bytes": builtin.nbytes, "cached": False}
            for name, builtin in BUILTIN.items()
        ]
        print(json.dumps(entries))
        return
    print(f"cache: {cache_folder()}")
    for name, builtin in BUILTIN.items():
        where = cached[name].path if name in cached else "not cached, fetched on first use"
        print(f"  {name:14}{builtin.nbytes / 1e6:8.1f} MB  {builtin.title}: {where}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0, 2 for an error, 130 after Ctrl-C."""
    if sys.stderr is None:  # closed: then printing to it would print to standard output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        return run(build_parser().parse_args(argv))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def run(args: argparse.Namespace) -> int:
    """Run the command that was asked for; 0, or 2 after printing an error."""
    try:
        output = standard_output()
        args.run(args)
        output.flush()
    except BrokenPipeError:  # the reader of our output left: nothing to say, and nothing more to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"freewheel: error: {message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
