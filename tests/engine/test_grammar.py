"""Grammars in the engine: the same tokens alone and in batches, with drafts or without, and neighbours that notice
nothing."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bytes_tokenizer import END, BytesTokenizer
from mock_model import EOS, VOCAB, Collected, collect, make_engine, make_request, run
from test_engine import assert_empty, results, workload

from freewheel.engine.engine import Engine
from freewheel.engine.outputs import Reply
from freewheel.grammar import Compiler
from freewheel.grammar import matcher as matchers
from freewheel.request import FinishReason, Request
from freewheel.sampling import Grammar, SamplingParams

TOKENIZER: Any = BytesTokenizer()
COMPILER = Compiler(TOKENIZER, VOCAB)  # what the tests share: compiling is not what they are about
GRAMMARS = [
    Grammar.regex("[a-e]{2,30}!"),
    Grammar.regex("(good day|good evening|go)( again)*[.]"),
    Grammar.choice(["yes, of course", "no", "é€!"]),
    Grammar.cfg('start: e "."\ne: "a" e "b" | "c" | e "," e'),
    Grammar.regex("[a-z ]*"),
]
FEATURES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "temperature": 0.9, "logprobs": 2},
    {"seed": 2, "top_k": 5, "frequency_penalty": 0.5},
    {"seed": 3, "top_p": 0.8, "repetition_penalty": 1.3, "logprobs": 1, "logprobs_mode": "processed"},
    {"seed": 4, "n": 3, "min_p": 0.05},
    {"seed": 5, "logit_bias": {EOS: 8.0, END: 8.0}, "bad": ((0, 1), (4,))},
    {"seed": 6, "prompt_logprobs": 1, "stop_token_ids": [3, 26]},
    {"seed": 7, "ignore_eos": True, "logit_bias": {EOS: 3.0}},
    {"seed": 8, "min_tokens": 3},
]
DRAFTS: list[dict[str, Any]] = [
    {"draft_width": 1, "draft_depth": 6, "draft_nodes": 6},
    {"draft_width": 4, "draft_depth": 4, "draft_nodes": 11},
]


def make(**options: Any) -> Engine:
    engine, _ = make_engine(**options)
    engine.grammars = COMPILER
    return engine


def constrained(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        prompt = [rng.randrange(33) for _ in range(rng.randint(1, 20))]
        prompt += prompt[: rng.randint(0, 8)]
        grammar = GRAMMARS[rng.randrange(len(GRAMMARS))]
        options = {"max_tokens": rng.randint(3, 30), **FEATURES[index % len(FEATURES)], "grammar": grammar}
        requests.append(make_request(f"g{index}", prompt, priority=rng.randrange(3), **options))
    return requests


def alone(requests: list[Request]) -> dict[tuple[str, int], Collected]:
    got: dict[tuple[str, int], Collected] = {}
    for request in requests:
        got |= run(make(caching=False, budget=512), [request])
    return got


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [*constrained(0, 27), *workload(0, 10)]


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> dict[tuple[str, int], tuple]:
    return results(alone(requests))


class TestSameTokens:
    @pytest.mark.parametrize("lookahead", [0, 1, 3])
    @pytest.mark.parametrize(("slots", "budget"), [(2, 3), (7, 40), (32, 512)])
    def test_alone_and_in_batches(
        self, requests: list[Request], expected: dict, slots: int, budget: int, lookahead: int
    ) -> None:
        engine = make(slots=slots, budget=budget, lookahead=lookahead)
        assert results(run(engine, requests)) == expected
        assert_empty(engine)

    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("drafts", DRAFTS, ids=["chains", "trees"])
    def test_with_drafts(self, requests: list[Request], expected: dict, drafts: dict[str, Any], caching: bool) -> None:
        engine = make(slots=7, budget=80, caching=caching, speculation=True, **drafts)
        assert results(run(engine, requests)) == expected
        assert engine.speculation
        assert engine.speculation.accepted > 0
        assert_empty(engine)

    @pytest.mark.parametrize("speculation", [False, True])
    @pytest.mark.parametrize("page_size", [1, 8])
    def test_after_preemption(self, requests: list[Request], expected: dict, page_size: int, speculation: bool) -> None:
        engine = make(
            slots=16, pages=64 // page_size, page_size=page_size, budget=24, lookahead=1, speculation=speculation,
            **(DRAFTS[1] if speculation else {}),
        )  # fmt: skip
        assert results(run(engine, requests)) == expected
        assert engine.preemptions > 0
        assert_empty(engine)

    @pytest.mark.parametrize("speculation", [False, True])
    def test_with_neighbours_that_come_and_go(self, expected: dict, requests: list[Request], speculation: bool) -> None:
        rng = random.Random(1)
        engine = make(slots=6, pages=60, budget=24, lookahead=1, speculation=speculation)
        queue, collected, noise = list(requests), {}, 0
        while queue or engine.has_unfinished:
            if queue and rng.random() < 0.5:
                engine.add(queue.pop())
                engine.add(make_request(f"n{noise}", [1, 2, 3], grammar=rng.choice(GRAMMARS), max_tokens=20))
                noise += 1
            if noise and (rng.random() < 0.3 or not queue):
                engine.abort(f"n{rng.randrange(noise)}")
            collect(engine.step(), collected)
            engine.check()
        kept = {key: got for key, got in results(collected).items() if key[0][0] != "n"}
        assert kept == expected
        assert_empty(engine)


def written(got: Collected) -> str:
    return TOKENIZER.decode(got.tokens)


def test_every_output_that_stops_belongs_to_its_grammar(requests: list[Request]) -> None:
    """By an automaton of its own: each token was legal, and the end is one."""
    by_name = {request.request_id: request for request in requests if request.params.grammar}
    stopped = 0
    for (name, _), got in alone(list(by_name.values())).items():
        grammar = by_name[name].params.grammar
        assert grammar is not None
        if got.finish_reason is FinishReason.ERROR:
            continue
        assert got.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        at = COMPILER.compile(grammar).matcher([EOS, END, *by_name[name].params.stop_token_ids])
        for token in got.tokens:
            if at.ended:
                break
            at.advance(token)
        assert at.error is None
        if got.finish_reason is FinishReason.STOP:
            stopped += 1
            assert at.complete or got.tokens[-1] == EOS or got.tokens[-1] in by_name[name].params.stop_token_ids
    assert stopped > 5


def one(request: Request, **options: Any) -> Collected:
    [got] = run(make(**options), [request]).values()
    return got


@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("pushed", [EOS, 9, 26])
def test_no_stop_id_cuts_an_output_in_half(pushed: int, speculation: bool) -> None:
    """Two ends and a user's stop id, each pushed where it can be: none comes before the grammar can end."""
    request = make_request(
        "a", [1, 2], temperature=0.0, max_tokens=40, stop_token_ids=[9], logit_bias={pushed: 50.0},
        grammar=Grammar.regex("[a-i]{5}( [a-i]+)*"),
    )  # fmt: skip
    got = one(request, speculation=speculation)
    assert len(got.tokens) >= 5
    assert not {EOS, 9} & set(got.tokens[:5])
    if pushed != 26:  # at the first place there is
        assert (got.tokens[5:], got.finish_reason) == ([pushed], FinishReason.STOP)
        assert got.stop_reason == (9 if pushed == 9 else None)


@pytest.mark.parametrize("speculation", [False, True])
def test_an_output_ends_with_its_grammar(speculation: bool) -> None:
    """Two digits, so to speak: whatever ends the model knows, and if it knows none."""
    for options in ({}, {"ignore_eos": True}, {"allowed_token_ids": [0, 1, 2]}, {"max_tokens": 2}, {"min_tokens": 2}):
        params = {"temperature": 0.0, "max_tokens": 30, **options}
        got = one(make_request("a", [1, 2], grammar=Grammar.regex("[a-c]{2}"), **params), speculation=speculation)
        assert (len(got.tokens), got.finish_reason, got.stop_reason) == (2, FinishReason.STOP, None)
    cut = one(make_request("a", [1, 2], grammar=Grammar.regex("[a-c]{2}"), max_tokens=1))
    assert (len(cut.tokens), cut.finish_reason) == (1, FinishReason.LENGTH)


def test_the_last_token_of_a_grammar_is_text() -> None:
    for stop, expected in (((), "ok!"), (("!",), "ok"), (("k",), "o")):
        request = make_request("a", [1, 2], grammar=Grammar.choice(["ok!"]), max_tokens=30, stop=stop)
        engine, reply = make(), Reply(request, None, TOKENIZER)
        engine.add(request)
        while engine.has_unfinished and not reply.finished:
            for output in engine.step():
                reply.add(output)
        output = reply.take()
        assert output is not None
        [choice] = output.outputs
        assert (choice.text, choice.finish_reason) == (expected, "stop")


def test_after_an_ignored_end_the_output_is_free() -> None:
    got = one(
        make_request(
            "a", [1], grammar=Grammar.regex("a+"), ignore_eos=True, logit_bias={EOS: 50.0}, max_tokens=9, seed=1
        )
    )
    assert got.tokens[:2] == [0, EOS]
    assert (len(got.tokens), got.finish_reason) == (9, FinishReason.LENGTH)


@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_token_ids": [20, 21]}, "no token is left"),
        ({"bad": ((0,), (1,), (2,))}, "no token is left"),
        ({"min_tokens": 5}, "min_tokens"),
    ],
)
def test_what_leaves_nothing_is_that_request_s_error(options: dict, message: str, speculation: bool) -> None:
    engine = make(speculation=speculation)
    neighbour = make_request("b", [3, 4], temperature=0.0, max_tokens=10)
    wrong = make_request("a", [1, 2], grammar=Grammar.regex("[a-c]{2}"), max_tokens=20, **options)
    got = run(engine, [wrong, neighbour])
    assert got["a", 0].finish_reason is FinishReason.ERROR
    assert message in str(got["a", 0].error)
    assert got["b", 0].result() == one(neighbour).result()
    assert_empty(engine)


def test_a_grammar_that_grows_too_large_is_that_request_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchers, "EARNED", -1.0)  # as if each mask took longer than it may
    monkeypatch.setattr(matchers, "DEBT", 5.0)
    engine = make()
    got = run(engine, [make_request("a", [1], grammar=Grammar.regex("[a-c]{20}"), max_tokens=20, temperature=0.0)])
    assert (got["a", 0].finish_reason, got["a", 0].tokens != []) == (FinishReason.ERROR, True)
    assert "takes too long" in str(got["a", 0].error)
    assert_empty(engine)


@pytest.mark.parametrize("fault", ["regex", "schema", "crash"])
def test_a_compiler_s_failure_is_one_request_s(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first grammar that there is, and one after another; the other nine requests finish."""
    for earlier in (False, True):
        engine, _ = make_engine()
        engine.grammars = Compiler(TOKENIZER, VOCAB)
        if earlier:
            run(engine, [make_request("x", [1], grammar=Grammar.regex("[a-c]{2}"))])
        others = [make_request(f"r{i}", [i, i + 1], temperature=0.0, max_tokens=8) for i in range(8)]
        others.append(make_request("g", [5], grammar=Grammar.choice(["no"])))
        for request in others[:5]:
            engine.add(request)
        collected: dict[tuple[str, int], Collected] = {}
        collect(engine.step(), collected)
        bad = {"regex": Grammar.regex("(["), "schema": Grammar("json_schema", "{")}.get(fault, Grammar.regex("[a-d]"))
        with monkeypatch.context() as patch:
            if fault == "crash":
                patch.setattr(Compiler, "_compile", lambda *_: (_ for _ in ()).throw(RuntimeError("injected")))
            with pytest.raises(ValueError, match=r"^grammar"):
                engine.add(make_request("bad", [1, 2], grammar=bad))
        for request in others[5:]:
            engine.add(request)
        while engine.has_unfinished:
            collect(engine.step(), collected)
            engine.check()
        assert all(collected[request.request_id, 0].finish_reason for request in others)
        assert written(collected["g", 0]) == "no"
        if fault == "crash":  # the failure is not kept
            assert run(engine, [make_request("bad", [1, 2], grammar=bad)])["bad", 0].finish_reason is FinishReason.STOP


def test_engines_that_know_no_grammar_refuse_one_by_name() -> None:
    engine, _ = make_engine()
    with pytest.raises(ValueError, match=r"^grammar must be None"):
        engine.add(make_request("a", [1], grammar=Grammar.regex("a")))
    with pytest.raises(ValueError, match=r"^grammar must be a Grammar"):
        SamplingParams(grammar="a")  # type: ignore[arg-type]


def test_forced_texts_are_drafted_though_nothing_like_them_came_before() -> None:
    text = "a quick brown fox jumps over a lazy dog"
    request = make_request("a", [1], grammar=Grammar.choice([text]), temperature=0.0, max_tokens=60)
    engine = make(speculation=True, draft_depth=16, draft_nodes=16)
    [got] = run(engine, [request]).values()
    assert written(got) == text
    assert engine.speculation
    assert engine.speculation.accepted == engine.speculation.drafted > 30
    assert got.result() == one(request).result()


def test_a_draft_has_no_node_that_the_grammar_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    fill: Callable[..., None] = matchers.Matcher.fill

    def noted(self: Any, masks: Any, tree: Any = matchers.ROOT) -> None:
        fill(self, masks, tree)
        seen.append((masks.copy(), tree))

    monkeypatch.setattr(matchers.Matcher, "fill", noted)
    prompt = [0, 1, 2, 0, 1, 3, 0, 1, 4] * 2
    request = make_request("a", prompt, grammar=Grammar.regex("(ab[ce])*x"), seed=3, max_tokens=30)
    one(request, speculation=True, draft_width=4, draft_depth=4, draft_nodes=12)
    drafted = [(masks, tree) for masks, tree in seen if tree.tokens]
    assert drafted
    for masks, tree in drafted:
        for token, parent in zip(tree.tokens, tree.parents):
            assert masks[parent + 1][token >> 5] >> (token & 31) & 1


@pytest.mark.parametrize("speculation", [False, True])
def test_draws_are_those_of_the_model_over_what_is_legal(speculation: bool) -> None:
    """Chi-square over first tokens, by the probabilities of the model's own logits among the legal ids."""
    engine, decoder = make_engine(speculation=speculation, slots=8, max_model_len=16)
    engine.grammars = COMPILER
    legal = [0, 1, 2, 3]
    decoder._logits = lambda history: torch.arange(VOCAB).float() / 4  # type: ignore[method-assign]
    requests = [
        make_request(f"r{i}", [1, 2], grammar=Grammar.regex("[a-d]{2}"), seed=i, max_tokens=2) for i in range(500)
    ]
    counts = torch.zeros(VOCAB)
    for got in run_quietly(engine, requests):
        counts[got.tokens[0]] += 1
    expected = torch.softmax(torch.tensor(legal).float() / 4, 0) * len(requests)
    assert counts.sum() == counts[legal].sum()
    assert float(((counts[legal] - expected) ** 2 / expected).sum()) < 16.3  # 0.999 quantile, 3 degrees of freedom


def run_quietly(engine: Engine, requests: list[Request]) -> list[Collected]:
    collected: dict[tuple[str, int], Collected] = {}
    for request in requests:
        engine.add(request)
    while engine.has_unfinished:
        collect(engine.step(), collected)
    return list(collected.values())


def test_a_prompt_does_not_wait_for_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its last chunk draws: those before read no earlier step ahead of its time."""
    engine = make(slots=2, budget=4, lookahead=2)
    waits, catch_up, steps = list[int](), engine._catch_up, 0
    monkeypatch.setattr(engine, "_catch_up", lambda: (waits.append(steps), catch_up()))
    engine.add(make_request("a", list(range(14)), grammar=Grammar.regex("[a-e]{5}"), max_tokens=3))
    while engine.has_unfinished:
        engine.step()
        steps += 1
    assert waits[0] == 3
    assert_empty(engine)


def test_unconstrained_neighbours_have_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    from freewheel.sampling import Sampler

    asked: list[Any] = []
    sample = Sampler.sample
    monkeypatch.setattr(Sampler, "sample", lambda self, logits, rows: asked.append(rows) or sample(self, logits, rows))
    plain = [make_request(f"r{i}", [i], temperature=0.0, max_tokens=12) for i in range(3)]
    run(make(), [*plain, make_request("g", [1], grammar=Grammar.regex("[a-c]{4}"), max_tokens=9)])
    for rows in asked:
        masked = 0 if rows.mask_rows is None else int((rows.mask_rows >= 0).sum())
        assert masked == (0 if rows.masks is None else len(rows.masks)) <= 1
    assert asked[-1].masks is None  # the others go on without any once the grammar has ended


def test_grammars_are_plain_data() -> None:
    import pickle

    schema = {"type": "object", "properties": {"日本": {"type": "string"}}}
    params = SamplingParams(grammar=Grammar.json_schema(schema))
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(SamplingParams(grammar=Grammar.json_schema(json.dumps(schema, ensure_ascii=False))))
