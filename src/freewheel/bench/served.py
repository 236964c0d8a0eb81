"""What ``freewheel bench serve`` starts beside its clients, each in a process of its own: this engine behind its
server, the same engine without one, and a server that answers at once.

The engine is what ``freewheel serve`` runs, but for three things that only benchmarks want: random weights of a shape,
no prefix cache, and a float32 copy of the logits before each draw.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from freewheel.bench.client import Address, Outcome, Traffic
from freewheel.bench.shapes import dummy_model, id_tokenizer, shape_config
from freewheel.engine.process import Load
from freewheel.models.store import resolve

if TYPE_CHECKING:
    from freewheel.config import EngineConfig
    from freewheel.engine.engine import Engine
    from freewheel.models.load import LoadedModel
    from freewheel.models.tokenizer import Tokenizer

RESULT = "result: "  # marks a line for who started the process
GRACE = 10.0  # seconds to stop in


@dataclass(frozen=True)
class Options:
    """How to run this engine.

    Attributes:
        model, dtype, device, threads, max_model_len, max_num_seqs: as ``freewheel serve`` takes them.
        shape: in place of a model, random weights of this one.
        engine: more fields of :class:`freewheel.config.EngineConfig`.
        float32_logits: copy the logits to float32 before each draw.
        api_key, served_model_name: of the server.
    """

    model: str
    dtype: str
    device: str
    threads: int | None
    max_model_len: int | None
    max_num_seqs: int
    shape: str | None = None
    engine: Mapping[str, Any] | None = None
    float32_logits: bool = False
    api_key: str | None = None
    served_model_name: str | None = None


@dataclass(frozen=True)
class LoadOptions(Load):
    """What the engine's process loads."""

    options: Options = field(kw_only=True)

    @classmethod
    def of(cls, options: Options, config: "EngineConfig") -> "LoadOptions":
        """As these options say."""
        model = Path(options.shape) if options.shape else resolve(options.model)
        return cls(model, config, cast(Any, options.dtype), options.device, options.threads, options=options)

    def load(self) -> "LoadedModel":
        if not self.options.shape:
            return super().load()
        dtype = "float32" if self.device == "cpu" else "bfloat16"
        return dummy_model(self.options.shape, dtype if self.dtype == "auto" else self.dtype, self.device)

    def build(self, model: "LoadedModel") -> "Engine":
        from freewheel.bench.systems import float32_runner
        from freewheel.engine.build import build_engine

        runner = float32_runner(self.config, model.decoder.device.type) if self.options.float32_logits else None
        return build_engine(model, self.config, runner)

    def tokenizer(self) -> "Tokenizer":
        if not self.options.shape:
            return super().tokenizer()
        return id_tokenizer(shape_config(self.options.shape)["vocab_size"])


@contextmanager
def _started(kind: str, options: Options) -> "Iterator[tuple[subprocess.Popen[str], Path]]":
    """A process of this module, and the file that its errors go to. It is asked to stop, and ended in the end."""
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder, "errors")
        with errors.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "freewheel.bench.served", kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if kind == "offline" else subprocess.DEVNULL,
                stderr=file,
                text=True,
                start_new_session=True,  # Ctrl-C is for the benchmark, which stops it then
            )
        try:
            assert process.stdin
            with suppress(BrokenPipeError):  # it is dead, and whoever waits for it says why
                # Among arguments all users would see a key.
                print(json.dumps(asdict(options)), file=process.stdin, flush=True)
            yield process, errors
        finally:
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in filter(None, (process.stdin, process.stdout)):
                with suppress(BrokenPipeError):
                    stream.close()


def _last_words(process: "subprocess.Popen[str]", errors: Path) -> str:
    return (errors.read_text(errors="replace").strip().splitlines() or [f"it ended with status {process.poll()}"])[-1]


@contextmanager
def own_server(options: Options) -> Iterator[str]:
    """A server of this engine on a free port: its address, once it is healthy.

    Raises:
        RuntimeError: it did not start, with the last line that it said.
    """
    with _started("serve", options) as (process, errors):
        found = None
        while found is None:
            if process.poll() is not None:
                raise RuntimeError(f"the server did not start: {_last_words(process, errors)}")
            time.sleep(0.05)
            found = re.search(r"at (http://\S+/v1), ", errors.read_text(errors="replace"))
        address = Address.of(found[1])
        connection = HTTPConnection(address.host, address.port, timeout=60)
        connection.request("GET", "/health")
        connection.getresponse().read()
        connection.close()
        yield found[1]


class Offline:
    """This engine without a server, made by :func:`offline_engine`."""

    def __init__(self, process: "subprocess.Popen[str]", errors: Path) -> None:
        self._process, self._errors = process, errors

    def run(self, bodies: Sequence[Mapping[str, Any]]) -> Traffic:
        """Answer completions, all given at once; text is made as for a server.

        Raises:
            RuntimeError: it failed, with the last line that it said.
        """
        assert self._process.stdin
        with suppress(BrokenPipeError):
            print(json.dumps(list(bodies)), file=self._process.stdin, flush=True)
        return Traffic([Outcome(**outcome) for outcome in self._result()], busy=0.0, late=0.0)

    def _result(self) -> Any:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(RESULT):
                return json.loads(line.removeprefix(RESULT))
        self._process.wait()
        raise RuntimeError(f"the offline engine failed: {_last_words(self._process, self._errors)}")


@contextmanager
def offline_engine(options: Options) -> Iterator[Offline]:
    """The engine of a server, ready and without one."""
    with _started("offline", options) as (process, errors):
        offline = Offline(process, errors)
        offline._result()
        yield offline


def _serve(options: Options) -> None:
    from freewheel.server import serve

    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = argparse.Namespace(**{**vars(parser.parse_args([])), **asdict(options)})
    args.port, args.grace, args.model = 0, GRACE / 2, options.shape or options.model

    def stop_without_benchmark() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_without_benchmark, daemon=True).start()
    serve.run(args, dict(options.engine or {}), lambda config: LoadOptions.of(options, config))


def _answer_offline(options: Options) -> None:
    from freewheel.config import EngineConfig
    from freewheel.engine.build import prepare

    config = EngineConfig(
        max_model_len=options.max_model_len, max_num_seqs=options.max_num_seqs, **(options.engine or {})
    )
    load = LoadOptions.of(options, config)
    model = load.load()
    engine = load.build(model)
    prepare(engine)
    print(RESULT + "null", flush=True)
    for line in sys.stdin:
        outcomes = generate(model, engine, json.loads(line))
        print(RESULT + json.dumps([asdict(outcome) for outcome in outcomes]), flush=True)


def generate(model: "LoadedModel", engine: "Engine", bodies: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Run completions to their end, with their text. Tokens after the first count as one arrival.

    Raises:
        ValueError: a body has what only a server knows.
        RuntimeError: a request failed.
    """
    from freewheel.engine.inputs import make_request
    from freewheel.engine.outputs import Reply
    from freewheel.sampling import SamplingParams

    served = {"model", "stream", "stream_options", "prompt"}
    start, replies = time.monotonic(), {}
    for number, body in enumerate(bodies):
        asked = {name: value for name, value in body.items() if name not in served}
        if unknown := sorted(asked.keys() - SamplingParams.__dataclass_fields__.keys()):
            raise ValueError(f"compare: the offline engine knows no {unknown[0]}")
        request, text = make_request(model.tokenizer, str(number), body["prompt"], SamplingParams(**asked))
        replies[request.request_id] = Reply(request, text, model.tokenizer)
        engine.add(request)
    while engine.has_unfinished:
        for output in engine.step():
            if output.error:
                raise RuntimeError(output.error)
            if replies[output.request_id].add(output):
                engine.finish(output.request_id, output.index)
    outcomes = []
    for reply in replies.values():
        result = reply.take()
        assert result is not None
        metrics = result.metrics
        arrivals = (metrics.first_token_time, 1), (metrics.finish_time, metrics.output_tokens - 1)
        outcomes.append(
            Outcome(
                start,
                metrics.finish_time,
                arrivals[: 1 + (metrics.output_tokens > 1)],
                True,
                metrics.prompt_tokens,
                metrics.output_tokens,
                metrics.cached_tokens,
            )
        )
    return outcomes


CHUNK = {"id": "x", "object": "text_completion", "choices": [{"index": 0, "text": " word", "finish_reason": None}]}


async def _answer_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A stream of as many chunks as tokens were asked for, each sent by itself."""
    event = b"data: " + json.dumps(CHUNK).encode() + b"\n\n"
    chunk = b"%x\r\n%b\r\n" % (len(event), event)
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            body = json.loads(await reader.readexactly(int(length[1]) if length else 0))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(body["max_tokens"]):
                writer.write(chunk)
                await asyncio.sleep(0)
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            await writer.drain()
    writer.close()


async def _serve_at_once(pipe: "Pipe[Any, Any]") -> None:
    server = await asyncio.start_server(_answer_at_once, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _instant(pipe: "Pipe[Any, Any]") -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve_at_once(pipe))


@contextmanager
def instant_server() -> Iterator[str]:
    """A server that answers at once, which shows what clients take by themselves: its address."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_instant, args=(theirs,), daemon=True)
    process.start()
    try:
        theirs.close()
        yield f"http://127.0.0.1:{pipe.recv()}/v1"
    finally:
        pipe.close()
        process.terminate()
        process.join()


def main(kind: str) -> None:
    """The process: options come as a line, and so does each load without a server."""
    options = Options(**json.loads(sys.stdin.readline()))
    if options.threads is not None:
        import torch

        torch.set_num_threads(options.threads)
    try:
        (_serve if kind == "serve" else _answer_offline)(options)
    except Exception as error:
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    from freewheel.bench import served  # by its name: another process has to find what is sent to it

    served.main(sys.argv[1])
