"""The engine over a decoder that remembers only what it reads through the page table (see tests/mock_model.py)."""

import random
from dataclasses import replace
from typing import Any

import pytest
from mock_model import EOS, VOCAB, Collected, collect, make_engine, make_request, run

from freewheel.config import EngineConfig
from freewheel.engine.engine import MAX_SCORED_ROWS, Engine
from freewheel.request import FinishReason, Request
from freewheel.sampling import SamplingParams, SamplingState
from freewheel.sampling.state import NEEDS

FEATURES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"seed": 1, "temperature": 0.8},
    {"seed": 2, "top_k": 5},
    {"seed": 3, "top_p": 0.7},
    {"seed": 4, "min_p": 0.2, "temperature": 1.5},
    {"seed": 5, "frequency_penalty": 1.0, "presence_penalty": 0.5, "logprobs": 3},
    {"seed": 6, "logit_bias": {3: 4.0, EOS: 3.0}, "min_tokens": 4},
    {"seed": 7, "allowed_token_ids": list(range(20, 40)), "logprobs": 0},
    {"seed": 8, "logit_bias": {EOS: 5.0}, "ignore_eos": True},
    {"seed": 9, "prompt_logprobs": 2},
    {"seed": 10, "n": 3},
    {"seed": 11, "n": 2, "prompt_logprobs": 0, "logprobs": 2, "logprobs_mode": "processed", "top_k": 7},
    {"temperature": 0.0, "max_tokens": 0, "prompt_logprobs": 1},
    {"seed": 12, "stop_token_ids": [5, 6, 8, 9, 10], "min_tokens": 2},
    {"seed": 13, "bad": ((3,), (4, 5))},
]


def workload(seed: int, count: int, *, longest: int = 30) -> list[Request]:
    """Requests with every feature, many of which share beginnings."""
    rng = random.Random(seed)
    stems = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(3)]
    requests = []
    for index in range(count):
        stem = rng.choice(stems)[: rng.randint(0, longest - 1)]
        prompt = stem + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest - len(stem)))]
        features = {"seed": index, "max_tokens": rng.randint(1, 30), **FEATURES[index % len(FEATURES)]}
        features["max_tokens"] = max(features["max_tokens"], features.get("min_tokens", 0))
        if "prompt_logprobs" in FEATURES[index % len(FEATURES)] and "max_tokens" in FEATURES[index % len(FEATURES)]:
            features["max_tokens"] = 0
        requests.append(make_request(f"r{index}", prompt, priority=rng.randrange(3), **features))
    return requests


def alone(requests: list[Request]) -> dict[tuple[str, int], tuple]:
    """What each request gets from an engine of its own, without prefix cache or chunks."""
    results = {}
    for request in requests:
        engine, _ = make_engine(caching=False, budget=512)
        results |= {key: got.result() for key, got in run(engine, [request]).items()}
    return results


def results(collected: dict[tuple[str, int], Collected]) -> dict[tuple[str, int], tuple]:
    return {key: got.result() for key, got in collected.items()}


def assert_empty(engine: Engine) -> None:
    engine.check()
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    assert engine._cache.available == engine._pool.num_pages
    assert not any(engine._cache.pages.references)
    assert len(engine._slots) == engine.config.max_num_seqs
    assert not any(map(engine._state.asked, NEEDS))


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return workload(0, 34)


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> dict[tuple[str, int], tuple]:
    return alone(requests)


class TestSameTokens:
    """Neighbours, batch size, prefix cache, chunks and preemption change nothing."""

    @pytest.mark.parametrize("lookahead", [0, 1, 3])
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize(("slots", "budget"), [(2, 32), (2, 3), (7, 7), (7, 40), (32, 64), (32, 512)])
    def test_in_batches_and_chunks(
        self, requests: list[Request], expected: dict, slots: int, budget: int, caching: bool, lookahead: int
    ) -> None:
        engine, _ = make_engine(slots=slots, budget=budget, caching=caching, lookahead=lookahead)
        assert results(run(engine, requests)) == expected
        assert_empty(engine)
        # Priorities may preempt for a slot, held a little longer with steps in flight; there is no want of pages.
        assert engine.preemptions == 0 or slots < 32 or lookahead

    @pytest.mark.parametrize("lookahead", [0, 1, 3])
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_after_forced_preemption(
        self, requests: list[Request], expected: dict, page_size: int, caching: bool, lookahead: int
    ) -> None:
        pages, budget = 80 // page_size, 24
        engine, _ = make_engine(
            slots=16, pages=pages, page_size=page_size, budget=budget, caching=caching, lookahead=lookahead
        )
        assert results(run(engine, requests)) == expected
        assert engine.preemptions > 0
        assert_empty(engine)

    @pytest.mark.parametrize("lookahead", [0, 1, 3])
    @pytest.mark.parametrize("seed", range(4))
    def test_with_neighbours_that_join_and_are_aborted(self, seed: int, lookahead: int) -> None:
        rng = random.Random(seed)
        requests = workload(seed + 10, 24)
        expected = alone(requests)
        engine, _ = make_engine(slots=6, pages=40, budget=16, caching=seed % 2 == 0, lookahead=lookahead)
        collected: dict[tuple[str, int], Collected] = {}
        queue, noise = list(requests), 0
        while queue or engine.has_unfinished:
            if queue and rng.random() < 0.5:
                engine.add(queue.pop())
            if rng.random() < 0.5:
                prompt = rng.choice(requests).prompt_ids[: rng.randint(1, 30)]
                engine.add(make_request(f"noise{noise}", list(prompt), max_tokens=20, priority=rng.randrange(3)))
                noise += 1
            if noise and rng.random() < 0.5:
                engine.abort(f"noise{rng.randrange(noise)}")
            if not queue:
                for index in range(noise):
                    engine.abort(f"noise{index}")
            collect(engine.step(), collected)
            engine.check()
        assert {key: got for key, got in results(collected).items() if key[0].startswith("r")} == expected
        assert_empty(engine)

    @pytest.mark.parametrize("neighbour", [None, 0, 9])
    @pytest.mark.parametrize("lookahead", [0, 1])
    def test_a_seed_holds_beside_requests_with_and_without_one(self, neighbour: int | None, lookahead: int) -> None:
        seeded = make_request("seeded", [1, 2], seed=0, temperature=0.8, max_tokens=12)
        expected = alone([seeded])["seeded", 0]
        for _ in range(5):
            engine, _ = make_engine(lookahead=lookahead)
            other = make_request("other", [1, 2], seed=neighbour, temperature=0.8, max_tokens=12)
            assert results(run(engine, [other, seeded]))["seeded", 0] == expected

    @pytest.mark.parametrize("lookahead", [0, 1, 3])
    def test_a_penalised_request_joins_a_running_batch(self, lookahead: int) -> None:
        plain = [make_request(f"r{i}", [i], seed=i, max_tokens=20, ignore_eos=True) for i in range(4)]
        penalties: dict[str, Any] = {"repetition_penalty": 2.0, "presence_penalty": 1.5, "frequency_penalty": 0.5}
        late = make_request("late", [5, 6, 5], seed=4, max_tokens=20, ignore_eos=True, logprobs=3, **penalties)
        expected = alone([*plain, late])
        engine, _ = make_engine(lookahead=lookahead)
        for request in plain:
            engine.add(request)
        collected: dict[tuple[str, int], Collected] = {}
        for _ in range(5):
            collect(engine.step(), collected)
        engine.add(late)
        while engine.has_unfinished:
            collect(engine.step(), collected)
        assert results(collected) == expected

    def test_an_unseeded_request_repeats_with_the_engines_seed(self) -> None:
        request = make_request("a", [1, 2, 3], max_tokens=20)
        first, again, other = (results(run(make_engine(seed=seed)[0], [request])) for seed in (1, 1, 2))
        assert first == again != other

    def test_choices_differ_but_not_with_their_number(self) -> None:
        request = make_request("a", [1, 2, 3], seed=5, n=4, ignore_eos=True, max_tokens=12)
        four = results(run(make_engine()[0], [request]))
        two = results(
            run(make_engine()[0], [make_request("a", [1, 2, 3], seed=5, n=2, ignore_eos=True, max_tokens=12)])
        )
        assert len({tuple(tokens) for tokens, *_ in four.values()}) == 4
        assert two == {key: four[key] for key in two}


class TestPrefixCache:
    def test_a_repeated_prompt_computes_only_its_last_page(self) -> None:
        engine, decoder = make_engine()
        prompt = list(range(18))
        run(engine, [make_request("a", prompt, max_tokens=1)])
        decoder.rows = 0
        (got,) = run(engine, [make_request("b", prompt, max_tokens=1)]).values()
        assert decoder.rows == 2
        assert got.cached_tokens == 16

    def test_a_prompt_that_is_cached_whole_still_computes_its_last_page(self) -> None:
        engine, decoder = make_engine()
        prompt = list(range(16))
        run(engine, [make_request("a", prompt, max_tokens=1)])
        decoder.rows = 0
        (got,) = run(engine, [make_request("b", prompt, max_tokens=1)]).values()
        assert (decoder.rows, got.cached_tokens) == (4, 12)

    def test_outputs_are_cached_for_the_next_turn(self) -> None:
        engine, decoder = make_engine()
        (first,) = run(engine, [make_request("a", [1, 2], seed=1, max_tokens=15, ignore_eos=True)]).values()
        decoder.rows = 0
        (second,) = run(engine, [make_request("b", [1, 2, *first.tokens, 9], max_tokens=1)]).values()
        assert second.cached_tokens == 16
        assert decoder.rows == 2

    def test_prompts_that_start_together_share_one_computation(self) -> None:
        """The second is already running when the first has its pages; it takes them over, and its own are freed."""
        engine, decoder = make_engine(budget=8, slots=4)
        stem = list(range(32))
        requests = [make_request(f"r{i}", [*stem, 40 + i], seed=i, max_tokens=6, ignore_eos=True) for i in range(4)]
        expected = alone(requests)
        collected = run(engine, requests)
        assert results(collected) == expected
        assert decoder.rows < 33 + 3 * 10 + 4 * 6
        assert [collected[f"r{i}", 0].cached_tokens for i in range(1, 4)] == [32, 32, 32]

    def test_recycled_pages_never_reach_a_sequence_that_shared_them(self) -> None:
        """Two equal prompts in chunks, then many short requests that recycle pages while the two decode."""
        long = [make_request(f"long{i}", list(range(30)), seed=i, max_tokens=30, ignore_eos=True) for i in range(2)]
        expected = alone(long)
        engine, _ = make_engine(slots=4, pages=34, budget=8)
        collected: dict[tuple[str, int], Collected] = {}
        for request in long:
            engine.add(request)
        for index in range(40):
            engine.add(make_request(f"short{index}", [index, index + 1, 3, 4, 5], max_tokens=2, seed=index))
            collect(engine.step(), collected)
            engine.check()
        while engine.has_unfinished:
            collect(engine.step(), collected)
            engine.check()
        assert {key: got.result() for key, got in collected.items() if key[0].startswith("long")} == expected

    @pytest.mark.parametrize("caching", [True, False])
    def test_choices_share_the_prompts_computation(self, caching: bool) -> None:
        engine, decoder = make_engine(caching=caching)
        run(engine, [make_request("a", list(range(29)), n=5, max_tokens=3, ignore_eos=True)])
        assert decoder.rows == 29 + 4 + 5 * 2

    @pytest.mark.parametrize("caching", [True, False])
    def test_cached_tokens_are_those_of_the_first_admission(self, caching: bool) -> None:
        """A sequence that comes back after a preemption finds its own pages: these were computed for it."""
        engine, _ = make_engine(slots=1, caching=caching, budget=8)
        stem = list(range(8))
        run(engine, [make_request("first", stem, max_tokens=1)])
        engine.add(make_request("slow", [*stem, *range(20, 40)], priority=1, max_tokens=2, ignore_eos=True))
        engine.step()
        engine.step()
        engine.add(make_request("urgent", [1], max_tokens=1))
        collected = run(engine)
        assert engine.preemptions == 1
        assert collected["slow", 0].cached_tokens == (8 if caching else 0)

    def test_off_means_off(self) -> None:
        engine, decoder = make_engine(caching=False)
        for name in "ab":
            run(engine, [make_request(name, list(range(20)), max_tokens=1)])
        assert decoder.rows == 40


class TestPromptLogprobs:
    @pytest.mark.parametrize("length", [1, 3, 4, 5, 13])
    @pytest.mark.parametrize("budget", [3, 64])
    def test_the_cached_answer_equals_the_first(self, length: int, budget: int) -> None:
        engine, _ = make_engine(budget=budget, slots=2)
        prompt = list(range(length))
        for name in ("first", "again"):
            (got,) = run(engine, [make_request(name, prompt, prompt_logprobs=1, max_tokens=2, seed=0)]).values()
            (plain,) = alone([make_request(name, prompt, prompt_logprobs=1, max_tokens=2, seed=0)]).values()
            assert got.result() == plain
            assert got.prompt_logprobs is not None
            assert [entry and entry.token_ids[0] for entry in got.prompt_logprobs] == [None, *prompt[1:]]
        extended = make_request("longer", [*prompt, 50, 51], prompt_logprobs=1, max_tokens=2, seed=0)
        assert results(run(engine, [extended])) == alone([extended])

    def test_the_prompt_alone_can_be_scored_up_to_a_full_context(self) -> None:
        engine, _ = make_engine(max_model_len=16)
        request = make_request("a", list(range(16)), max_tokens=0, prompt_logprobs=0)
        (got,) = run(engine, [request]).values()
        assert (got.tokens, got.finish_reason) == ([], FinishReason.LENGTH)
        assert got.prompt_logprobs is not None
        assert len(got.prompt_logprobs) == 16

    def test_rows_with_logits_are_bounded(self) -> None:
        engine, decoder = make_engine(max_model_len=400, budget=400, pages=100)
        prompt = [i % VOCAB for i in range(300)]
        run(engine, [make_request("a", prompt, max_tokens=1, prompt_logprobs=0)])
        assert max(len(batch.logit_rows) for batch in decoder.batches) <= MAX_SCORED_ROWS + 1

    def test_rows_with_logits_are_bounded_over_all_sequences(self) -> None:
        engine, decoder = make_engine(max_model_len=400, budget=400, pages=400, caching=False)
        requests = [make_request(f"r{i}", [i] * 100, max_tokens=1, prompt_logprobs=0, seed=i) for i in range(6)]
        requests.append(make_request("plain", [9] * 100, max_tokens=1, seed=9))
        collected = run(engine, requests)
        assert max(len(batch.logit_rows) for batch in decoder.batches) <= MAX_SCORED_ROWS + 7
        assert all(len(collected[f"r{i}", 0].prompt_logprobs or ()) == 100 for i in range(6))

    def test_come_once_even_if_the_second_draw_fails(self) -> None:
        engine, _ = make_engine()
        request = make_request("a", [1, 2], prompt_logprobs=0, allowed_token_ids=[3], bad=((3, 3),))
        (got,) = run(engine, [request]).values()
        assert (got.tokens, got.finish_reason) == ([3], FinishReason.ERROR)
        assert got.prompt_logprobs is not None

    def test_survives_a_preemption_in_mid_prompt(self) -> None:
        request = make_request("slow", list(range(30)), priority=1, prompt_logprobs=2, max_tokens=3, seed=1)
        engine, _ = make_engine(slots=1, budget=7)
        engine.add(request)
        engine.step()
        engine.step()
        engine.add(make_request("urgent", [1], max_tokens=1))
        collected = run(engine)
        assert engine.preemptions == 1
        assert collected["slow", 0].result() == alone([request])["slow", 0]


class TestEnds:
    def force(self, **params: Any) -> Collected:
        engine, _ = make_engine()
        (got,) = run(engine, [make_request("a", **{"prompt": [1, 2], "seed": 0, **params})]).values()
        assert_empty(engine)
        return got

    @pytest.mark.parametrize("prompt_length", [1, 40])
    @pytest.mark.parametrize("min_tokens", [0, 1, 4])
    def test_min_tokens_holds_the_end_back_exactly(self, prompt_length: int, min_tokens: int) -> None:
        asked = {"prompt": [3] * prompt_length, "min_tokens": min_tokens, "logit_bias": {EOS: 100.0}}
        got = self.force(**asked)
        assert [token == EOS for token in got.tokens] == [False] * min_tokens + [True]
        assert (got.finish_reason, got.stop_reason) == (FinishReason.STOP, None)
        got = self.force(**asked, ignore_eos=True, max_tokens=min_tokens + 2)
        assert [token == EOS for token in got.tokens] == [False] * min_tokens + [True] * 2

    @pytest.mark.parametrize("end", [EOS, 8, 9, 10])
    def test_min_tokens_holds_every_end_and_stop_id_back_and_no_other(self, end: int) -> None:
        engine, _ = make_engine()
        engine.limits = replace(engine.limits, eos_token_ids=frozenset({EOS, 8, -1}))
        bias = {EOS: 100.0, 8: 100.0, 9: 100.0, 10: 100.0, end: 110.0, VOCAB - 1: 90.0}
        ends = make_request("ends", [1], min_tokens=3, logit_bias=bias, stop_token_ids=[9, 10], seed=0)
        assert run(engine, [ends])["ends", 0].tokens == [VOCAB - 1] * 3 + [end]

    def test_a_stop_id_is_reported(self) -> None:
        got = self.force(logit_bias={9: 100.0}, stop_token_ids=[9, 10])
        assert (got.tokens, got.finish_reason, got.stop_reason) == ([9], FinishReason.STOP, 9)

    def test_ignore_eos_goes_on_to_the_limit(self) -> None:
        got = self.force(logit_bias={EOS: 100.0}, ignore_eos=True, max_tokens=5)
        assert (got.tokens, got.finish_reason) == ([EOS] * 5, FinishReason.LENGTH)

    def test_an_ignored_eos_can_still_be_a_stop_id(self) -> None:
        got = self.force(logit_bias={EOS: 100.0}, ignore_eos=True, stop_token_ids=[EOS])
        assert (got.tokens, got.stop_reason) == ([EOS], EOS)

    def test_a_stop_on_the_last_token_is_a_stop(self) -> None:
        assert self.force(logit_bias={EOS: 100.0}, max_tokens=1).finish_reason is FinishReason.STOP

    @pytest.mark.parametrize("max_tokens", [None, 1000])
    def test_the_context_is_the_limit(self, max_tokens: int | None) -> None:
        got = self.force(prompt=[1] * 60, max_tokens=max_tokens, ignore_eos=True)
        assert (len(got.tokens), got.finish_reason) == (4, FinishReason.LENGTH)

    def test_nothing_to_generate(self) -> None:
        got = self.force(max_tokens=0)
        assert (got.tokens, got.finish_reason, got.prompt_logprobs) == ([], FinishReason.LENGTH, None)


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompt", "params", "message"),
        [
            ([], {}, "prompt is empty"),
            ([1] * 65, {"max_tokens": 0}, "prompt has 65 tokens, the longest sequence is 64"),
            ([1] * 64, {}, "leaves no room for output"),
            ([1, VOCAB], {}, f"prompt_token_ids has id {VOCAB}"),
            ([-1], {}, "prompt_token_ids has id -1"),
            ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
            ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
            ([1], {"logprobs": VOCAB + 1}, "logprobs"),
            ([1], {"allowed_token_ids": [3], "bad": ((3,),)}, "allowed_token_ids leaves no token"),
            (
                [1],
                {"allowed_token_ids": [3, EOS], "bad": ((3,),), "min_tokens": 1},
                "allowed_token_ids leaves no token",
            ),
            ([1] * 60, {"min_tokens": 5}, r"min_tokens \(5\) exceeds the 4 tokens that the prompt leaves room for"),
            ([10**5000], {}, "prompt_token_ids has id a very large integer"),
        ],
    )
    def test_at_once_and_by_name(self, prompt: list[int], params: dict[str, Any], message: str) -> None:
        engine, _ = make_engine()
        with pytest.raises(ValueError, match=message):
            engine.add(make_request("a", prompt, **params))
        assert_empty(engine)

    def test_neighbours_of_a_refused_request_get_the_same_logits(self) -> None:
        healthy = make_request("healthy", [1], seed=1, max_tokens=20, ignore_eos=True, logprobs=5)
        expected = alone([healthy])
        engine, _ = make_engine()
        engine.add(healthy)
        collected: dict[tuple[str, int], Collected] = {}
        for id in (VOCAB, VOCAB + 1, 2**31 - 1):
            fields: list[dict[str, Any]] = [
                {"stop_token_ids": [id]},
                {"logit_bias": {id: 1.0}},
                {"allowed_token_ids": [id]},
            ]
            for field in fields:
                collect(engine.step(), collected)
                with pytest.raises(ValueError, match=rf"{next(iter(field))} has id {id}, outside the vocabulary"):
                    engine.add(make_request("refused", [1], min_tokens=1, **field))
        while engine.has_unfinished:
            collect(engine.step(), collected)
        assert results(collected) == expected

    def test_seeds_that_the_draw_would_drop(self) -> None:
        engine, _ = make_engine(draw="multinomial")
        with pytest.raises(ValueError, match="seed must be None: this engine draws by multinomial"):
            engine.add(make_request("a", [1], seed=0))
        run(engine, [make_request("a", [1])])
        with pytest.raises(ValueError, match="seed must be None with draw='multinomial'"):
            EngineConfig(draw="multinomial", seed=1)

    @pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, True, 1.0])
    def test_a_seed_that_is_no_key(self, seed: Any) -> None:
        with pytest.raises(ValueError, match="seed must be a signed 64-bit integer"):
            EngineConfig(seed=seed)

    def test_checks_are_not_repeated_for_choices_and_preemptions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = []
        check = SamplingParams.check_vocabulary
        monkeypatch.setattr(SamplingParams, "check_vocabulary", lambda *args: calls.append(check(*args)))
        engine, _ = make_engine(slots=4, pages=24, budget=16)
        run(engine, [make_request(f"r{i}", [i] * 20, n=3, max_tokens=30, ignore_eos=True) for i in range(4)])
        assert engine.preemptions > 0
        assert len(calls) == 4
        request = make_request("again", [1])
        engine.limits.validate(request, None)
        engine.add(request, checked=True)
        assert len(calls) == 5

    def test_stop_ids_are_one_table_for_all_choices(self) -> None:
        engine, _ = make_engine()
        engine.add(make_request("a", [1], n=8, stop_token_ids=list(range(50))))
        assert len({id(sequence.stop_ids) for sequence in engine._requests["a"]}) == 1

    def test_the_id_zero_is_a_prompt(self) -> None:
        assert run(make_engine()[0], [make_request("a", [0])])["a", 0].tokens

    def test_a_name_in_use(self) -> None:
        engine, _ = make_engine()
        engine.add(make_request("a", [1]))
        with pytest.raises(ValueError, match="request_id 'a' is in use"):
            engine.add(make_request("a", [1]))
        run(engine)
        run(engine, [make_request("a", [1])])

    def test_a_pool_that_cannot_hold_one_sequence(self) -> None:
        with pytest.raises(ValueError, match="64 tokens do not fit into 15 pages of 4"):
            make_engine(pages=15)


class TestLookahead:
    def test_steps_are_launched_before_the_results_of_earlier_ones_are_read(self) -> None:
        engine, decoder = make_engine(lookahead=2)
        engine.add(make_request("a", [1, 2], max_tokens=4, ignore_eos=True))
        brought, launched = [], []
        while engine.has_unfinished:
            brought.append(sum(len(output.token_ids) for output in engine.step()))
            launched.append(len(decoder.batches))
        assert brought == [0, 0, 1, 1, 1, 1]
        assert launched == [1, 2, 3, 4, 4, 4]  # never more than the request may need
        assert_empty(engine)

    def test_an_end_that_was_not_foreseen_costs_rows_and_nothing_else(self) -> None:
        engine, decoder = make_engine(lookahead=2)
        ends = make_request("ends", [1, 2], seed=3, logit_bias={EOS: 100.0}, max_tokens=30)
        goes_on = make_request("goes on", [3], seed=4, max_tokens=12, ignore_eos=True)
        expected = alone([ends, goes_on])
        assert results(run(engine, [ends, goes_on])) == expected
        assert expected["ends", 0][0] == [EOS]
        assert [batch.row_counts for batch in decoder.batches[:4]] == [(2, 1), (1, 1), (1, 1), (1,)]
        assert_empty(engine)


class TestLoad:
    @pytest.mark.parametrize("lookahead", [0, 1])
    def test_busy_is_while_a_step_is_on_its_way(self, lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Steps take a second, and what is done between them ten: with one launched ahead that is no idle time."""
        clock = [100.0]
        monkeypatch.setattr("freewheel.engine.engine.perf_counter", lambda: clock[0])
        engine, decoder = make_engine(lookahead=lookahead)
        seen = []

        def pass_a_second(batch: Any) -> None:
            before = engine.busy_seconds
            clock[0] += 1
            seen.append(engine.busy_seconds - before)

        decoder.before = pass_a_second
        engine.add(make_request("a", [1, 2], max_tokens=4, ignore_eos=True))
        while engine.has_unfinished:
            engine.step()
            clock[0] += 10
        assert seen == [1.0] * 4  # a step on its way counts at once
        assert engine.busy_seconds == (4 + 4 * 10 if lookahead else 4)

    def test_a_step_that_raised_is_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine, decoder = make_engine()

        def fail(batch: Any) -> None:
            raise RuntimeError("sick")

        decoder.before = fail
        engine.add(make_request("a", [1, 2]))
        with pytest.raises(RuntimeError, match="sick"):
            engine.step()
        assert engine.busy_seconds == engine.busy_seconds

    def test_pages_in_use_are_those_that_sequences_hold(self) -> None:
        engine, _ = make_engine(page_size=4, pages=200)
        assert (engine.stats.pages, engine.stats.pages_in_use) == (200, 0)
        engine.add(make_request("a", list(range(10)), max_tokens=8, ignore_eos=True))
        engine.step()
        assert engine.stats.pages_in_use == 3
        run(engine)
        assert engine.stats.pages_in_use == 0  # the prefix cache keeps some, for whoever may want them


class TestSteadySteps:
    @pytest.mark.parametrize("seed", range(8))
    def test_are_what_the_scheduler_would_have_planned(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        requests = workload(seed, 12)

        def batches() -> list[tuple]:
            engine, decoder = make_engine(slots=4, pages=16 + 4 * (seed % 3), lookahead=seed % 3, caching=seed % 2 == 0)
            run(engine, requests)
            return [
                (batch.token_ids.tolist(), batch.positions.tolist(), batch.kv_slots.tolist(), batch.logit_rows.tolist())
                for batch in decoder.batches
            ]

        steady, chosen = [], Engine._steady
        monkeypatch.setattr(Engine, "_steady", lambda engine: steady.append(rows := chosen(engine)) or rows)
        taken = batches()
        assert any(steady)
        assert not all(steady)
        monkeypatch.setattr(Engine, "_steady", lambda engine: [])
        assert batches() == taken


class TestErrors:
    @pytest.mark.parametrize(
        ("poison", "message"), [(float("nan"), "NaN"), (float("inf"), "NaN"), (-float("inf"), "no token")]
    )
    @pytest.mark.parametrize("where", [3, 6])
    @pytest.mark.parametrize("lookahead", [0, 2])
    def test_a_sick_row_ends_its_own_request_alone(
        self, poison: float, message: str, where: int, lookahead: int
    ) -> None:
        healthy = make_request("healthy", [5, 6], seed=1, max_tokens=10, ignore_eos=True)
        expected = alone([healthy])
        engine, decoder = make_engine(lookahead=lookahead)
        decoder.poison = lambda history: poison if history[:3] == [1, 2, 3] and len(history) >= where else None
        sick = make_request("sick", [1, 2, 3], max_tokens=10, seed=0, n=2, ignore_eos=True)
        collected = run(engine, [sick, healthy])
        assert collected["healthy", 0].result() == expected["healthy", 0]
        for index in range(2):
            got = collected["sick", index]
            assert got.finish_reason is FinishReason.ERROR
            assert message in (got.error or "")
            assert len(got.tokens) == where - 3
        assert_empty(engine)

    def test_a_prompt_that_cannot_be_scored_is_an_error(self) -> None:
        engine, decoder = make_engine(budget=8)
        decoder.poison = lambda history: float("nan") if len(history) == 5 else None
        collected = run(engine, [make_request("a", list(range(20)), prompt_logprobs=0, n=2, max_tokens=1)])
        assert collected["a", 0].finish_reason is FinishReason.ERROR
        assert collected["a", 1].finish_reason is FinishReason.LENGTH
        assert_empty(engine)

    @pytest.mark.parametrize("lookahead", [0, 2])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_masks_that_leave_nothing_are_that_requests_error(self, temperature: float, lookahead: int) -> None:
        none = make_request("none", [1], temperature=temperature, allowed_token_ids=[3], bad=((1, 3),), logprobs=1)
        fine = make_request("fine", [1], seed=0, logprobs=1)
        engine, _ = make_engine(lookahead=lookahead)
        collected = run(engine, [none, fine])
        assert collected["none", 0].tokens == []
        assert collected["none", 0].finish_reason is FinishReason.ERROR
        assert "no token is left to draw" in (collected["none", 0].error or "")
        assert collected["fine", 0].result() == alone([fine])["fine", 0]
        assert_empty(engine)

    @pytest.mark.parametrize("lookahead", [0, 2])
    def test_a_request_that_could_not_join_gets_what_it_would_have_got(
        self, lookahead: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It waits again, and the others go on."""
        requests = [
            make_request(name, [1, 2, len(name)], seed=3, ignore_eos=True, max_tokens=9) for name in ("a", "bb")
        ]
        expected = alone(requests)
        engine, _ = make_engine(lookahead=lookahead)
        engine.add(requests[0])
        got: dict[tuple[str, int], Collected] = {}
        collect(engine.step(), got)
        engine.add(requests[1])
        with monkeypatch.context() as broken:
            broken.setattr(SamplingState, "join", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        engine.check()
        assert engine.num_waiting == 1
        while engine.has_unfinished:
            collect(engine.step(), got)
        assert results(got) == expected

    @pytest.mark.parametrize("lookahead", [0, 2])
    def test_a_step_that_raised_leaves_everything_in_order(self, lookahead: int) -> None:
        engine, decoder = make_engine(slots=2, lookahead=lookahead)
        for name in "abc":
            engine.add(make_request(name, [1, 2, 3], n=2, ignore_eos=True))
        engine.step()

        def fail(batch: object) -> None:
            raise RuntimeError("device lost")

        decoder.before = fail
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
        engine.check()
        for name in "abc":
            engine.abort(name)
        outputs = engine.step()
        assert {(out.request_id, out.index) for out in outputs if out.finish_reason is FinishReason.ABORT} == {
            (name, index) for name in "abc" for index in range(2)
        }
        assert_empty(engine)

    def test_a_step_that_raised_after_the_draw_changes_nothing_for_the_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        features = [{"frequency_penalty": 1.0}, {"repetition_penalty": 1.3}, {"bad": ((3,), (4, 5))}]
        requests = [
            make_request(f"r{i}", [i, 1], seed=i, max_tokens=20, ignore_eos=True, **more)
            for i, more in enumerate(features)
        ]
        expected = alone(requests)
        engine, _ = make_engine()
        for request in requests:
            engine.add(request)
        collected: dict[tuple[str, int], Collected] = {}
        for _ in range(5):
            collect(engine.step(), collected)

        def fail(*arguments: object) -> None:
            raise RuntimeError("out of memory")

        engine.add(make_request("scored", [8, 9], prompt_logprobs=0))
        with monkeypatch.context() as patched:
            patched.setattr("freewheel.engine.runner.prompt_logprobs", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                engine.step()
        engine.abort("scored")
        while engine.has_unfinished:
            collect(engine.step(), collected)
        del collected["scored", 0]
        assert results(collected) == expected


class TestAbort:
    def test_while_waiting_in_mid_prompt_and_in_mid_output(self) -> None:
        engine, _ = make_engine(slots=2, budget=8)
        for name, length in (("decoding", 2), ("prefilling", 40), ("waiting", 5)):
            engine.add(make_request(name, list(range(length)), max_tokens=50, n=2, ignore_eos=True))
        collected: dict[tuple[str, int], Collected] = {}
        for _ in range(2):
            collect(engine.step(), collected)
        for name in ("waiting", "prefilling", "decoding"):
            engine.abort(name)
            engine.check()
        collect(engine.step(), collected)
        assert {key: got.finish_reason for key, got in collected.items()} == {
            (name, index): FinishReason.ABORT for name in ("decoding", "prefilling", "waiting") for index in range(2)
        }
        assert collected["decoding", 0].tokens
        assert not engine.has_unfinished
        assert_empty(engine)

    def test_of_nobody_is_nothing(self) -> None:
        engine, _ = make_engine()
        engine.abort("nobody")
        engine.finish("nobody", 0)
        assert engine.step() == []

    def test_a_finished_choice_leaves_without_a_reply_and_the_others_stay(self) -> None:
        engine, _ = make_engine()
        engine.add(make_request("a", [1], n=2, seed=1, max_tokens=9, ignore_eos=True))
        collected: dict[tuple[str, int], Collected] = {}
        for _ in range(4):
            collect(engine.step(), collected)
        engine.finish("a", 0)
        while engine.has_unfinished:
            collect(engine.step(), collected)
            engine.check()
        assert collected["a", 0].finish_reason is None
        assert len(collected["a", 1].tokens) == 9

    def test_200_random_rounds_leave_nothing_in_use(self) -> None:
        rng = random.Random(1)
        engine, _ = make_engine(slots=4, pages=24, max_model_len=48, budget=12)
        replies: dict[tuple[str, int], Collected] = {}
        added: dict[str, int] = {}
        finished_by_us: set[tuple[str, int]] = set()
        for round_number in range(200):
            for part in range(rng.randint(0, 3)):
                name = f"{round_number}.{part}"
                added[name] = rng.choice([1, 1, 1, 3])
                prompt = [rng.randrange(3) for _ in range(rng.randint(1, 40))]
                params: dict[str, Any] = {"max_tokens": rng.randint(0, 12), "n": added[name]}
                if rng.random() < 0.2:
                    params["prompt_logprobs"] = 1
                engine.add(make_request(name, prompt, priority=rng.randrange(2), **params))
            for _ in range(rng.randint(0, 5)):
                if added and rng.random() < 0.6:
                    engine.abort(rng.choice(list(added)[-8:]))
                if replies and rng.random() < 0.1:
                    key = rng.choice(list(replies))
                    if replies[key].finish_reason is None and key[0] in engine._requests:
                        engine.finish(*key)
                        finished_by_us.add(key)
                engine.check()
                collect(engine.step(), replies)
                engine.check()
        while engine.has_unfinished:
            collect(engine.step(), replies)
        assert engine.preemptions > 0
        for name, count in added.items():
            for index in range(count):
                assert (name, index) in finished_by_us or replies[name, index].finish_reason is not None
        assert_empty(engine)


class TestPriorities:
    def test_the_urgent_one_takes_the_slot_and_the_other_resumes(self) -> None:
        background = make_request("background", [1, 2, 3], priority=5, seed=1, max_tokens=20, ignore_eos=True)
        engine, _ = make_engine(slots=1)
        engine.add(background)
        collected: dict[tuple[str, int], Collected] = {}
        for _ in range(5):
            collect(engine.step(), collected)
        engine.add(make_request("urgent", [4, 5], max_tokens=3, ignore_eos=True))
        order = []
        while engine.has_unfinished:
            outputs = engine.step()
            order += [output.request_id for output in outputs]
            collect(outputs, collected)
            engine.check()
        assert order[:3] == ["urgent"] * 3
        assert collected["background", 0].result() == alone([background])["background", 0]

    def test_equal_priorities_are_served_in_order(self) -> None:
        engine, _ = make_engine(slots=1)
        for name in "abc":
            engine.add(make_request(name, [1, 2], max_tokens=2, ignore_eos=True))
        order = []
        while engine.has_unfinished:
            order += [output.request_id for output in engine.step()]
        assert order == list("aabbcc")

    def test_decoding_goes_on_in_every_step_of_a_long_prefill(self) -> None:
        engine, _ = make_engine(slots=2, budget=4)
        engine.add(make_request("decoding", [1], max_tokens=30, ignore_eos=True))
        engine.step()
        engine.add(make_request("long", [2] * 40, max_tokens=1))
        for _ in range(10):
            assert "decoding" in [output.request_id for output in engine.step()]
