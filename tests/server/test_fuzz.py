"""What the server's own description allows, and what it does not: no request is the server's error, or its end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from conftest import Served, serving
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.routing import Route

from freewheel.server.assets import FILES
from freewheel.server.description import openapi

JSON = {"Content-Type": "application/json"}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
FEW = {"max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3, "min_tokens": 2, "n": 2}
OWN = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
}


@pytest.fixture(scope="module")
def fuzzed(tiny_model: Path) -> Iterator[Served]:
    with serving(tiny_model) as running:
        yield running


SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
OPERATIONS: list[Any] = list(schemathesis.openapi.from_dict(openapi("")).get_all_operations())


MODES = [(found.ok(), True) for found in OPERATIONS]
MODES += [(operation, False) for operation, _ in MODES if operation.method == "post"]  # only bodies can be wrong


@pytest.mark.parametrize(("operation", "right"), MODES, ids=lambda one: getattr(one, "label", one))
def test_nothing_made_of_the_description_is_the_server_s_error(fuzzed: Served, operation: Any, right: bool) -> None:
    """Answers have a documented status, type and form. Texts are kept short: they are not what is tried here."""
    mode = GenerationMode.POSITIVE if right else GenerationMode.NEGATIVE

    @settings(max_examples=25, suppress_health_check=SLOW)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            if case.path in OWN:
                case.body.setdefault(OWN[case.path], 3)
            for name, most in FEW.items():
                value = case.body.get(name)
                if isinstance(value, int) and value > most:
                    case.body[name] = most
        case.call_and_validate(base_url=fuzzed.url, checks=CHECKS, timeout=30)

    ask()


def test_everything_is_described(fuzzed: Served) -> None:
    app = fuzzed.app
    routes = {route.path.replace(":path", "") for route in app.routes if isinstance(route, Route)}
    assert routes - {"/openapi.json", *FILES} == set(openapi("")["paths"]), "the page is for people"


BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "half an object": b'{"prompt": "Hi", ',
    "a list": b"[1]",
    "null": b"null",
    "a number": b"3",
    "two objects": b"{} {}",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "Hi"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "Hi"}',
    "half a pair of surrogates": b'{"prompt": "\\ud800"}',
    "half a pair in what is told again": b'{"prompt": "Hi", "user": "\\ud800"}',
    "half a pair further in": b'{"prompt": "Hi", "metadata": {"a": "\\uDC00"}}',
    "half a pair in a name": b'{"prompt": "Hi", "\\ud800": 1}',
    "a control character": b'{"prompt": "a\x00b"}',
    "NaN": b'{"prompt": "Hi", "temperature": NaN}',
    "infinity": b'{"prompt": "Hi", "temperature": Infinity}',
    "minus infinity": b'{"prompt": "Hi", "logit_bias": {"1": -Infinity}}',
    "a number past all numbers": b'{"prompt": "Hi", "temperature": 1e400}',
    "a bias past all numbers": b'{"prompt": "Hi", "logit_bias": {"1": 1e400}}',
    "1e308": b'{"prompt": "Hi", "temperature": 1e308}',
    "2^31": b'{"prompt": "Hi", "top_k": 2147483648}',
    "2^63": b'{"prompt": "Hi", "seed": 9223372036854775808}',
    "400 digits": b'{"prompt": "Hi", "temperature": ' + b"9" * 400 + b"}",
    "a million digits": b'{"prompt": "Hi", "seed": ' + b"9" * 10**6 + b"}",
    "a million decimals": b'{"prompt": "Hi", "temperature": -0.' + b"9" * 10**6 + b"}",
    "100,000 brackets": b'{"prompt": ' + b"[" * 100_000,
    "100,000 braces": b'{"a":' * 100_000,
    "brackets that are closed": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "one name twice": b'{"prompt": "Hi", "prompt": "Ho"}',
    "a long name": b'{"prompt": "Hi", "' + b"x" * 10**6 + b'": 1}',
    "a long value": b'{"prompt": "Hi", "temperature": "' + b"x" * 10**6 + b'"}',
    "a long model": b'{"prompt": "Hi", "model": "' + b"x" * 10**6 + b'"}',
    "a long token id": b'{"prompt": "Hi", "logit_bias": {"' + b"1" * 10**6 + b'": 1}}',
    "a long stop": b'{"prompt": "Hi", "stop": "' + b"x" * 10**6 + b'"}',
    "spaces": b" " * 10**6,
    "an unfinished string": b'{"prompt": "' + b"x" * 10**6,
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_what_is_broken_is_refused_in_a_few_words(fuzzed: Served, path: str, name: str) -> None:
    got = httpx.post(f"{fuzzed.url}/v1/{path}", content=BROKEN[name], headers=JSON, timeout=30)
    assert got.status_code in (400, 404), got.text[:300]
    assert got.json()["error"]["message"]
    assert len(got.content) < 700
    assert fuzzed.client.completions.create(model="tiny", prompt="Hi", max_tokens=1).choices


MESSAGE = {"role": "user", "content": "Hi"}
MALFORMED: list[tuple[str, Any, str]] = [
    ("chat/completions", {"messages": None}, "messages"),
    ("chat/completions", {"messages": "Hi"}, "messages"),
    ("chat/completions", {"messages": {"role": "user"}}, "messages"),
    ("chat/completions", {"messages": [None]}, "messages.0"),
    ("chat/completions", {"messages": [[]]}, "messages.0"),
    ("chat/completions", {"messages": [{}]}, "messages.0.role"),
    ("chat/completions", {"messages": [MESSAGE | {"role": None}]}, "messages.0.role"),
    ("chat/completions", {"messages": [MESSAGE | {"role": "User"}]}, "messages.0.role"),
    ("chat/completions", {"messages": [MESSAGE | {"content": 3}]}, "messages.0.content"),
    ("chat/completions", {"messages": [MESSAGE | {"content": [3]}]}, "messages.0.content.0"),
    ("chat/completions", {"messages": [MESSAGE | {"content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ("chat/completions", {"messages": [MESSAGE | {"content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ("chat/completions", {"messages": [MESSAGE | {"more": 1}]}, "messages.0.more"),
    ("chat/completions", {"messages": [MESSAGE | {"content": "\ufdd0"}]}, "messages"),
    ("chat/completions", {"messages": [MESSAGE], "response_format": "json"}, "response_format"),
    ("chat/completions", {"messages": [MESSAGE], "response_format": {}}, "response_format"),
    ("chat/completions", {"messages": [MESSAGE], "response_format": []}, "response_format"),
    (
        "chat/completions",
        {"messages": [MESSAGE], "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
    ),
    ("chat/completions", {"messages": [MESSAGE], "logprobs": 3}, "logprobs"),
    ("chat/completions", {"messages": [MESSAGE], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("chat/completions", {"messages": [MESSAGE], "metadata": {"a": 1}}, "metadata.a"),
    ("completions", {"prompt": "Hi", "stop": [3]}, "stop"),
    ("completions", {"prompt": "Hi", "stop": {"a": 1}}, "stop"),
    ("completions", {"prompt": "Hi", "logit_bias": [1]}, "logit_bias"),
    ("completions", {"prompt": "Hi", "logit_bias": {"1": "x"}}, "logit_bias"),
    ("completions", {"prompt": "Hi", "logit_bias": {"-1": 1}}, "logit_bias"),
    ("completions", {"prompt": "Hi", "logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
    ("completions", {"prompt": "Hi", "stop_token_ids": [1.5]}, "stop_token_ids"),
    ("completions", {"prompt": "Hi", "allowed_token_ids": [True]}, "allowed_token_ids"),
    ("completions", {"prompt": "Hi", "bad_words": [None]}, "bad_words"),
    ("completions", {"prompt": "Hi", "bad_words": "no"}, "bad_words"),
    ("completions", {"prompt": "Hi", "stream": "yes"}, "stream"),
    ("completions", {"prompt": {"a": 1}}, "prompt"),
    ("completions", {"prompt": [1, [2]]}, "prompt"),
    ("completions", {"prompt": [[1, "a"]]}, "prompt"),
    ("completions", {"prompt": [2**63]}, "prompt"),
    ("completions", {"prompt": [10**400]}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "field"), MALFORMED)
def test_the_field_that_is_malformed_is_named(fuzzed: Served, path: str, body: Any, field: str) -> None:
    got = httpx.post(f"{fuzzed.url}/v1/{path}", content=json.dumps(body), headers=JSON)
    assert got.status_code == 400, got.text
    assert got.json()["error"]["param"] == field, got.text
    assert len(got.content) < 700


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_has_to_be_said_to_be_json(fuzzed: Served, kind: str | None) -> None:
    """Else a page of any origin could send it without being asked whether it may."""
    headers = {} if kind is None else {"Content-Type": kind}
    got = httpx.post(f"{fuzzed.url}/v1/completions", content=b'{"prompt": "Hi"}', headers=headers)
    assert got.status_code == 415
    assert "application/json" in got.json()["error"]["message"]


def test_names_of_types_do_not_hide_a_field(fuzzed: Served) -> None:
    got = httpx.post(f"{fuzzed.url}/v1/completions", json={"prompt": "Hi", "str": 1})
    assert got.json()["error"]["param"] == "str"


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_tokenize_and_detokenize_refuse_what_they_cannot_read(fuzzed: Served, field: str) -> None:
    def post(path: str, body: Any) -> httpx.Response:
        return httpx.post(f"{fuzzed.url}/{path}", content=json.dumps(body), headers=JSON)

    for body in ({}, {"prompt": "Hi", "messages": [MESSAGE]}, {"prompt": "\ud800"}, {field: 3}, {field: [3]}):
        assert post("tokenize", body).status_code == 400
    for tokens in (None, "1", [None], [1.5], [True], [-1], [2**63], [[1]], {"a": 1}):
        got = post("detokenize", {"tokens": tokens})
        assert (got.status_code, got.json()["error"]["param"]) == (400, "tokens")
