"""A real model in float32 gives a request the same tokens whatever runs beside it, however its prompt is read, and
whether its tokens are guessed before they are known."""

from collections.abc import Sequence
from typing import Any

import pytest

from freewheel import LLM, SamplingParams

pytestmark = pytest.mark.real

PAGE = 16 * 2 * 30 * 3 * 64 * 4  # bytes: tokens, keys and values, layers, heads, width, float32
PROMPTS = [
    "The sea is",
    "Once upon a time there was a small robot that",
    "def fibonacci(n):\n    if n < 2:",
    "Name three rivers of Europe and the cities they flow through:",
    "Once upon a time there was a small robot who",
    "1, 2, 3, 4, 5, 6, 7,",
    "Red fish, blue fish, old hat, new hat. Once more: Red fish,",
    "total += price * count\ntotal -= rebate\n\n# The same again:\ntotal +=",
]
ASKED = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.9, top_p=0.9, seed=1, max_tokens=24),
    SamplingParams(temperature=1, top_k=20, repetition_penalty=1.2, seed=2, max_tokens=24),
    SamplingParams(temperature=0, presence_penalty=0.5, logit_bias={28: -2.0}, max_tokens=24),
    SamplingParams(temperature=0.7, min_p=0.05, seed=3, n=2, max_tokens=24),
    SamplingParams(temperature=1.2, seed=4, bad_words=[" and"], min_tokens=5, max_tokens=24),
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0.5, seed=5, repetition_penalty=1.05, logprobs=1, stop="rebate\n\n", max_tokens=24),
]


def tokens(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[list[tuple[int, ...]]]:
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [[tuple(choice.token_ids) for choice in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list[list[tuple[int, ...]]]:
    with LLM("smollm2", dtype="float32", enable_prefix_caching=False) as llm:
        return [tokens(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, ASKED)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"max_num_seqs": 3, "max_model_len": 64, "kv_cache_memory": 7 * PAGE},
        {"speculation": True},
        {"speculation": True, "draft_width": 3, "draft_depth": 4, "draft_nodes": 10},
    ],
    ids=["batch", "no prefix cache", "prompts in chunks", "too few pages for all", "drafts", "draft trees"],
)
def test_a_batch_gives_what_each_request_gets_alone(
    options: dict[str, Any], alone: list[list[tuple[int, ...]]]
) -> None:
    with LLM("smollm2", dtype="float32", **options) as llm:
        assert tokens(llm, PROMPTS, ASKED) == alone
        assert tokens(llm, PROMPTS[::-1], ASKED[::-1]) == alone[::-1]
        assert llm.speculation is None or llm.speculation.accepted > 0
