"""An engine in a process of its own, which loads the model; the process that starts it needs the tokenizer alone.

Messages are those of :mod:`freewheel.engine.loop`, pickled, each with its length before it, over a pair of sockets.
Either side ends when the other one does: the pair tells.
"""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from freewheel.config import EngineConfig
from freewheel.engine.loop import Close, EngineDeadError, Failed, News, Order, run
from freewheel.models.errors import ModelError

if TYPE_CHECKING:  # nothing that imports torch: it is the process that needs it soon
    from freewheel.engine.limits import Limits
    from freewheel.models.load import DType

PATIENCE = 5.0  # seconds that a process has for its last step
CHUNK = 1 << 18  # bytes that are read at once


@dataclass(frozen=True)
class Load:
    """The first message to the process: what it is to run."""

    model: str | Path
    config: EngineConfig
    dtype: "DType"
    device: str
    threads: int | None


class Loaded(NamedTuple):
    """Its answer, with the seconds that it took to load the model, and to build and prepare the engine."""

    limits: "Limits"
    load_s: float
    prepare_s: float


class Refused(NamedTuple):
    """Its answer if it cannot: the error, and its traceback where the user is not to blame."""

    kind: type[Exception]
    message: str
    details: str = ""


class EngineProcess:
    """Started at once; :meth:`wait` says when it is loaded, and the end of its ``with`` block ends it.

    It heeds neither SIGINT nor SIGTERM: whoever has its requests decides when they are done. If that process is killed,
    it ends as well.

    Args:
        model, dtype, device: see :func:`freewheel.models.load.load`.
        config: the engine's options.
        threads: of torch; None: torch's choice.

    Attributes:
        pid: of the process.
        limits, load_s, prepare_s: see :class:`Loaded`; there once it is loaded.
    """

    limits: "Limits"
    load_s: float
    prepare_s: float

    def __init__(
        self,
        model: str | Path,
        config: EngineConfig,
        *,
        dtype: "DType" = "auto",
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            # A new interpreter, as devices and threads don't survive a fork; in a group of its own, so that Ctrl-C in a
            # terminal does not reach it even while it starts.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import main; main({theirs.fileno()})"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self.pid = self._process.pid
        self._messages = Messages()
        self._transport: asyncio.WriteTransport | None = None
        with suppress(ConnectionError):  # if it has ended already, wait() says how
            self._socket.sendall(packed(Load(model, config, dtype, device, threads)))

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def wait(self) -> None:
        """Wait until it is loaded.

        Raises:
            ModelError, ValueError: as :func:`freewheel.models.load.load` and
                :func:`freewheel.engine.build.build_engine` raise them.
            EngineDeadError: anything else came in between.
        """
        with suppress(ConnectionError):
            while data := self._socket.recv(CHUNK):
                for message in self._messages.add(data):
                    if isinstance(message, Loaded):
                        self.limits, self.load_s, self.prepare_s = message
                        return
                    assert isinstance(message, Refused)
                    error = message.kind(message.message)
                    if message.details:
                        error.add_note(message.details)
                    raise error
        raise EngineDeadError(f"{self._ended()} before its model was loaded")

    async def start(self, deliver: Callable[[News], None]) -> None:
        """Let it run; ``deliver`` is called on the loop with its messages."""
        loop = asyncio.get_running_loop()
        receiver = _Receiver(self._messages, deliver, self._ended)
        self._transport, _ = await loop.create_unix_connection(lambda: receiver, sock=self._socket)
        receiver.data_received(b"")  # what came with the first message

    def send(self, order: Order) -> None:
        """Give it a message. Returns at once: what the socket does not take is kept."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(packed(order))

    async def close(self) -> None:
        """Wait for its end, which comes with the end of a step, but not for long."""
        self.send(Close())
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, PATIENCE)
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        if self._transport is not None:
            self._transport.close()

    def _ended(self) -> str:
        """How it did: its end of the sockets is closed."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "the engine's process is ending"
        cause = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        return f"the engine's process ended {cause}"


class _Receiver(asyncio.Protocol):
    """On the loop: the end of the messages."""

    def __init__(self, messages: "Messages", deliver: Callable[[News], None], ended: Callable[[], str]) -> None:
        self._messages, self._deliver, self._ended = messages, deliver, ended

    def data_received(self, data: bytes) -> None:
        for message in self._messages.add(data):
            self._deliver(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deliver(Failed(self._ended()))


def packed(message: Any) -> bytes:
    """A message with its length before it."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(8, "little") + data


class Messages:
    """Puts messages together from bytes as they come."""

    def __init__(self) -> None:
        self._left = bytearray()

    def add(self, data: bytes) -> Iterator[Any]:
        """Messages that are complete now."""
        self._left += data
        while len(self._left) >= 8 and len(self._left) >= (end := 8 + int.from_bytes(self._left[:8], "little")):
            with memoryview(self._left) as view, view[8:end] as body:
                message = pickle.loads(body)
            del self._left[:end]
            yield message


class _Outlet:
    """The process's way to tell something: it keeps what the reader has no room for, so that no step waits for that."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = bytearray()

    def tell(self, news: Any, idle: bool) -> None:
        self._left += packed(news)
        if idle:
            self._connection.sendall(self._left)
            self._left.clear()
            return
        with suppress(BlockingIOError):
            del self._left[: self._connection.send(self._left, socket.MSG_DONTWAIT)]


def _receive(connection: socket.socket, inbox: "SimpleQueue[Any]") -> None:
    """A thread beside the steps: it puts what has come into the inbox. What is to be done about a request before the
    engine gets it, and takes long, has its place here. With nobody left to work for it ends the process."""
    messages = Messages()
    with suppress(OSError):
        while data := connection.recv(CHUNK):
            for message in messages.add(data):
                inbox.put(message)
    os._exit(1)


def main(descriptor: int) -> None:
    """The process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection, inbox = socket.socket(fileno=descriptor), SimpleQueue()
    threading.Thread(target=_receive, args=(connection, inbox), name="freewheel-inbox", daemon=True).start()
    outlet = _Outlet(connection)
    load: Load = inbox.get()
    try:
        began = time.perf_counter()
        import torch

        from freewheel.engine.build import build_engine, prepare
        from freewheel.models.load import load as load_model

        if load.threads is not None:
            torch.set_num_threads(load.threads)
        model = load_model(load.model, dtype=load.dtype, device=load.device)
        loaded = time.perf_counter()
        engine = build_engine(model, load.config)
        prepare(engine)
    except (ModelError, ValueError) as error:
        outlet.tell(Refused(ModelError if isinstance(error, ModelError) else ValueError, str(error)), True)
        return
    except Exception as error:
        words = f"the engine's process failed: {type(error).__name__}: {error}"
        outlet.tell(Refused(EngineDeadError, words, traceback.format_exc()), True)
        return
    outlet.tell(Loaded(engine.limits, loaded - began, time.perf_counter() - loaded), True)
    run(engine, inbox, outlet.tell)
