"""The server's interface, by the client that it is made for; its answers are those of the offline API."""

import contextlib
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import Served, serving

from freewheel import LLM, SamplingParams
from freewheel.engine.outputs import RequestOutput

SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 7, "max_tokens": 12}
JSON = {"Content-Type": "application/json"}
TURNS: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, dtype="float32") as model:
        yield model


def offline(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    [output] = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    return output


def test_models_are_listed(served: Served) -> None:
    [model] = served.client.models.list().data
    assert model.id == served.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        served.client.models.retrieve("other")
    assert httpx.get(f"{served.url}/health").status_code == 200
    assert set(httpx.get(f"{served.url}/version").json()) == {"version"}


@pytest.mark.parametrize("stream", [False, True])
def test_completions_are_those_of_the_offline_api(served: Served, llm: LLM, stream: bool) -> None:
    expected = offline(llm, "Once upon a time", n=2, logprobs=3, **SEEDED)
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    got = served.client.completions.create(
        model="tiny", prompt="Once upon a time", n=2, logprobs=3, stream=stream, **options, **SEEDED
    )
    texts, tokens, logprobs, reasons, counted = ["", ""], [[], []], [[], []], ["", ""], None
    for part in got if stream else [got]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            logprobs[choice.index] += choice.logprobs.token_logprobs
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        counted = part.usage or counted
    for one in expected.outputs:
        assert texts[one.index] == one.text
        assert reasons[one.index] == one.finish_reason
        assert one.logprobs is not None
        own = [entry[id] for id, entry in zip(one.token_ids, one.logprobs)]
        assert tokens[one.index] == [entry.decoded_token for entry in own]
        assert logprobs[one.index] == pytest.approx([entry.logprob for entry in own], abs=1e-4)
    assert counted is not None
    made = sum(len(one.token_ids) for one in expected.outputs)
    assert (counted.prompt_tokens, counted.completion_tokens) == (len(expected.prompt_token_ids), made)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_are_those_of_the_offline_api(served: Served, llm: LLM, stream: bool) -> None:
    [expected] = llm.chat(TURNS, SamplingParams(logprobs=2, **SEEDED), use_tqdm=False)
    got = served.client.chat.completions.create(
        model="tiny", messages=TURNS, logprobs=True, top_logprobs=2, stream=stream, **SEEDED
    )
    [one] = expected.outputs
    if stream:
        chunks = list(got)
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        entries = [
            entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
        ]
        reason = chunks[-1].choices[0].finish_reason
    else:
        [choice] = got.choices
        assert choice.message.role == "assistant"
        text, entries, reason = choice.message.content, choice.logprobs.content, choice.finish_reason
    assert (text, reason) == (one.text, one.finish_reason)
    assert one.logprobs is not None
    assert len(entries) == len(one.token_ids)
    for entry, id, wanted in zip(entries, one.token_ids, one.logprobs):
        assert entry.logprob == pytest.approx(wanted[id].logprob, abs=1e-4)
        likely = sorted(wanted.values(), key=lambda each: each.rank)[:2]
        assert [top.token for top in entry.top_logprobs] == [each.decoded_token for each in likely]


def test_prompts_come_as_text_or_ids_alone_or_together(served: Served, llm: LLM) -> None:
    ids = llm.tokenizer.encode("Good morning")
    got = served.client.completions.create(model="tiny", prompt=["Good morning", "Never"], max_tokens=4, temperature=0)
    assert [choice.index for choice in got.choices] == [0, 1]
    expected = [offline(llm, text, max_tokens=4, temperature=0).outputs[0].text for text in ("Good morning", "Never")]
    assert [choice.text for choice in got.choices] == expected
    for prompt in (ids, [ids]):
        again = served.client.completions.create(model="tiny", prompt=prompt, max_tokens=4, temperature=0)
        assert again.choices[0].text == expected[0]
    assert served.client.completions.create(model="tiny", prompt=[0], max_tokens=1).usage is not None


def test_an_echo_begins_with_the_prompt(served: Served, llm: LLM) -> None:
    got = served.client.completions.create(
        model="tiny", prompt="Good morning", echo=True, logprobs=1, max_tokens=3, temperature=0
    )
    expected = offline(llm, "Good morning", max_tokens=3, temperature=0, logprobs=1, prompt_logprobs=1)
    [choice] = got.choices
    assert choice.text == "Good morning" + expected.outputs[0].text
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == len(expected.prompt_token_ids) + 3
    assert choice.logprobs.token_logprobs[0] is None


def test_what_the_engine_knows_beyond_openai_s_fields_reaches_it(served: Served, llm: LLM) -> None:
    asked: dict[str, Any] = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 2, "ignore_eos": True}
    asked |= {"bad_words": ["e"], "stop_token_ids": [9]}
    got = served.client.completions.create(
        model="tiny", prompt="Hi", logit_bias={"30": 2.5}, stop=["zz"], frequency_penalty=0.2, presence_penalty=0.1,
        extra_body={**asked, "return_token_ids": True}, **SEEDED,
    )  # fmt: skip
    expected = offline(
        llm, "Hi", logit_bias={30: 2.5}, stop=["zz"], frequency_penalty=0.2, presence_penalty=0.1, **asked, **SEEDED
    )
    assert got.choices[0].model_extra is not None
    assert got.choices[0].model_extra["token_ids"] == expected.outputs[0].token_ids


def test_texts_become_tokens_and_tokens_texts(served: Served, llm: LLM) -> None:
    def post(path: str, **body: Any) -> Any:
        return httpx.post(f"{served.url}/{path}", json=body).json()

    made = post("tokenize", prompt="Good morning")
    assert made["tokens"] == llm.tokenizer.encode("Good morning")
    assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), llm.max_model_len)
    assert post("detokenize", tokens=made["tokens"])["prompt"] == llm.tokenizer.decode(made["tokens"], False)
    assert post("tokenize", messages=TURNS)["tokens"] == llm.render(TURNS).get("prompt_token_ids")


PLAIN = {"prompt": "Hi"}


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("completions", PLAIN | {"temperature": "hot"}, "temperature", "valid number"),
        ("completions", PLAIN | {"temperature": -1}, "temperature", "from"),
        ("completions", PLAIN | {"top_p": 0}, "top_p", "above 0"),
        ("completions", PLAIN | {"n": 0}, "n", "from 1"),
        ("completions", PLAIN | {"n": 2**63}, "n", "n"),
        ("completions", PLAIN | {"max_tokens": 2**31}, "max_tokens", "integer"),
        ("completions", PLAIN | {"logprobs": 10**6}, "logprobs", "integer"),
        ("completions", PLAIN | {"seed": 2**63}, "seed", "integer"),
        ("completions", PLAIN | {"stop": [""]}, "stop", "characters"),
        ("completions", PLAIN | {"logit_bias": {"x": 1}}, "logit_bias", "no token id"),
        ("completions", PLAIN | {"logit_bias": {"99999": 1}}, "logit_bias", "outside the vocabulary"),
        ("completions", PLAIN | {"stop_token_ids": [-1]}, "stop_token_ids", "integer"),
        ("completions", PLAIN | {"allowed_token_ids": []}, "allowed_token_ids", "empty"),
        ("completions", PLAIN | {"best_of": 3}, "best_of", "not supported"),
        ("completions", PLAIN | {"suffix": "!"}, "suffix", "not supported"),
        ("completions", PLAIN | {"nonsense": 3}, "nonsense", "not supported"),
        ("completions", {}, "prompt", "missing"),
        ("completions", {"prompt": ""}, "prompt", "empty"),
        ("completions", {"prompt": []}, "prompt", "empty"),
        ("completions", {"prompt": [[]]}, "prompt", "empty"),
        ("completions", {"prompt": [-1]}, "prompt", "vocabulary"),
        ("completions", {"prompt": [1, "a"]}, "prompt", "prompt"),
        ("completions", {"prompt": ["a"] * 257}, "prompt", "limit of 256"),
        ("completions", {"prompt": "a " * 5000}, "prompt", "longest sequence"),
        ("completions", PLAIN | {"model": "other"}, "model", "does not exist"),
        ("chat/completions", {"messages": []}, "messages", "at least 1"),
        ("chat/completions", {"messages": [{"role": "boss", "content": "x"}]}, "messages.0.role", "input should be"),
        ("chat/completions", {"messages": TURNS, "max_completion_tokens": -1}, "max_completion_tokens", "integer"),
        ("chat/completions", {"messages": TURNS, "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ("chat/completions", {"messages": TURNS, "logprobs": True, "top_logprobs": 9999}, "top_logprobs", "integer"),
        ("chat/completions", {"messages": TURNS, "tools": []}, "tools", "not be empty"),
        ("chat/completions", {"messages": TURNS, "response_format": {"type": "json"}}, "response_format", "'text'"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(served: Served, path: str, body: dict[str, Any], field: str, words: str) -> None:
    got = httpx.post(f"{served.url}/v1/{path}", json=body)
    assert got.status_code in (400, 404), got.text
    error = got.json()["error"]
    assert words.lower() in error["message"].lower()
    assert error["message"].startswith(field) or error["param"] == field
    assert served.client.completions.create(model="tiny", prompt="Hi", max_tokens=1).choices


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"NaN"])
def test_what_is_no_request_is_refused(served: Served, body: bytes) -> None:
    got = httpx.post(f"{served.url}/v1/completions", content=body, headers=JSON)
    assert got.status_code == 400
    assert got.json()["error"]["message"]


def test_paths_and_methods_that_are_not_there_are_said_so(served: Served) -> None:
    assert httpx.post(f"{served.url}/v1/nothing", json={}).json()["error"]["code"] == 404
    assert httpx.get(f"{served.url}/v1/completions").json()["error"]["code"] == 405


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_what_they_had(served: Served, stream: bool) -> None:
    url = f"{served.url}/v1/completions"
    body = {"prompt": "Hi", "max_tokens": 120, "ignore_eos": True, "stream": stream, "n": 64}
    for _ in range(5):
        if stream:
            with httpx.stream("POST", url, json=body) as reply:
                assert next(reply.iter_lines()).startswith("data: ")
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=0.1)
    left = time.monotonic()
    ends = time.monotonic() + 5
    while (served.engine.has_unfinished or served.service.active) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not served.engine.has_unfinished
    assert served.service.active == 0
    assert time.monotonic() - left < 1, "they were not worked on to their end"


def test_a_key_is_asked_for_and_too_much_is_refused(tiny_model: Path) -> None:
    with serving(tiny_model, api_key="secret", max_requests=4, max_body=2000) as server:
        assert server.client.models.list().data
        wrong = server.client.with_options(api_key="secreT")
        with pytest.raises(openai.AuthenticationError, match="API key"):
            wrong.models.list()
        assert httpx.get(f"{server.url}/health").status_code == 200
        with pytest.raises(openai.RateLimitError, match="too many") as refused:
            server.client.completions.create(model="tiny", prompt=["Hi"] * 5)
        assert refused.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.APIStatusError, match="limit of 2000 bytes") as large:
            server.client.completions.create(model="tiny", prompt="x" * 3000)
        assert large.value.status_code == 413
        unsized = httpx.post(
            f"{server.url}/v1/completions",
            content=iter([b"x" * 1500] * 2),
            headers=JSON | {"Authorization": "Bearer secret"},
        )
        assert unsized.status_code == 413
        assert server.client.completions.create(model="tiny", prompt="Hi", max_tokens=1).choices


def test_a_request_that_takes_too_long_is_ended(tiny_model: Path) -> None:
    with serving(tiny_model, timeout=0.5) as server:
        step = server.engine.step
        server.engine.step = lambda: time.sleep(0.01) or step()  # type: ignore[method-assign]
        body = {"prompt": "Hi", "max_tokens": 120, "n": 500, "ignore_eos": True, "stream": True}
        lines = [line for line in httpx.post(f"{server.url}/v1/completions", json=body).text.split("\n\n") if line]
        assert '"text"' in lines[0]
        assert "took longer than" in lines[-2]
        assert lines[-1] == "data: [DONE]"
        with pytest.raises(openai.APIStatusError, match="took longer than") as late:
            server.client.completions.create(
                model="tiny", prompt="Hi", max_tokens=200, n=64, extra_body={"ignore_eos": True}
            )
        assert late.value.status_code == 504


def test_events_are_json_without_infinities(served: Served) -> None:
    body = {"prompt": "Hi", "max_tokens": 3, "logprobs": 2, "temperature": 0, "stream": True}
    body |= {"allowed_token_ids": [40, 41], "stream_options": {"include_usage": True}}
    lines = httpx.post(f"{served.url}/v1/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: "), parse_constant=pytest.fail) for line in lines[:-2]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_metrics_count_what_was_done(tiny_model: Path) -> None:
    with serving(tiny_model) as server:
        server.client.completions.create(
            model="tiny", prompt=["Hi", "Ho"], max_tokens=3, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.BadRequestError):
            server.client.completions.create(model="tiny", prompt="Hi", n=0)
        assert httpx.post(f"{server.url}/v1/completions", json={}).status_code == 400
        assert httpx.get(f"{server.url}/nowhere").status_code == 404
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values['freewheel_requests_total{reason="length"}']) == 2
    assert float(values['freewheel_tokens_total{kind="output"}']) == 6
    assert float(values['freewheel_refused_total{status="400"}']) == 2
    assert float(values['freewheel_refused_total{status="404"}']) == 1
    assert float(values["freewheel_first_token_seconds_count"]) == 2
    assert float(values["freewheel_running"]) == float(values["freewheel_waiting"]) == 0


def test_metrics_count_tokens_as_they_come(served: Served) -> None:
    def count(kind: str) -> float:
        [line] = re.findall(rf'^freewheel_tokens_total{{kind="{kind}"}} (.*)$', httpx.get(metrics).text, re.MULTILINE)
        return float(line)

    metrics = f"{served.url}/metrics"
    prompt, output = count("prompt"), count("output")
    body = {"prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True, "stream": True, "return_token_ids": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as reply:
        next(reply.iter_lines())
        assert count("prompt") == prompt + 3
        assert count("output") > output


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_tokens_from_drafts_are_told(copying_model: Path, path: str, stream: bool) -> None:
    with serving(copying_model, {"speculation": True}) as server:
        body: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body |= {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
        body |= {"prompt": "abc" * 9} if path == "completions" else {"messages": TURNS}
        got = httpx.post(f"{server.url}/v1/{path}", json=body)
        lines = [line.removeprefix("data: ") for line in got.text.split("\n\n") if line]
        parts = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for part in parts for choice in part["choices"] if "token_ids" in choice]
    assert all(len(choice["from_draft"]) == len(choice["token_ids"]) for choice in choices)
    told = [one for choice in choices for one in choice["from_draft"]]
    assert len(told) == 60
    usage = parts[-1]["usage"]
    assert sum(told) == usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_bytes_of_a_token_are_its_own_even_of_part_of_a_character(served: Served, llm: LLM) -> None:
    part = llm.tokenizer.encode("€")[1]
    got = served.client.chat.completions.create(
        model="tiny", messages=TURNS, logprobs=True, max_tokens=1, extra_body={"allowed_token_ids": [part]}
    )
    [entry] = got.choices[0].logprobs.content
    assert (entry.token, entry.bytes) == ("\ufffd", [0x82])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_can_be_scored_alone(served: Served, llm: LLM, max_tokens: int, stream: bool) -> None:
    """One that leaves room for a token, and one that fills the context."""
    ids = [token % 200 + 10 for token in range(llm.max_model_len - 1)]
    for prompt in [ids[:9], ids] + [[*ids, 10]] * (max_tokens == 0):
        got = served.client.completions.create(
            model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, stream=stream, temperature=0
        )
        choices = [choice for part in (got if stream else [got]) for choice in part.choices]
        expected = offline(llm, prompt, max_tokens=max_tokens, temperature=0, logprobs=1, prompt_logprobs=1)
        assert choices[-1].finish_reason == "length"
        assert "".join(choice.text for choice in choices) == llm.tokenizer.decode(prompt) + expected.outputs[0].text
        logprobs = [one for choice in choices for one in choice.logprobs.token_logprobs]
        assert len(logprobs) == len(prompt) + max_tokens
        assert expected.prompt_logprobs is not None
        wanted = [entry and entry[id].logprob for id, entry in zip(prompt, expected.prompt_logprobs)]
        assert logprobs[0] is None
        assert logprobs[1 : len(prompt)] == pytest.approx(wanted[1:], abs=1e-4)


RIGHT: list[Any] = [[0], [0, 0], [[0]], " "]
EMPTY: list[Any] = [[], [[]], "", ["Hi", ""]]


@pytest.mark.parametrize(("prompt", "right"), [(one, one in RIGHT) for one in (*RIGHT, *EMPTY)])
def test_only_prompts_without_tokens_are_empty(served: Served, prompt: Any, right: bool) -> None:
    got = httpx.post(f"{served.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert got.status_code == (200 if right else 400)
    assert right or "prompt is empty" in got.json()["error"]["message"]


CHAT = {"messages": TURNS}
WRONG = [None, True, 1, -1, 2**31, 2**63, 1e400, "x", "", [], [None], {}, {"a": {}}, [[]], "\x00", "é" * 300]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_no_value_of_any_field_is_a_server_s_error(served: Served, path: str) -> None:
    """The answer names what is wrong, and does not echo what came."""
    schema = httpx.get(f"{served.url}/openapi.json").json()["components"]["schemas"]
    fields = schema["CompletionRequest" if path == "completions" else "ChatCompletionRequest"]["properties"]
    with httpx.Client(timeout=30) as client:
        for field, value in itertools.product(fields, WRONG):
            if (field, value) in (("max_tokens", 2**31), ("stream", True)):
                continue
            body = (PLAIN if path == "completions" else CHAT) | {"max_tokens": 1, field: value}
            text = json.dumps(body).replace("Infinity", "1e400")
            got = client.post(f"{served.url}/v1/{path}", content=text, headers=JSON)
            assert got.status_code in (200, 400, 404), (field, value, got.text)
            if got.status_code != 200:
                error = got.json()["error"]
                assert (error["param"] or "").startswith(field) or error["message"].startswith(field), (value, error)
                assert len(got.content) < 1000
    assert served.client.completions.create(model="tiny", prompt="Hi", max_tokens=1).choices


LIMITS = {"logprobs": 1024, "top_logprobs": 1024, "prompt_logprobs": 1024, "n": 1024, "min_tokens": 1}
LIMITS |= {"top_k": 2**31 - 1, "max_tokens": 2**31 - 1, "seed": 2**63 - 1}


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_integers_at_their_limits_are_taken_or_refused_at_once(served: Served, llm: LLM, path: str) -> None:
    """Below the limit of its own a field may have another: the vocabulary's size, or what fits."""
    size = llm.tokenizer.vocab_size
    foreign = "top_logprobs" if path == "completions" else "logprobs"
    for field, limit in LIMITS.items():
        for value in {0, 1, -1, limit, limit + 1, size, size + 1, 2**31, 2**63} if field != foreign else ():
            body = (PLAIN if path == "completions" else CHAT) | {"max_tokens": 1, field: value}
            body |= {"logprobs": True} if field == "top_logprobs" else {}
            got = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=60)
            assert got.status_code in (200, 400), (field, value, got.text)
            assert (got.status_code == 400) or -1 <= value <= limit, (field, value)
            if got.status_code == 400:
                assert got.json()["error"]["param"] == field, (field, value, got.text)
        assert served.client.completions.create(model="tiny", prompt="Hi", max_tokens=1).choices


def test_each_answer_has_the_request_s_name(served: Served) -> None:
    """The client's, if it is a plain one: it goes into logs."""

    def named(name: str | bytes | None) -> str:
        headers: Any = {} if name is None else {"X-Request-Id": name}
        return httpx.get(f"{served.url}/nowhere", headers=headers).headers["x-request-id"]

    assert named("a-1.b_2:c") == "a-1.b_2:c"
    for name in (None, "", "a b", "x" * 129, "a\tb", "é".encode(), "a;b"):
        assert re.fullmatch("[0-9a-f]{32}", named(name))
    assert named(None) != named(None)


def test_each_request_has_a_line_in_the_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    def logged(method: str, path: str, lines: int, **options: Any) -> list[str]:
        caplog.clear()
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.request(method, f"{served.url}{path}", **options)
        ends = time.monotonic() + 10
        while len(caplog.messages) < lines and time.monotonic() < ends:
            time.sleep(0.005)
        return [re.sub(r"^\w{32} (.*), \d+\.\d{3} s$", r"\1", message) for message in caplog.messages]

    body = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
    assert logged("GET", "/health", 0) == [], "nothing is written unless asked for"
    with caplog.at_level("INFO", "freewheel.server"):
        assert logged("GET", "/health", 1) == ["GET /health 200, 0 + 0 tokens"]
        for stream in (False, True):
            [line] = logged("POST", "/v1/completions", 1, json=body | {"stream": stream})
            assert line == "POST /v1/completions 200, 2 + 3 tokens"
        [line] = logged("POST", "/v1/responses", 1, json={"input": "Hi", "max_output_tokens": 3})
        assert re.fullmatch(r"POST /v1/responses 200, \d+ \+ [1-3] tokens", line)
        assert logged("POST", "/v1/completions", 1, json={}) == ["POST /v1/completions 400, 0 + 0 tokens"]
        [line] = logged("GET", "/a%0Ab%1B" + "x" * 500, 1)
        assert line.startswith(r"GET /a\nb\x1bxxx")
        assert len(line) < 300
        [line] = logged("POST", "/v1/completions", 1, json=body | {"max_tokens": 200, "n": 64}, timeout=0.1)
        assert line.startswith("POST /v1/completions 499")
