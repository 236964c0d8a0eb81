"""What users read: deltas, log probabilities, metrics, JSON."""

import json
import math
from typing import Any

import pytest
from bytes_tokenizer import END, BytesTokenizer

from freewheel.engine.inputs import make_request
from freewheel.engine.outputs import Reply
from freewheel.request import FinishReason, Request, StepOutput, TokenLogprobs
from freewheel.sampling import SamplingParams

TOKENIZER: Any = BytesTokenizer()


def make_reply(**params: Any) -> Reply:
    return Reply(Request("a", (0, 1), SamplingParams(**params)), "ab", TOKENIZER)


def test_deltas_add_up_and_slow_readers_lose_nothing() -> None:
    reply = make_reply(max_tokens=20)
    assert reply.take() is None
    deltas = []
    for number, token in enumerate(TOKENIZER.encode("hello world €!")):
        reply.add(StepOutput("a", 0, token_ids=[token]))
        if number % 3 == 0 and (output := reply.take()):
            deltas.append(output.delta)
    reply.add(StepOutput("a", 0, finish_reason=FinishReason.ABORT))
    output = reply.take()
    assert output is not None
    assert "".join([*deltas, output.delta]) == output.outputs[0].text == "hello world €!"
    assert output.finished
    assert reply.take() is None


def test_tokens_from_drafts_are_told_up_to_a_stop_string() -> None:
    reply = make_reply(stop=["c"])
    reply.add(StepOutput("a", 0, token_ids=[TOKENIZER.encode("a")[0]]))
    reply.add(StepOutput("a", 0, token_ids=TOKENIZER.encode("bbcab"), drafted=6, accepted=4))
    output = reply.take()
    assert output is not None
    assert output.outputs[0].from_draft == [False, True, True, True]
    assert output.metrics.speculation.accepted == 3


def test_an_output_does_not_change_afterwards() -> None:
    reply = make_reply()
    reply.add(StepOutput("a", 0, token_ids=[1]))
    early = reply.take()
    reply.add(StepOutput("a", 0, token_ids=[2]))
    assert early is not None
    assert early.outputs[0].token_ids == [1]
    assert early.metrics.output_tokens == 1


def test_what_all_choices_have_in_common_is_read_and_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    token_bytes = BytesTokenizer.token_bytes
    monkeypatch.setattr(BytesTokenizer, "token_bytes", lambda self, id: reads.append(id) or token_bytes(self, id))
    make_reply(n=1)
    alone = len(reads)
    reply = make_reply(n=100, stop=["x" * 1000] * 16)
    assert len(reads) == 2 * alone > 0
    assert len({id(choice._stops._children) for choice in reply._choices}) == 1


def test_a_prompt_that_ends_within_a_character_has_no_text_of_its_own() -> None:
    reply = Reply(Request("a", tuple(TOKENIZER.encode("a€")[:2]), SamplingParams(max_tokens=0)), None, TOKENIZER)
    reply.add(StepOutput("a", 0, finish_reason=FinishReason.LENGTH))
    output = reply.take()
    assert output is not None
    assert output.outputs[0].text == ""


def test_log_probabilities_by_id_in_order() -> None:
    reply = make_reply(logprobs=2, prompt_logprobs=0)
    entry = TokenLogprobs([3, 1, 2], [-2.0, -0.5, -math.inf], [3, 1, 2])
    reply.add(StepOutput("a", 0, token_ids=[3], logprobs=[entry], prompt_logprobs=[None, entry]))
    output = reply.take()
    assert output is not None
    (choice,) = output.outputs
    assert choice.logprobs is not None
    assert [(id, p.logprob, p.rank, p.decoded_token) for id, p in choice.logprobs[0].items()] == [
        (3, -2.0, 3, "d"),
        (1, -0.5, 1, "b"),
        (2, -math.inf, 2, "c"),
    ]
    assert choice.cumulative_logprob == -2.0
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    plain = json.loads(json.dumps(output.to_dict(), allow_nan=False))
    assert plain["outputs"][0]["logprobs"][0]["2"]["logprob"] is None
    assert plain["prompt"] == "ab"


def test_choices_end_one_by_one() -> None:
    reply = make_reply(n=2)
    reply.add(StepOutput("a", 1, token_ids=[END], finish_reason=FinishReason.STOP))
    assert not reply.finished
    reply.add(StepOutput("a", 0, finish_reason=FinishReason.ERROR, error="sick"))
    output = reply.take()
    assert output is not None
    assert output.finished
    assert [(choice.finish_reason, choice.error) for choice in output.outputs] == [("error", "sick"), ("stop", None)]


def test_metrics() -> None:
    reply = make_reply()
    reply.add(StepOutput("a", 0, token_ids=[1], cached_tokens=1))
    reply.add(StepOutput("a", 0, token_ids=[2], finish_reason=FinishReason.LENGTH))
    metrics = reply.metrics
    assert 0 < metrics.arrival_time <= metrics.first_token_time <= metrics.finish_time
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.output_tokens) == (2, 1, 2)


def test_a_request_without_tokens_has_times_too() -> None:
    reply = make_reply(max_tokens=0)
    reply.add(StepOutput("a", 0, finish_reason=FinishReason.LENGTH))
    assert reply.metrics.first_token_time == reply.metrics.finish_time > 0


@pytest.mark.parametrize("prompt", ["ab", [0, 1], (0, 1), {"prompt_token_ids": [0, 1], "prompt": "ab"}])
def test_prompts_come_in_several_forms(prompt: Any) -> None:
    request, text = make_request(TOKENIZER, "a", prompt, None)
    assert request.prompt_ids == (0, 1)
    assert request.params == SamplingParams()
    assert text == (None if isinstance(prompt, list | tuple) else "ab")


def test_bad_words_become_ids() -> None:
    request, _ = make_request(TOKENIZER, "a", "ab", SamplingParams(bad_words=["ba", "c"]))
    assert request.bad_word_ids == ((1, 0), (2,))


@pytest.mark.parametrize(
    ("prompt", "params", "priority", "message"),
    [
        (None, None, 0, "prompt must be text or a list of token ids, not NoneType"),
        (b"ab", None, 0, "prompt must be text"),
        (["a"], None, 0, "prompt must hold token ids, not 'a'"),
        ([True], None, 0, "prompt must hold token ids, not True"),
        ([1.0], None, 0, "prompt must hold token ids"),
        ({"prompt": "ab"}, None, 0, "prompt_token_ids"),
        ({"prompt_token_ids": "ab"}, None, 0, "prompt_token_ids must hold token ids"),
        ({"prompt_token_ids": 3}, None, 0, "prompt_token_ids must be"),
        ({"prompt_token_ids": [1], "image": 1}, None, 0, "image"),
        ({"prompt_token_ids": [1], 3: 1, "image": 1, (1, "x" * 9999): 1}, None, 0, "prompt may have prompt_token_ids"),
        ([[1] * 99_999], None, 0, "prompt must hold token ids, not a list"),
        ([1, "x" * 99_999], None, 0, "prompt must hold token ids, not 'x"),
        ("a\ud800b", None, 0, "prompt has a lone surrogate at character 1"),
        ({"prompt_token_ids": [1], "prompt": "\udc00"}, None, 0, "prompt has a lone surrogate at character 0"),
        ("ab", None, "x" * 99_999, "priority must be an integer, not 'x"),
        ({"prompt_token_ids": [1], "prompt": 1}, None, 0, "prompt must be text"),
        ("ab", {"n": 1}, 0, "sampling_params must be SamplingParams, not dict"),
        ("ab", None, 1.5, "priority must be an integer"),
        ("ab", None, True, "priority must be an integer"),
    ],
)
def test_a_wrong_request_is_named(prompt: Any, params: Any, priority: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        make_request(TOKENIZER, "a", prompt, params, priority)
    assert len(str(raised.value)) < 200
