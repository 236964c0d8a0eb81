"""``/v1/responses``, by the client that it is made for; its answers are those of the offline API."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import Served, serving
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from freewheel import LLM, SamplingParams

SEEDED: dict[str, Any] = {"temperature": 0.8, "extra_body": {"seed": 7}}
TURNS: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Wien", "Zürich", "東京"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}
TOOL = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": SCHEMA}
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"]}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, dtype="float32") as model:
        yield model


def offline(llm: LLM, turns: Any = TURNS, **params: Any) -> Any:
    asked = {"temperature": 0.8, "seed": 7, "max_tokens": 12} | params
    return llm.chat(turns, SamplingParams(**asked), use_tqdm=False)[0]


def post(served: Served, **body: Any) -> httpx.Response:
    return httpx.post(f"{served.url}/v1/responses", json=body, timeout=30)


def test_a_response_is_what_the_offline_api_gives(served: Served, llm: LLM) -> None:
    got = served.client.responses.create(model="tiny", input=TURNS, max_output_tokens=12, **SEEDED)
    expected = offline(llm)
    assert got.output_text == expected.outputs[0].text
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (got.object, got.model, got.error, got.temperature) == ("response", "tiny", None, 0.8)
    [message] = got.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    counted = got.usage.input_tokens, got.usage.output_tokens, got.usage.total_tokens
    assert counted == (len(expected.prompt_token_ids), 12, len(expected.prompt_token_ids) + 12)
    Response.model_validate(post(served, input=TURNS, max_output_tokens=3).json(), strict=True)


def test_a_response_that_ends_by_itself_is_completed(served: Served, llm: LLM) -> None:
    text = offline(llm).outputs[0].text
    asked = {"seed": 7, "stop": [text[3:5]]}
    for stream in (False, True):
        got = served.client.responses.create(
            model="tiny", input=TURNS, max_output_tokens=12, temperature=0.8, stream=stream, extra_body=asked
        )
        response = list(got)[-1].response if stream else got
        assert (response.status, response.incomplete_details) == ("completed", None)
        assert response.output_text == text[: text.index(text[3:5])]
        assert response.completed_at >= response.created_at


def test_input_comes_as_text_messages_or_what_came_out_earlier(served: Served, llm: LLM) -> None:
    def tokens(**asked: Any) -> tuple[str, int]:
        got = served.client.responses.create(model="tiny", max_output_tokens=12, **SEEDED, **asked)
        return got.output_text, got.usage.input_tokens

    expected = tokens(input=TURNS)
    assert tokens(input="Hello there", instructions="Be brief.") == expected
    parts = [{"type": "input_text", "text": "Hello "}, {"type": "input_text", "text": "there"}]
    assert tokens(input=[TURNS[0], {"type": "message", "role": "user", "content": parts}]) == expected

    first = served.client.responses.create(model="tiny", input=TURNS, max_output_tokens=4, **SEEDED, **LOGPROBS)
    more = [{"role": "user", "content": "And?"}]
    given_back = tokens(input=[*TURNS, *first.output, *more])
    turns = [*TURNS, {"role": "assistant", "content": first.output_text}, *more]
    output = offline(llm, turns)
    assert given_back == (output.outputs[0].text, len(output.prompt_token_ids))


def test_events_tell_of_each_part_in_order_and_add_up(served: Served, llm: LLM) -> None:
    expected = offline(llm, logprobs=2)
    lines = post(served, input=TURNS, max_output_tokens=12, temperature=0.8, seed=7, top_logprobs=2, stream=True,
                 **LOGPROBS).text.split("\n\n")  # fmt: skip
    assert lines.pop() == ""
    events = []
    for line in lines:
        name, data = line.split("\n")
        events.append(json.loads(data.removeprefix("data: "), parse_constant=pytest.fail))
        assert name == f"event: {events[-1]['type']}"
        TypeAdapter(ResponseStreamEvent).validate_python(events[-1], strict=True)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = expected.outputs[0].text
    parts = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in parts) == text
    [message] = events[-1]["response"]["output"]
    assert message == events[-2]["item"]
    assert message["content"] == [events[-3]["part"]]
    assert (events[-4]["text"], message["content"][0]["text"]) == (text, text)
    listed = [entry for event in parts for entry in event["logprobs"]]
    assert listed == events[-4]["logprobs"] == message["content"][0]["logprobs"]
    wanted = [entry[id] for id, entry in zip(expected.outputs[0].token_ids, expected.outputs[0].logprobs)]
    assert [entry["logprob"] for entry in listed] == pytest.approx([one.logprob for one in wanted], abs=1e-4)
    assert all(len(entry["top_logprobs"]) == 2 for entry in listed)
    assert {event["response"]["id"] for event in events if "response" in event} == {events[0]["response"]["id"]}


def test_the_client_follows_a_stream(served: Served, llm: LLM) -> None:
    text = offline(llm).outputs[0].text
    asked = {"seed": 7, "stop": [text[6:8]]}
    with served.client.responses.stream(
        model="tiny", input=TURNS, max_output_tokens=12, temperature=0.8, extra_body=asked
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == text[: text.index(text[6:8])]
    assert final.status == "completed"


def test_what_the_engine_knows_beyond_openai_s_fields_reaches_it(served: Served, llm: LLM) -> None:
    asked: dict[str, Any] = {
        "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1,
        "min_tokens": 2, "ignore_eos": True, "bad_words": ["e"], "seed": 9,
    }  # fmt: skip
    got = post(served, input=TURNS, max_output_tokens=12, top_p=0.9, logit_bias={"30": 2.5}, **asked).json()
    expected = offline(llm, top_p=0.9, logit_bias={30: 2.5}, temperature=1.0, **asked)
    assert got["output"][0]["content"][0]["text"] == expected.outputs[0].text
    assert got["top_p"] == 0.9


def test_what_was_asked_is_said_again(served: Served) -> None:
    asked: dict[str, Any] = {"instructions": "Rhyme.", "metadata": {"a": "b"}, "user": "me", "max_output_tokens": 2}
    asked |= {"store": False, "truncation": "disabled", "background": False, "text": {"format": {"type": "text"}}}
    got = served.client.responses.create(model="tiny", input="Hi", **asked)
    for name in asked:
        value = getattr(got, name)
        assert (value.to_dict(exclude_none=True) if name == "text" else value) == asked[name]


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [3]}, "input.0", "valid dict"),
        ({"input": 3}, "input", "input should be"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input.0.role", "input should be"),
        ({"input": [{"role": "user"}]}, "input.0.content", "missing"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "input_text"),
        ({"input": [{"type": "reasoning"}]}, "input.0", "type must be 'message'"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id", "missing"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "b"}]}, "input.0.arguments", "missing"),
        ({"input": "x", "max_output_tokens": -1}, "max_output_tokens", "integer"),
        ({"input": "x", "top_logprobs": 3}, "top_logprobs", "needs include"),
        ({"input": "x", "top_logprobs": 2**40, **LOGPROBS}, "top_logprobs", "integer"),
        ({"input": "x", "include": ["reasoning.encrypted_content"]}, "include.0", "output_text.logprobs"),
        ({"input": "x", "store": True}, "store", "false"),
        ({"input": "x", "background": True}, "background", "false"),
        ({"input": "x", "truncation": "auto"}, "truncation", "disabled"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"input": "x", "tools": []}, "tools", "empty"),
        ({"input": "x", "tools": [{"type": "function", "function": {"name": "a"}}]}, "tools.0.name", "missing"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.name", "missing"),
        ({"input": "x", "tools": [TOOL, TOOL]}, "tools", "different names"),
        ({"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}}, "tool_choice", "'b'"),
        ({"input": "x", "tools": [TOOL], "tool_choice": "always"}, "tool_choice", "input should be"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "x", "tools": [TOOL], **LOGPROBS}, "include", "combined with tools"),
        ({"input": "x", "tools": [TOOL], "regex": "a"}, "regex", "combined with tools"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.name", "missing"),
        ({"input": "x", "text": {"format": {**FORMAT, "schema": {"uniqueItems": True}}}}, "text.format", "unique"),
        ({"input": "x", "text": {"format": FORMAT}, "regex": "a"}, "regex", "text.format"),
        ({"input": "x", "response_format": FORMAT}, "response_format", "not supported"),
        ({"input": "x", "reasoning": {"effort": "low"}}, "reasoning", "not supported"),
        ({"input": "x", "n": 2}, "n", "not supported"),
        ({"input": "x", "max_tokens": 2}, "max_tokens", "not supported"),
        ({"input": "x", "text": {"format": {"type": "yaml"}}}, "text.format", "'text'"),
        ({"input": "x" * 9999}, "input", "longest sequence"),
        ({"input": "x", "model": "other"}, "model", "does not exist"),
    ],
)
def test_bad_fields_are_named(served: Served, body: dict[str, Any], field: str, words: str) -> None:
    got = post(served, **body)
    assert got.status_code in (400, 404), got.text
    error = got.json()["error"]
    assert error["param"] == field
    assert words in error["message"].lower()


def test_one_that_fails_on_the_way_says_so(tiny_model: Path) -> None:
    with serving(tiny_model, timeout=0.5) as server:
        step = server.engine.step
        server.engine.step = lambda: time.sleep(0.02) or step()  # type: ignore[method-assign]
        with pytest.raises(openai.APIStatusError, match="took longer than") as late:
            server.client.responses.create(model="tiny", input="Hi", extra_body={"ignore_eos": True})
        assert late.value.status_code == 504
        events = list(server.client.responses.create(model="tiny", input="Hi", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert "took longer than" in events[-1].response.error.message
