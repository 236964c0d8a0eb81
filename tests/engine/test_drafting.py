"""Speculation in the engine: it changes nothing but the number of steps."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from bytes_tokenizer import BytesTokenizer
from mock_model import EOS, VOCAB, Collected, collect, make_engine, make_request, run
from oracle import Oracle
from test_engine import alone, assert_empty, results, workload

from freewheel.cache.pool import KVPool
from freewheel.config import EngineConfig
from freewheel.engine.drafting import Drafting, Pace
from freewheel.engine.engine import Engine
from freewheel.engine.outputs import Reply
from freewheel.request import FinishReason, Request
from freewheel.speculative import Budget, DraftTree, NgramIndex, SpeculationMetrics

SHAPES: list[dict[str, Any]] = [
    {"draft_width": 1, "draft_depth": 6, "draft_nodes": 6},
    {"draft_width": 4, "draft_depth": 4, "draft_nodes": 11},
]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 3}
FEW = [20, 21, 22]  # a text of three tokens repeats itself: drafts are found everywhere, and are mostly wrong


class Scripted(Drafting):
    """Drafts of a test's own: ``make`` gets the output so far."""

    def __init__(self, engine: Engine, make: Callable[[list[int]], DraftTree | None]) -> None:
        super().__init__(engine.config, Pace())
        assert engine._drafting is not None
        engine._drafting = self
        self._make = make

    def draft(self, sequence: Any, most: int) -> DraftTree | None:
        sequence.budget = sequence.budget or self.budget()
        tree = self._make(sequence.output_ids)
        room = sequence.max_length - len(sequence.tokens) - 1
        return tree if tree and len(tree.tokens) <= most and max(tree.depths) <= room else None


def chain(tokens: Sequence[int]) -> DraftTree | None:
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1))) if tokens else None


def texts(expected: dict[tuple[str, int], tuple]) -> dict[tuple[str, int], list[int]]:
    return {key: result[0] for key, result in expected.items()}


def endless(request: Request) -> list[int]:
    """What the request would get if nothing ended it."""
    params = replace(request.params, ignore_eos=True, max_tokens=40, stop_token_ids=(), stop=(), min_tokens=0)
    return alone([replace(request, params=params)])[request.request_id, 0][0]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    few: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1, "logprobs": 2, "frequency_penalty": 0.3},
        {"seed": 2, "bad": ((20, 21), (21, 22, 20)), "prompt_logprobs": 1},
    ]
    repetitive = [
        make_request(f"few{i}", FEW * 3, allowed_token_ids=FEW, max_tokens=40, ignore_eos=True, **more)
        for i, more in enumerate(few)
    ]
    return [*workload(0, 34), *repetitive]


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> dict[tuple[str, int], tuple]:
    return alone(requests)


class TestSameTokens:
    """Tokens, log probabilities and ends are those of plain decoding, whatever is drafted."""

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize(("slots", "budget", "lookahead"), [(2, 32, 0), (7, 7, 0), (7, 40, 2), (32, 512, 0)])
    def test_in_batches_and_chunks(
        self,
        requests: list[Request],
        expected: dict,
        slots: int,
        budget: int,
        lookahead: int,
        caching: bool,
        shape: dict[str, Any],
    ) -> None:
        engine, decoder = make_engine(
            slots=slots, budget=budget, caching=caching, lookahead=lookahead, speculation=True, **shape
        )
        drafting = Oracle(engine, texts(expected), random.Random(slots))
        assert results(run(engine, requests)) == expected
        assert_empty(engine)
        assert max(len(batch.token_ids) for batch in decoder.batches) <= budget
        assert drafting.metrics.drafted > drafting.metrics.accepted > 0

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_after_forced_preemption(
        self, requests: list[Request], expected: dict, page_size: int, caching: bool, shape: dict[str, Any]
    ) -> None:
        pages, budget = 80 // page_size, 24
        engine, _ = make_engine(
            slots=16, pages=pages, page_size=page_size, budget=budget, caching=caching, speculation=True, **shape
        )
        drafting = Oracle(engine, texts(expected), random.Random(page_size))
        assert results(run(engine, requests)) == expected
        assert engine.preemptions > 0
        assert_empty(engine)
        assert drafting.metrics.accepted > 50

    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("caching", [True, False])
    def test_drafts_from_the_sequences_own_tokens(
        self, requests: list[Request], expected: dict, caching: bool, shape: dict[str, Any]
    ) -> None:
        engine, _ = make_engine(slots=7, budget=64, caching=caching, speculation=True, **shape)
        assert results(run(engine, requests)) == expected
        assert_empty(engine)
        assert engine.speculation is not None
        assert engine.speculation.accepted > 20

    @pytest.mark.parametrize("caching", [True, False])
    def test_a_shared_beginning_and_cancelled_neighbours(self, caching: bool) -> None:
        rng = random.Random(3)
        stem = [rng.choice(FEW) for _ in range(24)]
        kept = [
            make_request(
                f"r{i}", [*stem, *rng.choices(FEW, k=i % 5)], temperature=0.0, allowed_token_ids=FEW, max_tokens=16
            )
            for i in range(12)
        ]
        expected = alone(kept)
        engine, _ = make_engine(slots=4, pages=40, caching=caching, speculation=True, draft_depth=5, draft_nodes=5)
        collected: dict[tuple[str, int], Collected] = {}
        queue = list(kept)
        for round_number in range(50):
            if queue and round_number % 3 == 0:
                engine.add(queue.pop())
            engine.add(make_request(f"noise{round_number}", stem, seed=round_number, allowed_token_ids=FEW))
            collect(engine.step(), collected)
            engine.check()
            engine.abort(f"noise{round_number - 1}")
        engine.abort("noise49")
        collect_all(engine, collected)
        assert {key: got for key, got in results(collected).items() if key[0].startswith("r")} == expected
        assert_empty(engine)


def collect_all(engine: Engine, collected: dict[tuple[str, int], Collected]) -> None:
    while engine.has_unfinished:
        collect(engine.step(), collected)
        engine.check()


class TestEnds:
    """A run of accepted tokens is cut where plain decoding would have ended."""

    PROMPT = (1, 2, 3)

    def drafted(self, request: Request, text: list[int]) -> Collected:
        """What the request gets when six tokens at a time are drafted, and all of them right."""
        engine, _ = make_engine(speculation=True)
        Scripted(engine, lambda output: chain(text[len(output) : len(output) + 6]))
        [got] = run(engine, [request]).values()
        assert_empty(engine)
        return got

    @pytest.mark.parametrize("cap", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    @pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 6, 7, 8, 9])
    def test_the_earliest_of_stop_and_length_wins(self, stop_at: int, cap: int) -> None:
        text = endless(make_request("a", list(self.PROMPT), seed=6))
        assert len(set(text[:9])) == 9
        stop = text[stop_at - 1]
        request = make_request("a", list(self.PROMPT), seed=6, max_tokens=cap, stop_token_ids=[stop], ignore_eos=True)
        got = self.drafted(request, text)
        assert got.result() == alone([request])["a", 0]
        assert got.tokens == text[: min(stop_at, cap)]
        stopped = stop_at <= cap
        assert (got.finish_reason, got.stop_reason) == (
            (FinishReason.STOP, stop) if stopped else (FinishReason.LENGTH, None)
        )

    @pytest.mark.parametrize("seed", range(8))
    def test_an_end_of_sequence_id_within_a_run(self, seed: int) -> None:
        request = make_request("a", list(self.PROMPT), seed=seed, logit_bias={EOS: 3.5}, max_tokens=20)
        text = endless(request)
        got = self.drafted(request, text)
        assert got.result() == alone([request])["a", 0]
        assert got.tokens == text[: text.index(EOS) + 1]

    @pytest.mark.parametrize("length", range(58, 64))
    def test_the_end_of_the_context(self, length: int) -> None:
        prompt = [i % VOCAB for i in range(length)]
        request = make_request("a", prompt, seed=5, ignore_eos=True, max_tokens=None)
        plain = alone([request])["a", 0]
        got = self.drafted(request, plain[0])
        assert got.result() == plain
        assert len(got.tokens) == 64 - length

    @pytest.mark.parametrize("first", [0, 1, 5, 6, 7])
    @pytest.mark.parametrize("length", [1, 3])
    @pytest.mark.parametrize("include", [False, True])
    def test_a_stop_string_within_a_run(self, first: int, length: int, include: bool) -> None:
        """The engine brings more than the reader keeps: what comes after the stop is dropped there."""
        tokenizer: Any = BytesTokenizer()
        letters = make_request("a", list(self.PROMPT), seed=5, allowed_token_ids=list(range(26)), max_tokens=12)
        text = endless(letters)
        stop = tokenizer.decode(text[first : first + length])
        params = replace(letters.params, stop=(stop,), include_stop_str_in_output=include)
        told = []
        for speculation in (False, True):
            engine, _ = make_engine(speculation=speculation)
            if speculation:
                Scripted(engine, lambda output: chain(text[len(output) : len(output) + 6]))
            request = replace(letters, params=params)
            reply = Reply(request, None, tokenizer)
            engine.add(request)
            while engine.has_unfinished:
                for output in engine.step():
                    if reply.add(output):
                        engine.finish("a", output.index)
            told.append(reply.take())
            assert_empty(engine)
        assert told[0].outputs == told[1].outputs
        assert told[0].outputs[0].stop_reason == stop
        metrics = told[1].metrics.speculation
        assert metrics.accepted < len(told[0].outputs[0].token_ids) <= metrics.steps + metrics.accepted


class TestFeatures:
    """What a request asks holds at each row of a draft, and sees what lies on its path."""

    def compare(self, text: list[int], *requests: Request) -> None:
        """Draft ``text`` for all of them, whatever they ask."""
        engine, decoder = make_engine(speculation=True)
        Scripted(engine, lambda output: chain(text[len(output) : len(output) + 5]))
        assert results(run(engine, list(requests))) == alone(list(requests))
        assert max(batch.row_counts[-1] for batch in decoder.batches[1:]) == 6
        assert_empty(engine)

    @pytest.mark.parametrize("at", range(1, 6))
    @pytest.mark.parametrize(
        "more",
        [
            {"logit_bias": -100.0},
            {"bad": 1},
            {"allowed_token_ids": 0},
            {"repetition_penalty": 1.9, "frequency_penalty": 2.0, "presence_penalty": 2.0},
            {"min_p": 0.9, "temperature": 1.0, "seed": 1},
            {"top_k": 1, "temperature": 1.0, "seed": 1},
            {"top_p": 0.1, "temperature": 1.0, "seed": 1},
            {"logit_bias": -100.0, "temperature": 0.1, "seed": 1, "logprobs_mode": "processed"},
        ],
    )
    def test_a_token_that_the_bare_model_would_take_is_forbidden(self, more: dict[str, Any], at: int) -> None:
        bare = make_request("bare", [1, 2, 3], **GREEDY)
        text = alone([bare])["bare", 0][0]
        token, asked = text[at], dict(more)
        if "logit_bias" in asked:
            asked["logit_bias"] = {token: -100.0}
        if "bad" in asked:
            asked["bad"] = ((token,),)
        if "allowed_token_ids" in asked:
            asked["allowed_token_ids"] = [id for id in range(VOCAB) if id != token]
        self.compare(text, bare, make_request("asks", [1, 2, 3], **{**GREEDY, **asked}))

    @pytest.mark.parametrize("at", range(9))
    @pytest.mark.parametrize("length", [2, 3])
    def test_bad_words_in_committed_text_in_the_draft_and_across(self, at: int, length: int) -> None:
        prompt = [1, 2, 3]
        bare = make_request("bare", prompt, **GREEDY)
        text = [*prompt, *alone([bare])["bare", 0][0]]
        word = tuple(text[at + 2 : at + 2 + length])
        near = (word[0] + 1, *word[1:]), (*word[:-1], word[-1] + 1)
        banned = make_request("banned", prompt, bad=(word,), **GREEDY)
        legal = make_request("legal", prompt, bad=near, **GREEDY)
        self.compare(text[3:], banned, legal, bare)

    @pytest.mark.parametrize("least", range(8))
    def test_minimum_tokens_hold_back_ends_at_each_depth(self, least: int) -> None:
        asked = {"logit_bias": {EOS: 9.0}, "min_tokens": least, "max_tokens": 12, "seed": 4}
        text = endless(make_request("a", [1, 2, 3], **asked))
        assert EOS in text
        held = alone([make_request("a", [1, 2, 3], **asked)])["a", 0][0]
        request = make_request("a", [1, 2, 3], **asked)
        engine, _ = make_engine(speculation=True)
        Scripted(engine, lambda output: chain((held + [EOS] * 6)[len(output) : len(output) + 6]))
        assert results(run(engine, [request]))["a", 0][0] == held
        assert EOS not in held[:least]

    def test_raw_log_probabilities_are_the_models(self) -> None:
        asked: dict[str, Any] = {"temperature": 0.1, "seed": 2, "max_tokens": 12, "ignore_eos": True, "logprobs": 5}
        biased = make_request("biased", [1, 2, 3], logit_bias={9: 30.0, 10: 29.8}, **asked)
        got = alone([biased])["biased", 0]
        forced = make_request("forced", [1, 2, 3, *got[0]], prompt_logprobs=5, max_tokens=1)
        scores = alone([forced])["forced", 0][2][4:]
        engine, _ = make_engine(speculation=True, budget=8)
        Oracle(engine, {("biased", 0): got[0], ("forced", 0): []}, random.Random(0))
        told = results(run(engine, [biased, forced]))
        assert told["biased", 0] == got
        assert told["biased", 0][1][1:] == scores

    @pytest.mark.parametrize("draw", ["gumbel", "multinomial"])
    def test_other_draws(self, draw: Any) -> None:
        asked = {"seed": None if draw == "multinomial" else 1, "max_tokens": 20, "ignore_eos": True}
        request = make_request("a", [1, 2, 3], **asked)
        engine, _ = make_engine(draw=draw)
        plain = results(run(engine, [request]))
        engine, _ = make_engine(draw=draw, speculation=True)
        Oracle(engine, texts(plain), random.Random(0))
        told = results(run(engine, [request]))
        assert len(told["a", 0][0]) == 20
        assert told == plain or draw == "multinomial"  # which cannot be repeated
        assert_empty(engine)


class TestTrees:
    """Keys and values of accepted nodes are put in path order; the mock model refuses to read any others."""

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    @pytest.mark.parametrize("path", list(product(range(3), repeat=2)))
    def test_any_path_may_be_the_right_one(self, page_size: int, path: tuple[int, int]) -> None:
        """The path takes child number path[0] of the root, and its child number path[1]; all have three children."""
        requests = [make_request(f"r{i}", [i, 2, 3], seed=i, max_tokens=24, ignore_eos=True) for i in range(3)]
        expected = alone(requests)
        engine, decoder = make_engine(
            speculation=True, page_size=page_size, budget=60, draft_width=9, draft_depth=2, draft_nodes=12
        )

        def make(output: list[int]) -> DraftTree | None:
            right = next(text for text in texts(expected).values() if text[: len(output)] == output)[len(output) :]
            if len(right) < 3:
                return None

            def three(token: int, place: int) -> list[int]:
                others = [id for id in range(VOCAB) if id != token][:2]
                return [*others[:place], token, *others[place:]]

            firsts, seconds = three(right[0], path[0]), three(right[1], path[1])
            return DraftTree.merge(product(firsts, seconds), 12, 2, 9)

        Scripted(engine, make)
        told = run(engine, requests)
        assert results(told) == expected
        metrics = engine.speculation
        assert metrics is not None
        assert metrics.accepted == 2 * metrics.drafted // 12 > 0
        assert any(batch.ancestors for batch in decoder.batches)
        assert_empty(engine)

    def test_trees_of_different_shapes_in_one_step(self) -> None:
        requests = [make_request(f"r{i}", [i, 2, 3], seed=i, max_tokens=30, ignore_eos=True) for i in range(6)]
        expected = alone(requests)
        engine, decoder = make_engine(speculation=True, budget=64, **SHAPES[1])
        Oracle(engine, texts(expected), random.Random(1))
        assert results(run(engine, requests)) == expected
        assert any(len({*batch.row_counts}) > 2 for batch in decoder.batches)


class TestErrors:
    @pytest.mark.parametrize("poison", [float("nan"), -float("inf")])
    @pytest.mark.parametrize("where", [4, 5, 8, 9])
    def test_a_sick_row_on_the_path_ends_its_request_after_the_tokens_before_it(
        self, poison: float, where: int
    ) -> None:
        healthy = make_request("healthy", [5, 6], seed=1, max_tokens=10, ignore_eos=True)
        sick = make_request("sick", [1, 2, 3], max_tokens=10, seed=0, ignore_eos=True)
        expected = alone([healthy, sick])
        engine, decoder = make_engine(speculation=True)
        decoder.poison = lambda history: poison if history[:3] == [1, 2, 3] and len(history) >= where else None
        text = expected["sick", 0][0]
        Scripted(
            engine, lambda output: chain(text[len(output) : len(output) + 6]) if text[: len(output)] == output else None
        )
        collected = run(engine, [sick, healthy])
        assert collected["healthy", 0].result() == expected["healthy", 0]
        assert collected["sick", 0].finish_reason is FinishReason.ERROR
        assert collected["sick", 0].tokens == text[: where - 3]
        assert_empty(engine)

    def test_a_sick_row_beside_the_path_leaves_nothing(self) -> None:
        """Attention may read places behind a sequence's end with weight zero: a NaN must not stay there."""
        request = make_request("a", [1, 2, 3], max_tokens=20, seed=0, ignore_eos=True)
        expected = alone([request])
        text = expected["a", 0][0]
        engine, decoder = make_engine(speculation=True)
        wrong = [(token + 1) % VOCAB for token in text]
        decoder.poison = lambda history: float("nan") if history != [1, 2, 3, *text][: len(history)] else None
        Scripted(engine, lambda output: chain([*text[len(output) :][:1], *wrong[len(output) + 1 :][:3]]))
        assert results(run(engine, [request])) == expected
        places = engine._pool.layers[0].view(2, -1)
        assert places[1].max() <= 24
        assert not places[0][places[1] == 0].any()

    def test_a_step_that_raised_leaves_everything_in_order(self) -> None:
        requests = [make_request(f"r{i}", [i, 2, 3], seed=i, max_tokens=20, ignore_eos=True) for i in range(3)]
        expected = alone(requests)
        engine, decoder = make_engine(speculation=True, slots=2)
        Oracle(engine, texts(expected), random.Random(0))
        collected: dict[tuple[str, int], Collected] = {}
        for request in requests:
            engine.add(request)
        for _ in range(3):
            collect(engine.step(), collected)

        def fail(batch: object) -> None:
            raise RuntimeError("device lost")

        decoder.before = fail
        for _ in range(2):
            with pytest.raises(RuntimeError, match="device lost"):
                engine.step()
            engine.check()
        decoder.before = lambda batch: None
        collect_all(engine, collected)
        assert results(collected) == expected
        assert_empty(engine)


class TestRows:
    """Drafts take what is left."""

    def test_a_prompt_comes_first(self) -> None:
        engine, decoder = make_engine(speculation=True, budget=8, slots=4)
        text = endless(make_request("a", [1, 2, 3], seed=5))
        Scripted(engine, lambda output: chain(text[len(output) : len(output) + 5]))
        engine.add(make_request("a", [1, 2, 3], seed=5, max_tokens=30, ignore_eos=True))
        engine.step()
        engine.step()
        assert decoder.batches[-1].row_counts == (6,)
        engine.add(make_request("long", [9] * 40, max_tokens=1))
        engine.step()
        assert decoder.batches[-1].row_counts == (1, 7)

    def test_rows_go_to_the_better_rank(self) -> None:
        engine, decoder = make_engine(speculation=True, budget=8, slots=4)
        Scripted(engine, lambda output: chain([1] * 5))
        for name, priority in (("late", 1), ("early", 0)):
            engine.add(make_request(name, [1, 2, 3], seed=5, max_tokens=30, ignore_eos=True, priority=priority))
        engine.step()
        engine.step()
        assert decoder.batches[-1].row_counts == (6, 1)

    def test_a_draft_takes_no_page_that_another_one_holds(self) -> None:
        """Both could run to the end in these pages, without a preemption; drafts go as far as there is room."""
        requests = [make_request(f"r{i}", [i] * 4, seed=i, max_tokens=12, ignore_eos=True) for i in range(2)]
        expected = alone(requests)
        engine, _ = make_engine(speculation=True, pages=8, max_model_len=32, caching=False)
        Scripted(engine, lambda output: chain([1] * 20))
        assert results(run(engine, requests)) == expected
        assert engine.preemptions == 0

    def test_pages_that_only_rejected_rows_needed_serve_the_next_draft_or_go_to_others(self) -> None:
        engine, _ = make_engine(speculation=True, page_size=1)
        Scripted(engine, lambda output: chain([1] * 9))
        engine.add(make_request("a", [1, 2, 3], seed=5, max_tokens=30, ignore_eos=True))
        engine.step()
        [sequence] = engine._running.values()
        for _ in range(5):
            engine.step()
            assert len(sequence.tokens) < len(sequence.pages) <= len(sequence.tokens) + 9
            engine.check()
        engine.add(make_request("b", [1, 2, 3], seed=5, max_tokens=0))
        engine._schedule()
        assert len(sequence.pages) == len(sequence.tokens)

    def test_where_nothing_matches_steps_are_those_without_speculation(self) -> None:
        requests = [make_request(f"r{i}", [i, 20 + i], seed=i, max_tokens=12, ignore_eos=True) for i in range(4)]

        def batches(speculation: bool) -> list[tuple]:
            engine, decoder = make_engine(speculation=speculation)
            run(engine, requests)
            return [(batch.token_ids.tolist(), batch.kv_slots.tolist(), batch.ancestors) for batch in decoder.batches]

        assert batches(True) == batches(False)

    def test_no_draft_goes_beyond_the_end(self) -> None:
        engine, decoder = make_engine(speculation=True)
        run(engine, [make_request("a", FEW * 4, temperature=0.0, allowed_token_ids=[20], max_tokens=9)])
        assert max(int(batch.positions.max()) for batch in decoder.batches) == 12 + 9 - 2


class TestBudget:
    def test_drafts_that_bring_nothing_end_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Pace, "cost", lambda pace, sequences: 0.5)
        engine, _ = make_engine(speculation=True, max_model_len=1000, pages=300)
        assert isinstance(engine._drafting, Drafting)
        engine._drafting.budget = lambda: Budget({1: 1.0, 2: 1.5})
        request = make_request("a", FEW * 3, seed=1, allowed_token_ids=FEW, max_tokens=900, ignore_eos=True)
        run(engine, [request])
        assert engine.speculation is not None
        assert 0 < engine.speculation.drafted < 30

    def test_drafts_that_are_right_get_longer(self) -> None:
        engine, decoder = make_engine(speculation=True, max_model_len=300, budget=64)
        assert isinstance(engine._drafting, Drafting)
        engine._drafting.budget = lambda: Budget({1: 1.0})
        run(engine, [make_request("a", [20] * 9, temperature=0.0, allowed_token_ids=[20], max_tokens=280)])
        assert max(len(batch.token_ids) for batch in decoder.batches) > 16

    @pytest.mark.parametrize(("sequences", "row"), [(1, 0.2), (1, 0.03), (8, 0.1)])
    def test_the_pace_is_a_line_through_steps_of_late(self, sequences: int, row: float) -> None:
        rng, pace = random.Random(0), Pace()
        for _ in range(200):
            rows = sequences * rng.randint(1, 9)
            pace.observe(rows, (1 + row * rows) * rng.uniform(0.95, 1.05) / 100)
        assert pace.cost(sequences) == pytest.approx(sequences * row / (1 + row * sequences), rel=0.25)

    def test_the_pace_is_a_guess_where_steps_are_all_alike(self) -> None:
        pace = Pace()
        assert pace.cost(1) == pytest.approx(1 / 7)
        for _ in range(500):
            pace.observe(8, 0.02)
        assert pace.cost(8) == pytest.approx(8 / 14)

    def test_a_step_that_was_held_up_changes_little(self) -> None:
        pace = Pace()
        for rows in [1, 9] * 50:
            pace.observe(rows, (1 + 0.1 * rows) / 100)
        before = pace.cost(1)
        pace.observe(1, 10.0)
        assert pace.cost(1) == pytest.approx(before, rel=0.5)


class TestMemory:
    def test_an_index_lives_as_long_as_its_sequence_has_a_slot(self) -> None:
        engine, _ = make_engine(speculation=True, slots=1)
        engine.add(make_request("a", FEW * 3, priority=1, seed=1, allowed_token_ids=FEW, max_tokens=20))
        for _ in range(3):
            engine.step()
        [sequence] = engine._running.values()
        assert sequence.ngrams is not None
        assert sequence.ngrams.max_length == 9 + 20
        budget = sequence.budget
        engine.add(make_request("urgent", [1], max_tokens=2))
        engine.step()
        assert sequence.slot < 0
        assert sequence.ngrams is None
        run(engine)
        assert sequence.ngrams is None
        assert sequence.budget is budget

    def test_a_step_adds_only_its_tokens_to_the_index(self, monkeypatch: pytest.MonkeyPatch) -> None:
        added, extend = [], NgramIndex.extend
        monkeypatch.setattr(
            NgramIndex, "extend", lambda self, tokens: added.append(len(tokens)) or extend(self, tokens)
        )
        engine, _ = make_engine(speculation=True)
        run(engine, [make_request("a", FEW * 8, seed=1, allowed_token_ids=FEW, max_tokens=30)])
        assert added[0] == 25
        assert max(added[1:]) <= 33


class TestMetrics:
    def test_requests_add_up_to_the_total(self, requests: list[Request], expected: dict) -> None:
        engine, _ = make_engine(speculation=True, budget=64, **SHAPES[1])
        Oracle(engine, texts(expected), random.Random(2))
        total = SpeculationMetrics()
        for request in requests:
            engine.add(request)
        while engine.has_unfinished:
            for output in engine.step():
                assert 0 <= output.accepted <= min(output.drafted, len(output.token_ids))
                if output.token_ids:
                    total.observe(output.drafted, output.accepted)
        assert engine.speculation == total
        brought = sum(len(tokens) for tokens in texts(expected).values())
        assert total.steps < brought <= total.steps + total.accepted  # an accepted token may have been the last

    def test_accepted_tokens_are_the_first_of_what_a_step_brings(self) -> None:
        """Drafts of two right tokens and a wrong one: each step brings these two, and the one that is right instead."""
        request = make_request("a", [1, 2, 3], seed=6, max_tokens=14, ignore_eos=True)
        text = texts(alone([request]))["a", 0]

        def two_right(output: list[int]) -> DraftTree | None:
            right = text[len(output) : len(output) + 3]
            return chain([*right[:2], (right[2] + 1) % VOCAB]) if output and len(right) == 3 else None

        engine, _ = make_engine(speculation=True)
        Scripted(engine, two_right)
        engine.add(request)
        tokenizer: Any = BytesTokenizer()
        reply = Reply(request, None, tokenizer)
        brought = []
        while engine.has_unfinished:
            for output in engine.step():
                brought.append((output.token_ids, output.accepted))
                reply.add(output)
        assert brought == [(text[:1], 0), *((text[at : at + 3], 2) for at in range(1, 13, 3)), (text[13:], 0)]
        taken = reply.take()
        assert taken is not None
        assert taken.outputs[0].from_draft == [False, *[True, True, False] * 4, False]

    def test_without_speculation_there_are_none(self) -> None:
        assert make_engine()[0].speculation is None


class TestConfig:
    def test_is_for_cpus(self) -> None:
        pool = KVPool(torch.empty(1, 2, 1, 16, 4, 1, device="meta"), slots=1)
        config = EngineConfig(max_num_seqs=1, speculation=True)
        with pytest.raises(ValueError, match="speculation must not be True on CUDA devices"):
            Engine(make_engine()[1], pool, config, max_model_len=64, vocab_size=VOCAB)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("speculation", 1.5, "speculation must be True or False"),
            ("draft_width", 0, "draft_width must be a positive integer"),
            ("draft_depth", True, "draft_depth must be a positive integer"),
            ("draft_nodes", 64, "draft_nodes must be at most 63"),
        ],
    )
    def test_fields_are_checked(self, field: str, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            EngineConfig(**{field: value})

    def test_is_off_by_default(self) -> None:
        assert not EngineConfig().speculation

    def test_a_corpus_without_speculation(self) -> None:
        with pytest.raises(ValueError, match="draft_corpus must be None without speculation"):
            EngineConfig(draft_corpus="texts.txt")


class TestCorpus:
    def test_drafts_come_from_it_as_well(self) -> None:
        """A second request gets the same tokens as the first, in fewer steps, where the corpus holds these."""
        request = make_request("a", [1, 2, 3], seed=6, max_tokens=30, ignore_eos=True)
        expected = alone([request])
        corpus = NgramIndex.corpus([[1, 2, 3, *texts(expected)["a", 0]]])
        steps = []
        for shared in (None, corpus):
            engine, decoder = make_engine(speculation=True, corpus=shared)
            assert results(run(engine, [request])) == expected
            assert_empty(engine)
            steps.append(len(decoder.batches))
        assert steps == [30, 2]
