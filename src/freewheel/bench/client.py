"""The clients of ``freewheel bench serve``: they send a load over HTTP, and note when each part of a reply came.

They run in processes of their own with nothing but Python's library, one event loop each. While a load runs, a reply's
bytes are only cut out of the transfer encoding and kept with the time of the read; what they say is looked at when all
is over.
"""

import asyncio
import gc
import json
import multiprocessing
import re
import signal
import ssl
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any
from urllib.parse import urlsplit

from freewheel.interrupts import held_interrupts

Piece = tuple[float, bytes]  # of a reply's body, and when it was read
MOST_HEAD = 1 << 16  # bytes of a head, or of the line that begins a chunk
UNFINISHED = "unfinished"  # what an outcome that nobody waited for is called: it is no failure of the server


@dataclass(frozen=True)
class Address:
    """Where a server is.

    Attributes:
        path: what comes before an endpoint's own, like ``/v1``.
    """

    secure: bool
    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> "Address":
        """ValueError if it is no address of HTTP."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"url: {url!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[^!-~]", url):
            raise ValueError(f"url: {url!r} is not like http://127.0.0.1:8000/v1")
        secure = parts.scheme == "https"
        return cls(secure, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/"))

    @property
    def host_header(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def post(self, path: str, body: dict[str, Any], key: str | None) -> bytes:
        """A whole request."""
        data = json.dumps(body).encode()
        lines = [f"POST {self.path}{path} HTTP/1.1", f"Host: {self.host_header}", "Accept: text/event-stream"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        if key:
            lines.append(f"Authorization: Bearer {key}")
        return "\r\n".join([*lines, "", ""]).encode() + data


@dataclass(frozen=True)
class Load:
    """What clients do.

    Attributes:
        address: of the server.
        requests: to send, in this order; again from the first if ``duration`` is longer.
        concurrency: send the next one when one of so many is done; or
        due: send each at its time, in seconds from the beginning, whatever the others do.
        duration: seconds after which nothing more is sent; None: when all are sent.
        timeout: seconds that a reply may take.
    """

    address: Address
    requests: list[bytes]
    concurrency: int = 1
    due: list[float] | None = None
    duration: float | None = None
    timeout: float = 300.0

    def share(self, number: int, processes: int) -> "Load":
        """What one of several processes does of it."""
        part = slice(number, None, processes)
        mine = len(range(self.concurrency)[part])
        return replace(
            self, requests=self.requests[part], concurrency=mine, due=None if self.due is None else self.due[part]
        )


@dataclass(frozen=True)
class Outcome:
    """What became of a request.

    Attributes:
        start, end: seconds of ``time.perf_counter()`` at which it was sent, and its reply had come.
        arrivals: when tokens came, and how many at once.
        counted: whether the server told how many those were; else each chunk with text counts as one.
        input_tokens, output_tokens, cached_tokens: as the server counts them, None where it did not.
        failure: its kind; None: there was none.
        message: about the failure.
    """

    start: float
    end: float
    arrivals: tuple[tuple[float, int], ...] = ()
    counted: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    failure: str | None = None
    message: str = ""

    @property
    def tokens(self) -> int:
        """Of the output: as the server counts them, else as they came."""
        return self.output_tokens or sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.start

    @property
    def tpot(self) -> float | None:
        """Seconds a token, of those that came after the first arrival; None if there are none."""
        rest = self.tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / rest if rest > 0 else None

    @property
    def e2el(self) -> float:
        """Seconds to the end of the reply."""
        return self.end - self.start


@dataclass(frozen=True)
class Traffic:
    """All that came of a load.

    Attributes:
        outcomes: of its requests, in no order.
        busy: share of its time that the busiest process was at work, and not waiting for the server.
        late: most seconds after its time that a request was sent.
        interrupted: whether Ctrl-C ended it.
    """

    outcomes: list[Outcome]
    busy: float
    late: float
    interrupted: bool = False


class Reply:
    """A reply of HTTP/1.1, fed with bytes as they come, cut anywhere.

    Attributes:
        status: 0 before its head is there.
        pieces: of its body.
        ended: whether it has come to its end, or failed.
        keeps: whether the connection can take another request.
        failure: kind and message, if it failed.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.pieces: list[Piece] = []
        self.ended = False
        self.keeps = True
        self.failure: tuple[str, str] | None = None
        self.end = 0.0
        self._rest = b""
        self._left: int | None = None  # bytes of the body, or of a chunk and its line end; None: until it is closed
        self._chunked = self._trailer = False

    def feed(self, data: bytes, now: float) -> None:
        """Take in what was read at ``now``."""
        data, self._rest = self._rest + data, b""
        try:
            while not self.status:
                head, found, data = data.partition(b"\r\n\r\n")
                if not found:
                    self._keep(head)
                    return
                self._read_head(head)
            if self._chunked:
                self._read_chunks(data, now)
            else:
                self._read_plain(data, now)
        except ValueError as error:
            self._fail(now, "malformed reply", str(error))

    def close(self, now: float) -> None:
        """The connection was closed."""
        if not self.ended and self.status and not self._chunked and self._left is None:
            self._finish(now)
        elif not self.ended:
            self._fail(now, "closed early", "the server closed the connection before the end of the reply")
        self.keeps = False

    def _finish(self, now: float) -> None:
        self.ended, self.end = True, now

    def _fail(self, now: float, kind: str, message: str) -> None:
        self._finish(now)
        self.failure, self.keeps = (kind, message), False

    def _keep(self, data: bytes) -> None:
        if len(data) > MOST_HEAD:
            raise ValueError("a line has no end")
        self._rest = data

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        match = re.fullmatch(rb"HTTP/1\.([01]) (\d{3})(?: .*)?", first)
        if not match:
            raise ValueError(f"it begins with {first[:80]!r}")
        status = int(match[2])
        if status < 200:  # another head follows
            return
        fields = (line.partition(b":") for line in lines)
        self.status, self.headers = status, {name.strip().lower(): value.strip() for name, _, value in fields}
        self._chunked = self.headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        length = self.headers.get(b"content-length")
        if self._chunked:
            self._left = 0
        elif length is not None:
            self._left = _number(length, 10)
        closes = self.headers.get(b"connection", b"").lower() == b"close"
        self.keeps = match[1] == b"1" and not closes and self._left is not None

    def _read_plain(self, data: bytes, now: float) -> None:
        if data:
            self.pieces.append((now, data))
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise ValueError("it is longer than it says")
            if not self._left:
                self._finish(now)

    def _read_chunks(self, data: bytes, now: float) -> None:
        at, parts = 0, []
        while at < len(data):
            if self._left:
                size = min(self._left, len(data) - at)
                text = min(size, self._left - 2)
                if text > 0:
                    parts.append(data[at : at + text])
                at += size
                self._left -= size
                continue
            stop = data.find(b"\r\n", at)
            if stop < 0:
                self._keep(data[at:])
                break
            line, at = data[at:stop], stop + 2
            if self._trailer:
                if not line:
                    self._finish(now)
                    self.keeps = self.keeps and at == len(data)
                    break
            elif size := _number(line.partition(b";")[0].strip(), 16):
                self._left = size + 2
            else:
                self._trailer = True
        if parts:
            self.pieces.append((now, b"".join(parts)))


def _number(digits: bytes, base: int) -> int:
    if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", digits):
        raise ValueError(f"{digits[:20]!r} is no length")
    return int(digits, base)


def read_events(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The data of each server-sent event, with the time at which its end came.

    Lines may end as the standard allows, and be cut anywhere; what is no data is left out, and so is an event without
    an end (https://html.spec.whatwg.org/multipage/server-sent-events.html).
    """
    rest, fields, skip, begins = b"", [], False, True
    for now, piece in pieces:
        if skip and piece.startswith(b"\n"):
            piece = piece[1:]
        skip = piece.endswith(b"\r") or (skip and not piece)
        *lines, rest = re.split(b"\r\n|\r|\n", rest + piece)
        for line in lines:
            if begins:
                line, begins = line.removeprefix(b"\xef\xbb\xbf"), False
            name, _, value = line.partition(b":")
            if name == b"data":
                fields.append(value.removeprefix(b" "))
            elif not line and fields:
                yield now, b"\n".join(fields)
                fields = []


def read_reply(start: float, reply: Reply) -> Outcome:
    """What a reply says."""
    if reply.failure:
        kind, message = reply.failure
        return Outcome(start, reply.end, failure=kind, message=message)
    if reply.status != 200:
        body = b"".join(piece for _, piece in reply.pieces)
        return Outcome(start, reply.end, failure=f"status {reply.status}", message=_error_of(body))
    arrivals: dict[float, int] = {}
    usage: dict[str, Any] = {}
    told, counted, ended, wrong = 0, False, False, None
    for now, data in read_events(reply.pieces):
        if data == b"[DONE]":
            ended = True
            break
        try:
            event = json.loads(data)
            if event.get("error"):
                wrong = "error in stream", _error_of(data)
                break
            choices = event.get("choices") or ()
            new = int(any(map(_has_news, choices)))
            if event.get("usage"):
                usage = event["usage"]
                if choices and (counted or not arrivals):  # else it is one at the end, which counts all
                    new, counted = usage["completion_tokens"] - told, True
            told += new
        except (ValueError, TypeError, AttributeError, KeyError):
            wrong = "malformed event", data[:200].decode(errors="replace")
            break
        if new > 0:
            arrivals[now] = arrivals.get(now, 0) + new
    if not wrong and not arrivals:
        kind = reply.headers.get(b"content-type", b"").decode(errors="replace")
        wrong = "no tokens", f"the stream has none (content-type: {kind})"
    if not wrong and not ended:
        wrong = "no end", "the stream ends without [DONE]"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    made = Outcome(
        start,
        reply.end,
        tuple(arrivals.items()),
        counted,
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        cached,
    )
    return replace(made, failure=wrong[0], message=wrong[1]) if wrong else made


def _has_news(choice: dict[str, Any]) -> bool:
    """Whether a chunk of a choice brings a token: text of any kind, or the end that a token without text makes."""
    if choice.get("finish_reason") or choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "refusal", "tool_calls"))


def _error_of(body: bytes) -> str:
    """The message of an error, as OpenAI's interface puts it, or how the body begins."""
    with suppress(ValueError, TypeError, KeyError):
        return str(json.loads(body)["error"]["message"])[:500]
    return body[:200].decode(errors="replace")


class Connection(asyncio.Protocol):
    """A connection to the server, for one request after another."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.open = False
        self._reply = Reply()
        self._waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.open = transport, True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._waiter is None:  # bytes that nobody asked for
            self.transport.abort()
            return
        self._reply.feed(data, now)
        if self._reply.ended:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._reply.close(time.perf_counter())
        self._end()

    def _end(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None

    async def ask(self, request: bytes, timeout: float) -> Reply:
        """Send a request, and return the reply when it has ended. Cancelled, it closes the connection."""
        loop = asyncio.get_running_loop()
        reply, waiter = Reply(), loop.create_future()
        self._reply, self._waiter = reply, waiter
        timer = loop.call_later(timeout, self._give_up, reply)
        self.transport.write(request)
        try:
            await waiter
        finally:
            timer.cancel()
            if not reply.ended:
                self.transport.abort()
        return reply

    def _give_up(self, reply: Reply) -> None:
        reply._fail(time.perf_counter(), "timed out", "the reply took too long")
        self.transport.abort()
        self._end()


class Clients:
    """A process's share of a load."""

    def __init__(self, load: Load, pipe: "Pipe[Any, Any]") -> None:
        self._load, self._pipe = load, pipe
        self._idle: list[Connection] = []
        self._replies: list[tuple[float, Reply]] = []
        self._left: list[Outcome] = []  # without a reply
        self._late = 0.0
        self._done = 0
        self._running: set[asyncio.Task[None]] = set()
        self._secure = ssl.create_default_context() if load.address.secure else None

    async def run(self) -> Traffic:
        """Send it all; a message through the pipe ends it early."""
        loop = asyncio.get_running_loop()
        self._pipe.send("ready")
        begin = self._pipe.recv()
        stopped = asyncio.Event()
        loop.add_reader(self._pipe.fileno(), stopped.set)
        sending = asyncio.create_task(self._send_when_due(begin) if self._load.due else self._send_in_turn(begin))
        stopping = asyncio.create_task(stopped.wait())
        worked = time.process_time()
        while not (sending.done() or stopped.is_set()):
            await asyncio.wait({sending, stopping}, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
            self._pipe.send(self._done)
        busy = (time.process_time() - worked) / max(time.perf_counter() - begin, 1e-9)
        loop.remove_reader(self._pipe.fileno())
        tasks = {sending, stopping, *self._running}
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._idle:
            connection.transport.abort()
        for result in results:
            if isinstance(result, Exception):
                raise result
        outcomes = self._left + [read_reply(start, reply) for start, reply in self._replies]
        return Traffic(outcomes, busy, self._late, stopped.is_set())

    def _ends(self, begin: float) -> float:
        return float("inf") if self._load.duration is None else begin + self._load.duration

    def _requests(self) -> Iterator[bytes]:
        while self._load.requests:
            yield from self._load.requests
            if self._load.duration is None:
                break

    async def _send_in_turn(self, begin: float) -> None:
        requests, ends = self._requests(), self._ends(begin)

        async def client() -> None:
            for request in requests:
                if time.perf_counter() >= ends:
                    break
                await self._exchange(request)

        await asyncio.sleep(begin - time.perf_counter())
        self._running = {asyncio.create_task(client()) for _ in range(self._load.concurrency)}
        await asyncio.gather(*self._running)

    async def _send_when_due(self, begin: float) -> None:
        assert self._load.due is not None
        for due, request in zip(self._load.due, self._requests()):
            await asyncio.sleep(begin + due - time.perf_counter())
            self._late = max(self._late, time.perf_counter() - begin - due)
            task = asyncio.create_task(self._exchange(request))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await asyncio.gather(*self._running)

    async def _exchange(self, request: bytes) -> None:
        """Send one request, by a connection that is free if there is one."""
        start = time.perf_counter()
        try:
            while True:
                while self._idle and not self._idle[-1].open:
                    self._idle.pop()
                used = bool(self._idle)
                connection = self._idle.pop() if used else await self._connect()
                reply = await connection.ask(request, self._load.timeout)
                # A server may close a connection for having been idle just as the next request is sent.
                if not (used and reply.failure and reply.failure[0] == "closed early" and not reply.status):
                    break
            if reply.keeps:
                self._idle.append(connection)
            else:
                connection.transport.abort()
            self._replies.append((start, reply))
        except OSError as error:  # TimeoutError is one
            message = str(error) or "it took too long"
            self._left.append(Outcome(start, time.perf_counter(), failure="no connection", message=message))
        except asyncio.CancelledError:
            self._left.append(Outcome(start, time.perf_counter(), failure=UNFINISHED))
            raise
        self._done += 1

    async def _connect(self) -> Connection:
        address, loop = self._load.address, asyncio.get_running_loop()
        async with asyncio.timeout(self._load.timeout):
            _, connection = await loop.create_connection(Connection, address.host, address.port, ssl=self._secure)
        return connection


def _work(load: Load, pipe: "Pipe[Any, Any]") -> None:
    """A client process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it decides what becomes of it
    gc.disable()  # a pause would look like the server's
    with suppress(BrokenPipeError):
        pipe.send(asyncio.run(Clients(load, pipe).run()))


def drive(load: Load, processes: int = 1, title: str | None = None) -> Traffic:
    """Send a load from so many processes and wait for its end, with a progress bar if it has a title.

    After Ctrl-C what there is comes back; requests that have no end then are named ``UNFINISHED``.

    Raises:
        RuntimeError: a process died.
    """
    context = multiprocessing.get_context("spawn")
    shares = [load.share(number, processes) for number in range(min(processes, len(load.requests)))]
    workers = []
    for share in [share for share in shares if share.due is not None or share.concurrency]:
        pipe, theirs = context.Pipe()
        process = context.Process(target=_work, args=(share, theirs), daemon=True)
        workers.append((process, pipe))
        process.start()
        theirs.close()
    parts: list[Traffic] = []
    interrupted = False
    try:
        with held_interrupts() as interrupts:
            _collect([pipe for _, pipe in workers], load, title, parts, interrupts)
    except KeyboardInterrupt:
        interrupted = True
    except EOFError:
        raise RuntimeError("a client process died") from None
    finally:
        for process, pipe in workers:
            pipe.close()
            process.join(10)
            process.kill()
    outcomes = [outcome for part in parts for outcome in part.outcomes]
    busy, late = (max((getattr(part, name) for part in parts), default=0.0) for name in ("busy", "late"))
    return Traffic(outcomes, busy, late, interrupted)


def _collect(
    pipes: "list[Pipe[Any, Any]]", load: Load, title: str | None, parts: list[Traffic], interrupts: Any
) -> None:
    """Let all begin at once, and gather what they bring."""
    from tqdm import tqdm

    for pipe in pipes:
        pipe.recv()
    begin = time.perf_counter() + 0.02
    for pipe in pipes:
        pipe.send(begin)
    done, waiting, told = dict.fromkeys(pipes, 0), list(pipes), False
    total = len(load.requests) if load.duration is None else None
    hidden = True if title is None else None  # None: shown on a terminal
    with tqdm(total=total, desc=title, unit=" requests", dynamic_ncols=True, disable=hidden) as bar:
        while waiting:
            for pipe in wait(waiting, timeout=0.1):
                message = pipe.recv()  # type: ignore[union-attr]
                if isinstance(message, Traffic):
                    parts.append(message)
                    waiting.remove(pipe)  # type: ignore[arg-type]
                else:
                    done[pipe] = message  # type: ignore[index]
                    bar.update(sum(done.values()) - bar.n)
            if interrupts and not told:
                told = True
                for pipe in waiting:
                    with suppress(OSError):
                        pipe.send("stop")
