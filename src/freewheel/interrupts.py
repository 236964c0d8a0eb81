"""Ctrl-C, where it must not come in between."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def held_interrupts(*, at_once_too: bool = False) -> Iterator[Sequence[Any]]:
    """Hold Ctrl-C back until the end of the block, so that it finds nothing half way through a change.

    Args:
        at_once_too: let it interrupt the block as well. Some code loses a KeyboardInterrupt or makes another error of
            it, as imports of extension modules do: then the one at the end counts.

    Yields:
        What is held: once that is not empty, the block should come to its end.
    """
    handler = signal.getsignal(signal.SIGINT)
    held: list[tuple[int, FrameType | None]] = []
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield held
        return

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if at_once_too:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
