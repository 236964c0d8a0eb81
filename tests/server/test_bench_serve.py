"""``freewheel bench serve``: what it sends, what it makes of the answers, and how it ends."""

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Served, serving

from freewheel.bench import serving as bench
from freewheel.bench.client import UNFINISHED, Address, Load, Outcome, Reply, Traffic, drive, read_events, read_reply
from freewheel.bench.served import LoadOptions, Options, generate
from freewheel.bench.serving import Failure, Heartbeat, Result, Side, arrivals, compare, latency, summarise
from freewheel.bench.workloads import WORDS, Shape, bodies, fitted
from freewheel.cli import main
from freewheel.config import EngineConfig
from freewheel.sampling import Sampler, SampleRows, Samples

SMALL = ["--vocab-size", "250", "--input-len", "9", "--output-len", "7", "--num-requests", "6", "--concurrency", "3"]


def command(served: Served, *options: str) -> list[str]:
    return ["bench", "serve", "--url", f"{served.url}/v1", *SMALL, *options]


# --- figures


def outcome(start: float, *steps: tuple[float, int], end: float | None = None, **more: Any) -> Outcome:
    """A request that gets tokens at times, which are relative to its start."""
    times = tuple((start + seconds, count) for seconds, count in steps)
    tokens = sum(count for _, count in steps)
    ended = start + (steps[-1][0] if end is None else end)
    counts: dict[str, Any] = {"input_tokens": 10, "output_tokens": tokens, "cached_tokens": 0}
    return Outcome(start, ended, times, True, **counts | more)


SCRIPTED = [
    outcome(0.0, (0.25, 1), (0.5, 2), (1.0, 1), end=1.125),
    outcome(1.0, (0.5, 2), (1.0, 4)),
    outcome(0.5, (3.5, 1)),
]


def numbers(result: Result, name: str) -> tuple[float, ...]:
    """Mean, median, p90, p99 and largest of a kind of latency."""
    value = result.latencies[name]
    assert value
    return astuple(value)


def test_figures_of_scripted_arrivals_are_exact() -> None:
    failed = [
        Outcome(0.0, 0.1, failure="status 429", message="full"),
        Outcome(0.0, 0.2, failure="status 429", message="still full"),
        Outcome(3.0, 3.5, failure=UNFINISHED),
    ]
    result = summarise(Traffic([*SCRIPTED, *failed], busy=0.25, late=0.003), {"ttft": 500, "tpot": 200})
    assert (result.seconds, result.completed, result.unfinished) == (4.0, 3, 1)
    assert result.failures == {"status 429": Failure(2, "full")}
    assert (result.request_rate, result.output_tokens, result.output_token_rate) == (0.75, 11, 2.75)
    assert (result.input_tokens, result.input_token_rate, result.cached_tokens) == (30, 7.5, 0)
    assert result.goodput == 0.25  # the first one's tokens take 250 ms each, and the last one's comes too late
    assert result.streams == pytest.approx((1.125 + 1.0 + 3.5 + 0.1 + 0.2 + 0.5) / 4)
    assert (result.busy, result.late_ms, result.counted) == (0.25, 3.0, 1.0)
    assert numbers(result, "ttft") == pytest.approx((4250 / 3, 500, 2900, 3440, 3500))
    assert numbers(result, "tpot") == pytest.approx((187.5, 187.5, 237.5, 248.75, 250))
    # Tokens that arrive together share the gap before them: twice 125, once 500, four times 125.
    assert numbers(result, "itl") == pytest.approx((1250 / 7, 125, 275, 477.5, 500))
    assert numbers(result, "gap") == pytest.approx((1250 / 3, 500, 500, 500, 500))
    assert numbers(result, "e2el") == pytest.approx((1875, 1125, 3025, 3452.5, 3500))
    assert [one["failure"] for one in result.outcomes].count(None) == 3
    json.dumps(asdict(result), allow_nan=False)


def test_nothing_has_no_latency() -> None:
    assert latency([]) is None
    result = summarise(Traffic([], 0.0, 0.0))
    assert (result.completed, result.request_rate, result.goodput) == (0, 0.0, None)
    assert set(result.latencies.values()) == {None}
    json.dumps(asdict(result), allow_nan=False)


def test_sums_are_left_out_where_a_server_counts_nothing() -> None:
    result = summarise(Traffic([outcome(0.0, (1.0, 3), input_tokens=None, output_tokens=None)], 0.0, 0.0))
    assert (result.input_tokens, result.input_token_rate, result.output_tokens) == (None, None, 3)


def test_sides_are_compared_pair_by_pair() -> None:
    def result(seconds: float) -> Any:
        return summarise(Traffic([outcome(0.0, (seconds / 2, 1), (seconds, 1))], 0.0, 0.0))

    row = compare([result(1.0), result(2.0), result(4.0)], [result(2.0), result(2.0), result(2.0)])["e2el"]
    assert row == {"first": 2000, "second": 2000, "ratio": 1, "least": 0.5, "most": 2}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_requests_come_at_the_rate_and_as_evenly_as_asked(burstiness: float) -> None:
    times = arrivals(50.0, burstiness, 1, 20_000, None)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert (times[0], len(times)) == (0.0, 20_000)
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert arrivals(50.0, burstiness, 1, 0, times[100]) == times[:100]


# --- what comes over the wire


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """The bytes at once, one by one, and cut in two anywhere."""
    yield [data]
    yield [data[at : at + 1] for at in range(len(data))]
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_events_are_found_however_they_are_cut(end: bytes) -> None:
    lines = [
        "\ufeff: hello",
        "data: {a é",
        'data:  "b"}',
        "",
        "",
        "event: x",
        "id: 3",
        "data",
        "",
        "retry: 9",
        "",
        "data:日",
    ]
    stream = end.join(line.encode() for line in lines) + end * 2 + b"data: without an end" + end
    for pieces in cuts(stream):
        timed = list(enumerate(pieces, 1))
        assert [data.decode() for _, data in read_events(timed)] == ['{a é\n "b"}', "", "日"]
    halves = [(1.0, b"data: 1" + end), (2.0, end + b"data: 2"), (3.0, end + end)]
    assert list(read_events(halves)) == [(2.0, b"1"), (3.0, b"2")]


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;name=value\r\nhello\r\nB\r\n\r\n0\r\n\r\n wor\r\n2\r\nld\r\n0\r\nTrailer: x\r\n\r\n"
)
COUNTED = b"HTTP/1.1 404 Not Found\r\ncontent-length: 16\r\n\r\nhello\r\n0\r\n\r\n wor"
OPEN = b"HTTP/1.1 200 OK\r\n\r\nhello"


def fed(pieces: list[bytes]) -> Reply:
    reply = Reply()
    for number, piece in enumerate(pieces):
        assert not reply.ended
        reply.feed(piece, float(number))
    return reply


@pytest.mark.parametrize(
    ("data", "status", "body"),
    [
        (CHUNKED, 200, b"hello\r\n0\r\n\r\n world"),
        (COUNTED, 404, b"hello\r\n0\r\n\r\n wor"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + COUNTED, 404, b"hello\r\n0\r\n\r\n wor"),
        (b"HTTP/1.1 503 \r\ncontent-length: 0\r\n\r\n", 503, b""),
    ],
)
def test_a_body_is_cut_out_however_it_comes(data: bytes, status: int, body: bytes) -> None:
    for pieces in cuts(data):
        reply = fed(pieces)
        assert reply.ended
        assert (reply.status, reply.failure, reply.keeps) == (status, None, True)
        assert b"".join(piece for _, piece in reply.pieces) == body


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reply = fed([OPEN])
    assert not reply.ended
    reply.close(7.0)
    assert (reply.ended, reply.failure, reply.keeps, reply.end) == (True, None, False, 7.0)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\n", CHUNKED[:-2], COUNTED[:-1]])
def test_what_is_cut_off_is_a_failure(data: bytes) -> None:
    reply = fed([data])
    reply.close(1.0)
    assert reply.failure
    assert reply.failure[0] == "closed early"
    assert not reply.keeps


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello5\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        COUNTED + b"more",
        b"x" * 100_000,
    ],
)
def test_what_is_no_http_is_a_failure(data: bytes) -> None:
    reply = fed([data])
    reply.feed(b"\r\n", 1.0)
    assert reply.failure
    assert reply.failure[0] == "malformed reply"


def test_a_connection_that_the_server_closes_is_not_used_again() -> None:
    closing = COUNTED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    assert not fed([closing]).keeps
    assert not fed([COUNTED.replace(b"1.1", b"1.0")]).keeps


def streamed(*events: Any, status: int = 200) -> Outcome:
    """What is made of a stream whose events come at 1, 2, ... seconds."""
    reply = Reply()
    reply.status, reply.end = status, 9.0
    for number, event in enumerate(events, 1):
        text = event if isinstance(event, str) else json.dumps(event)
        reply.pieces.append((float(number), f"data: {text}\n\n".encode()))
    return read_reply(0.0, reply)


def text(text: str, tokens: int | None = None, finish: str | None = None) -> dict[str, Any]:
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 4, "completion_tokens": tokens}}
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **usage}


USAGE = {"prompt_tokens": 4, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 2}}
LAST = {"choices": [], "usage": USAGE}


def test_a_chunk_counts_as_a_token_where_the_server_tells_sums_only() -> None:
    made = streamed(text("a"), text(""), text("b"), text("", finish="stop"), LAST, "[DONE]")
    assert made == Outcome(0.0, 9.0, ((1.0, 1), (3.0, 1), (4.0, 1)), False, 4, 6, 2)
    assert (made.tokens, made.ttft, made.e2el, made.tpot) == (6, 1.0, 9.0, 3.0 / 5)
    early = streamed(text("a"), text("b"), text("", tokens=6, finish="stop"), "[DONE]")
    assert early.arrivals == ((1.0, 1), (2.0, 1), (3.0, 1))
    assert (early.counted, early.output_tokens) == (False, 6)


def test_tokens_of_chunks_are_counted_as_the_server_tells_them() -> None:
    made = streamed(text("", 0), text("a", 1), text("bcd", 5), text("", 6, "stop"), LAST, "[DONE]")
    assert (made.arrivals, made.counted) == (((2.0, 1), (3.0, 4), (4.0, 1)), True)
    assert made.ttft == 2.0


def test_what_comes_in_one_read_arrives_at_once() -> None:
    reply = Reply()
    reply.status, reply.pieces = 200, [(1.0, b"".join(f"data: {json.dumps(text(word))}\n\n".encode() for word in "ab"))]
    reply.pieces.append((2.0, b"data: [DONE]\n\n"))
    assert read_reply(0.0, reply).arrivals == ((1.0, 2),)


@pytest.mark.parametrize("name", ["content", "reasoning_content", "tool_calls"])
def test_chats_have_tokens_of_several_kinds(name: str) -> None:
    def delta(**fields: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}

    value: Any = [{"index": 0}] if name == "tool_calls" else "a"
    made = streamed(delta(role="assistant", content=""), delta(**{name: value}), "[DONE]")
    assert made.arrivals == ((2.0, 1),)


@pytest.mark.parametrize(
    ("events", "failure", "message"),
    [
        ([text("a")], "no end", "DONE"),
        ([LAST, "[DONE]"], "no tokens", "has none"),
        ([text("a"), {"error": {"message": "out of luck"}}, "[DONE]"], "error in stream", "out of luck"),
        ([text("a"), "{", "[DONE]"], "malformed event", "{"),
        ([text("a"), "[1]", "[DONE]"], "malformed event", "[1]"),
    ],
)
def test_a_stream_that_goes_wrong_is_a_failure(events: list[Any], failure: str, message: str) -> None:
    made = streamed(*events)
    assert made.failure == failure
    assert message in made.message


def test_an_error_is_a_failure_by_its_status() -> None:
    reply = Reply()
    reply.status, reply.pieces = 429, [(1.0, b'{"error": {"message": "full"}}')]
    assert (read_reply(0.0, reply).failure, read_reply(0.0, reply).message) == ("status 429", "full")
    reply.pieces = [(1.0, b"<html>")]
    assert read_reply(0.0, reply).message == "<html>"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a/v1", "http://", "http://a:99999/v1", "http://a/v1\r\nX: y"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        Address.of(url)


def test_addresses_are_read() -> None:
    assert Address.of("https://a.example/api/v1/") == Address(True, "a.example", 443, "/api/v1")
    assert Address.of("http://[::1]:80/v1").host_header == "[::1]:80"
    request = Address.of("http://h:1/v1").post("/completions", {"prompt": "é"}, "secret")
    assert request.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in request
    assert b"\r\nContent-Length: 20\r\n" in request


# --- a server of our own making


Answer = Callable[[int, asyncio.StreamWriter], Any]


@contextmanager
def scripted(answer: Answer) -> Iterator[Address]:
    """A server that answers requests, counted from 0, by a function that returns false to end a connection."""
    loop, ready, ports, numbers = asyncio.new_event_loop(), threading.Event(), [], iter(range(10**6))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                await reader.readexactly(int(length[1]) if length else 0)
                if not await answer(next(numbers), writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def listen() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()

    task = loop.create_task(listen())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    assert ready.wait(30)
    try:
        yield Address.of(f"http://127.0.0.1:{ports[0]}/v1")
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        del task
        for left in asyncio.all_tasks(loop):
            left.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


BODY = f"data: {json.dumps(text('a'))}\n\ndata: [DONE]\n\n".encode()
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)


def test_failures_are_counted_and_others_go_on() -> None:
    async def answer(number: int, writer: asyncio.StreamWriter) -> bool:
        match number % 4:
            case 0:
                writer.write(WHOLE)
            case 1:
                writer.write(WHOLE[:-5])
                return False
            case 2:
                await asyncio.sleep(30)
            case 3:
                writer.write(b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n")
        return True

    with scripted(answer) as address:
        request = address.post("/completions", {}, None)
        result = summarise(drive(Load(address, [request] * 8, timeout=0.5)))
    assert result.completed == 2
    assert {kind: failure.count for kind, failure in result.failures.items()} == {
        "closed early": 2,
        "timed out": 2,
        "status 500": 2,
    }


def test_a_connection_closed_for_being_idle_costs_no_request() -> None:
    seen: list[int] = []

    async def answer(number: int, writer: asyncio.StreamWriter) -> bool:
        seen.append(number)
        if number == 1:  # the second request on the first connection is not answered at all
            return False
        writer.write(WHOLE)
        return True

    with scripted(answer) as address:
        result = summarise(drive(Load(address, [address.post("/completions", {}, None)] * 3)))
    assert (result.completed, result.failures) == (3, {})
    assert seen == [0, 1, 2, 3]


def test_a_server_that_is_not_there_is_a_failure() -> None:
    async def answer(number: int, writer: asyncio.StreamWriter) -> bool:
        return False

    with scripted(answer) as address:
        pass
    result = summarise(drive(Load(address, [b""] * 2)))
    assert result.failures["no connection"].count == 2


def test_a_stall_shows_in_all_pings_that_were_due_meanwhile() -> None:
    stalled = threading.Event()

    async def answer(number: int, writer: asyncio.StreamWriter) -> bool:
        if number == 3:
            await asyncio.sleep(0.3)
            stalled.set()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        return True

    with scripted(answer) as address, Heartbeat(address, 0.02) as heartbeat:
        assert stalled.wait(30)
        deadline = time.monotonic() + 30
        while len(heartbeat._latencies) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
    pulse = heartbeat.result()
    assert pulse.failed == 0
    assert pulse.latency
    assert pulse.latency.max >= 300
    assert sum(seconds > 0.05 for seconds in heartbeat._latencies) >= 10


# --- what is asked


def test_random_prompts_are_the_same_for_the_same_seed() -> None:
    shape = Shape(20, 10, spread=0.5, vocab=300)
    made = bodies("random", 50, shape, 1)
    assert made == bodies("random", 50, shape, 1)
    assert made != bodies("random", 50, shape, 2)
    assert {len(body["prompt"]) for body in made} <= set(range(10, 31))
    assert len({len(body["prompt"]) for body in made}) > 5
    assert {body["max_tokens"] for body in made} <= set(range(5, 16))
    assert all(30 <= token < 300 for body in made for token in body["prompt"])


def test_prompts_share_beginnings() -> None:
    made = bodies("shared-prefix", 40, Shape(5, 10, groups=3, prefix=8), 1)
    assert len({tuple(body["prompt"][:8]) for body in made}) == 3
    assert len({tuple(body["prompt"]) for body in made}) == 40
    assert {len(body["prompt"]) for body in made} == {13}


def test_prompts_can_be_words() -> None:
    (body,) = bodies("random", 1, Shape(12, 3, words=True), 1)
    assert len(body["prompt"].split()) == 12
    assert set(body["prompt"].split()) <= set(WORDS)
    assert fitted(body, "chat") == {"messages": [{"role": "user", "content": body["prompt"]}], "max_tokens": 3}
    with pytest.raises(ValueError, match="endpoint"):
        fitted({"prompt": [1]}, "chat")


def test_answers_of_copies_are_what_prompts_hold() -> None:
    made = bodies("copy", 4, Shape(1, 100), 0)
    assert len({body["prompt"] for body in made}) == 4
    assert all("again" in body["prompt"] or "renamed" in body["prompt"] for body in made)
    assert all(0 < body["max_tokens"] <= 100 for body in made)


def test_a_dataset_s_lines_are_bodies(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines: list[dict[str, Any]] = [{"prompt": "a", "top_k": 3}, {"messages": [{"role": "user", "content": "b"}]}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    first, second, third = bodies("jsonl", 3, Shape(1, 9), 0, file)
    assert first == third == {"prompt": "a", "top_k": 3, "max_tokens": 9}
    assert fitted(first, "completions") == first
    assert fitted(second, "chat") == {**lines[1], "max_tokens": 9}
    with pytest.raises(ValueError, match="endpoint"):
        fitted(second, "completions")


@pytest.mark.parametrize(
    ("content", "words"), [("", "empty"), ("{}", "line 1"), ('{"prompt": 1}\n[', "line 2"), ("[]", "line 1")]
)
def test_a_dataset_s_wrong_lines_are_named(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(ValueError, match=f"dataset: .*{words}"):
        bodies("jsonl", 1, Shape(1, 1), 0, tmp_path / "data.jsonl")


# --- the whole


def test_a_load_is_measured_and_told(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "plot.png"
    options = ["--ignore-eos", "--continuous-usage", "--temperature", "1", "--seed", "5", "--processes", "2"]
    options += ["--goodput", "e2el:60000", "--heartbeat", "20", "--json", str(report), "--plot", str(picture)]
    assert main(command(served, *options)) == 0
    told = json.loads(report.read_text())
    (result,) = told["results"]["served"]
    assert (result["completed"], result["unfinished"], result["failures"]) == (6, 0, {})
    assert (result["input_tokens"], result["output_tokens"], result["counted"]) == (54, 42, 1.0)
    assert result["goodput"] == result["request_rate"] == 6 / result["seconds"]
    assert result["output_token_rate"] == pytest.approx(7 * result["request_rate"])
    assert [one["output_tokens"] for one in result["outcomes"]] == [7] * 6
    for name in ("ttft", "tpot", "itl", "gap", "e2el"):
        assert 0 < result["latencies"][name]["median"] <= result["latencies"][name]["p99"]
    assert result["latencies"]["ttft"]["max"] < result["latencies"]["e2el"]["max"]
    assert result["pulse"]["pings"] > 0 == result["pulse"]["failed"]
    assert (told["model"], told["interrupted"]) == ("tiny", False)
    assert told["clients"]["chunks_per_s"] > 0
    assert told["arguments"]["seed"] == 5
    assert picture.stat().st_size > 1000
    printed = capsys.readouterr().out
    for word in ("machine", "floor", "requests   6 done, 0 failed", "rates", "goodput", "TTFT", "/health"):
        assert word in printed


@pytest.mark.parametrize(
    "options",
    [
        ["--request-rate", "200", "--burstiness", "0.5"],
        ["--duration", "0.2"],
        ["--duration", "0.2", "--request-rate", "30"],
        ["--workload", "shared-prefix", "--prefix-len", "16", "--prefix-groups", "1"],
        ["--endpoint", "chat", "--extra-body", '{"top_k": 5, "logprobs": true}'],
    ],
)
def test_loads_of_all_kinds(served: Served, options: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert main(command(served, "--no-calibrate", "--json", str(report), *options)) == 0
    (result,) = json.loads(report.read_text())["results"]["served"]
    assert result["failures"] == {}
    assert result["completed"] == 6 if "--duration" not in options else result["completed"] > 0
    if "shared-prefix" in options:
        assert result["cached_tokens"] > 0


def test_what_a_server_refuses_is_told(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    body = '{"nonsense": 1}'
    assert main(command(served, "--no-calibrate", "--warmup", "0", "--extra-body", body)) == 2
    out, err = capsys.readouterr()
    assert "requests   0 done, 6 failed" in out
    assert "6 x status 400: nonsense is not supported" in out
    assert "no request ended well" in err


def test_a_key_is_sent(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tiny_model, api_key="secret") as served:
        assert main(command(served, "--no-calibrate")) == 2
        assert "url" in capsys.readouterr().err
        assert main(command(served, "--no-calibrate", "--api-key", "secret")) == 0


def test_fields_are_compared_in_turns(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    options = ["--no-calibrate", "--repeats", "2", "--compare-body", '{"max_tokens": 2}', "--json", str(report)]
    assert main(command(served, *options)) == 0
    told = json.loads(report.read_text())
    tokens = {name: [one["output_tokens"] for one in results] for name, results in told["results"].items()}
    assert tokens.keys() == {"without", "with the fields"}
    assert max(tokens["with the fields"]) <= 12 < min(tokens["without"])
    assert told["comparison"].keys() >= {"request_rate", "output_token_rate", "ttft", "tpot", "e2el"}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("with")]
    assert [line.split("  ")[0] for line in lines] == ["without", "with the fields", "with the fields", "without"]


def test_a_copy_of_the_logits_is_compared_as_it_was_published(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Options] = []

    @contextmanager
    def own_server(options: Options) -> Iterator[str]:
        started.append(options)
        yield f"{served.url}/v1"

    monkeypatch.setattr(bench, "own_server", own_server)
    options = ["--model", "tiny", "--compare", "float32-logits", "--no-calibrate", "--repeats", "1", *SMALL]
    assert main(["bench", "serve", *options]) == 0
    plain, copying = started
    assert (plain.float32_logits, copying.float32_logits) == (False, True)
    assert plain.max_model_len == 9 + 7
    assert plain.engine == {"enable_prefix_caching": False}
    printed = capsys.readouterr().out
    assert "temperature 1, top_p 1, top_k 0, min_p 0" in printed
    assert "'without' over 'with the copy'" in printed
    assert [float(number) for number in re.findall(r"published ([+-]\S+) %", printed)] == [11.3, -8.7, -7.4, -8.6]


@pytest.mark.parametrize("copied", [False, True])
def test_an_engine_copies_the_logits_where_that_is_asked(
    tiny_model: Path, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: set[torch.dtype] = set()
    sample = Sampler.sample

    def listen(self: Sampler, logits: torch.Tensor, rows: SampleRows) -> Samples:
        dtypes.add(logits.dtype)
        return sample(self, logits, rows)

    monkeypatch.setattr(Sampler, "sample", listen)
    options = Options(str(tiny_model), "bfloat16", "cpu", None, None, 2, float32_logits=copied)
    load = LoadOptions.of(options, EngineConfig(max_num_seqs=2))
    model = load.load()
    engine = load.build(model)
    (outcome,) = generate(model, engine, [{"model": "x", "stream": True, "prompt": [3, 4], "max_tokens": 5}])
    assert 1 <= outcome.tokens <= 5
    assert dtypes == {torch.float32 if copied else torch.bfloat16}
    with pytest.raises(ValueError, match="response_format"):
        generate(model, engine, [{"prompt": [3], "response_format": {}}])


def test_our_own_server_and_the_engine_offline_are_started_and_stopped(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "vocab_size": 250, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = tmp_path / "report.json"
    options = ["--shape", str(tmp_path / "config.json"), "--compare", "offline", "--repeats", "1", "--no-calibrate"]
    options += ["--threads", "1", "--json", str(report)]
    assert main(["bench", "serve", *SMALL, *options]) == 0
    told = json.loads(report.read_text())
    assert told["results"].keys() == {"offline", "served"}
    for (result,) in told["results"].values():
        assert (result["completed"], result["input_tokens"], result["output_tokens"]) == (6, 54, 42)
    assert set(told["comparison"]) == {"request_rate", "output_token_rate", "ttft", "tpot", "e2el"}


def test_a_server_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho loading >&2\necho there is no such model >&2\nexit 2\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    assert main(["bench", "serve", "--no-calibrate"]) == 2
    assert "the server did not start: there is no such model" in capsys.readouterr().err


def test_an_interrupt_tells_what_there_is(served: Served, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--no-calibrate", "--duration", "300", "--warmup", "0", "--json", str(report)]
    arguments = [sys.executable, "-m", "freewheel", *command(served, *options)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            deadline = time.monotonic() + 60
            while not served.service.active and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "interrupted" in printed
    assert "TTFT" in printed
    told = json.loads(report.read_text())
    (result,) = told["results"]["served"]
    assert told["interrupted"]
    assert result["completed"] > 0
    assert 0 < result["unfinished"] <= 3
    assert result["failures"] == {}


def test_turns_are_taken_in_both_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def side(name: str) -> Side:
        def answer(several: Any, title: str, counts: bool) -> tuple[Traffic, None]:
            order.append(f"{name}{'' if counts else ' before'}")
            return Traffic([outcome(0.0, (1.0, 1), (2.0, 1))], 0.0, 0.0), None

        return Side(name, answer)

    monkeypatch.setattr(bench, "make_sides", lambda *_: ([side("a"), side("b")], "here", "tiny"))
    assert main(["bench", "serve", "--no-calibrate", "--compare", "offline"]) == 0
    assert order == ["a before", "b before", "a", "b", "b", "a", "a", "b"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--url", "here"], "url"),
        (["--concurrency", "0"], "concurrency"),
        (["--num-requests", "0"], "num_requests"),
        (["--request-rate", "0"], "request_rate"),
        (["--request-rate", "nan"], "request_rate"),
        (["--range-ratio", "1"], "range_ratio"),
        (["--goodput", "ttft"], "goodput"),
        (["--goodput", "itl:3"], "goodput"),
        (["--workload", "jsonl"], "dataset"),
        (["--dataset", "x"], "dataset"),
        (["--shape", "other"], "shape"),
        (["--shape", "qwen3-0.6b", "--words"], "shape"),
        (["--url", "http://a/v1", "--compare", "offline"], "compare"),
        (["--url", "http://a/v1", "--float32-logits"], "float32_logits"),
        (["--compare", "offline", "--request-rate", "3"], "compare"),
        (["--compare", "offline", "--compare-body", "{}"], "compare_body"),
        (["--extra-body", '{"n": 2}'], "extra_body"),
        (["--api-key", "a\nb"], "api_key"),
        (["--threads", "0"], "threads"),
    ],
)
def test_wrong_options_are_named(options: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *options]) == 2
    assert f"error: {named}" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--extra-body", "[]"], ["--compare-body", "{"], ["--top-k", "x"]])
def test_what_cannot_be_read_is_named(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", *options])
    assert f"argument {options[0]}: invalid" in capsys.readouterr().err
