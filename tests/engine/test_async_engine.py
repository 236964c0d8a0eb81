"""The asynchronous engine: streams side by side, readers that vanish, and a step that raises."""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from bytes_tokenizer import BytesTokenizer
from mock_model import Collected, make_engine, make_request, run

from freewheel.engine.async_engine import AsyncEngine, EngineDeadError
from freewheel.engine.engine import Engine
from freewheel.engine.limits import Limits
from freewheel.engine.outputs import RequestOutput
from freewheel.grammar import Compiler
from freewheel.request import Request
from freewheel.sampling import Grammar, SamplingParams

TOKENIZER: Any = BytesTokenizer()
LONG = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on a loop of its own, within a minute."""

    def wrapper(**arguments: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**arguments), 60))

    wrapper.__name__, wrapper.__doc__ = test.__name__, test.__doc__
    wrapper.__dict__.update(test.__dict__)
    return wrapper


async def read(engine: AsyncEngine, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
    deltas, output = "", None
    async for output in engine.generate(prompt, params, **options):
        deltas += output.delta
    assert output is not None
    assert output.finished
    assert deltas == output.outputs[0].text
    return output


async def settle(engine: Engine) -> None:
    """Wait until the engine has nothing to do, then check that nothing is in use."""
    while engine.has_unfinished:
        await asyncio.sleep(0.005)
    engine.check()
    assert engine._cache.available == engine._pool.num_pages


@asynchronous
async def test_streams_side_by_side_get_what_they_get_alone() -> None:
    requests = {f"r{i}": make_request(f"r{i}", [i, 1, 2], seed=i, max_tokens=12, ignore_eos=True) for i in range(20)}
    expected: dict[str, Collected] = {}
    for name, request in requests.items():
        expected[name] = run(make_engine()[0], [request])[name, 0]
    engine, _ = make_engine(slots=6)
    async with AsyncEngine(engine, TOKENIZER) as running:
        reads = [read(running, list(r.prompt_ids), r.params, request_id=name) for name, r in requests.items()]
        for output in await asyncio.gather(*reads):
            assert output.outputs[0].token_ids == expected[output.request_id].tokens
        await settle(engine)


@asynchronous
async def test_a_slow_reader_gets_the_end_too() -> None:
    engine, _ = make_engine()
    async with AsyncEngine(engine, TOKENIZER) as running:
        outputs = []
        async for output in running.generate("ab", LONG):
            outputs.append(output)
            await settle(engine)
            await asyncio.sleep(0.01)  # so that all news is in
        assert outputs[-1].finished
        assert "".join(output.delta for output in outputs) == outputs[-1].outputs[0].text


@asynchronous
async def test_stop_strings_end_the_work_too() -> None:
    engine, _ = make_engine()
    async with AsyncEngine(engine, TOKENIZER) as running:
        free = await read(running, "ab", LONG)
        stop = free.outputs[0].text[3:5]
        params = SamplingParams(max_tokens=None, ignore_eos=True, seed=1, stop=stop)
        output = await read(running, "ab", params)
        assert output.outputs[0].stop_reason == stop
        assert output.outputs[0].text == free.outputs[0].text[: free.outputs[0].text.index(stop)]
        await settle(engine)


@asynchronous
async def test_a_reader_that_breaks_off_or_is_cancelled_aborts_its_request() -> None:
    engine, decoder = make_engine(max_model_len=400, pages=400)
    decoder.before = lambda batch: threading.Event().wait(0.002)
    async with AsyncEngine(engine, TOKENIZER) as running:
        stream = running.generate("ab", LONG)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        task = asyncio.create_task(read(running, "cd", LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle(engine)
        assert max(batch.kv_lengths[0] for batch in decoder.batches) < 300


@asynchronous
async def test_abort_from_another_thread() -> None:
    engine, decoder = make_engine(max_model_len=400, pages=400)
    decoder.before = lambda batch: threading.Event().wait(0.002)
    async with AsyncEngine(engine, TOKENIZER) as running:
        reader = asyncio.create_task(read(running, "ab", LONG, request_id="mine"))
        await asyncio.sleep(0.05)
        thread = threading.Thread(target=running.abort, args=("mine",))
        thread.start()
        output = await reader
        thread.join()
        assert output.outputs[0].finish_reason == "abort"
        assert (await read(running, "ab", SamplingParams(), request_id="mine")).outputs[0].finish_reason != "abort"
        running.abort("nobody")
        await settle(engine)


class Slow(BytesTokenizer):
    """Says when it has begun, and takes its time."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.begun.set()
        assert self.go_on.wait(30)
        return super().encode(text, add_special_tokens)


@asynchronous
async def test_abort_while_the_request_is_being_prepared() -> None:
    engine, decoder = make_engine()
    slow: Any = Slow()
    async with AsyncEngine(engine, slow) as running:
        params = SamplingParams(max_tokens=1, n=3, ignore_eos=True)
        reader = asyncio.create_task(read(running, "ab", params, request_id="mine"))
        await asyncio.to_thread(slow.begun.wait)
        running.abort("mine")
        await asyncio.sleep(0)
        slow.go_on.set()
        output = await reader
        assert [choice.finish_reason for choice in output.outputs] == ["abort"] * 3
        assert decoder.batches == []
        assert (await read(running, "ab", params, request_id="mine")).outputs[0].finish_reason == "length"


@asynchronous
async def test_a_name_is_in_use_from_the_moment_that_it_is_asked_for() -> None:
    engine, _ = make_engine()
    slow: Any = Slow()
    async with AsyncEngine(engine, slow) as running:
        reader = asyncio.create_task(read(running, "ab", SamplingParams(), request_id="mine"))
        await asyncio.to_thread(slow.begun.wait)
        with pytest.raises(ValueError, match="request_id 'mine' is in use"):  # while "ab" is held up: before encoding
            await read(running, "cd", SamplingParams(), request_id="mine")
        reader.cancel()
        slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reader
        with pytest.raises(ValueError, match="prompt is empty"):
            await read(running, "", SamplingParams(), request_id="mine")
        await read(running, "ab", SamplingParams(), request_id="mine")


@asynchronous
async def test_a_name_is_a_string() -> None:
    async with AsyncEngine(make_engine()[0], TOKENIZER) as running:
        for name in (5, b"mine", ["mine"]):
            with pytest.raises(ValueError, match="request_id must be a string"):
                await read(running, "ab", SamplingParams(), request_id=name)


@asynchronous
async def test_a_step_that_raises_ends_everyone_with_a_reply() -> None:
    engine, decoder = make_engine(slots=2)

    def fail(batch: Any) -> None:
        if engine.num_running + engine.num_waiting == 6:  # all have come: whoever comes later is told so at once
            raise RuntimeError("device lost")

    decoder.before = fail
    async with AsyncEngine(engine, TOKENIZER) as running:
        outputs = await asyncio.gather(*(read(running, "ab", LONG) for _ in range(6)))
        for output in outputs:
            assert output.outputs[0].finish_reason == "error"
            assert "device lost" in (output.outputs[0].error or "")
        with pytest.raises(EngineDeadError, match="device lost"):
            await read(running, "ab", LONG)


@asynchronous
async def test_closing_ends_everyone_with_a_reply() -> None:
    engine, decoder = make_engine(max_model_len=400, pages=400)
    decoder.before = lambda batch: threading.Event().wait(0.002)
    async with AsyncEngine(engine, TOKENIZER) as running:
        readers = [asyncio.create_task(read(running, "ab", LONG)) for _ in range(3)]
        await asyncio.sleep(0.05)
    for output in await asyncio.gather(*readers):
        assert output.outputs[0].error == "the engine was closed"
    with pytest.raises(EngineDeadError, match="closed"):
        await read(running, "ab", LONG)


@asynchronous
async def test_refusals_reach_the_caller_and_nobody_else() -> None:
    engine, _ = make_engine()
    async with AsyncEngine(engine, TOKENIZER) as running:
        reader = asyncio.create_task(read(running, "ab", LONG, request_id="a"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="prompt is empty"):
            await read(running, "", LONG)
        with pytest.raises(ValueError, match="longest sequence"):
            await read(running, [1] * 100, LONG)
        assert (await reader).outputs[0].finish_reason == "length"
        await settle(engine)


@asynchronous
async def test_a_request_is_prepared_off_the_loop() -> None:
    engine, _ = make_engine()
    threads = []

    class Watched(BytesTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            threads.append(threading.get_ident())
            return super().encode(text, add_special_tokens)

        @property
        def leading_spaces(self) -> int:  # type: ignore[override]
            threads.append(threading.get_ident())
            return 0

    class Strict(Limits):
        def validate(self, request: Request, grammars: Compiler | None) -> Request:
            threads.append(threading.get_ident())
            return super().validate(request, grammars)

    engine.limits = Strict(**vars(engine.limits))
    watched: Any = Watched()
    async with AsyncEngine(engine, watched) as running:
        await read(running, "ab", SamplingParams())
        assert len(threads) == 3  # tokenised, checked, and made ready for its text
        assert threading.get_ident() not in threads


@asynchronous
async def test_a_name_in_use_is_refused_and_automatic_names_are_nobodys() -> None:
    engine, decoder = make_engine(max_model_len=400, pages=400, slots=16)
    decoder.before = lambda batch: threading.Event().wait(0.002)
    async with AsyncEngine(engine, TOKENIZER) as running:
        mine = [asyncio.create_task(read(running, "ab", LONG, request_id=str(i))) for i in range(6, 14)]
        await asyncio.sleep(0.05)
        with pytest.raises(ValueError, match="request_id '7' is in use"):
            await read(running, "ab", LONG, request_id="7")
        short = SamplingParams(max_tokens=1)
        outputs = await asyncio.gather(*(read(running, "ab", short) for _ in range(8)))
        assert len({output.request_id for output in outputs}) == 8
        for i in range(6, 14):
            running.abort(str(i))
        assert {output.outputs[0].finish_reason for output in await asyncio.gather(*mine)} == {"abort"}
        await settle(engine)


@asynchronous
async def test_it_is_entered_once() -> None:
    engine, decoder = make_engine()

    def fail(batch: Any) -> None:
        raise RuntimeError("device lost")

    decoder.before = fail
    running = AsyncEngine(engine, TOKENIZER)
    async with running:
        assert (await read(running, "ab", LONG)).outputs[0].finish_reason == "error"
    with pytest.raises(RuntimeError, match="entered only once"):
        await running.__aenter__()
    with pytest.raises(EngineDeadError, match="device lost"):
        await read(running, "ab", LONG)


@asynchronous
async def test_stop_strings_end_each_choice_where_it_alone_would_end() -> None:
    engine, _ = make_engine()
    params = {"max_tokens": 30, "ignore_eos": True, "seed": 1, "n": 4, "logprobs": 1}
    async with AsyncEngine(engine, TOKENIZER) as running:
        free = await read(running, "ab", SamplingParams(**params))
        stops = [choice.text[5:7] for choice in free.outputs[:3]]
        output = await read(running, "ab", SamplingParams(**params, stop=stops))
        for got, whole in zip(output.outputs, free.outputs):
            found = [whole.text.find(stop) for stop in stops if stop in whole.text]
            assert got.text == whole.text[: min(found, default=None)]
            assert (got.stop_reason in stops) == bool(found)
            assert whole.logprobs is not None
            assert got.logprobs == whole.logprobs[: len(got.token_ids)]
        await settle(engine)


@asynchronous
async def test_200_rounds_of_readers_that_vanish_leave_nothing_in_use() -> None:
    rng = random.Random(0)
    engine, _ = make_engine(slots=4, pages=24, max_model_len=48, budget=16)
    async with AsyncEngine(engine, TOKENIZER) as running:

        async def reader(number: int) -> None:
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 30))]
            params = SamplingParams(max_tokens=rng.randint(1, 15), n=rng.choice([1, 1, 3]))
            patience = rng.randint(0, 10)
            stream = running.generate(prompt, params, priority=number % 2)
            async for output in stream:
                patience -= 1
                if patience < 0 and not output.finished:
                    break
            await stream.aclose()  # type: ignore[attr-defined]

        tasks = []
        for number in range(200):
            task = asyncio.create_task(reader(number))
            tasks.append(task)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.005)
                task.cancel()
            if number % 8 == 0:
                await asyncio.gather(task, return_exceptions=True)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} == {type(None), asyncio.CancelledError}
        await settle(engine)
        assert not running._active
        assert not running._names


@asynchronous
async def test_whose_grammar_waits_to_be_compiled_is_told_that_the_engine_closed() -> None:
    go_on, began = threading.Event(), threading.Event()

    class Slow(Compiler):
        def compile(self, grammar: Grammar) -> Any:
            began.set()
            go_on.wait(30)
            return super().compile(grammar)

    engine, _ = make_engine()
    engine.grammars = Slow(TOKENIZER, engine.limits.logits)
    params = SamplingParams(max_tokens=4, grammar=Grammar.regex("a*"))
    async with AsyncEngine(engine, TOKENIZER) as running:
        waiting = [asyncio.create_task(read(running, [1], params)) for _ in range(6)]
        await asyncio.to_thread(began.wait, 30)
    go_on.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [EngineDeadError] * 6
    for asked in (params, LONG):
        with pytest.raises(EngineDeadError, match="closed"):
            await read(running, [1], asked)
