"""The offline API over a tiny random Llama in float32."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from freewheel import LLM, SamplingParams
from freewheel.config import Draw
from freewheel.engine.outputs import Reply, RequestOutput
from freewheel.request import StepOutput


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, dtype="float32", max_num_seqs=8) as llm:
        yield llm


def assert_idle(llm: LLM) -> None:
    llm._step()  # takes in what was aborted
    assert not llm._engine.has_unfinished
    assert not llm._replies
    llm._engine.check()
    assert llm._engine._cache.available == llm._engine._pool.num_pages


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(seed=2, top_k=20, top_p=0.9, max_tokens=24),
    SamplingParams(seed=3, min_p=0.1, repetition_penalty=1.2, frequency_penalty=0.5, max_tokens=24),
    SamplingParams(temperature=0.0, presence_penalty=1.0, min_tokens=10, max_tokens=24, prompt_logprobs=1),
    SamplingParams(seed=4, bad_words=["the"], logit_bias={40: 3.0}, max_tokens=24, logprobs=2),
    SamplingParams(seed=5, n=3, max_tokens=12),
]


def mixed(count: int) -> tuple[list[str], list[SamplingParams]]:
    rng = random.Random(0)
    stem = "the quick brown fox jumps over the lazy dog and then the other "
    prompts = [stem[: rng.randrange(60)] + f"{index} " * rng.randint(1, 20) for index in range(count)]
    return prompts, [PARAMS[index % len(PARAMS)] for index in range(count)]


def essence(output: RequestOutput) -> tuple[Any, ...]:
    return tuple((choice.text, choice.token_ids, choice.finish_reason) for choice in output.outputs)


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[RequestOutput]:
    """What mixed requests get one after the other, without prefix cache."""
    prompts, params = mixed(21)
    with LLM(tiny_model, dtype="float32", max_num_seqs=4, enable_prefix_caching=False) as llm:
        return [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params)]


class TestSameTokens:
    @pytest.mark.parametrize(
        "options",
        [
            {"max_num_seqs": 2},
            {"max_num_seqs": 32, "enable_prefix_caching": False},
            {"max_num_seqs": 16, "max_num_batched_tokens": 20},
            {"max_num_seqs": 8, "page_size": 4, "max_num_batched_tokens": 33},
            {"max_num_seqs": 8, "lookahead": 2},
            {"max_num_seqs": 8, "speculation": True},
            {"max_num_seqs": 8, "speculation": True, "draft_width": 3, "draft_depth": 4, "draft_nodes": 10},
            # 2 layers, 2 key-value heads of 8, keys and values, float32: a pool of one context and a half
            {"max_num_seqs": 8, "kv_cache_memory": 2 * 2 * 8 * 2 * 4 * 384},
        ],
        ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
    )
    def test_as_alone(self, tiny_model: Path, alone: list[RequestOutput], options: dict[str, Any]) -> None:
        prompts, params = mixed(21)
        with LLM(tiny_model, dtype="float32", **options) as llm:
            first = llm.generate(prompts, params, use_tqdm=False)
            outputs = llm.generate(prompts, params, use_tqdm=False)  # now from the prefix cache
            for output, again, expected in zip(first, outputs, alone):
                assert essence(output) == essence(again) == essence(expected)
            if "kv_cache_memory" in options:
                assert llm._engine.preemptions > 0
            assert_idle(llm)
        for output, expected in zip(outputs, alone):
            if expected.prompt_logprobs:
                assert output.prompt_logprobs
                assert output.prompt_logprobs[0] is None
                for got, want in zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:]):
                    assert got
                    assert want
                    assert got.keys() == want.keys()
                    assert [p.logprob for p in got.values()] == pytest.approx(
                        [p.logprob for p in want.values()], abs=1e-4
                    )

    def test_prompt_logprobs_are_the_models(self, llm: LLM, tiny_model: Path) -> None:
        from transformers import AutoModelForCausalLM

        ids = llm.tokenizer.encode("the lazy dog and the quick brown fox")
        (output,) = llm.generate(ids, SamplingParams(max_tokens=0, prompt_logprobs=0))
        with torch.inference_mode():
            logits = AutoModelForCausalLM.from_pretrained(tiny_model)(torch.tensor([ids])).logits[0]
        expected = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        assert output.prompt_logprobs
        got = [entry[id].logprob for entry, id in zip(output.prompt_logprobs[1:], ids[1:]) if entry]
        assert got == pytest.approx(expected.tolist(), abs=1e-4)
        assert output.outputs[0].token_ids == []
        assert output.outputs[0].finish_reason == "length"
        processed = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs_mode="processed", temperature=0.1)
        assert llm.generate(ids, processed)[0].prompt_logprobs == output.prompt_logprobs


class TestGenerate:
    def test_one_prompt_or_several_as_text_or_ids(self, llm: LLM) -> None:
        greedy = SamplingParams(temperature=0.0, max_tokens=5)
        ids = llm.tokenizer.encode("the fox")
        several = llm.generate(["the fox", ids, {"prompt_token_ids": ids}], greedy)
        for output in (*llm.generate("the fox", greedy), *llm.generate(ids, greedy), *several):
            assert output.prompt_token_ids == ids
            assert essence(output) == essence(several[0])
        assert [output.prompt for output in several] == ["the fox", None, None]
        assert llm.generate([], greedy) == []

    def test_the_id_zero_is_a_prompt(self, llm: LLM) -> None:
        for prompt in ([0], [[0]], [[0, 0]]):
            assert llm.generate(prompt, SamplingParams(max_tokens=1))[0].outputs[0].token_ids

    def test_the_text_is_the_tokenizers_reading_of_the_tokens(self, llm: LLM) -> None:
        for seed in range(10):
            (output,) = llm.generate("the", SamplingParams(seed=seed, max_tokens=40, ignore_eos=True))
            assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)

    def test_an_ids_padding_is_never_drawn(self, tmp_path: Path) -> None:
        from tiny import make_tiny_llama

        with LLM(make_tiny_llama(tmp_path / "padded", vocab_padding=64), dtype="float32") as padded:
            params = SamplingParams(temperature=2.0, max_tokens=200, ignore_eos=True, logprobs=5, n=4)
            (output,) = padded.generate("a", params)
            for choice in output.outputs:
                assert max(choice.token_ids) < padded.tokenizer.vocab_size
                assert choice.logprobs
                assert max(max(entry) for entry in choice.logprobs) < padded.tokenizer.vocab_size
                padded.generate(choice.token_ids, SamplingParams(max_tokens=1))
            with pytest.raises(ValueError, match="prompt_token_ids"):
                padded.generate([padded.tokenizer.vocab_size])

    @pytest.mark.parametrize(
        ("prompts", "params", "message"),
        [
            ("", None, "prompt is empty"),
            (["a", ""], None, r"prompts\[1\]: prompt is empty"),
            (["a", "b"], [SamplingParams()], "sampling_params has 1 entries for 2 prompts"),
            ("a", {"n": 1}, "sampling_params must be SamplingParams"),
            (None, None, "prompt must be text or a list of token ids, not NoneType"),
            (5, None, "prompt must be text or a list of token ids, not int"),
            ({1, 2}, None, "prompt must be text or a list of token ids, not set"),
            (["a", None], None, r"prompts\[1\]: prompt must be text or a list of token ids, not NoneType"),
            ("a\ud800", None, "prompt has a lone surrogate"),
            ("a" * 300, None, "prompt has 300 tokens, the longest sequence is 256"),
            ([[5], [10**6]], None, "prompt_token_ids has id 1000000"),
            ("a", SamplingParams(stop_token_ids=[2**31 - 1]), "stop_token_ids"),
        ],
    )
    def test_a_wrong_request_is_refused_whole(self, llm: LLM, prompts: Any, params: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, params)
        assert_idle(llm)

    def test_stop_strings_end_each_choice_where_it_alone_would_end(self, llm: LLM) -> None:
        params: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "seed": 1, "n": 4, "logprobs": 1}
        (free,) = llm.generate("the", SamplingParams(**params))
        stops = [choice.text[8:10] for choice in free.outputs[:3]]
        (output,) = llm.generate("the", SamplingParams(**params, stop=stops))
        for got, whole in zip(output.outputs, free.outputs):
            found = [whole.text.find(stop) for stop in stops if stop in whole.text]
            assert got.text == whole.text[: min(found, default=None)]
            assert (got.stop_reason in stops) == bool(found)
            assert len(got.logprobs or ()) == len(got.token_ids)
            assert got.token_ids == whole.token_ids[: len(got.token_ids)]
        assert sum(choice.stop_reason in stops for choice in output.outputs) >= 3
        assert_idle(llm)

    @pytest.mark.parametrize("draw", ["two_level", "gumbel", "multinomial"])
    def test_the_draw_is_the_one_that_was_asked_for(self, tiny_model: Path, draw: Draw) -> None:
        with LLM(tiny_model, dtype="float32", draw=draw) as llm:
            drawn = llm._engine.runner._sampler._draw
            assert type(drawn).__name__.lower() == draw.replace("_", "")
            calls = []
            rows = drawn.rows
            drawn.rows = lambda *args: calls.append(args) or rows(*args)  # type: ignore[method-assign]
            assert llm.generate("the", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids
            assert len(calls) == 3

    def test_a_text_that_cannot_be_made_is_that_requests_error(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        expected = essence(llm.generate("the", greedy)[0])
        add, broken = Reply.add, []

        def fail(reply: Reply, output: StepOutput) -> bool:
            if reply.request.request_id in broken:
                raise RuntimeError("no such character")
            return add(reply, output)

        monkeypatch.setattr(Reply, "add", fail)
        streams = [llm.stream("the", greedy) for _ in range(3)]
        broken.append(streams[0]._reply.request.request_id)
        failed, *others = [list(stream)[-1] for stream in streams]
        assert failed.outputs[0].error == "RuntimeError: no such character"
        assert [essence(output) for output in others] == [expected] * 2
        assert_idle(llm)

    def test_priorities_one_for_each(self, llm: LLM) -> None:
        assert len(llm.generate(["a", "b"], SamplingParams(max_tokens=2), priority=[1, 0])) == 2
        with pytest.raises(ValueError, match="priority has 1 entries"):
            llm.generate(["a", "b"], priority=[1])

    def test_a_seeded_engine_repeats_itself(self, tiny_model: Path) -> None:
        texts = []
        for _ in range(2):
            with LLM(tiny_model, dtype="float32", seed=7) as seeded:
                texts.append([essence(output) for output in seeded.generate(["a", "a"], SamplingParams(max_tokens=9))])
        assert texts[0] == texts[1]
        assert texts[0][0] != texts[0][1]

    def test_a_sick_token_harms_no_neighbour_and_no_successor(self, tiny_model: Path) -> None:
        """One token's embedding is NaN: so become keys and values of its sequence, in pages that others get next."""
        with LLM(tiny_model, dtype="float32", max_num_seqs=4, kv_cache_memory=2 * 2 * 8 * 2 * 4 * 256) as llm:
            healthy = [f"the fox {index}" for index in range(3)]
            greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
            expected = [essence(output) for output in llm.generate(healthy, greedy)]
            sick = 250
            forward = llm._engine.runner._decoder.forward

            def infected(batch: Any, kv: Any) -> Any:
                logits = forward(batch, kv)
                for first in (batch.token_ids == sick).nonzero().flatten().tolist():
                    for cache in kv:
                        cache.flatten(2, 3)[:, :, batch.kv_slots[first]] = torch.nan
                return logits

            llm._engine.runner._decoder.forward = infected  # type: ignore[method-assign]
            for _ in range(4):
                outputs = llm.generate([[sick] * 20, *healthy], greedy)
                assert outputs[0].outputs[0].finish_reason == "error"
                assert "NaN" in (outputs[0].outputs[0].error or "")
                assert [essence(output) for output in outputs[1:]] == expected
            assert_idle(llm)


class TestStream:
    def test_deltas_add_up_to_the_text_of_generate(self, llm: LLM) -> None:
        params = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
        outputs = list(llm.stream("the", params))
        assert "".join(output.delta for output in outputs) == outputs[-1].outputs[0].text
        assert outputs[-1].finished
        assert essence(outputs[-1]) == essence(llm.generate("the", params)[0])

    def test_closing_or_dropping_it_aborts(self, llm: LLM) -> None:
        stream = llm.stream("the", SamplingParams(max_tokens=None, ignore_eos=True))
        next(stream)
        stream.close()
        assert list(stream) == []
        assert_idle(llm)
        stream = llm.stream("the", SamplingParams(max_tokens=None, ignore_eos=True))
        next(stream)
        del stream
        assert_idle(llm)

    def test_one_that_nobody_reads_is_no_burden(self, llm: LLM) -> None:
        llm.stream("the", SamplingParams(max_tokens=None, ignore_eos=True))
        assert_idle(llm)

    def test_other_calls_run_beside_it(self, llm: LLM) -> None:
        params = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
        expected = essence(llm.generate("the", params)[0])
        stream = llm.stream("the", params)
        next(stream)
        llm.generate(["a", "b"], SamplingParams(max_tokens=10))
        assert essence(list(stream)[-1]) == expected
        assert_idle(llm)

    def test_readers_that_leave_do_not_disturb_those_that_share_their_prefix(self, tiny_model: Path) -> None:
        rng = random.Random(0)
        prefix = "the quick brown fox jumps over the lazy dog, and then "
        greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        with LLM(tiny_model, dtype="float32", enable_prefix_caching=False) as llm:
            expected = [essence(llm.generate(f"{prefix}{number}", greedy)[0]) for number in range(10)]
        # a pool of one context and a quarter, so that pages are recycled all the time
        with LLM(tiny_model, dtype="float32", page_size=4, kv_cache_memory=2 * 2 * 8 * 2 * 4 * 320) as llm:
            for _ in range(30):
                numbers = rng.sample(range(10), 5)
                streams = [(number, llm.stream(f"{prefix}{number}", greedy)) for number in numbers]
                for number, stream in streams:
                    if rng.random() < 0.5:
                        for _ in range(rng.randrange(15)):
                            next(stream, None)
                        stream.close()
                    else:
                        assert essence(list(stream)[-1]) == expected[number]
                llm._engine.check()
            assert_idle(llm)

    def test_a_wrong_prompt_is_refused_at_once(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="prompt is empty"):
            llm.stream([])


class TestChat:
    def test_one_conversation_or_several(self, llm: LLM) -> None:
        messages = [{"role": "user", "content": "hi"}]
        greedy = SamplingParams(temperature=0.0, max_tokens=5)
        (one,) = llm.chat(messages, greedy)
        two = llm.chat([messages, [*messages, {"role": "assistant", "content": "yes"}]], greedy)
        assert essence(one) == essence(two[0])
        assert one.prompt == "<|start|>user\nhi<|end|><|start|>assistant\n"
        assert one.prompt_token_ids == llm.render(messages)["prompt_token_ids"]
        assert two[1].prompt != one.prompt

    @pytest.mark.parametrize("messages", [[], [{"content": "hi"}], "hi"])
    def test_malformed_messages(self, llm: LLM, messages: Any) -> None:
        with pytest.raises(ValueError, match="message"):
            llm.chat(messages)


class TestInterruption:
    @pytest.mark.parametrize("prompts", ["the", ["the", "fox"] * 4])
    def test_ctrl_c_within_a_step_leaves_the_model_usable(self, tiny_model: Path, prompts: str | list[str]) -> None:
        with LLM(tiny_model, dtype="float32") as llm:
            greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
            expected = essence(llm.generate("the", greedy)[0])
            decoder = llm._engine.runner._decoder
            forward, calls = decoder.forward, []

            def interrupted(batch: Any, kv: Any) -> Any:
                calls.append(batch)
                if len(calls) == 5:
                    os.kill(os.getpid(), signal.SIGINT)
                return forward(batch, kv)

            decoder.forward = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                llm.generate(prompts, greedy)
            assert len(calls) == 5
            assert_idle(llm)
            assert essence(llm.generate("the", greedy)[0]) == expected

    def test_a_handler_that_returns_lets_generation_go_on(self, tiny_model: Path) -> None:
        with LLM(tiny_model, dtype="float32") as llm:
            forward, signals = llm._engine.runner._decoder.forward, []

            def interrupted(batch: Any, kv: Any) -> Any:
                os.kill(os.getpid(), signal.SIGINT)
                return forward(batch, kv)

            llm._engine.runner._decoder.forward = interrupted  # type: ignore[method-assign]
            before = signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
            try:
                greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
                assert len(llm.generate("the", greedy)[0].outputs[0].token_ids) == 3
            finally:
                signal.signal(signal.SIGINT, before)
            assert len(signals) == 3

    def test_an_exception_in_a_step_ends_the_call_and_leaves_nothing(self, tiny_model: Path) -> None:
        with LLM(tiny_model, dtype="float32") as llm:
            decoder = llm._engine.runner._decoder
            forward = decoder.forward

            def fail(batch: Any, kv: Any) -> Any:
                raise RuntimeError("out of memory")

            decoder.forward = fail  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="out of memory"):
                llm.generate(["a", "b"])
            stream = llm.stream("a")
            with pytest.raises(RuntimeError, match="out of memory"):
                next(stream)
            decoder.forward = forward  # type: ignore[method-assign]
            assert_idle(llm)
            llm.generate("a")

    def test_after_closing(self, tiny_model: Path) -> None:
        llm = LLM(tiny_model, dtype="float32")
        stream = llm.stream("a", SamplingParams(max_tokens=None, ignore_eos=True))
        next(stream)
        llm.close()
        assert list(stream)[-1].outputs[0].error == "the LLM was closed"
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate("a")
        llm.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 1000}, "max_model_len is 1000, but the model's context holds 256"),
        ({"kv_cache_memory": 100}, "kv_cache_memory"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 10**12, "max_num_batched_tokens": 10**12}, "max_num_seqs: .* GiB are free"),
        ({"enable_prefix_caching": "false"}, "enable_prefix_caching"),
        ({"dtype": "int3"}, "dtype"),
        ({"device": "meta"}, "device"),
        ({"draft_corpus": "a.txt"}, "draft_corpus must be None without speculation"),
        ({"draft_nodes": 64}, "draft_nodes must be at most 63"),
        (
            {"speculation": True, "draft_corpus": "no/such/file"},
            "draft_corpus: no/such/file: cannot be read: No such file",
        ),
    ],
)
def test_an_impossible_configuration_fails_at_the_start(tiny_model: Path, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(tiny_model, **options)
