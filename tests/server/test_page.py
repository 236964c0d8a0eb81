"""The page at /, in a headless Chromium."""

import json
import math
import os
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import pytest
from browser import NAMES, Browser, Page, chromium, find
from conftest import Served, serving

SEEDED = {"temperature": 0.8, "seed": 7, "max_tokens": 12}
ANSWERED = "!document.querySelector('[aria-busy=true]') && document.querySelectorAll('.facts').length"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find()
    if program is None:
        missing = f"none of {', '.join(NAMES)} is installed: apt-get install chromium-headless-shell brings the first"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with chromium(program, tmp_path_factory.mktemp("chromium")) as running:
        yield running


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """The page; at the end it has asked nobody else, and nothing went wrong in it."""
    page = Page(browser, url)
    try:
        yield page
        asked = [event["request"]["url"] for event in page.events("Network.requestWillBeSent")]
        assert asked
        assert {f"{urlsplit(one).scheme}://{urlsplit(one).netloc}" for one in asked} == {url}
        answers = [event["response"] for event in page.events("Network.responseReceived")]
        assert all("/v1/" in answer["url"] for answer in answers if answer["status"] >= 400)
        assert not page.events("Runtime.exceptionThrown")
        assert not page.events("Runtime.consoleAPICalled")
        entries = [event["entry"] for event in page.events("Log.entryAdded")]
        assert not [entry for entry in entries if entry["source"] != "network"]  # those are looked at above
    finally:
        page.close()


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    with opened(browser, served.url) as page:
        yield page


@pytest.fixture
def held(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[None], threading.Semaphore]]:
    """The engine launches a step for each release. Those it has launched, and what releases them."""
    steps: list[None] = []
    gate = threading.Semaphore(0)
    launch = served.engine.runner.launch

    def wait(*step: Any) -> Any:
        gate.acquire()
        steps.append(None)
        return launch(*step)

    monkeypatch.setattr(served.engine.runner, "launch", wait)
    yield steps, gate
    gate.release(1000)


def fill(page: Page, **parameters: Any) -> None:
    for name, value in parameters.items():
        page.type(f"#{name}", str(value))


def ask(page: Page, text: str) -> None:
    """Send it, and wait for the end of the answer."""
    count = page.run("document.querySelectorAll('.facts').length")
    page.type("#message", text)
    page.press("Enter")
    page.until(f"{ANSWERED} > {count}")


def sent(page: Page) -> dict[str, Any]:
    """The body of the page's last request for an answer."""
    requests = [event["request"] for event in page.events("Network.requestWillBeSent")]
    return json.loads([one["postData"] for one in requests if one["url"].endswith("/v1/chat/completions")][-1])


def eventually(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.01)


def answering(page: Page, events: list[Any], text: str) -> None:
    """Send a text, and let the answer be these events."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.call("Fetch.enable", patterns=[{"urlPattern": "*/v1/chat/completions"}])
    page.type("#message", text)
    page.press("Enter")
    request = page.browser.wait_for("Fetch.requestPaused")["requestId"]
    headers = [{"name": "Content-Type", "value": "text/event-stream"}]
    encoded = b64encode(body.encode()).decode()
    page.call("Fetch.fulfillRequest", requestId=request, responseCode=200, responseHeaders=headers, body=encoded)
    page.call("Fetch.disable")
    page.until(ANSWERED)


class TestFiles:
    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/", "text/html"),
            ("/page.js", "text/javascript"),
            ("/style.css", "text/css"),
            ("/icon.svg", "image/svg+xml"),
        ],
    )
    def test_come_with_what_browsers_want_to_know(self, served: Served, path: str, kind: str) -> None:
        got = httpx.get(f"{served.url}{path}")
        assert got.status_code == 200
        assert got.headers["content-type"].split(";")[0] == kind
        assert got.headers["x-content-type-options"] == "nosniff"
        assert got.headers["content-security-policy"].split(";")[0] == "default-src 'self'"
        again = httpx.get(f"{served.url}{path}", headers={"If-None-Match": got.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert httpx.get(f"{served.url}{path}", headers={"If-None-Match": '"other"'}).content == got.content
        assert httpx.head(f"{served.url}{path}").headers["content-length"] == str(len(got.content))
        assert httpx.post(f"{served.url}{path}").status_code == 405

    def test_are_no_part_of_the_interface(self, served: Served) -> None:
        assert "/" not in httpx.get(f"{served.url}/openapi.json").json()["paths"]


class TestConversation:
    def test_answers_are_those_of_the_api(self, page: Page, served: Served) -> None:
        assert page.until("document.querySelector('#model').textContent") == "tiny"
        fill(page, system="Be brief.", **SEEDED)
        messages: list[Any] = [{"role": "system", "content": "Be brief."}]
        for number, text in enumerate(("Hello there", "And again")):
            ask(page, text)
            messages.append({"role": "user", "content": text})
            got = served.client.chat.completions.create(model="tiny", messages=messages, **SEEDED)
            answer = got.choices[0].message.content
            messages.append({"role": "assistant", "content": answer})
            assert page.texts(".user .plain")[number] == text
            assert page.texts(".assistant .plain")[number] == answer
            assert page.texts(".facts")[number].startswith(f"{got.usage.completion_tokens} tokens")

    def test_by_keys_and_buttons(self, page: Page) -> None:
        fill(page, **SEEDED)
        page.type("#message", "one")
        page.press("Enter", shift=True)
        page.call("Input.insertText", text="two")
        page.press("Enter")
        page.until(ANSWERED)
        [first] = page.texts(".assistant .plain")
        assert page.texts(".user .plain") == ["one\ntwo"]

        page.click("#retry")
        page.until(ANSWERED)
        assert page.texts(".assistant .plain") == [first]  # the seed is the same
        page.click("#edit")
        assert page.texts(".turn") == []
        assert page.run("document.querySelector('#message').value") == "one\ntwo"
        ask(page, "three")
        ask(page, "four")
        page.click("#retry")
        page.until(f"{ANSWERED} == 2")
        assert [turn["content"] for turn in sent(page)["messages"] if turn["role"] == "user"] == ["three", "four"]
        page.click("#clear")
        assert page.texts(".turn") == []
        assert page.run("document.activeElement.id") == "message"

    def test_stopping_frees_the_row(self, page: Page, served: Served, held: Any) -> None:
        steps, gate = held
        gate.release(8)
        page.type("#message", "Go on")
        page.press("Enter")
        page.until("document.querySelector('.assistant .plain')?.textContent")
        page.until("document.querySelector('#running').textContent == '1'")
        assert page.texts("[aria-busy=true] .facts") == []
        page.click("#halt")
        page.until(ANSWERED)
        assert page.text(".facts") == "stopped by you"
        eventually(lambda: served.service.active == 0)
        before = len(steps)
        gate.release(1000)
        eventually(lambda: not served.engine.has_unfinished)
        assert len(steps) <= before + 1  # the one that was about to be launched
        page.until("document.querySelector('#running').textContent == '0'")

    def test_a_stop_before_the_first_token_gives_the_text_back(self, page: Page, served: Served, held: Any) -> None:
        page.type("#message", "Never mind")
        page.press("Enter")
        eventually(lambda: served.service.active == 1)
        page.click("#halt")
        assert page.until("document.querySelector('#message').value") == "Never mind"
        assert page.texts(".turn") == []
        eventually(lambda: served.service.active == 0)

    def test_what_was_written_is_text_and_nothing_else(self, page: Page) -> None:
        hostile = "<img src=/evil onerror=hacked=1><script>hacked=1</script>&amp;"
        entry = {"token": hostile, "bytes": list(hostile.encode()), "logprob": -0.1}
        choice = {"index": 0, "delta": {"content": hostile}, "finish_reason": "stop", "from_draft": [False]}
        choice["logprobs"] = {"content": [{**entry, "top_logprobs": [entry]}]}
        page.click("#tokens")
        answering(page, [{"choices": [choice]}, {"error": {"code": 500, "message": hostile}}], hostile)
        page.point(".token")
        assert page.texts(".plain") == [hostile, hostile]
        assert page.text(".token") == page.text("#alternatives td") == page.text("#error") == hostile
        assert page.run("typeof hacked") == "undefined"
        assert (
            page.run("document.querySelectorAll('main :is(img, script), #alternatives :is(img, script)').length") == 0
        )
        assert not [event for event in page.events("Network.requestWillBeSent") if "evil" in event["request"]["url"]]


class TestParameters:
    ALL: ClassVar[dict[str, float]] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "max_tokens": 5, "seed": 2**62 + 1,
        "frequency_penalty": 0.25, "presence_penalty": -0.5, "repetition_penalty": 1.1,
    }  # fmt: skip

    def test_reach_the_request_and_are_remembered(self, page: Page) -> None:
        ask(page, "Hi")
        assert sent(page).keys() == {"messages", "stream", "stream_options"}  # nothing that was not asked for
        page.click("#clear")
        fill(page, stop="END\\n\nzz", system="Be brief.", **self.ALL)
        ask(page, "Hi")
        body = sent(page)
        assert body.items() >= self.ALL.items()
        assert body["stop"] == ["END\n", "zz"]
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        page.reload()
        values = {name: page.run(f"document.querySelector('#{name}').value") for name in self.ALL}
        assert values == {name: str(value) for name, value in self.ALL.items()}
        page.click("#defaults")
        page.reload()
        assert page.run("[...document.querySelectorAll('#fields :is(input, textarea)')].every((one) => !one.value)")

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [("top_p", "7", "at most 1"), ("temperature", "hot", "number"), ("seed", "1.5", "integer")],
    )
    def test_a_wrong_one_is_shown_at_its_field(self, page: Page, name: str, value: str, words: str) -> None:
        fill(page, max_tokens=3, **{name: value})
        page.run("document.querySelector('#settings').open = false")
        page.type("#message", "Hi")
        page.press("Enter")
        page.until(f"document.querySelector('#{name}').getAttribute('aria-invalid') == 'true'")
        assert words in page.text(f"#{name}-wrong")
        assert page.run("document.activeElement.id") == name
        assert page.run("document.querySelector('#settings').open")
        assert page.run("document.querySelector('#message').value") == "Hi"
        page.type(f"#{name}", "1")
        assert page.text(f"#{name}-wrong") == ""
        ask(page, "Hi")
        assert len(page.texts(".assistant")) == 1

    def test_other_refusals_are_shown_as_well(
        self, page: Page, served: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page.type("#message", "x" * 300)
        page.press("Enter")
        assert "longest sequence" in page.until("document.querySelector('#error').textContent")
        monkeypatch.setattr(served.service, "active", 10**6)
        page.type("#message", "Hi")
        page.press("Enter")
        page.until("document.querySelector('#error').textContent.includes('too many requests')")
        assert page.text("#error").endswith("(in 1 s)")
        assert page.run("document.querySelector('#error').getAttribute('role')") == "alert"
        monkeypatch.undo()
        ask(page, "Hi")
        assert page.text("#error") == ""


class TestKey:
    def test_is_asked_for_and_kept_for_the_session_alone(self, browser: Browser, tiny_model: Path) -> None:
        with serving(tiny_model, api_key="open-sesame") as server:
            for path in ("/", "/page.js"):
                assert not {"open-sesame", "tiny"} & set(httpx.get(f"{server.url}{path}").text.split())
            with opened(browser, server.url) as page:
                page.until("document.querySelector('#lock').open")
                assert page.text("#model") == ""
                for key, title in (("", "This server asks for a key"), ("guess", "The key is wrong")):
                    if key:
                        page.type("#key", key)
                        page.press("Enter")
                    page.until(f"document.querySelector('#lock').open && {json.dumps(title)} == "
                               "document.querySelector('#lock-title').textContent")  # fmt: skip
                page.type("#key", "open-sesame")
                page.press("Enter")
                assert page.until("document.querySelector('#model').textContent") == "tiny"
                fill(page, max_tokens=3)
                ask(page, "Hi")
                assert "open-sesame" not in page.run("JSON.stringify({...localStorage}) + document.cookie")
                page.reload()
                assert page.until("document.querySelector('#model').textContent") == "tiny"
            with opened(browser, server.url) as other:
                other.until("document.querySelector('#lock').open")
                other.press("Escape")
                assert "API key" in other.until("document.querySelector('#error').textContent")


def shown(logprob: float) -> str:
    value = 100 * math.exp(logprob)
    return "< 0.01 %" if value < 0.01 else f"{value:.{2 if value < 1 else 1}f} %"


class TestTokens:
    def test_each_has_its_probability_and_its_alternatives(self, page: Page, served: Served) -> None:
        page.click("#tokens")
        fill(page, **SEEDED)
        ask(page, "Hello there")
        got = served.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello there"}], logprobs=True, top_logprobs=5, **SEEDED
        )
        entries = got.choices[0].logprobs.content
        labels = page.run("[...document.querySelectorAll('.turn .token')].map((one) => one.ariaLabel)")
        assert labels == [f"{json.dumps(one.token, ensure_ascii=False)}, {shown(one.logprob)}" for one in entries]
        surprises = page.run(
            "[...document.querySelectorAll('.turn .token')].map((one) => +one.style.getPropertyValue('--surprise'))"
        )
        expected = [min(1, -one.logprob / math.log(10) / 3) for one in entries]
        assert surprises == pytest.approx(expected, abs=2e-3)
        assert page.run("getComputedStyle(document.querySelector('.assistant .plain')).display") == "none"

        page.point(".turn .token")
        for number, entry in enumerate(entries):
            likely = [one.logprob for one in entry.top_logprobs]
            listed = likely if entry.logprob in likely else [*likely, entry.logprob]
            assert page.texts("#alternatives td:last-child") == [shown(one) for one in listed]
            assert page.texts("#alternatives .drawn td:last-child") == [shown(entry.logprob)]
            if number == 0:
                page.run("document.querySelector('.turn .token').focus()")
            page.press("ArrowRight")
        page.press("Escape")
        assert page.run("document.querySelector('#alternatives').hidden")
        assert page.run("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1

    def test_all_of_a_token_is_visible(self, page: Page) -> None:
        texts = [b"  ", b" a", b"b\n", b"\t", b"\xe2\x82", "\u200b€".encode(), b"", b"<|end|>", "\ufeff".encode()]
        entries = [{"token": text.decode("utf-8", "replace"), "bytes": list(text), "logprob": None} for text in texts]
        content = [{**entry, "top_logprobs": [entry]} for entry in entries]
        choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": "stop", "from_draft": [False] * len(texts)}
        page.click("#tokens")
        answering(page, [{"choices": [{**choice, "logprobs": {"content": content}}]}], "Hi")
        assert page.texts(".turn .token") == [
            "␣␣", " a", "b⏎\n", "⇥\t", "⟨E2 82⟩", "⟨200B⟩€", "∅", "<|end|>", "⟨FEFF⟩",
        ]  # fmt: skip
        page.point(".turn .token:nth-child(2)")
        assert page.texts("#alternatives td") == ["␣a", "", "0.00 %"]

    def test_those_from_drafts_are_marked(self, browser: Browser, copying_model: Path) -> None:
        with serving(copying_model, {"speculation": True}) as server, opened(browser, server.url) as page:
            page.click("#tokens")
            fill(page, temperature=0, max_tokens=60)
            ask(page, "abc" * 9)
            marked = len(page.texts(".turn .drafted"))
            assert marked > 0
            assert f"· {marked} of " in page.text(".facts")
            page.point(".turn .drafted")
            assert page.text("#alternatives p") == "accepted from a draft"
            decoration = "getComputedStyle(document.querySelector('.turn .drafted')).textDecorationLine"
            assert page.run(decoration) == "underline"
            page.until("document.querySelector('#acceptance').textContent.endsWith('%')")


class TestLooks:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_the_least_likely_token_can_be_read(self, page: Page, scheme: str) -> None:
        """The contrast between text and ground is 4.5 at least, after WCAG 2."""
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.click("#tokens")
        ratio = page.run("""(() => {
            const token = document.querySelector("#legend .token");
            token.style.setProperty("--surprise", 1);
            const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
            const luminance = (...colours) => {
                for (canvas.fillStyle of colours) canvas.fillRect(0, 0, 1, 1);
                const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((one) => one / 255)
                    .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const body = getComputedStyle(document.body);
            const ground = getComputedStyle(token).backgroundColor;
            const both = [luminance(body.color), luminance(body.backgroundColor, ground)];
            return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
        })()""")
        assert 4.5 <= ratio <= 12

    def test_fits_a_phone(self, page: Page) -> None:
        page.call("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=2, mobile=True)
        page.reload()
        page.click("#tokens")
        ask(page, "x" * 100)
        assert page.run("document.documentElement.scrollWidth") <= 360
        assert not page.run("document.querySelector('#settings').open")
        for id in ("message", "send", "tokens", "clear"):
            assert page.run(f"(box => box.right <= 360 && box.bottom <= 640)({id}.getBoundingClientRect())")

    def test_every_field_and_button_has_a_name(self, page: Page) -> None:
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        named = {"button", "textbox", "checkbox", "log", "dialog"}
        controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in named]
        assert len(controls) > 15
        assert [node for node in controls if not node["name"]["value"]] == []


class TestLive:
    def test_numbers_move_with_what_the_server_does(self, page: Page) -> None:
        fill(page, max_tokens=100)
        page.until("document.querySelector('#speed').textContent != '–'")
        ask(page, "Hello there")
        page.until("+document.querySelector('#speed').textContent > 0")
        page.until("parseInt(document.querySelector('#occupancy').textContent) >= 0")
        assert len(page.run("document.querySelector('#trend polyline').getAttribute('points')").split()) == 60
        assert page.text("#pages").startswith("0 / ")
        page.until("document.querySelector('#hits').textContent.endsWith('%')")

    def test_nothing_is_asked_while_nobody_looks(self, page: Page) -> None:
        polls = "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/metrics')).length"
        page.until(f"{polls} > 1")
        page.run("Object.defineProperty(document, 'visibilityState', { value: 'hidden', writable: true })")
        count = page.run(polls)
        page.run("new Promise((resolve) => setTimeout(resolve, 1200))")
        assert page.run(polls) <= count + 1  # one may have been on its way
        page.run("document.visibilityState = 'visible'")
        page.run("document.dispatchEvent(new Event('visibilitychange'))")
        page.until(f"{polls} > {count}")
