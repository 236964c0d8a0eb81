"""An engine in a process of its own: the same replies, and an end whoever ends."""

import asyncio
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from freewheel import LLM, SamplingParams
from freewheel.config import EngineConfig
from freewheel.engine.async_engine import AsyncEngine
from freewheel.engine.build import build_engine
from freewheel.engine.loop import EngineDeadError, Step
from freewheel.engine.outputs import RequestOutput
from freewheel.engine.process import EngineProcess, Load, Messages, _Outlet, packed
from freewheel.models import ModelError
from freewheel.models.load import load, load_tokenizer
from freewheel.request import Stats, StepOutput

CONFIG = EngineConfig(max_num_seqs=8)
LONG = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)
SEEDED: dict[str, Any] = {"seed": 3, "max_tokens": 10, "ignore_eos": True}
ASKED: list[tuple[Any, SamplingParams]] = [
    ("Once upon a time", SamplingParams(**SEEDED)),
    ("Once upon a time", SamplingParams(n=3, logprobs=2, prompt_logprobs=1, **SEEDED)),
    ([5] * 200, SamplingParams(n=8, logprobs=200, prompt_logprobs=200, **SEEDED)),  # some 2 MB
    ([7, 8, 9], SamplingParams(max_tokens=0, prompt_logprobs=0)),
    ("the", SamplingParams(bad_words=["he"], logit_bias={40: 1.5}, allowed_token_ids=range(30, 60), **SEEDED)),
    ("a", SamplingParams(temperature=0, max_tokens=20, stop_token_ids=list(range(0, 250, 3)))),
]  # fmt: skip


def spawned(path: Path, **options: Any) -> EngineProcess:
    return EngineProcess(Load(path, CONFIG, dtype="float32", threads=1, **options))


async def ask(engine: AsyncEngine, prompt: Any, params: SamplingParams, **options: Any) -> RequestOutput:
    outputs = [output async for output in engine.generate(prompt, params, **options)]
    return outputs[-1]


def gist(output: RequestOutput) -> list[Any]:
    """What is the same whoever else is in the batch."""
    return [(one.text, one.token_ids, one.finish_reason, one.stop_reason, one.error) for one in output.outputs]


def scores(output: RequestOutput) -> list[float]:
    """Log probabilities: how many there are of each token, and the token's own."""
    entries = [list(zip(output.prompt_token_ids, output.prompt_logprobs or ()))[1:]]
    entries += [list(zip(one.token_ids, one.logprobs or ())) for one in output.outputs]
    pairs = [(id, entry) for some in entries for id, entry in some if entry is not None]
    return [value for id, entry in pairs for value in (len(entry), entry[id].logprob)]


async def until(holds: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not holds():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), 120)


async def ask_all(engine: AsyncEngine) -> list[RequestOutput]:
    """All at once, and one more that is cut by a stop string which its text is known to have."""
    outputs = await asyncio.gather(*(ask(engine, prompt, params) for prompt, params in ASKED))
    stop = outputs[0].outputs[0].text[4:6]
    return [*outputs, await ask(engine, ASKED[0][0], SamplingParams(stop=stop, **SEEDED))]


def test_replies_are_those_of_a_thread_and_of_the_offline_api(tiny_model: Path) -> None:
    async def in_process() -> list[RequestOutput]:
        with spawned(tiny_model) as process:
            process.wait()
            async with AsyncEngine(process, load_tokenizer(tiny_model)) as engine:
                outputs = await ask_all(engine)
                with pytest.raises(ValueError, match="longest sequence is 256"):
                    await ask(engine, [1] * 300, LONG)
                streams = [asyncio.create_task(ask(engine, "a", LONG, request_id=str(i))) for i in range(20)]
                await until(lambda: engine.stats.waiting > 0)
                assert engine.stats.running == 8
                for i in range(20):
                    engine.abort(str(i))
                ends = await asyncio.gather(*streams)
                assert {end.outputs[0].finish_reason for end in ends} == {"abort"}
                await until(lambda: engine.stats[:2] == (0, 0) and not engine.stats.pages_in_use)
            assert process._process.poll() == 0, "it ended by itself, and well"
        return outputs

    async def in_thread() -> list[RequestOutput]:
        model = load(tiny_model, dtype="float32")
        async with AsyncEngine(build_engine(model, CONFIG), model.tokenizer) as engine:
            return await ask_all(engine)

    outputs, expected = asyncio.run(in_process()), asyncio.run(in_thread())
    assert outputs[-1].outputs[0].stop_reason is not None
    for output, other in zip(outputs, expected):
        assert gist(output) == gist(other)
        assert scores(output) == pytest.approx(scores(other), abs=1e-4)
    with LLM(tiny_model, dtype="float32") as llm:
        offline = llm.generate([ASKED[0][0]], ASKED[0][1], use_tqdm=False)
    assert offline[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_signals_leave_it_alone_but_for_the_last_one(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(process: EngineProcess) -> None:
        async with AsyncEngine(process, load_tokenizer(tiny_model)) as engine:
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(process.pid, number)
                assert (await ask(engine, "a", SamplingParams(max_tokens=3))).outputs[0].error is None
            assert not engine.dead
            many = SamplingParams(n=500, **SEEDED)
            streams = [asyncio.create_task(ask(engine, "a", many)) for _ in range(3)]
            await until(lambda: engine.stats.running > 0)
            os.kill(process.pid, signal.SIGKILL)
            for output in await asyncio.gather(*streams):
                assert output.finished
                assert "ended by SIGKILL" in (output.outputs[-1].error or "")
            assert engine.dead
            assert engine.stats.running == engine.stats.waiting == 0
            with pytest.raises(EngineDeadError, match="ended by SIGKILL"):
                await ask(engine, "a", LONG)

    with spawned(tiny_model) as process:
        process.wait()
        asyncio.run(scenario(process))
    assert "ended by SIGKILL" in caplog.text


def test_what_cannot_be_loaded_is_said_as_in_one_process(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    wrong: list[tuple[Callable[[], Any], Callable[[], EngineProcess], type[Exception]]] = [
        (lambda: load(broken), lambda: spawned(broken), ModelError),
        (lambda: load(tiny_model, device="tpu"), lambda: spawned(tiny_model, device="tpu"), ValueError),
    ]
    for here, there, kind in wrong:
        with pytest.raises(kind) as expected:
            here()
        with pytest.raises(kind) as told, there() as process:
            process.wait()
        assert str(told.value) == str(expected.value)


def test_it_may_end_while_it_loads(tiny_model: Path) -> None:
    with spawned(tiny_model) as process:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="ended by SIGKILL before its model was loaded"):
            process.wait()


def test_it_ends_when_nobody_is_left_to_work_for(tiny_model: Path) -> None:
    process = spawned(tiny_model)
    process._socket.close()
    assert process._process.wait(60) == 1


def test_steps_do_not_wait_for_a_slow_reader() -> None:
    step = Step([StepOutput(str(i), 0, [i]) for i in range(32)], Stats(32))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outlet = _Outlet(theirs)
        for _ in range(2000):  # more than any socket's buffer
            outlet.tell(step, False)
        end = threading.Thread(target=outlet.tell, args=(Step([], Stats()), True))
        end.start()
        got: list[Any] = []
        messages = Messages()
        while not got or got[-1].outputs:
            got += messages.add(ours.recv(1 << 16))
        end.join()
    assert got == [step] * 2000 + [Step([], Stats())]


def test_messages_may_be_cut_anywhere() -> None:
    sent = [Step([], Stats(1, 2, 3)), Step([StepOutput("a", 0, [1])], Stats()), None]
    data = b"".join(map(packed, sent))
    for size in range(1, len(data) + 1):
        messages, got = Messages(), []
        for start in range(0, len(data), size):
            got += messages.add(data[start : start + size])
        assert got == sent
