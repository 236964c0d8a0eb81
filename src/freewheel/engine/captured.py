"""What is captured once and launched again and again."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Captured(NamedTuple, Generic[T]):
    """A graph, and tensors that it leaves, until another one of its runner is replayed."""

    graph: torch.cuda.CUDAGraph
    left: T

    def replay(self) -> T:
        self.graph.replay()
        return self.left


def capture(run: Callable[[], T], device: torch.device, memory: Any = None) -> Captured[T]:
    """Capture what ``run`` launches, all of which has been compiled; it waits for the device.

    Args:
        memory: a pool that the graph shares with others (``torch.cuda.graph_pool_handle``); None: its own.
    """
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # Other threads may use the device meanwhile.
    with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
        left = run()
    return Captured(graph, left)
