"""Where an output ends: ids, lengths and stop strings, whatever the number of tokens that a step brings."""

from typing import Any

import pytest
from bytes_tokenizer import END, BytesTokenizer

from freewheel.engine.outputs import CompletionOutput, Reply
from freewheel.engine.stopping import cut, max_length, stop_ids
from freewheel.request import FinishReason, Request, StepOutput, TokenLogprobs
from freewheel.sampling import SamplingParams

TOKENIZER: Any = BytesTokenizer()


def deliver(tokens: list[int], run: int, **params: Any) -> CompletionOutput:
    """What a user sees of these tokens, when the engine brings up to ``run`` of them in a step."""
    sampling = SamplingParams(**params)
    request = Request("a", (0,), sampling)
    reply = Reply(request, None, TOKENIZER)
    stops = stop_ids(sampling, [END])
    room = max_length(sampling, 1, 1000) - 1
    while tokens and not reply.finished:
        kept, reason = cut(tokens[:run], stops, room)
        output = StepOutput("a", 0, token_ids=tokens[:kept], finish_reason=reason)
        if reason is FinishReason.STOP:
            output.stop_reason = stops[tokens[kept - 1]]
        finish = reply.add(output)
        assert finish == (reply.finished and reason is None)
        tokens, room = tokens[kept:], room - kept
    result = reply.take()
    assert result is not None
    return result.outputs[0]


@pytest.mark.parametrize("run", [1, 2, 3, 6])
@pytest.mark.parametrize("cap", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", ["end", "id", "string"])
def test_the_earliest_end_wins(kind: str, stop_at: int, cap: int, run: int) -> None:
    tokens = TOKENIZER.encode("abcdef")
    params: dict[str, Any] = {"max_tokens": cap}
    stop = tokens[stop_at - 1]
    if kind == "end":
        tokens[stop_at - 1] = stop = END
    elif kind == "id":
        params["stop_token_ids"] = [stop]
    else:
        params["stop"] = "abcdef"[stop_at - 1]
    got = deliver(tokens, run, **params)
    stopped = stop_at <= cap
    assert got.finish_reason == ("stop" if stopped else "length")
    assert got.token_ids == tokens[: min(stop_at, cap)]
    assert got.text == "abcdef"[: stop_at - 1 if stopped else cap]
    assert got.stop_reason == ({"end": None, "id": stop, "string": params.get("stop")}[kind] if stopped else None)


@pytest.mark.parametrize("run", [1, 4])
def test_a_stop_string_over_several_tokens_is_cut_out_or_kept(run: int) -> None:
    tokens = TOKENIZER.encode("so it ends. more")
    got = deliver(tokens, run, stop=["ends."], max_tokens=100)
    assert (got.text, got.stop_reason, len(got.token_ids)) == ("so it ", "ends.", 11)
    got = deliver(tokens, run, stop=["ends."], max_tokens=100, include_stop_str_in_output=True)
    assert got.text == "so it ends."


def test_held_back_text_comes_at_the_end() -> None:
    assert deliver(TOKENIZER.encode("so it en"), 1, stop=["ends"], max_tokens=8).text == "so it en"


def test_min_tokens_holds_for_stop_strings_too() -> None:
    tokens = TOKENIZER.encode("aaaa")
    assert len(deliver(tokens, 1, stop="a", min_tokens=3, max_tokens=4).token_ids) == 3


@pytest.mark.parametrize("run", [1, 2, 6])
@pytest.mark.parametrize(
    ("min_tokens", "text", "stop"),
    [(0, "a", "bc"), (3, "a", "bc"), (4, "abcb", "dbc"), (6, "abcb", "dbc"), (7, "abcb", "dbc")],
)
def test_a_stop_string_counts_when_it_is_complete_at_min_tokens_or_later(
    run: int, min_tokens: int, text: str, stop: str
) -> None:
    got = deliver(TOKENIZER.encode("abcbdbc"), run, stop=["bc", "dbc"], min_tokens=min_tokens, max_tokens=7)
    assert (got.text, got.stop_reason) == (text, stop)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_id_that_completes_a_stop_string_is_a_stop_id(include: bool) -> None:
    tokens = TOKENIZER.encode("ab!")
    got = deliver(tokens, 1, stop_token_ids=[tokens[-1]], stop="b!", include_stop_str_in_output=include)
    assert (got.text, got.stop_reason) == ("ab!" if include else "ab", tokens[-1])


def test_log_probabilities_end_with_the_token_that_completes_the_stop_string() -> None:
    reply = Reply(Request("a", (0,), SamplingParams(stop="cd", logprobs=0, n=2)), None, TOKENIZER)
    tokens = TOKENIZER.encode("abcdef")
    entries = [TokenLogprobs([token], [-1.0 - token], [1]) for token in tokens]
    for start, run in ((0, 1), (1, 5)):
        reply.add(StepOutput("a", 1, tokens[start : start + run], entries[start : start + run]))
    output = reply.take()
    assert output is not None
    other, got = output.outputs
    assert got.logprobs is not None
    assert (got.text, got.token_ids, [list(entry) for entry in got.logprobs]) == (
        "ab",
        tokens[:4],
        [[t] for t in tokens[:4]],
    )
    assert got.cumulative_logprob == sum(-1.0 - token for token in tokens[:4])
    assert (other.token_ids, other.finish_reason) == ([], None)
    assert output.metrics.output_tokens == 4


def test_the_text_of_a_stop_id_is_left_out_or_kept() -> None:
    tokens = TOKENIZER.encode("ab!")
    stop = tokens[-1]
    assert deliver(tokens, 1, stop_token_ids=[stop]).text == "ab"
    assert deliver(tokens, 1, stop_token_ids=[stop], include_stop_str_in_output=True).text == "ab!"


@pytest.mark.parametrize(("cap", "text"), [(1, "\ufffd"), (2, "\ufffd"), (3, "€"), (4, "€a")])
def test_a_character_cut_by_the_limit_is_replaced_once_at_the_end(cap: int, text: str) -> None:
    assert deliver(TOKENIZER.encode("€a"), 1, max_tokens=cap).text == text


def test_a_stop_string_found_late_drops_what_the_engine_did_meanwhile() -> None:
    reply = Reply(Request("a", (0,), SamplingParams(stop="b", max_tokens=9)), None, TOKENIZER)
    assert reply.add(StepOutput("a", 0, token_ids=TOKENIZER.encode("ab")))
    assert not reply.add(StepOutput("a", 0, token_ids=TOKENIZER.encode("c")))
    assert not reply.add(StepOutput("a", 0, finish_reason=FinishReason.ABORT))
    output = reply.take()
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "stop")


def test_limits_and_end_ids() -> None:
    assert max_length(SamplingParams(max_tokens=None), 5, 100) == 100
    assert max_length(SamplingParams(max_tokens=200), 5, 100) == 100
    assert max_length(SamplingParams(max_tokens=7), 5, 100) == 12
    assert stop_ids(SamplingParams(stop_token_ids=[3, 4]), {4, 5}) == {3: 3, 4: None, 5: None}
    assert stop_ids(SamplingParams(stop_token_ids=[4], ignore_eos=True), {4, 5}) == {4: 4}
