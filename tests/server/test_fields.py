"""Field by field: each one that is described does what it says, on every path, as a stream and not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Served

from freewheel import LLM, SamplingParams
from freewheel.server.description import openapi

PATHS = {
    "completions": "CompletionRequest",
    "chat/completions": "ChatCompletionRequest",
    "responses": "ResponsesRequest",
}
TURNS = [{"role": "user", "content": "Hello there"}]
BASE: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 12, "ignore_eos": True}
END = 260  # the end-of-sequence token of the tiny model
ENDS: dict[str, Any] = {"logit_bias": {END: 100.0}, "ignore_eos": False}

# Of each field a value that changes the text, and what makes it do so.
CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0, {}),
    "top_p": (0.01, {}),
    "top_k": (1, {}),
    "min_p": (1.0, {}),
    "seed": (8, {}),
    "max_tokens": (3, {}),
    "stop": (["a", "e", "i", "o", "u", "!", "#", "\x01", " "], {"allowed_token_ids": list(range(64, 90)), "top_k": 3}),
    "frequency_penalty": (2, {}),
    "presence_penalty": (2, {}),
    "repetition_penalty": (50, {}),
    "logit_bias": ({40: 100.0}, {}),
    "min_tokens": (5, ENDS),
    "stop_token_ids": ([40], {"allowed_token_ids": [40, 41]}),
    "bad_words": (["I"], {"allowed_token_ids": [40, 41]}),
    "allowed_token_ids": ([40, 41], {}),
    "ignore_eos": (True, ENDS | {"skip_special_tokens": False}),
    "include_stop_str_in_output": (True, {"allowed_token_ids": [40, 41], "stop": ["I"]}),
    "skip_special_tokens": (False, {"logit_bias": {END: 100.0}}),
}
# What has tests of its own, by what it does, or is accepted and does nothing.
ELSEWHERE = {
    "model", "stream", "prompt", "messages", "input", "instructions", "echo", "logprobs", "top_logprobs", "include",
    "prompt_logprobs", "n", "stream_options", "return_token_ids", "max_completion_tokens", "max_output_tokens",
    "add_generation_prompt", "chat_template_kwargs", "response_format", "text", "suffix", "best_of", "store",
    "truncation", "background", "previous_response_id", "regex", "grammar", "choice", "tools", "tool_choice",
    "parallel_tool_calls",
}  # fmt: skip
NOTHING = {"user", "metadata", "safety_identifier", "prompt_cache_key", "priority"}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, dtype="float32") as model:
        yield model


def ask(served: Served, path: str, stream: bool, asked: dict[str, Any]) -> str:
    """The text, by the client."""
    body = dict(asked)
    body["logit_bias"] = {str(id): bias for id, bias in body.get("logit_bias", {}).items()}
    client = served.client
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
        got = client.responses.create(model="tiny", input=TURNS, stream=stream, extra_body=body)
        if not stream:
            return got.output_text
        return "".join(event.delta for event in got if event.type == "response.output_text.delta")
    if path == "completions":
        got = client.completions.create(model="tiny", prompt="Hello there", stream=stream, extra_body=body)
        return "".join(part.choices[0].text for part in (got if stream else [got]))
    got = client.chat.completions.create(model="tiny", messages=TURNS, stream=stream, extra_body=body)
    if not stream:
        return got.choices[0].message.content
    return "".join(part.choices[0].delta.content or "" for part in got)


def offline(llm: LLM, path: str, asked: dict[str, Any]) -> str:
    params = SamplingParams(**asked)
    outputs = llm.generate(["Hello there"], params, use_tqdm=False) if path == "completions" else None
    [output] = outputs or llm.chat(TURNS, params, use_tqdm=False)
    return output.outputs[0].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_each_field_has_its_effect(served: Served, llm: LLM, path: str, stream: bool) -> None:
    for field, (value, more) in CHANGES.items():
        without = BASE | more
        given = without | {field: value}
        expected = offline(llm, path, given)
        assert expected != offline(llm, path, without), f"{field}: this case shows nothing"
        assert ask(served, path, stream, given) == expected, field


def test_every_field_is_tried() -> None:
    schemas = openapi("")["components"]["schemas"]
    for path, schema in PATHS.items():
        fields = set(schemas[schema]["properties"])
        assert fields <= CHANGES.keys() | ELSEWHERE | NOTHING, path
        missing = {"max_tokens"} if path == "responses" else set()
        assert CHANGES.keys() | NOTHING <= fields | missing, path


@pytest.mark.parametrize("path", PATHS)
def test_fields_that_do_nothing_are_accepted_and_null_is_not_given(served: Served, llm: LLM, path: str) -> None:
    ignored = {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y", "priority": -3}
    schemas = openapi("")["components"]["schemas"]
    nulls = {
        name: None
        for name, schema in schemas[PATHS[path]]["properties"].items()
        if {"type": "null"} in schema.get("anyOf", ()) or schema.get("type") == "null"
    }
    assert ask(served, path, False, BASE | ignored) == offline(llm, path, BASE)
    body = nulls | {"temperature": 0, "seed": 7, "ignore_eos": True}
    body |= {"max_output_tokens" if path == "responses" else "max_tokens": 12}
    source = {"completions": {"prompt": "Hello there"}, "responses": {"input": TURNS}}.get(path, {"messages": TURNS})
    got = httpx.post(f"{served.url}/v1/{path}", json=body | source).json()
    match path:
        case "completions":
            text = got["choices"][0]["text"]
        case "responses":
            text = got["output"][0]["content"][0]["text"]
        case _:
            text = got["choices"][0]["message"]["content"]
    assert text == offline(llm, path, BASE | {"temperature": 0})


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_usage_comes_with_a_stream_as_it_is_asked_for(served: Served, path: str) -> None:
    source = {"prompt": "Hi"} if path == "completions" else {"messages": TURNS}
    create = served.client.completions.create if path == "completions" else served.client.chat.completions.create
    asked = {"model": "tiny", "n": 2, "max_tokens": 3, "extra_body": {"ignore_eos": True}, **source}
    whole = create(**asked).usage
    assert whole.completion_tokens == 6
    assert all(part.usage is None for part in create(stream=True, **asked))
    *parts, last = create(stream=True, stream_options={"include_usage": True}, **asked)
    assert all(part.usage is None for part in parts)
    assert (last.choices, last.usage.completion_tokens) == ([], 6)
    *parts, last = create(stream=True, stream_options={"continuous_usage_stats": True}, **asked)
    counts = [part.usage.completion_tokens for part in parts if part.usage]
    assert counts == sorted(counts)
    assert last.usage.total_tokens == whole.total_tokens


def test_a_chat_s_other_fields(served: Served, llm: LLM) -> None:
    def create(**more: Any) -> Any:
        body = {"extra_body": {"ignore_eos": True, "return_token_ids": True} | more.pop("extra", {})}
        return served.client.chat.completions.create(model="tiny", messages=TURNS, seed=7, **body, **more)

    short = create(max_completion_tokens=3)
    assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (3, "length")
    ids = short.choices[0].model_extra["token_ids"]
    assert llm.tokenizer.decode(ids) == short.choices[0].message.content
    streamed = create(max_completion_tokens=3, stream=True)
    assert [id for part in streamed for id in (part.choices[0].model_extra or {}).get("token_ids", [])] == ids
    several = create(max_completion_tokens=3, n=3, response_format={"type": "text"}, store=False)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert several.choices[0].message.content == short.choices[0].message.content
    bare = create(max_completion_tokens=3, extra={"add_generation_prompt": False})
    assert bare.usage.prompt_tokens < short.usage.prompt_tokens
    dry = create(max_completion_tokens=3, extra={"chat_template_kwargs": {"tone": "dry"}})
    assert dry.usage.prompt_tokens == short.usage.prompt_tokens + len(llm.tokenizer.encode_within("dry"))
    as_many_as_fit = create()
    assert as_many_as_fit.usage.total_tokens == llm.max_model_len


def test_a_completion_s_other_fields(served: Served) -> None:
    got = served.client.completions.create(
        model="tiny", prompt="Hi", max_tokens=2, echo=True, extra_body={"prompt_logprobs": 1, "return_token_ids": True}
    )
    [choice] = got.choices
    assert choice.text.startswith("Hi")
    assert choice.model_extra is not None
    assert len(choice.model_extra["prompt_token_ids"]) == 2
    assert choice.logprobs is None
