"""Texts that are known beforehand, on every path, as a stream and not: stop strings, split characters, no text."""

import json
from typing import Any

import httpx
import pytest
from conftest import Served

PATHS = ("completions", "chat/completions", "responses")
LIMIT = {"responses": "max_output_tokens"}
ALPHABET = "abcdefghijklmnopqrstuvwxyz, 日本, é!"


def answer(served: Served, path: str, stream: bool, text: str | None = None, **asked: Any) -> tuple[list[str], str]:
    """What the model says, in the pieces in which it comes, and why it ends; ``text`` is what it has to say."""
    body = {"stream": stream, "seed": 1} | asked
    body[LIMIT.get(path, "max_tokens")] = body.pop("max_tokens", 100)
    if text is not None:
        body["choice"] = [text]
    turns = [{"role": "user", "content": "Hi"}]
    body |= {"completions": {"prompt": "Hi"}, "responses": {"input": turns}}.get(path, {"messages": turns})
    got = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=60)
    assert got.status_code == 200, got.text
    lines = [line.removeprefix("data: ") for line in got.content.decode().splitlines() if line.startswith("data: {")]
    parts = [json.loads(line, parse_constant=pytest.fail) for line in (lines if stream else [got.content])]
    if path == "responses":
        response = parts[-1]["response"] if stream else parts[-1]
        pieces = [part["delta"] for part in parts if stream and part["type"] == "response.output_text.delta"]
        whole = response["output"][0]["content"][0]["text"]
        assert not stream or "".join(pieces) == whole
        return pieces if stream else [whole], {"completed": "stop", "incomplete": "length"}[response["status"]]
    choices = [part["choices"][0] for part in parts]
    said = [one.get("delta" if stream else "message") for one in choices] if "chat" in path else choices
    return [one.get("content" if "chat" in path else "text") or "" for one in said], choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("stops", "cut"),
    [
        (["hijklm"], "hijklm"),
        (["hijx", "hijk", "hijz"], "hijk"),  # they begin alike
        (["ijklmnx", "lmn"], "lmn"),  # one begins in another that fails
        (["hijklmnopqrstx"], None),  # almost
        (["é!!"], None),  # held back to the end
        (["日本"], "日本"),
        (["本, é"], "本, é"),
        (["日x", "!"], "!"),
    ],
)
def test_nothing_of_a_stop_string_is_sent(
    served: Served, path: str, stream: bool, stops: list[str], cut: str | None
) -> None:
    pieces, reason = answer(served, path, stream, ALPHABET, stop=stops)
    assert "".join(pieces) == (ALPHABET if cut is None else ALPHABET[: ALPHABET.index(cut)])
    assert reason == "stop"
    kept, _ = answer(served, path, stream, ALPHABET, stop=stops, include_stop_str_in_output=True)
    assert "".join(kept) == (ALPHABET if cut is None else ALPHABET[: ALPHABET.index(cut) + len(cut)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_a_character_that_the_limit_cuts_is_one_replacement_at_the_end(served: Served, path: str, stream: bool) -> None:
    """Tokens are bytes here."""
    text = "é日本😀"
    logprobs: dict[str, Any] = {
        "completions": {"logprobs": 2},
        "chat/completions": {"logprobs": True, "top_logprobs": 2},
        "responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    }
    for most in range(1, len(text.encode()) + 1):
        for more in ({}, logprobs[path]):
            pieces, reason = answer(served, path, stream, text, max_tokens=most, **more)
            assert "".join(pieces) == text.encode()[:most].decode(errors="replace")
            assert "\ufffd" not in "".join(pieces[:-1])
            assert "".join(pieces).count("\ufffd") <= 1
            assert reason == ("stop" if most == len(text.encode()) else "length")


@pytest.mark.parametrize("kind", ["special", "bytes that begin", "bytes that go on", "a mixture"])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_without_a_text_of_their_own_add_up_to_one_shot_decoding(
    served: Served, stream: bool, kind: str
) -> None:
    tokenizer = served.service.tokenizer
    begins, goes_on = tokenizer.encode("日")[:2]
    end = max(tokenizer.eos_token_ids)
    ids = {"special": [end], "bytes that begin": [begins], "bytes that go on": [goes_on]}.get(
        kind, [end, begins, goes_on]
    )
    body = {"prompt": "Hi", "max_tokens": 250, "ignore_eos": True, "allowed_token_ids": ids, "stream": stream}
    got = httpx.post(f"{served.url}/v1/completions", json=body | {"return_token_ids": True, "seed": 1}, timeout=60)
    lines = [line.removeprefix("data: ") for line in got.text.splitlines() if line.startswith("data: {")]
    choices = [json.loads(line)["choices"][0] for line in (lines if stream else [got.text])]
    made = [id for choice in choices for id in choice["token_ids"]]
    assert len(made) == 250
    assert set(made) <= set(ids)
    assert "".join(choice["text"] for choice in choices) == tokenizer.decode(made)
    if stream:  # who did not ask for ids hears of text alone
        got = httpx.post(f"{served.url}/v1/completions", json=body | {"seed": 1}, timeout=60)
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in got.text.splitlines() if line[6:7] == "{"]
        assert all(texts[:-1])
        assert "".join(texts) == tokenizer.decode(made)
