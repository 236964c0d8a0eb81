"""``/v1/responses``, by the client that it is made for; its answers are those of the offline API."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from conftest import Served, serving
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from tiny import make_tiny_llama

from freewheel import LLM, SamplingParams
from freewheel.sampling import Grammar
from freewheel.server.responses import ResponsesRequest

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


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With room for tools in a prompt of bytes."""
    with serving(make_tiny_llama(tmp_path_factory.mktemp("models") / "long", context=1024)) as running:
        yield running


NOW = {"type": "function", "name": "now"}
NAMED = {"type": "function", "name": "get_weather"}


def respond(served: Served, stream: bool, **body: Any) -> Any:
    """A response; of a stream what the client makes of its events, each of which has the documented form."""
    asked = {"model": "tiny", "input": TURNS, "max_output_tokens": 170, "extra_body": {"seed": body.pop("seed", 1)}}
    asked |= body
    if not stream:
        return served.client.responses.create(**asked)
    with served.client.responses.stream(**asked) as events:
        items: list[Any] = []
        final = None
        for event in events:
            final = getattr(event, "response", None)
            kind = event.type.removeprefix("response.")
            if kind == "output_item.added":
                assert event.output_index == len(items)
                items.append([event.item.id, ""])
            elif kind in ("output_text.delta", "function_call_arguments.delta"):
                assert event.item_id == items[-1][0]
                items[-1][1] += event.delta
            elif kind in ("output_text.done", "function_call_arguments.done"):
                assert items[-1] == [event.item_id, event.text if "text" in kind else event.arguments]
            elif kind == "output_item.done":
                assert items[event.output_index][0] == event.item.id
        assert final is not None
        assert [item.id for item in final.output] == [id for id, _ in items]
        return final


def said(response: Any) -> list[Any]:
    """What is the same in a stream and without."""
    about = [response.status, response.usage.output_tokens]
    for item in response.output:
        own = (item.name, item.arguments) if item.type == "function_call" else (item.content[0].text,)
        about.append((item.type, item.status, *own))
    return about


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_is_kept_to(served: Served, stream: bool) -> None:
    for seed in range(3):
        got = respond(served, stream, text={"format": FORMAT}, seed=seed)
        assert got.status == "completed"
        jsonschema.validate(json.loads(got.output_text), SCHEMA)
        assert got.text.format.to_dict() == FORMAT
    bias = {str(served.service.tokenizer.encode("}")[0]): 9.0}
    body = {"seed": 3, "logit_bias": bias}
    got = respond(served, stream, text={"format": {"type": "json_object"}}, extra_body=body)
    assert isinstance(json.loads(got.output_text), dict)
    assert respond(served, stream, extra_body={"choice": ["é", "日本"]}).output_text in ("é", "日本")
    assert re.fullmatch("[a-c]{3}", respond(served, stream, extra_body={"regex": "[a-c]{3}"}).output_text)


def test_the_client_parses_what_it_asked_for(long: Served) -> None:
    class Trip(BaseModel):
        city: Literal["Wien", "Graz"]
        days: Literal[1, 2]

    got = long.client.responses.parse(model="tiny", input=TURNS, text_format=Trip)
    assert isinstance(got.output_parsed, Trip)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_calls_that_must_come_do_and_fit_their_schemas(long: Served, stream: bool, choice: Any) -> None:
    got = respond(long, stream, tools=[TOOL, NOW], tool_choice=choice, parallel_tool_calls=False)
    [call] = got.output
    assert (call.type, call.status, got.status) == ("function_call", "completed", "completed")
    schema = SCHEMA if call.name == "get_weather" else {"maxProperties": 0}
    jsonschema.validate(json.loads(call.arguments), schema)
    assert call.call_id != call.id
    assert (got.parallel_tool_calls, len(got.tools), got.tools[0].name) == (False, 2, "get_weather")
    assert (got.tool_choice if choice == "required" else got.tool_choice.to_dict()) == choice


def test_a_call_that_is_cut_off_says_so_streaming_or_not(long: Served) -> None:
    ends = set()
    for most in (1, 40, 60, 75, 100, 400):
        asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": NAMED, "max_output_tokens": most, "seed": 2}
        whole, streamed = (respond(long, stream, **asked) for stream in (False, True))
        assert said(whole) == said(streamed)
        ends.add(whole.status)
        for item in whole.output:
            if whole.status == "completed":
                json.loads(item.arguments)
            else:
                assert (item.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert ends == {"completed", "incomplete"}


@pytest.mark.parametrize("stream", [False, True])
def test_texts_and_calls_are_items_in_their_order(long: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = '<tool_call>\n{"name": "now", "arguments": {"é": "a}"}}\n</tool_call>'
    written = f"So:\n{now}\n{now}\nThat is all."
    # As if the model wanted to say this.
    monkeypatch.setattr(ResponsesRequest, "output_grammar", lambda self: Grammar.choice([written]))
    got = respond(long, stream, tools=[NOW])
    call = ("function_call", "completed", "now", '{"é": "a}"}')
    assert said(got)[2:] == [("message", "completed", "So:"), call, call, ("message", "completed", "That is all.")]
    assert len({item.id for item in got.output} | {item.call_id for item in got.output[1:3]}) == 6
    assert said(respond(long, stream, tools=[NOW], parallel_tool_calls=False))[2:4] == [
        ("message", "completed", "So:"), call,
    ]  # fmt: skip
    assert [item.type for item in respond(long, stream, tools=[NOW], tool_choice="none").output] == ["message"]


def test_calls_and_what_they_gave_come_back_as_chats_have_them(long: Served) -> None:
    first = respond(long, False, tools=[TOOL, NOW], tool_choice=NAMED, parallel_tool_calls=False)
    [call] = first.output
    given = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    parts = given | {"output": [{"type": "input_text", "text": "ra"}, {"type": "input_text", "text": "in"}]}
    more = {"role": "user", "content": "And?"}
    asked: dict[str, Any] = {"tools": [TOOL, NOW], "max_output_tokens": 1}
    tokens = {
        respond(long, False, input=[*TURNS, *first.output, output, more], **asked).usage.input_tokens
        for output in (given, parts)
    }
    own = {"name": call.name, "arguments": call.arguments}
    turns = [
        *TURNS,
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": own}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
        more,
    ]
    tools = [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        for tool in (TOOL, NOW)
    ]
    chat = long.client.chat.completions.create(model="tiny", messages=turns, tools=tools, max_tokens=1)
    assert tokens == {chat.usage.prompt_tokens}
    wrong = {"type": "function_call", "call_id": "x", "name": "now", "arguments": "["}
    got = post(long, input=[wrong])
    assert (got.status_code, got.json()["error"]["param"]) == (400, "input")
    assert "'now' are no JSON object" in got.json()["error"]["message"]


def test_a_text_and_calls_in_a_row_are_one_turn() -> None:
    call = {"type": "function_call", "call_id": "x", "name": "now", "arguments": "{}"}
    request = ResponsesRequest.model_validate({"input": [{"role": "assistant", "content": "So:"}, call, call]})
    [turn] = request.turns()
    assert (turn["content"], len(turn["tool_calls"])) == ("So:", 2)


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
