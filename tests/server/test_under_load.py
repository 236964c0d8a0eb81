"""Many clients at once, clients that vanish, and bodies that are far too large, while the others go on."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Served, serving

from freewheel import LLM, SamplingParams

JSON = {"Content-Type": "application/json"}
ENDLESS: dict[str, Any] = {"prompt": "Hi", "max_tokens": 200, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def roomy(tiny_model: Path) -> Iterator[Served]:
    """One that takes large bodies."""
    with serving(tiny_model, max_body=6 * 10**6) as running:
        yield running


def settle(served: Served) -> None:
    """Wait until everybody has gone, then check that nothing is in use: pages may be cached, but nobody's."""
    ends = time.monotonic() + 30
    while (served.engine.has_unfinished or served.service.active) and time.monotonic() < ends:
        time.sleep(0.01)
    assert (served.engine.num_running, served.engine.num_waiting, served.service.active) == (0, 0, 0)
    served.engine.check()
    assert served.engine._cache.available == served.engine._pool.num_pages


@asynccontextmanager
async def connected(served: Served) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, timeout=60, limits=limits) as client:
        yield client


async def lines_of(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    """The events of a stream."""
    async with client.stream("POST", path, json=body | {"stream": True}) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def test_256_streams_at_once_are_neither_lost_nor_mixed_up(served: Served, tiny_model: Path) -> None:
    params: dict[str, Any] = {"temperature": 0.8, "seed": 7}
    turns = [[{"role": "user", "content": f"Number {number} is"}] for number in range(256)]
    with LLM(tiny_model, dtype="float32") as llm:
        expected = [
            output.outputs[0].text for output in llm.chat(turns, SamplingParams(max_tokens=8, **params), use_tqdm=False)
        ]
        prompts = [llm.render(one)["prompt_token_ids"] for one in turns]

    async def ask(client: httpx.AsyncClient, number: int) -> str:
        match number % 3:
            case 0:
                body = {"prompt": list(prompts[number]), "max_tokens": 8, **params}
                chunks = [chunk async for chunk in lines_of(client, "/v1/completions", body)]
                return "".join(chunk["choices"][0]["text"] for chunk in chunks)
            case 1:
                body = {"messages": turns[number], "max_tokens": 8, **params}
                chunks = [chunk async for chunk in lines_of(client, "/v1/chat/completions", body)]
                return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            case _:
                body = {"input": turns[number], "max_output_tokens": 8, **params}
                return "".join([event.get("delta", "") async for event in lines_of(client, "/v1/responses", body)])

    async def all_of_them() -> list[str]:
        async with connected(served) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(256)))

    assert asyncio.run(all_of_them()) == expected
    settle(served)


def test_200_rounds_of_clients_that_vanish_leave_nothing_in_use(served: Served) -> None:
    rng = random.Random(0)

    async def vanish(client: httpx.AsyncClient) -> None:
        """After some lines of a stream, or some time: while it is sent, waits, or runs."""
        text = "x" * rng.randint(1, 150)
        path, body = rng.choice(
            [
                ("/v1/completions", {"prompt": [text] * rng.choice([1, 3])}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "n": rng.choice([1, 4])}),
                ("/v1/responses", {"input": text}),
            ]
        )
        body |= {"ignore_eos": True, "stream": rng.random() < 0.7}
        patience = rng.randint(0, 10)
        try:
            async with asyncio.timeout(rng.choice([0.001, 0.01, 0.05, 0.2])):
                async with client.stream("POST", path, json=body) as reply:
                    async for _ in reply.aiter_lines():
                        patience -= 1
                        if patience < 0:
                            return
        except TimeoutError:
            pass

    async def rounds() -> None:
        async with connected(served) as client:
            for _ in range(20):
                await asyncio.gather(*(vanish(client) for _ in range(10)))

    asyncio.run(rounds())
    settle(served)


def test_who_leaves_while_waiting_is_never_worked_on(tiny_model: Path) -> None:
    with serving(tiny_model, {"max_num_seqs": 1}) as server:
        step = server.engine.step
        server.engine.step = lambda: time.sleep(0.01) or step()  # type: ignore[method-assign]

        async def leave_two() -> None:
            async with connected(server) as client:
                events = lines_of(client, "/v1/completions", ENDLESS)
                await anext(events)
                for stream in (False, True):
                    with pytest.raises(httpx.ReadTimeout):
                        await client.post("/v1/completions", json=ENDLESS | {"stream": stream}, timeout=0.1)
                while server.engine.num_waiting or server.service.active > 1:
                    await asyncio.sleep(0.005)
                assert server.engine.num_running == 1, "the first, for which they waited, still runs"
                await events.aclose()  # type: ignore[attr-defined]

        asyncio.run(leave_two())
        settle(server)


def test_who_leaves_between_the_first_output_and_the_stream_frees_what_they_had(served: Served) -> None:
    """The reply is there, but nobody takes it: as if the client had left just then."""
    from freewheel.server.protocol import CompletionRequest

    body = CompletionRequest.model_validate(ENDLESS)

    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def nowhere(message: Any) -> None:
        await asyncio.sleep(60)

    async def leave() -> None:
        reply = await served.service.complete(body)
        await asyncio.wait_for(reply({"type": "http", "asgi": {"spec_version": "2.3"}}, gone, nowhere), 30)
        reply = await served.service.complete(body)
        del reply  # not even begun

    loop = served.service.engine._loop
    asyncio.run_coroutine_threadsafe(leave(), loop).result(60)
    settle(served)


def test_a_slow_client_gets_all_of_it_in_fewer_pieces(served: Served) -> None:
    """What is waiting for it does not pile up."""

    async def slowly() -> tuple[int, str]:
        pieces, text = 0, ""
        prompt = {"prompt_token_ids": [40]}
        params = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
        from freewheel.server.protocol import CompletionRequest

        outputs = served.service.run([prompt], params, CompletionRequest(prompt="("))  # type: ignore[list-item]
        async for _, output in outputs:
            pieces += 1
            text += output.delta
            await asyncio.sleep(0.05)
            while served.engine.has_unfinished:
                await asyncio.sleep(0.05)
        return pieces, text

    loop = served.service.engine._loop
    pieces, text = asyncio.run_coroutine_threadsafe(slowly(), loop).result(60)
    whole = served.client.completions.create(
        model="tiny", prompt=[40], max_tokens=200, seed=1, extra_body={"ignore_eos": True}
    )
    assert text == whole.choices[0].text
    assert pieces < 10


def during(served: Served, work: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]) -> int:
    """Do it while /health is asked and another stream is read; both have to go on. How often the first answered."""
    beats = 0

    async def heartbeat(client: httpx.AsyncClient) -> None:
        nonlocal beats
        while True:
            assert (await client.get("/health")).status_code == 200
            beats += 1
            await asyncio.sleep(0.005)

    async def stream(client: httpx.AsyncClient) -> None:
        while True:
            ids = [chunk async for chunk in lines_of(client, "/v1/completions", ENDLESS)]
            assert ids[-1]["choices"][0]["finish_reason"] == "length"

    async def all_of_it() -> None:
        async with connected(served) as client:
            others = [asyncio.create_task(other(client)) for other in (heartbeat, stream)]
            try:
                await asyncio.wait_for(work(client), 60)
            finally:
                for other in others:
                    other.cancel()
                ends = await asyncio.gather(*others, return_exceptions=True)
            assert [type(end) for end in ends] == [asyncio.CancelledError] * 2

    asyncio.run(all_of_it())
    return beats


MB = 10**6
MANY = 100_000
WORDS = "one, two " * (5 * MB // 9)
LARGE: dict[str, tuple[str, Any, str]] = {
    "a chat": (
        "chat/completions",
        {"messages": [{"role": "user", "content": WORDS}]},
        "messages",
    ),
    "many messages": ("chat/completions", {"messages": [{"role": "user", "content": "a"}] * MANY}, "objects"),
    "some messages": ("chat/completions", {"messages": [{"role": "user", "content": "a"}] * 2049}, "messages"),
    "an input": ("responses", {"input": WORDS}, "input"),
    "a text": ("completions", {"prompt": WORDS}, "prompt"),
    "token ids": ("completions", {"prompt": [1] * MANY}, "prompt"),
    "no token ids": ("completions", {"prompt": [None] * MANY}, "prompt"),
    "prompts": ("completions", {"prompt": ["a"] * MANY}, "prompt"),
    "lists": ("completions", {"prompt": [[]] * MANY}, "objects and lists"),
    "unknown fields": ("completions", {"prompt": "a"} | {f"field{number}": 1 for number in range(MANY)}, "field0"),
    "biases": ("completions", {"prompt": "a", "logit_bias": {str(id): 1 for id in range(MANY)}}, "logit_bias"),
    "stops": ("completions", {"prompt": "a", "stop": ["a"] * MANY}, "stop"),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_far_too_large_is_refused_while_others_go_on(roomy: Served, name: str) -> None:
    """Above the limit before it is read, and below it for what is wrong with it; the answer stays small."""
    path, body, words = LARGE[name]
    data = json.dumps(body).encode()

    async def refused(client: httpx.AsyncClient) -> None:
        got = await client.post(f"/v1/{path}", content=data, headers=JSON)
        assert got.status_code == 400
        assert words in got.json()["error"]["message"]
        assert len(got.content) < 1000

    assert during(roomy, refused) > 0


def test_no_more_is_tokenised_than_a_prompt_may_have(roomy: Served) -> None:
    got = httpx.post(f"{roomy.url}/tokenize", json={"prompt": WORDS})
    assert (got.status_code, got.json()["error"]["param"]) == (400, "prompt")
    assert "more than the longest sequence" in got.json()["error"]["message"]
    assert httpx.post(f"{roomy.url}/tokenize", json={"prompt": "one " * 1000}).json()["count"] > 1000


def test_a_body_above_the_limit_is_not_even_read(served: Served) -> None:
    async def refused(client: httpx.AsyncClient) -> None:
        got = await client.post("/v1/chat/completions", content=b" " * 5 * MB, headers=JSON)
        assert got.status_code == 413
        assert "larger than the limit" in got.json()["error"]["message"]

    during(served, refused)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "a", "n": 4, "logprobs": 200}),
        ("completions", {"prompt": [40] * 200, "echo": True, "logprobs": 200, "stream": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 200}),
        ("responses", {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 200, "stream": True}),
    ],
)
def test_many_log_probabilities_hold_nobody_up(roomy: Served, path: str, body: dict[str, Any]) -> None:
    async def asked(client: httpx.AsyncClient) -> None:
        length = {"max_output_tokens" if path == "responses" else "max_tokens": 50}
        got = await client.post(f"/v1/{path}", json=body | length | {"ignore_eos": True})
        assert got.status_code == 200
        assert len(got.content) > 200 * 50 * 10

    during(roomy, asked)


def test_a_full_server_says_so_before_any_work_and_takes_requests_again(tiny_model: Path) -> None:
    with serving(tiny_model, {"max_num_seqs": 1}, max_requests=3) as server:

        async def fill() -> None:
            async with connected(server) as client:
                streams = [lines_of(client, "/v1/completions", ENDLESS | {"n": 50}) for _ in range(3)]
                waiting = [asyncio.create_task(anext(stream)) for stream in streams]  # type: ignore[arg-type]
                while server.service.active < 3:
                    await asyncio.sleep(0.005)
                asked: list[Any] = [("completions", {"prompt": "a"}), ("responses", {"input": "a"})]
                asked.append(("chat/completions", {"messages": [{"role": "user", "content": "a"}]}))
                for path, body in asked:
                    got = await client.post(f"/v1/{path}", json=body)
                    assert (got.status_code, got.headers["retry-after"]) == (429, "1")
                for task in waiting:
                    task.cancel()
                await asyncio.gather(*waiting, return_exceptions=True)

        asyncio.run(fill())
        settle(server)
        assert server.client.completions.create(model="tiny", prompt="Hi", max_tokens=1).choices


def test_the_more_urgent_comes_first(tiny_model: Path) -> None:
    ended: list[str] = []
    with serving(tiny_model, {"max_num_seqs": 1}) as server:

        async def ask(client: httpx.AsyncClient, name: str, priority: int) -> None:
            body = {"prompt": name, "max_tokens": 3, "ignore_eos": True, "priority": priority}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            ended.append(name)

        async def ask_in_turn() -> None:
            async with connected(server) as client:
                endless = lines_of(client, "/v1/completions", ENDLESS | {"n": 100, "priority": -9})
                await anext(endless)
                waiting = server.engine.num_waiting
                asked: list[asyncio.Task[None]] = []
                for number, (name, priority) in enumerate({"late": 5, "soon": 1, "now": -1, "later": 5}.items(), 1):
                    asked.append(asyncio.create_task(ask(client, name, priority)))
                    while len(server.engine._requests) <= number:
                        await asyncio.sleep(0.001)
                assert waiting > 0
                await endless.aclose()  # type: ignore[attr-defined]
                await asyncio.gather(*asked)

        async def in_time() -> None:
            await asyncio.wait_for(ask_in_turn(), 60)

        asyncio.run(in_time())
        settle(server)
    assert ended == ["now", "soon", "late", "later"]


def test_prompts_that_begin_alike_get_what_they_get_without_a_cache(tiny_model: Path) -> None:
    """Started together, in chunks, with many short ones that take pages again as they are let go."""
    beginning = [number * 7 % 250 for number in range(150)]
    prompts = [[*beginning, *range(number, number + 9)] for number in range(6)]
    prompts += [[number, 3, number] for number in range(60)] + [[*beginning, number] for number in range(6)]
    body = {"max_tokens": 20, "ignore_eos": True, "seed": 1, "return_token_ids": True}
    answers = []
    for caching in (True, False):
        sizes = {"enable_prefix_caching": caching, "max_num_batched_tokens": 40, "kv_cache_memory": 2**18}
        with serving(tiny_model, sizes) as server:
            step, engine = server.engine.step, server.engine

            def checked(step: Any = step, engine: Any = engine) -> Any:
                outputs = step()
                engine.check()
                return outputs

            engine.step = checked  # type: ignore[method-assign]

            async def ask_all(server: Served = server) -> list[Any]:
                async with connected(server) as client:
                    asked = [client.post("/v1/completions", json=body | {"prompt": prompt}) for prompt in prompts]
                    return [reply.json() for reply in await asyncio.gather(*asked)]

            answers.append(asyncio.run(ask_all()))
            settle(server)
    cached, plain = ([reply["choices"][0]["token_ids"] for reply in replies] for replies in answers)
    assert cached == plain
    used = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in answers[0]]
    assert sum(used) > 9 * len(beginning)


def test_who_waits_too_long_is_told_so(tiny_model: Path) -> None:
    with serving(tiny_model, {"max_num_seqs": 1}, timeout=0.4) as server:

        async def wait() -> None:
            async with connected(server) as client:
                first = asyncio.create_task(client.post("/v1/completions", json=ENDLESS | {"n": 200}))
                while not server.engine.num_running:
                    await asyncio.sleep(0.005)
                for stream in (False, True):
                    got = await client.post("/v1/completions", json=ENDLESS | {"stream": stream, "n": 200})
                    assert (got.status_code, "longer than" in got.text) in ((504, True), (200, True))
                assert "longer than" in (await first).text

        asyncio.run(wait())
        settle(server)
