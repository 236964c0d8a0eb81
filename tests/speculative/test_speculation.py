"""Decoding with drafts gives the tokens that decoding without them gives."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from sampling.drawing import p_value
from sampling.reference import probabilities
from trees import path, random_tree

from freewheel.sampling import Sampler, SampleRows, SamplingParams, SamplingState
from freewheel.speculative import DraftTree, NgramIndex, SpeculationMetrics, batch_trees, draft, walk, walk_batch

VOCAB = 12
TABLE = 3 * torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
PROMPT = [1, 2, 3, 4]

Drafter = Callable[[list[int], int], DraftTree]


def decode(params: SamplingParams, drafter: Drafter, *, new: int = 120, **join: Any) -> tuple[list[int], list[Any]]:
    """Tokens of a model that looks two tokens back, and what was reported beside each of them."""
    tokens, reported, end = list(PROMPT), [], len(PROMPT) + new
    state = SamplingState(1, VOCAB, end + 64)
    state.join(0, params, PROMPT, seed=5, **join)
    sampler, slot = Sampler(state), torch.tensor([0])
    while len(tokens) < end:
        tree = drafter(tokens, end - len(tokens) - 1)
        ends = [(tokens + path(tree, node))[-2:] for node in range(-1, len(tree.tokens))]
        positions = len(tokens) + torch.tensor(tree.links.depths)
        logits = torch.stack([TABLE[a, b] for a, b in ends])
        paths = torch.from_numpy(tree.paths)
        samples = sampler.sample(logits, SampleRows(slot.expand(tree.rows), positions, paths=paths))
        rows, run = walk(tree, samples.tokens.tolist())
        for position, token in enumerate(run, len(tokens)):
            state.append(slot, torch.tensor([position]), torch.tensor([token]))
        tokens += run
        if samples.logprobs is not None:
            found = samples.logprobs
            parts = found.token_logprobs, found.ranks, found.top_ids, found.top_logprobs
            reported += [[part[row].tolist() for part in parts] for row in rows]
    return tokens[:end], reported[:new]


def nothing(tokens: list[int], room: int) -> DraftTree:
    return DraftTree()


def lookup(width: int, nodes: int, corpus: NgramIndex | None = None) -> Drafter:
    index = NgramIndex(1000)

    def drafter(tokens: list[int], room: int) -> DraftTree:
        index.extend(tokens[len(index) :])
        return draft(index, width=width, depth=min(6, room), nodes=nodes, corpus=corpus) or DraftTree()

    return drafter


def anything(seed: int) -> Drafter:
    """Drafts at random: most of them wrong."""
    random = Random(seed)
    return lambda tokens, room: random_tree(random, 40, VOCAB) if room > 40 else DraftTree()


def oracle(tokens: Sequence[int], wrong: int) -> Drafter:
    """What will come, up to one wrong token every so often, and a branch that goes on rightly after it."""

    def drafter(before: list[int], room: int) -> DraftTree:
        coming = list(tokens[len(before) : len(before) + min(room, 5)])
        spoilt = [(token + 1) % VOCAB if i % wrong == wrong - 1 else token for i, token in enumerate(coming)]
        return DraftTree.merge([spoilt, coming], 12, 5, 2)

    return drafter


# Faults, 19: each applies to every row of a draft, not to the last one alone.
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 0.4},
    "hot": {"temperature": 2.0},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 1.0, "top_p": 0.6},
    "min-p": {"temperature": 1.0, "min_p": 0.4},
    "all": {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    "greedy-bias": {"temperature": 0, "logit_bias": {3: -100.0, 5: 2.0}},
    "bias": {"temperature": 0.5, "logit_bias": {3: -100.0, 5: 2.0}},
    "allowed": {"temperature": 0.5, "allowed_token_ids": [1, 2, 5, 7, 8]},
    "repetition": {"temperature": 0, "repetition_penalty": 1.2},
    "frequency": {"temperature": 0.3, "frequency_penalty": 0.05},
    "presence": {"temperature": 0.3, "presence_penalty": 1.5, "max_tokens": 11},
    "penalties": {
        "temperature": 0.4,
        "repetition_penalty": 0.9,
        "frequency_penalty": 0.03,
        "presence_penalty": -0.5,
        "top_k": 5,
        "logit_bias": {3: -100.0, 5: 2.0},
    },
    "min-tokens": {"temperature": 0, "min_tokens": 60, "max_tokens": None, "stop_token_ids": [1, 6, 9]},
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_speculation_changes_no_token(asked: dict[str, Any]) -> None:
    params = SamplingParams(**asked)
    plain, _ = decode(params, nothing)
    corpus = NgramIndex.corpus([plain[10:70], plain[50:110], PROMPT * 5])
    drafters = [lookup(1, 6), lookup(3, 14), lookup(4, 63, corpus), anything(0), anything(1)]
    for drafter in [*drafters, oracle(plain, 2), oracle(plain, 9)]:
        assert decode(params, drafter)[0] == plain


@pytest.mark.parametrize("temperature", [0.0, 0.6])
@pytest.mark.parametrize("length", [2, 3])
def test_bad_words_are_seen_along_a_path(length: int, temperature: float) -> None:
    """Faults, 20: their beginning in what is known, across the end of it, or all in the draft."""
    params = SamplingParams(temperature=temperature)
    free, _ = decode(params, nothing)
    common = [tuple(free[i : i + length]) for i in (20, 40, 60, 61, 80)]
    never = tuple((token + 1) % VOCAB for token in common[0])
    asked: dict[str, Any] = {"bad_word_ids": (*common, never)}
    plain, _ = decode(params, nothing, **asked)
    assert not {tuple(plain[i : i + length]) for i in range(len(PROMPT), len(plain))} & {*common}
    for drafter in (lookup(3, 14), anything(0), oracle(plain, 9), oracle(free, 3)):
        assert decode(params, drafter, **asked)[0] == plain


def test_drafts_are_accepted() -> None:
    """The case above tests something."""
    steps = []
    plain, _ = decode(SamplingParams(temperature=0.2), nothing)
    for drafter in (lookup(2, 12), oracle(plain, 9)):
        count = [0]

        def counted(tokens: list[int], room: int, drafter: Drafter = drafter, count: list[int] = count) -> DraftTree:
            count[0] += 1
            return drafter(tokens, room)

        assert decode(SamplingParams(temperature=0.2), counted)[0] == plain
        steps.append(count[0])
    assert steps[0] < 80
    assert steps[1] == 20


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_log_probabilities_are_those_of_plain_decoding(mode: Any) -> None:
    """Faults, 21: values, ranks and alternatives at every position, with a bias and a low temperature."""
    asked: dict[str, Any] = {"temperature": 0.3, "logit_bias": {4: 3.0}, "logprobs": 3, "logprobs_mode": mode}
    plain = decode(SamplingParams(**asked), nothing)
    assert len(plain[1]) == 120
    assert decode(SamplingParams(**asked), lookup(3, 14)) == plain
    assert decode(SamplingParams(**asked), oracle(plain[0], 9)) == plain


def test_a_sequence_that_was_set_back_goes_on_as_before() -> None:
    """Faults, 22: preempted and cancelled runs leave nothing in the index."""
    params = SamplingParams(temperature=0.5)
    plain, _ = decode(params, nothing)
    index, random = NgramIndex(1000), Random(0)

    def drafter(tokens: list[int], room: int) -> DraftTree:
        index.extend(tokens[len(index) :])
        index.extend([random.randrange(VOCAB) for _ in range(random.randrange(60))])  # of a run that is cancelled
        index.truncate(random.randint(0, len(tokens)))
        index.extend(tokens[len(index) :])
        fresh = NgramIndex(1000)
        fresh.extend(tokens)
        asked: dict[str, Any] = {"width": 2, "depth": min(6, room), "nodes": 12}
        assert draft(index, **asked) == draft(fresh, **asked)
        return draft(index, **asked) or DraftTree()

    assert decode(params, drafter)[0] == plain


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.7},
    ],
    ids=lambda asked: "-".join(asked),
)
def test_emitted_tokens_have_the_distribution_of_the_model(asked: dict[str, Any]) -> None:
    """Faults, 23: a tree with two branches at each level; the first token, and the second where there is one."""
    params, vocab, count = SamplingParams(**asked), 8, 6_000
    rows = torch.randn(7, vocab, generator=torch.Generator().manual_seed(1))
    likely = rows[0].argsort(descending=True)[:2].tolist()
    tree = DraftTree((likely[0], likely[1], 0, 1, 2, 3), (-1, -1, 0, 0, 1, 1))
    state = SamplingState(1, vocab, 8)
    state.join(0, params, [0], seed=3)
    positions = 1 + 3 * torch.arange(count)[:, None] + torch.tensor(tree.links.depths)
    asked_rows = SampleRows(torch.zeros(7 * count, dtype=torch.int64), positions.flatten())
    sampled = Sampler(state).sample(rows.repeat(count, 1), asked_rows).tokens.view(count, 7)
    found = walk_batch(type(one := batch_trees([tree], 7))(*(part.expand(count, -1) for part in one)), sampled)

    def wanted(row: int) -> Any:
        return probabilities(rows[row].double().numpy(), params)

    assert p_value(found.tokens[:, 0], wanted(0)) > 1e-3
    for node, token in enumerate(likely):
        seconds = found.tokens[found.tokens[:, 0] == token, 1]
        assert len(seconds) > 300
        assert p_value(seconds, wanted(node + 1)) > 1e-3


def test_the_examples_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "speculative.md").read_text()
    loop, budget = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert 30 <= len(loop.splitlines()) <= 50
    space: dict[str, Any] = {}
    exec(loop, space)
    metrics = space["metrics"]
    assert capsys.readouterr().out == f"{metrics.acceptance_length:.2f} tokens a step\n"
    assert space["tokens"] == space["plain"]
    assert metrics.accepted + metrics.steps == 200
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=1.5, top_k=4, seed=-1)):
        with_drafts, counted = space["generate"]([3, 1], params, 90, True)
        without, plain = space["generate"]([3, 1], params, 90, False)
        assert with_drafts == without
        assert counted.accepted > 0
        assert plain == SpeculationMetrics(steps=90)
    exec(budget, space)
    assert space["nodes"] > 0
