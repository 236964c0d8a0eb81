"""A decoder whose only memory is the paged cache: any mistake with pages, chunks or sharing changes its tokens.

Its keys hold token ids and its values positions, counted from 1. A row reads back the whole history of its sequence
through the page table, of a draft tree its own path, refuses to go on if a position is not where it should be, and
answers with logits that are a hash of exactly these tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freewheel.cache.pool import KVPool
from freewheel.config import Draw, EngineConfig
from freewheel.engine.drafting import Drafting
from freewheel.engine.engine import Engine
from freewheel.ops.rows import RowBatch
from freewheel.request import FinishReason, Request, StepOutput
from freewheel.sampling import SamplingParams
from freewheel.speculative import Budget, NgramIndex

VOCAB = 61
EOS = 7


class MockDecoder:
    """See the module. ``before`` is called with each batch and may raise; ``poison`` maps a history to its logits."""

    def __init__(self, vocab_size: int = VOCAB) -> None:
        self.vocab_size = vocab_size
        self.rows = 0
        self.batches: list[RowBatch] = []
        self.before: Callable[[RowBatch], object] = lambda batch: None
        self.poison: Callable[[list[int]], float | None] = lambda history: None

    def forward(self, batch: RowBatch, kv: Sequence[Tensor]) -> Tensor:
        self.before(batch)
        self.batches.append(batch)
        self.rows += len(batch.token_ids)
        keys, values = kv[0].view(2, -1)
        page_size = kv[0].shape[3]
        assert len(batch.token_ids) == sum(batch.row_counts)
        assert len(set(batch.kv_slots.tolist())) == len(batch.kv_slots), "two rows write to one place"
        keys[batch.kv_slots] = batch.token_ids
        values[batch.kv_slots] = batch.positions + 1
        logits = torch.empty(sum(batch.row_counts), self.vocab_size)
        first = 0
        trees = batch.ancestors or [None] * len(batch.row_counts)
        for pages, rows, length, tree in zip(batch.page_table, batch.row_counts, batch.kv_lengths, trees):
            places = torch.arange(length)
            places = torch.tensor(pages)[places // page_size] * page_size + places % page_size
            known = length - rows
            for row in range(rows):
                own = range(row + 1) if tree is None else [j for j in range(rows) if tree[row] >> j & 1]
                seen = places[[*range(known), *(known + j for j in own)]]
                assert batch.positions[first + row] == len(seen) - 1
                written = values[seen].tolist()
                assert written == list(range(1, len(seen) + 1)), "a place in the cache was not written for this history"
                logits[first + row] = self._logits(keys[seen].numpy())
            first += rows
        return logits[batch.logit_rows]

    def _logits(self, history: np.ndarray) -> Tensor:
        poison = self.poison(history.tolist())
        if poison is not None:
            return torch.full((self.vocab_size,), poison)
        state = 0
        for token in history.tolist():
            state = (state * 6364136223846793005 + token + 1442695040888963407) % (1 << 64)
        words = np.arange(self.vocab_size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(state)
        words = (words ^ (words >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        uniform = (words >> np.uint64(11)).astype(np.float64) / (1 << 53)
        return torch.from_numpy(6.0 * uniform).float()


class Eager(Budget):
    """A budget that takes no notice of what drafts bring: the same tokens are drafted at every run."""

    def __init__(self, most: int) -> None:
        super().__init__({1: 1.0, 64: 1.0})
        self._most = most

    def nodes(self) -> int:
        return self._most


def make_engine(
    *,
    slots: int = 8,
    pages: int = 200,
    page_size: int = 4,
    max_model_len: int = 64,
    budget: int = 32,
    caching: bool = True,
    seed: int | None = None,
    draw: Draw = "two_level",
    lookahead: int = 0,
    speculation: bool = False,
    corpus: NgramIndex | None = None,
    **drafts: Any,
) -> tuple[Engine, MockDecoder]:
    """An engine over the mock decoder; one that speculates drafts whenever it can."""
    decoder = MockDecoder()
    storage = torch.full((1, 2, 1, pages, page_size, 1), -1)
    config = EngineConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        page_size=page_size,
        enable_prefix_caching=caching,
        seed=seed,
        draw=draw,
        lookahead=lookahead,
        speculation=speculation,
        **drafts,
    )
    pool = KVPool(storage, slots=slots)
    engine = Engine(
        decoder, pool, config, max_model_len=max_model_len, vocab_size=VOCAB, eos_token_ids={EOS}, corpus=corpus
    )
    if isinstance(engine._drafting, Drafting):
        engine._drafting.budget = lambda: Eager(config.draft_nodes)
    return engine, decoder


class Collected:
    """All that an engine said about one choice."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list = []
        self.prompt_logprobs: list | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None
        self.cached_tokens = 0
        self.drafted = 0

    def add(self, output: StepOutput) -> None:
        assert self.finish_reason is None, "an output after the last one"
        assert output.prompt_logprobs is None or self.prompt_logprobs is None, "prompt logprobs come once"
        self.tokens += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        self.drafted += output.drafted

    def result(self) -> tuple:
        """What must not depend on neighbours, cache, chunks or preemption."""
        return (self.tokens, self.logprobs, self.prompt_logprobs, self.finish_reason, self.stop_reason)


def collect(outputs: list[StepOutput], into: dict[tuple[str, int], Collected]) -> None:
    for output in outputs:
        into.setdefault((output.request_id, output.index), Collected()).add(output)


def run(engine: Engine, requests: list[Request] | None = None) -> dict[tuple[str, int], Collected]:
    """Add the requests, step until nothing is left, with every integrity check after every step."""
    for request in requests or ():
        engine.add(request)
    collected: dict[tuple[str, int], Collected] = {}
    steps = 0
    while engine.has_unfinished:
        collect(engine.step(), collected)
        engine.check()
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
    return collected


def make_request(name: str, prompt: list[int], *, priority: int = 0, bad: tuple = (), **params: Any) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**params), bad_word_ids=bad, priority=priority)
