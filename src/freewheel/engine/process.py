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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from freewheel.config import EngineConfig
from freewheel.engine.loop import Abort, Close, EngineDeadError, Failed, Finish, News, Order, Refuse, run
from freewheel.models.errors import ModelError
from freewheel.request import FinishReason, Request, StepOutput

if TYPE_CHECKING:  # nothing that imports torch: it is the process that needs it soon
    from freewheel.engine.engine import Engine
    from freewheel.engine.limits import Limits
    from freewheel.grammar import Compiler
    from freewheel.models.load import DType, LoadedModel
    from freewheel.models.tokenizer import Tokenizer

PATIENCE = 5.0  # seconds that a process has for its last step
CHUNK = 1 << 18  # bytes that are read at once


@dataclass(frozen=True)
class Load:
    """The first message to the process: what it is to run.

    Attributes:
        model, dtype, device: see :func:`freewheel.models.load.load`; a file or folder.
        config: the engine's options.
        threads: of torch; None: torch's choice.
    """

    model: Path
    config: EngineConfig
    dtype: "DType" = "auto"
    device: str = "cpu"
    threads: int | None = None

    def load(self) -> "LoadedModel":
        """The model."""
        from freewheel.models.load import load

        return load(self.model, dtype=self.dtype, device=self.device)

    def build(self, model: "LoadedModel") -> "Engine":
        """Its engine."""
        from freewheel.engine.build import build_engine

        return build_engine(model, self.config)

    def tokenizer(self) -> "Tokenizer":
        """The model's, without the model."""
        from freewheel.models.load import load_tokenizer

        return load_tokenizer(self.model)


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
        load: what it runs.

    Attributes:
        pid: of the process.
        limits, load_s, prepare_s: see :class:`Loaded`; there once it is loaded.
    """

    limits: "Limits"
    load_s: float
    prepare_s: float

    def __init__(self, load: Load) -> None:
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
            self._socket.sendall(packed(load))

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


class _Inlet:
    """A thread beside the steps: it puts what has come into the inbox. Grammars are compiled before, which takes long.

    With nobody left to work for it ends the process.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self._grammars: Compiler | None = None
        self._connection = connection
        self._compiling = ThreadPoolExecutor(2, "freewheel-grammars")
        self._held: dict[str, list[Order]] = {}  # what came for requests whose grammars are compiled
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="freewheel-inbox", daemon=True).start()

    def know(self, grammars: "Compiler | None") -> None:
        """Who compiles from now on."""
        self._grammars = grammars
        if grammars is not None:
            self._compiling.submit(grammars.prepare)

    def _run(self) -> None:
        messages = Messages()
        try:
            with suppress(OSError):
                while data := self._connection.recv(CHUNK):
                    for message in messages.add(data):
                        self._take(message)
        except BaseException:  # a message that cannot be read
            traceback.print_exc()
        os._exit(1)

    def _take(self, message: Any) -> None:
        with self._lock:
            if isinstance(message, Request) and message.params.grammar is not None:
                self._held[message.request_id] = []
                self._compiling.submit(self._compile, message)
            elif isinstance(message, Abort | Finish) and message.request_id in self._held:
                self._held[message.request_id].append(message)
            else:
                self.inbox.put(message)

    def _compile(self, request: Request) -> None:
        """The other process has done so as well, to know that it can be done."""
        from freewheel.engine.limits import with_grammar

        order: Order
        try:
            order = with_grammar(request, self._grammars)
        except BaseException as error:
            outputs = [
                StepOutput(request.request_id, i, finish_reason=FinishReason.ERROR, error=str(error))
                for i in range(request.params.n)
            ]
            order = Refuse(outputs)
        with self._lock:
            for one in (order, *self._held.pop(request.request_id)):
                self.inbox.put(one)


def main(descriptor: int) -> None:
    """The process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    inlet, outlet = _Inlet(connection), _Outlet(connection)
    load: Load = inlet.inbox.get()
    try:
        began = time.perf_counter()
        import torch

        from freewheel.engine.build import prepare

        if load.threads is not None:
            torch.set_num_threads(load.threads)
        model = load.load()
        loaded = time.perf_counter()
        engine = load.build(model)
        prepare(engine)
        inlet.know(engine.grammars)
    except (ModelError, ValueError) as error:
        outlet.tell(Refused(ModelError if isinstance(error, ModelError) else ValueError, str(error)), True)
        return
    except Exception as error:
        words = f"the engine's process failed: {type(error).__name__}: {error}"
        outlet.tell(Refused(EngineDeadError, words, traceback.format_exc()), True)
        return
    outlet.tell(Loaded(engine.limits, loaded - began, time.perf_counter() - loaded), True)
    run(engine, inlet.inbox, outlet.tell)
