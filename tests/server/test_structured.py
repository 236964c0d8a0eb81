"""Structured output through the openai client: every field that asks for it, and what is wrong with it."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from conftest import Served, serving
from pydantic import BaseModel

TURNS: list[Any] = [{"role": "user", "content": "Hello there"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["é", "日本", "the"]}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def complete(served: Served, kind: str, stream: bool, **body: Any) -> tuple[str, str, int]:
    """Text, finish reason and tokens of an answer."""
    body = {"model": "tiny", "max_tokens": 100, "temperature": 1.0, "seed": 3, "stream": stream} | body
    native = {key: body.pop(key) for key in ("regex", "grammar", "choice") if key in body}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if kind == "chat":
        got = served.client.chat.completions.create(messages=TURNS, extra_body=native, **body)
    else:
        native |= {key: body.pop(key) for key in ("response_format",) if key in body}
        got = served.client.completions.create(prompt="Hello", extra_body=native, **body)
    text, reason, tokens = "", "", 0
    for part in got if stream else [got]:
        for choice in part.choices:
            if kind == "chat":
                text += (choice.delta if stream else choice.message).content or ""
            else:
                text += choice.text
            reason = choice.finish_reason or reason
        tokens = part.usage.completion_tokens if part.usage else tokens
    return text, reason, tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["chat", "completion"])
class TestEachField:
    def test_json_schema(self, served: Served, kind: str, stream: bool) -> None:
        for seed in range(3):
            text, reason, tokens = complete(served, kind, stream, response_format=BY_SCHEMA, seed=seed)
            assert reason == "stop"
            jsonschema.validate(json.loads(text), SCHEMA)
            assert 0 < tokens <= 100

    def test_json_object(self, served: Served, kind: str, stream: bool) -> None:
        bias = {str(served.service.tokenizer.encode("}")[0]): 9.0}
        options: dict[str, Any] = {"response_format": {"type": "json_object"}, "logit_bias": bias}
        text, reason, _ = complete(served, kind, stream, **options)
        assert (type(json.loads(text)), reason) == (dict, "stop")

    def test_choice(self, served: Served, kind: str, stream: bool) -> None:
        text, reason, _ = complete(served, kind, stream, choice=["yes", "no", "vielleicht, é"])
        assert text in ("yes", "no", "vielleicht, é")
        assert reason == "stop"

    def test_regex(self, served: Served, kind: str, stream: bool) -> None:
        text, reason, _ = complete(served, kind, stream, regex=r"[A-Z]{2}-\d{4}")
        assert re.fullmatch(r"[A-Z]{2}-\d{4}", text)
        assert reason == "stop"
        assert complete(served, kind, stream, regex=r"\d{40}", max_tokens=7)[1:] == ("length", 7)

    def test_grammar(self, served: Served, kind: str, stream: bool) -> None:
        for grammar in ('root ::= "(" root ")" | "x"', 'start: "(" start ")" | "x"'):
            text, _, _ = complete(served, kind, stream, grammar=grammar, seed=1)
            assert re.fullmatch(r"(\(*)x(\)*)", text)
            assert text.count("(") == text.count(")")


def test_text_is_no_constraint(served: Served) -> None:
    free = complete(served, "chat", False, max_tokens=9)
    assert complete(served, "chat", False, max_tokens=9, response_format={"type": "text"}) == free


def test_the_client_parses_what_it_asked_for(served: Served) -> None:
    class Person(BaseModel):
        name: str
        nicknames: list[str] | None

    got = served.client.chat.completions.parse(
        model="tiny", messages=TURNS, response_format=Person, seed=1, max_tokens=200, logit_bias={"1": 9.0, "60": 9.0}
    )
    assert isinstance(got.choices[0].message.parsed, Person)


def test_each_of_n_choices_is_constrained_for_itself(served: Served) -> None:
    got = served.client.completions.create(
        model="tiny", prompt="Hi", n=6, max_tokens=220, seed=1, extra_body={"response_format": BY_SCHEMA}
    )
    texts = [choice.text for choice in got.choices]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": {"type": "json"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": []}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 3}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format.json_schema"),
        ({"response_format": {**BY_SCHEMA, "more": 1}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}},
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": True}}}},
            "response_format",
        ),
        ({"regex": "(["}, "regex"),
        ({"regex": 3}, "regex"),
        ({"regex": "a" * 2**18}, "regex"),
        ({"grammar": "start: ("}, "grammar"),
        ({"grammar": ""}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": [1]}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"choice": ["a"], "regex": "a"}, "regex"),
        ({"response_format": BY_SCHEMA, "regex": "a"}, "regex"),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_what_is_wrong_is_named(served: Served, path: str, body: dict[str, Any], field: str) -> None:
    body = {"prompt": "Hi"} | body if path == "completions" else {"messages": TURNS} | body
    got = httpx.post(f"{served.url}/v1/{path}", json=body)
    assert got.status_code == 400, got.text
    error = got.json()["error"]
    assert error["param"].startswith(field)
    assert error["message"].startswith(field)
    assert len(got.content) < 1000
    assert complete(served, "chat", False, choice=["ok"])[0] == "ok"


def test_a_failing_compiler_is_one_request_s_error(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    from freewheel.grammar import Compiler

    def fail(*_: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(Compiler, "_compile", fail)
        with pytest.raises(openai.BadRequestError, match="regex cannot be compiled"):
            complete(served, "chat", False, regex="[a-c]{3}x")
        assert complete(served, "chat", False, max_tokens=3)[2] == 3
    assert re.fullmatch("[a-c]{3}x", complete(served, "chat", False, regex="[a-c]{3}x")[0])


MALFORMED: list[dict[str, Any]] = [
    {"regex": "(["},
    {"grammar": "start: ("},
    {"grammar": "root ::= ("},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}},
]


def test_of_ten_at_once_only_the_ones_at_fault_fail(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be the wrong grammar the very first, or come after right ones; be the grammar wrong, or its compiler."""
    from freewheel.grammar import Compiler

    with serving(tiny_model) as server:

        def ask(body: dict[str, Any]) -> int:
            body = {"prompt": "Hi", "max_tokens": 40, "seed": 1} | body
            got = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert httpx.get(f"{server.url}/health").status_code == 200
            if got.status_code == 200 and "regex" in body:
                assert re.fullmatch(body["regex"], got.json()["choices"][0]["text"])
            return got.status_code

        right: list[dict[str, Any]] = [{"regex": f"{letter}[0-9]{{9}}"} for letter in "abcdefgh"] + [{}]
        with ThreadPoolExecutor(10) as threads:
            for body in (*MALFORMED, *MALFORMED):
                got = threads.map(ask, [body, *right])
                assert list(got) == [400] + [200] * 9
            compile_it = Compiler._compile

            def fail(self: Any, grammar: Any, *rest: Any) -> Any:
                if grammar.text == "z{9}":
                    raise RuntimeError("injected")
                return compile_it(self, grammar, *rest)

            with monkeypatch.context() as patch:
                patch.setattr(Compiler, "_compile", fail)
                assert list(threads.map(ask, [{"regex": "z{9}"}, *right])) == [400] + [200] * 9
            assert ask({"regex": "z{9}"}) == 200, "the failure is not kept"


def test_answers_parse_at_any_concurrency_with_drafts(tiny_model: Path) -> None:
    """Each answer is the one that comes alone, whoever else asks."""
    schema = {**SCHEMA, "x": "an annotation"}  # compiled anew
    with serving(tiny_model, {"speculation": True, "draft_width": 2}) as server:

        def ask(seed: int) -> str:
            form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
            kind = ("chat", "completion")[seed % 2]
            text, reason, _ = complete(server, kind, seed % 3 == 0, seed=seed, response_format=form, max_tokens=200)
            assert reason == "stop"
            return text

        alone = [ask(seed) for seed in range(12)]
        for text in alone:
            jsonschema.validate(json.loads(text), SCHEMA)
        with ThreadPoolExecutor(12) as threads:
            assert list(threads.map(ask, range(12))) == alone


def test_ends_are_those_of_model_and_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    """The configuration names one end and the tokenizer another: both are legal after two digits, and only then."""
    folder = shutil.copytree(tiny_model, tmp_path / "two-ends")
    config = json.loads((folder / "config.json").read_text())
    both = {config["eos_token_id"], config["eos_token_id"] - 1}
    config["eos_token_id"] -= 1
    (folder / "config.json").write_text(json.dumps(config))
    with serving(folder) as server:
        assert server.service.tokenizer.eos_token_ids == both
        for end in both:
            for pattern, length in ((r"\d{2}", 2), (r"\d{2}( \d+)*", 2)):
                body = {"regex": pattern, "logit_bias": {str(end): 50.0}, "max_tokens": 40}
                text, reason, _ = complete(server, "completion", False, **body)
                assert (len(text), reason) == (length, "stop")
