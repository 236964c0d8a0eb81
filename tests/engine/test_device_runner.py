"""An engine whose steps are run by kernels gives the answers of one whose steps are run by torch."""

import json
import shutil
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freewheel.cache.pool import KVPool
from freewheel.config import MOST_LOOKAHEAD, EngineConfig
from freewheel.engine.build import build_engine, runner_for
from freewheel.engine.drafting import DeviceDrafting
from freewheel.engine.engine import Engine
from freewheel.engine.runner import InFlight, Runner, Span
from freewheel.models.decoder import kv_cache_shape
from freewheel.models.load import load
from freewheel.request import Request
from freewheel.sampling import SamplingParams, SamplingState

pytest.importorskip("triton", reason="Triton is made for Linux only")

from mock_model import Collected, collect, run

from freewheel.engine import buckets, device_runner, step
from freewheel.engine.buckets import chunk_sizes
from freewheel.engine.device_runner import DeviceRunner
from freewheel.engine.ring import Outbox

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


pytestmark = pytest.mark.usefixtures("few_programs")


def make_engine(
    path: Path, device: str, runner: type[Runner], lookahead: int = 0, pages: int = 24, **options: Any
) -> Engine:
    model = load(path, dtype="float32", device=device)
    spec = model.spec
    storage = torch.zeros(spec.num_layers, *kv_cache_shape(spec, pages, 4), device=device)
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=12,
        page_size=4,
        lookahead=lookahead,
        fused=runner is DeviceRunner,
        **{"speculation": False, **options},
    )
    return Engine(
        model.decoder,
        KVPool(storage, slots=4),
        config,
        max_model_len=32,
        vocab_size=spec.vocab_size,
        valid_vocab_size=model.tokenizer.vocab_size,
        runner=runner_for(config, device),
    )


def requests() -> list[Request]:
    asked: list[tuple[int, dict[str, Any]]] = [
        (9, {"temperature": 0.0, "max_tokens": 4}),
        (3, {"top_p": 0.9, "max_tokens": 6, "logprobs": 2}),
        (14, {"n": 2, "max_tokens": 3, "frequency_penalty": 0.5}),
        (5, {"max_tokens": 2, "prompt_logprobs": 1}),
        (2, {"max_tokens": 1}),
    ]
    return [
        Request(f"r{i}", tuple(range(10 + i, 10 + i + length)), SamplingParams(seed=i, ignore_eos=True, **fields))
        for i, (length, fields) in enumerate(asked)
    ]


def test_cuda_devices_get_this_runner_unless_kernels_are_not_wanted() -> None:
    given = runner_for(EngineConfig(graphs=False, max_num_batched_tokens=300), "cuda")
    assert isinstance(given, partial)
    assert (given.func, given.keywords) == (DeviceRunner, {"graphs": False, "most_rows": 300})
    assert runner_for(EngineConfig(fused=False), "cuda") is Runner
    assert runner_for(EngineConfig(), "cpu") is Runner


@pytest.mark.parametrize("lookahead", [0, 3])
def test_answers_are_those_of_torch(tiny_model: Path, lookahead: int) -> None:
    expected = run(make_engine(tiny_model, "cpu", Runner), requests())
    engine = make_engine(tiny_model, DEVICE, DeviceRunner, lookahead)
    names = []
    for name, prepare in engine.preparations():
        if lookahead == 0:
            prepare()
        names.append(name)
    assert names == ["prompts", *(f"steps of up to {rows} rows" for rows in (4, 2, 1))]
    got = run(engine, requests())
    assert {key: one.tokens for key, one in got.items()} == {key: one.tokens for key, one in expected.items()}
    for key, one in expected.items():
        assert got[key].finish_reason is one.finish_reason
        for mine, other in zip(got[key].logprobs, one.logprobs, strict=True):
            assert mine.token_ids == other.token_ids
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        for mine, other in zip((got[key].prompt_logprobs or [])[1:], (one.prompt_logprobs or [])[1:], strict=True):
            assert mine.token_ids == other.token_ids
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def test_a_step_that_fails_in_part_changes_no_other_answer(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its rows had got their token, and the penalties knew of it, when it failed."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5, max_tokens=8, ignore_eos=True)
    lasting = Request("a", (10, 11, 12, 13), params)
    expected = run(make_engine(tiny_model, "cpu", Runner), [lasting])["a", 0].tokens
    engine = make_engine(tiny_model, DEVICE, DeviceRunner)
    engine.add(lasting)
    collected: dict[tuple[str, int], Collected] = {}
    for _ in range(2):
        collect(engine.step(), collected)
    engine.add(Request("b", tuple(range(20, 26)), SamplingParams(temperature=0.0)))
    fails_once(engine, "_chunks", monkeypatch)
    engine.abort("b")
    while engine.has_unfinished:
        collect(engine.step(), collected)
        engine.check()
    assert collected["a", 0].tokens == expected


def test_a_step_that_fails_leaves_no_trace_on_the_device(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows may not have moved on: who comes next, to where they should be, starts where it is itself."""
    engine = make_engine(tiny_model, DEVICE, DeviceRunner)
    engine.add(Request("a", (10, 11, 12, 13), SamplingParams(temperature=0.0, ignore_eos=True)))
    for _ in range(2):
        engine.step()
    fails_once(engine, "_sample", monkeypatch)
    engine.abort("a")
    engine.step()
    following = Request("b", (20, 21, 22, 23, 24, 25), SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    expected = run(make_engine(tiny_model, "cpu", Runner), [following])["b", 0].tokens
    assert run(engine, [following])["b", 0].tokens == expected


def test_the_device_knows_the_pages_of_all_that_run(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of those who got other pages: from the prefix cache, after a preemption, after an upload that failed."""
    monkeypatch.setattr(device_runner, "MOST_SCATTERED", 2)
    engine = make_engine(tiny_model, DEVICE, DeviceRunner, pages=9)
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    for name, last in (("a", 10), ("b", 10), ("c", 30), ("d", 40)):
        prompt = (*range(10, 18), last)
        engine.add(Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)))
    fails_once(engine, "scatter", monkeypatch, Outbox)
    failed = engine.preemptions
    while engine.has_unfinished:
        engine.step()
        runner._upload_pages()  # as the next step would
        for sequence in engine._running.values():
            assert runner._page_table[sequence.slot, : len(sequence.pages)].tolist() == sequence.pages
    assert engine.preemptions > failed > 0


def decoding(path: Path, slots: int = 3) -> tuple[DeviceRunner, SamplingState]:
    """A runner whose slots hold sequences of 4 tokens, the last one drawn."""
    engine = make_engine(path, DEVICE, DeviceRunner)
    runner, state = engine.runner, engine._state
    assert isinstance(runner, DeviceRunner)
    for slot in range(slots):
        engine._pool.set_pages(slot, 0, list(range(6 * slot, 6 * slot + 6)))
        state.join(slot, SamplingParams(), [10 + slot, 11, 12], seed=slot)
    runner.launch([Span(slot, 0, 3, True) for slot in range(slots)]).result()
    return runner, state


class Decoding:
    """Launches steps of the sequences in some slots, and reads them late: each must bring what went to the history."""

    def __init__(self, runner: Runner, state: SamplingState) -> None:
        self._runner = runner
        self._state = state
        self._lengths = [4] * len(state.settings)
        self._flights: deque[tuple[list[Span], InFlight]] = deque()

    def launch(self, *slots: int) -> None:
        spans = [Span(slot, self._lengths[slot] - 1, 1, True) for slot in slots]
        self._flights.append((spans, self._runner.launch(spans)))
        for slot in slots:
            self._lengths[slot] += 1

    def read(self, left: int = 0) -> None:
        """All but the last ``left`` launches."""
        while len(self._flights) > left:
            spans, flight = self._flights.popleft()
            result = flight.result()
            assert result.tokens == [int(self._state.history[span.slot, span.start + 1]) for span in spans]
            assert result.statuses == [0] * len(spans)
            assert result.logprobs == [None] * len(spans)


SHORT = 3  # the most that an engine of these tests looks ahead: its rings come round sooner


@pytest.fixture
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_runner, "MOST_LOOKAHEAD", SHORT)


@pytest.mark.usefixtures("short_rings")
def test_results_are_those_of_their_launch_however_late_they_are_read(tiny_model: Path) -> None:
    steps = Decoding(*decoding(tiny_model))
    for slots in [(0,), (0, 1), (0, 1, 2), (2, 0), (2,), *[(1,)] * 4, (1, 2), (1, 0, 2)]:
        steps.launch(*slots)
        steps.read(SHORT)
    steps.read()


def set_buckets(monkeypatch: pytest.MonkeyPatch, *rows: int) -> None:
    for module in (buckets, device_runner):
        monkeypatch.setattr(module, "BUCKETS", rows)


@pytest.mark.usefixtures("short_rings")
def test_a_step_of_more_rows_than_a_graph_takes_has_a_place_for_each_part(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_buckets(monkeypatch, 1, 2)
    steps = Decoding(*decoding(tiny_model, slots=4))
    for _ in range(SHORT + 3):  # of 4 and 4 places
        steps.launch(0, 1, 2, 3)
        steps.read(SHORT)
    steps.read()


def test_results_that_were_overwritten_are_not_given(tiny_model: Path) -> None:
    steps = Decoding(*decoding(tiny_model, slots=1))
    for _ in range(MOST_LOOKAHEAD + 2):
        steps.launch(0)
    with pytest.raises(RuntimeError, match="more than 9 launches were in flight"):
        steps.read()
    steps.read()  # the others are there


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Graphs that are none: they run the same again."""
    graphs = []

    class Repeated:
        def __init__(self, run: Callable[[], Any], *_: object) -> None:
            self.replay, self.graph = run, self
            graphs.append(self)

    monkeypatch.setattr(device_runner, "capture", Repeated)
    return graphs


def test_chunks_are_captured_up_to_what_a_step_may_have() -> None:
    assert chunk_sizes(8192) == [16, 32, 64, 128, 256, 512, 1024]
    assert chunk_sizes(300) == [16, 32, 64, 128, 256, 512]
    assert chunk_sizes(256) == [16, 32, 64, 128, 256]
    assert chunk_sizes(1) == [16]


def test_chunks_are_captured_for_some_numbers_of_rows(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, captured: list[Any]
) -> None:
    """Here they have 12, 10, 9 and 4."""
    monkeypatch.setattr(device_runner, "MOST_WANTED", 3)
    expected = run(make_engine(tiny_model, "cpu", Runner), requests())
    engine = make_engine(tiny_model, DEVICE, DeviceRunner)
    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    runner._graphs = True
    runner._chunk_sizes = [4, 10]
    got = run(engine, requests())
    assert {key: one.tokens for key, one in got.items()} == {key: one.tokens for key, one in expected.items()}
    chunks = {rows: chunk.decoder for rows, chunk in runner._captured_chunks.items()}
    assert chunks.keys() == {4, 10}, "that of 12 rows goes without"
    assert all(decoder in captured for decoder in chunks.values())


def test_whole_steps_are_captured_for_demands_that_recur(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, captured: list[Any]
) -> None:
    monkeypatch.setattr(device_runner, "MOST_WHOLE", 1)
    runner, state = decoding(tiny_model)
    captured.clear()  # on a device, those of prompts
    runner._graphs = True
    steps = Decoding(runner, state)
    for params in [SamplingParams(), SamplingParams(top_k=3), SamplingParams()]:
        state.join(2, params, [12, 11, 12], seed=2)  # not in the step: what slots may ask counts
        for _ in range(device_runner.RARE):
            steps.launch(0)
        before = len(captured)
        steps.launch(0)
        steps.launch(0)
        assert len(captured) == before + 1
        assert [*runner._steps[1].graphs.whole.values()] == captured[-1:]
        steps.read()
    assert len(captured) == 4, "the decoder, and each demand"


def test_a_step_that_cannot_be_captured_is_launched_in_parts(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, captured: list[Any]
) -> None:
    """And said once; it is not tried again and again."""
    runner, state = decoding(tiny_model)
    runner._graphs = True
    steps, tried = Decoding(runner, state), []

    def fails(*_: object) -> None:
        tried.append(1)
        raise RuntimeError("out of memory")

    for _ in range(device_runner.RARE):
        steps.launch(0, 1)
    monkeypatch.setattr(device_runner, "capture", fails)
    with pytest.warns(UserWarning, match="could not be captured: out of memory"):
        steps.launch(0, 1)
    for _ in range(2):
        steps.launch(0, 1)
    assert len(tried) == 1
    steps.read()


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"speculation": True, "draft_nodes": 4}])
def test_graphs_and_look_ahead_change_no_token(
    copying_model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one, and no step waits for the device but for its results."""
    if options:
        plan = DeviceDrafting.nodes

        def nodes(drafting: DeviceDrafting, sequences: list[Any], most: Callable[[Any], int]) -> list[int]:
            plan(drafting, sequences, most)
            drafting.guessing = False
            return [min(3, most(sequence)) for sequence in sequences]

        monkeypatch.setattr(DeviceDrafting, "nodes", nodes)

    def make(graphs: bool, lookahead: int) -> Engine:
        config = EngineConfig(max_model_len=128, max_num_seqs=4, lookahead=lookahead, graphs=graphs, **options)
        return build_engine(model, config)

    model = load(copying_model, dtype="float32", device="cuda")
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 9, "top_p": 0.8},
        {"frequency_penalty": 0.5},
        {"logprobs": 2, "temperature": 0.3},
        {"min_p": 0.1, "logit_bias": {7: 1.0}},
    ]
    asked = [
        Request(f"r{i}", (5 + i, 6, 5 + i, 6), SamplingParams(seed=i, ignore_eos=True, max_tokens=30, **one))
        for i, one in enumerate(params)
    ]
    expected = {key: one.tokens for key, one in run(make(False, 0), asked).items()}
    ways = [(True, 1), (True, 3)] if options else [(True, 0), (True, 1), (True, 3), (False, 1)]
    for graphs, lookahead in ways:
        engine = make(graphs, lookahead)
        for _, prepare in engine.preparations():
            prepare()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = run(engine, asked)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert {key: one.tokens for key, one in got.items()} == expected


@pytest.mark.parametrize("kind", [Runner, DeviceRunner])
@pytest.mark.parametrize("bad_at", [8, 10])
def test_a_nan_in_a_prompt_stays_in_its_request(
    tiny_model: Path, kind: type[Runner], bad_at: int, tmp_path: Path
) -> None:
    """Rows before it are in the same chunk, and would be found by others that begin alike."""
    bad = 77
    shutil.copytree(tiny_model, folder := tmp_path / "sick")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][bad] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    def make() -> Engine:
        return make_engine(folder, DEVICE if kind is DeviceRunner else "cpu", kind)

    def request(name: str, prompt: list[int]) -> Request:
        return Request(name, tuple(prompt), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))

    sick, healthy = [*range(10, 10 + bad_at), bad, *range(11 + bad_at, 26)], [*range(10, 10 + bad_at), 40]
    engine = make()
    assert "NaN" in (run(engine, [request("sick", sick)])["sick", 0].error or "")
    expected = run(make(), [request("a", healthy)])["a", 0]
    assert expected.error is None
    got = run(engine, [request("a", healthy)])["a", 0]
    assert (got.tokens, got.error) == (expected.tokens, None)


@pytest.mark.parametrize("part", ["decoder", "results"])
def test_a_launch_that_fails_between_others_changes_none_of_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Before its rows have moved on, or after."""
    steps = Decoding(*decoding(tiny_model))
    for _ in range(2):
        steps.launch(0, 1)
    with monkeypatch.context() as broken:
        if part == "decoder":
            broken.setattr(DeviceRunner, "_sample", lambda *_: 1 / 0)
        else:
            broken.setattr(step, "on_its_way", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            steps.launch(0, 1)
    for slots in [(0, 1), (0, 1), (1,), (0, 1)]:
        steps.launch(*slots)
    steps.read()


@pytest.mark.usefixtures("short_rings")
@pytest.mark.parametrize("bucket", [1, 4])
def test_launches_that_fail_in_part_use_up_no_places(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    """However many: nobody reads what their other parts brought."""
    set_buckets(monkeypatch, bucket)
    runner, state = decoding(tiny_model)
    steps = Decoding(runner, state)
    for _ in range(SHORT):
        steps.launch(0, 1)
    with monkeypatch.context() as broken:
        broken.setattr(DeviceRunner, "_chunks", lambda *_: 1 / 0)
        for _ in range(len(runner._steps[bucket].ring.words)):
            with pytest.raises(ZeroDivisionError):
                runner.launch([*(Span(slot, 3 + SHORT, 1, True) for slot in (0, 1)), Span(2, 0, 3, True)])
    for slots in [(0, 1), (0, 1), (1,), (0, 1)]:
        steps.launch(*slots)
        steps.read(SHORT)
    steps.read()


def fails_once(engine: Engine, part: str, monkeypatch: pytest.MonkeyPatch, of: type = DeviceRunner) -> None:
    """A step in which this part of the runner, or of what it has, does not do its work."""
    with monkeypatch.context() as broken:
        broken.setattr(of, part, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
