"""Long lives of an engine: random requests come, are preempted, cut short and answered, and nothing is lost.

Whatever goes on around a request, it gets what it gets alone, and one that is cut short gets the beginning of that.
"""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from operator import eq
from pathlib import Path
from typing import Any

import pytest
import torch
from mock_model import VOCAB, Collected, collect, make_engine, make_request, run
from oracle import Oracle
from safetensors.torch import load_file, save_file
from test_engine import alone, assert_empty, results

from freewheel.config import EngineConfig
from freewheel.engine.build import build_engine
from freewheel.engine.drafting import Drafting
from freewheel.engine.engine import Engine
from freewheel.engine.scheduler import pages_for
from freewheel.models.decoder import kv_bytes_per_token
from freewheel.models.load import load
from freewheel.request import FinishReason, Request

LONGEST = 64
LONGEST_PROMPT = 24

Key = tuple[str, int]
"""A choice: name of the request, index."""

Results = dict[Key, tuple]
"""For each choice its tokens, log probabilities, those of the prompt, finish reason and stop reason."""


def features(rng: random.Random, vocab: int, room: int) -> dict[str, Any]:
    """What a request may ask, each thing with every other."""

    def ids(least: int, most: int) -> list[int]:
        return rng.sample(range(vocab), rng.randint(least, most))

    longest = rng.randint(0, room)
    possible: dict[str, Callable[[], Any]] = {
        "n": lambda: rng.randint(2, 4),
        "temperature": lambda: rng.choice([0.0, 0.5, 2.0]),
        "top_k": lambda: rng.randint(1, 20),
        "top_p": lambda: rng.uniform(0.1, 1.0),
        "min_p": lambda: rng.uniform(0.0, 0.3),
        "repetition_penalty": lambda: rng.uniform(0.5, 2.0),
        "frequency_penalty": lambda: rng.uniform(-1.0, 1.0),
        "presence_penalty": lambda: rng.uniform(-1.0, 1.0),
        "logit_bias": lambda: {id: rng.uniform(-4.0, 4.0) for id in ids(1, 9)},
        "allowed_token_ids": lambda: ids(vocab // 3, vocab // 2),
        "bad": lambda: tuple(tuple(ids(1, 2)) for _ in range(3)),
        "stop_token_ids": lambda: ids(1, vocab // 8),
        "min_tokens": lambda: rng.randint(0, longest),
        "max_tokens": lambda: None,
        "ignore_eos": lambda: True,
        "logprobs": lambda: rng.randint(0, 3),
        "logprobs_mode": lambda: "processed",
        "prompt_logprobs": lambda: rng.randint(0, 3),
        "priority": lambda: rng.randint(-1, 1),
    }
    asked = {"max_tokens": longest} | {name: make() for name, make in possible.items() if rng.random() < 0.2}
    if rng.random() < 0.1:  # after one token none is left
        a, b = ids(2, 2)
        asked |= {"allowed_token_ids": [a, b], "bad": ((a, a), (a, b), (b, a), (b, b)), "stop_token_ids": []}
    return asked


def workload(
    rng: random.Random, count: int, vocab: int, alone: Callable[[list[Request]], Results]
) -> tuple[list[Request], Results]:
    """Requests, and what each gets alone. Many repeat an earlier one, begin like it, or go on where it ends."""
    requests: list[Request] = []
    expected: Results = {}
    for number in range(count):
        name, earlier = f"r{number}", rng.choice(requests[-6:]) if requests else None
        if earlier and rng.random() < 0.2:
            request = replace(earlier, request_id=name)
        else:
            known = [*earlier.prompt_ids, *expected[earlier.request_id, 0][0]] if earlier else []
            prompt = known[: rng.randint(0, LONGEST_PROMPT)]
            prompt += [rng.randrange(vocab) for _ in range(rng.randint(not prompt, LONGEST_PROMPT - len(prompt)))]
            asked = features(rng, vocab, LONGEST - len(prompt))
            request = make_request(name, prompt, seed=rng.randint(-(2**63), 2**63 - 1), **asked)
        requests.append(request)
        told = alone([request])
        assert told.keys() == {(name, index) for index in range(request.params.n)}
        assert all(fits(request, index, result) for (_, index), result in told.items())
        expected |= told
    return requests, expected


def fits(request: Request, index: int, result: tuple) -> bool:
    """Whether what a choice is told is as long as the request asked."""
    tokens, logprobs, scores, reason, _ = result
    params, room = request.params, LONGEST - len(request.prompt_ids)
    most = room if params.max_tokens is None else params.max_tokens
    scored = index == 0 and params.prompt_logprobs is not None
    return (
        len(tokens) <= most
        and (reason is not FinishReason.LENGTH or len(tokens) == most)
        and (reason is not FinishReason.STOP or len(tokens) > params.min_tokens)
        and len(logprobs) == (0 if params.logprobs is None else len(tokens))
        and len(scores or ()) == (len(request.prompt_ids) if scored else 0)
    )


def live(engine: Engine, rng: random.Random, requests: list[Request], expected: Results) -> Results:
    """Let the requests come at random, and cut some short: ``expected`` is then what these had been told before."""
    arriving, told = requests[::-1], dict[Key, Collected]()
    choices: list[Key] = []
    ended: set[Key] = set()
    steps = 0

    def cut(key: Key, reason: FinishReason | None) -> None:
        if key not in ended:
            got, (tokens, logprobs, scores, *_) = told.setdefault(key, Collected()), expected[key]
            count = len(got.tokens)
            expected[key] = (tokens[:count], logprobs[:count], got.prompt_logprobs and scores, reason, None)
            ended.add(key)

    while arriving or engine.has_unfinished:
        while arriving and engine.num_waiting < 4 and rng.random() < 0.5:
            request = arriving.pop()
            engine.add(request)
            choices += [(request.request_id, index) for index in range(request.params.n)]
        if choices and rng.random() < 0.1:
            name, index = rng.choice(choices[-8:] + [key for key in told if key not in ended])
            if rng.random() < 0.5:
                engine.finish(name, index)
                cut((name, index), None)
            else:
                engine.abort(name)
                for key in choices:
                    if key[0] == name:
                        cut(key, FinishReason.ABORT)
        outputs = engine.step()
        collect(outputs, told)
        ended |= {(output.request_id, output.index) for output in outputs if output.finish_reason}
        steps += 1
        assert steps < 100 * len(requests), "the engine does not come to an end"
        if steps % 3 == 0:
            engine.check()
    return results(told)


def soak(
    engine: Engine,
    rng: random.Random,
    count: int,
    vocab: int,
    alone: Callable[[list[Request]], Results],
    same: Callable[[tuple, tuple], bool] = eq,
) -> Results:
    """Let an engine live through random requests; return the choices that were told something else than alone."""
    requests, expected = workload(rng, count, vocab, alone)
    if isinstance(engine._drafting, Drafting):
        Oracle(engine, {key: result[0] for key, result in expected.items()}, rng)
    got = live(engine, rng, requests, expected)
    assert_empty(engine)
    assert got.keys() == expected.keys()
    assert engine.preemptions > count // 10
    assert {reason for tokens, *_, reason, _ in got.values() if tokens} == {*FinishReason, None}
    return {key: (got[key], one) for key, one in expected.items() if not same(got[key], one)}


@pytest.mark.parametrize(
    ("lookahead", "speculation"), [(0, False), (1, False), (2, False), (3, False), (0, True), (2, True)]
)
@pytest.mark.parametrize("caching", [True, False])
def test_everyone_gets_what_they_get_alone(caching: bool, lookahead: int, speculation: bool) -> None:
    rng = random.Random(2 * lookahead + caching)
    slots, page_size = rng.randint(4, 8), rng.choice([1, 3, 4, 8])
    budget = rng.randint(slots, 32)
    engine, decoder = make_engine(
        slots=slots,
        pages=pages_for(LONGEST + rng.randint(0, 32), page_size),
        page_size=page_size,
        max_model_len=LONGEST,
        budget=budget,
        caching=caching,
        lookahead=lookahead,
        speculation=speculation,
        draft_width=1 + 2 * caching,
        draft_depth=rng.randint(1, 8),
        draft_nodes=rng.randint(8, 12),
    )
    assert not soak(engine, rng, 60, VOCAB, alone)
    assert engine.speculation is None or engine.speculation.accepted > 20
    assert max(len(batch.token_ids) for batch in decoder.batches) <= budget


@pytest.fixture
def repeating_model(copying_model: Path, tmp_path: Path) -> Path:
    """One that is sure of what comes next, so that drawn tokens repeat themselves as well."""
    shutil.copytree(copying_model, folder := tmp_path / "repeating")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].mul_(5)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def close(got: tuple, alone: tuple) -> bool:
    """Whether the tokens are the same, and their log probabilities nearly."""

    def numbers(result: tuple) -> list[float]:
        return [entry.logprobs[0] for entry in [*result[1], *(result[2] or [])] if entry]

    return (got[0], *got[3:]) == (alone[0], *alone[3:]) and numbers(got) == pytest.approx(numbers(alone), abs=1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("many_drafts")
@pytest.mark.parametrize(
    ("caching", "lookahead", "drafts"), [(True, 0, False), (False, 1, True), (True, 2, True), (False, 3, False)]
)
def test_on_a_device(repeating_model: Path, caching: bool, lookahead: int, drafts: bool) -> None:
    model = load(repeating_model, dtype="float32", device="cuda")
    memory = (LONGEST + 32) * kv_bytes_per_token(model.spec, torch.float32)

    def make(slots: int, caching: bool, lookahead: int, drafts: bool) -> Engine:
        config = EngineConfig(
            max_model_len=LONGEST,
            max_num_seqs=slots,
            max_num_batched_tokens=32,
            page_size=4,
            kv_cache_memory=memory,
            enable_prefix_caching=caching,
            lookahead=lookahead,
            speculation=drafts,
            draft_width=2,
            draft_depth=5,
            draft_nodes=7,
        )
        return build_engine(model, config)

    one_slot = make(1, caching=False, lookahead=0, drafts=False)  # a fresh engine each would capture its graphs anew
    engine = make(8, caching, lookahead, drafts)
    wrong = soak(
        engine,
        random.Random(lookahead),
        500,
        model.tokenizer.vocab_size,
        lambda requests: results(run(one_slot, requests)),
        close,
    )
    assert engine.speculation is None or engine.speculation.accepted > 20
    assert len(wrong) <= 1, wrong  # rounding differs between prompt and step: it may tip a draw in a million
