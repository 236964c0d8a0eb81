"""Tools: calls are read out of any text however it is cut, and through the openai client, streaming and not."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from conftest import Served, serving
from tiny import make_tiny_llama

from freewheel.models.tokenizer import Tokenizer
from freewheel.server.tools import CallReader, Tool, told

TURNS: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Wien", "Zürich", "東京"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a}\\"{", "n": {"x": [1]}}}\n</tool_call>'
NOW = '{"name": "now", "arguments": {}}'
OTHER = 'x <tool_call>{"name": "other", "arguments": {}}</tool_call> y'
HALF = '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "now"}</tool_call>'
ARGUMENTS = '{"city": "a}\\"{", "n": {"x": [1]}}'


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With room for tools in a prompt of bytes."""
    with serving(make_tiny_llama(tmp_path_factory.mktemp("models") / "long", context=1024)) as running:
        yield running


# Text, what of it is content, the calls in it, and whether they are whole.
TEXTS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Hello there.", "Hello there.", []),
    (" Hello  there \n", " Hello  there \n", []),
    ("a < b <tool_ca", "a < b <tool_ca", []),
    (CALL, "", [("get_weather", ARGUMENTS)]),
    (f"Let me see.\n\n{CALL}", "Let me see.", [("get_weather", ARGUMENTS)]),
    (f"{CALL}\n{CALL}", "", [("get_weather", ARGUMENTS)] * 2),
    (f"{CALL}\n so  it is.", "so  it is.", [("get_weather", ARGUMENTS)]),
    (f"<tool_call>[{NOW}, {NOW}]</tool_call>", "", [("now", "{}")] * 2),
    ('<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", [("now", '{"a": 1}')]),
    ('<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ('{"name": "now", "parameters": {"é": 1}}', "", [("now", '{"é": 1}')]),
    ('\n{"name":"now","arguments":{}}\n{"name":"now","arguments":{}}', "", [("now", "{}")] * 2),
    ('{"name": "now", "arguments": {}', "", [("now", "{}")]),
    ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
    ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("{not JSON", "{not JSON", []),
    (f"{NOW} , {NOW}", "", [("now", "{}")] * 2),
    (f"{NOW} , and", ",and", [("now", "{}")]),
    (f"<tool_call>{NOW} but }} {{ of no use, {NOW}</tool_call> y", "y", [("now", "{}")]),
    ('{"name": []}', '{"name": []}', []),
    ('{"arguments": {"a": NaN}, "name": "now"}', '{"arguments": {"a": NaN}, "name": "now"}', []),
    (HALF, HALF, []),
    (OTHER, OTHER, []),
    ("a <tool_call>no call</tool_call>", "a <tool_call>no call</tool_call>", []),
    ("a <tool_call>no end", "a <tool_call>no end", []),
    ('<tool_call>{"name": "now", "arguments": {"a": "b', "", [("now", '{"a": "b')]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), TEXTS, ids=range(len(TEXTS)))
def test_calls_are_read_however_the_text_is_cut(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    rng = random.Random(1)
    for most in (len(text), 1, 3, 3, 7):
        reader, got, parts = CallReader({"get_weather", "now"}), "", []
        left = text
        while True:
            size = most if most in (1, len(text)) else rng.randint(1, most)
            piece, left = left[:size], left[size:]
            more, new = reader.push(piece, last=not left)
            got += more
            parts += new
            if not left:
                break
        assert got == content
        assert [(call.name, call.arguments) for call in reader.read] == calls
        streamed: dict[int, list[str]] = {}
        for part in parts:
            function = part["function"]
            if "id" in part:
                assert part["index"] == len(streamed)
                streamed[part["index"]] = [function["name"], ""]
            streamed[part["index"]][1] += function["arguments"]
        assert [tuple(call) for call in streamed.values()] == calls
        whole = bool(calls) and not text.endswith('"b')
        assert reader.finish_reason("stop") == ("tool_calls" if whole else "stop")
        assert reader.finish_reason("length") == "length"
        assert reader.finish_reason(None) is None


@pytest.mark.parametrize("begins", ["", "{", '{"name": "', f"<tool_call>{NOW[:-1]}", NOW[:-1]])
@pytest.mark.parametrize("goes_on", ["    ", "abcd"])
def test_what_goes_on_for_ever_is_not_kept_or_cheap_to_look_at(begins: str, goes_on: str) -> None:
    """What is kept is short, unless it may be a call in the end: between tags."""
    reader = CallReader({"now"})
    reader.push(begins)
    for _ in range(2000):
        reader.push(goes_on)
    assert len(reader._text) < 200 or not reader._text.strip()


def test_arguments_come_before_they_are_complete() -> None:
    reader = CallReader({"now"})
    _, [begun] = reader.push('<tool_call>{"name": "now", "arguments": {"a')
    assert begun["function"] == {"name": "now", "arguments": '{"a'}
    _, [more] = reader.push('": "b')
    assert more == {"index": 0, "function": {"arguments": '": "b'}}


def test_of_one_call_at_most_the_first_is_read() -> None:
    reader = CallReader({"get_weather"}, 1)
    _, parts = reader.push(f"{CALL}\n{CALL}", last=True)
    assert [part["index"] for part in parts] == [0]
    assert len(reader.read) == 1


def test_templates_that_know_no_tools_are_told_in_messages() -> None:
    tools = [Tool.model_validate(tool).function for tool in TOOLS]
    call = {"id": "x", "type": "function", "function": {"name": "now", "arguments": '{"é": 1}'}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Well", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "x"},
    ]
    system, user, assistant, answer = told(turns, tools, native=False)
    assert system["role"] == "system"
    assert '"get_weather"' in system["content"]
    assert user == turns[0]
    assert assistant["content"] == 'Well\n<tool_call>\n{"name": "now", "arguments": {"é": 1}}\n</tool_call>'
    assert answer == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
    _, native, last = told(turns, tools, native=True)
    assert native["tool_calls"][0]["function"]["arguments"] == {"é": 1}
    assert last == turns[2]
    wrong = {**call, "function": {"name": "now", "arguments": "["}}
    with pytest.raises(ValueError, match="arguments of an earlier call of 'now'"):
        told([{"role": "assistant", "content": "", "tool_calls": [wrong]}], [], native=True)


def test_a_template_that_knows_tools_gets_them(tiny_model: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_model)
    assert not tokenizer.knows_tools
    tokenizer._chat_templates["default"] = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    assert tokenizer.knows_tools
    tools = [tool["function"] for tool in TOOLS]
    assert tokenizer.encode_chat(TURNS, tools=[{"function": tool} for tool in tools])[1] == "get_weather now "


class Answer:
    """A chat's answer, whole or put together from its chunks."""

    def __init__(self, served: Served, stream: bool, **body: Any) -> None:
        body = {"model": "tiny", "max_tokens": 170, "tools": TOOLS, "temperature": 1.0, "seed": 1} | body
        got = served.client.chat.completions.create(messages=TURNS, stream=stream, **body)
        self.content, self.reason = "", None
        self.calls: list[tuple[str, str]] = []
        self.ids: list[str] = []
        for part in got if stream else [got]:
            [choice] = part.choices
            message = choice.delta if stream else choice.message
            self.content += message.content or ""
            for call in message.tool_calls or ():
                if not stream or call.id:
                    assert not stream or call.index == len(self.calls)
                    self.ids.append(call.id)
                    self.calls.append((call.function.name, ""))
                name, before = self.calls[call.index if stream else -1]
                self.calls[call.index if stream else -1] = name, before + call.function.arguments
            self.reason = choice.finish_reason or self.reason


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_must_come_do_and_fit_their_schemas(
    served: Served, stream: bool, choice: Any, parallel: bool
) -> None:
    seen = set()
    for seed in range(2):
        got = Answer(served, stream, tool_choice=choice, parallel_tool_calls=parallel, seed=seed)
        assert got.content == ""
        assert got.calls
        assert len(set(got.ids)) == len(got.calls)
        assert (len(got.calls) == 1) or (parallel and choice == "required")
        if got.reason == "length":  # white space, of which a random model is fond
            continue
        assert got.reason == "tool_calls"
        for name, arguments in got.calls:
            seen.add(name)
            jsonschema.validate(json.loads(arguments), WEATHER if name == "get_weather" else {"maxProperties": 0})
    assert seen


def test_a_call_that_is_cut_off_says_so_streaming_or_not(served: Served) -> None:
    reasons = set()
    for most in (1, 40, 60, 75, 100, 400):
        whole, streamed = (
            Answer(served, stream, tool_choice=NAMED, max_tokens=most, seed=2) for stream in (False, True)
        )
        assert (whole.reason, whole.calls, whole.content) == (streamed.reason, streamed.calls, streamed.content)
        reasons.add(whole.reason)
        if whole.reason == "tool_calls":
            assert [json.loads(arguments) for _, arguments in whole.calls]
    assert reasons == {"length", "tool_calls"}


@pytest.mark.parametrize("stream", [False, True])
def test_auto_reads_calls_and_leaves_texts(served: Served, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    free = Answer(served, stream, tool_choice="none", tools=TOOLS, max_tokens=12)
    assert not free.calls
    plain = Answer(served, stream, max_tokens=12)
    assert (plain.calls, plain.reason) == ([], "length")
    from freewheel.sampling import Grammar
    from freewheel.server.protocol import ChatCompletionRequest

    written = f"So:\n{CALL}"  # as if the model wanted to say this
    monkeypatch.setattr(ChatCompletionRequest, "output_grammar", lambda self: Grammar.choice([written]))
    got = Answer(served, stream)
    assert (got.content, got.calls, got.reason) == ("So:", [("get_weather", ARGUMENTS)], "tool_calls")
    ignored = Answer(served, stream, tool_choice="none")
    assert (ignored.content, ignored.calls, ignored.reason) == (written, [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_strict_tools_are_kept_to_where_the_model_decides_to_call(served: Served, stream: bool) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    tokenizer = served.service.tokenizer
    bias = {str(id): 30.0 for id in tokenizer.encode("<")}  # only text can begin otherwise
    text = Answer(served, stream, tools=strict, max_tokens=15, logit_bias=bias)
    assert (text.calls, set(text.content)) == ([], {"<"})
    grammar = ("<tool_call>\n", '{"name": "get_weather", "arguments": {"city": "Wien", "days": 3}}', "\n</tool_call>")
    from freewheel.grammar import Compiler
    from freewheel.sampling import Grammar

    compiled = Compiler(tokenizer, 512).compile(Grammar.tool_calls({"get_weather": WEATHER}, several=True, text=True))
    for written, fits in (("".join(grammar), True), ("".join(grammar).replace("3", "30"), False)):
        at = compiled.matcher([])
        for token in tokenizer.encode_within(f"Well. {written}"):
            at.advance(token)
        assert (at.error is None) == fits


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"tools": []}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 3}}]}, "tools.0"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
        ({"parallel_tool_calls": "yes", "tools": TOOLS}, "parallel_tool_calls"),
        ({"tools": TOOLS, "regex": "a"}, "regex"),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
            },
            "tools",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "x"}}]}
                ]
            },
            "messages",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(served: Served, body: dict[str, Any], field: str) -> None:
    got = httpx.post(f"{served.url}/v1/chat/completions", json={"messages": TURNS, "max_tokens": 3} | body)
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert error["param"].startswith(field)
    assert error["message"].startswith(field)
