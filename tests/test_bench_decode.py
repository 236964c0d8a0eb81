"""``freewheel bench decode``: what it measures, beside which floor."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from freewheel.bench import decode
from freewheel.bench.decode import DecodeResult, Failed, Loaded, floor_seconds, measure, plot
from freewheel.bench.shapes import SHAPES, STD, DummyWeights, dummy_model, shape_config, weight_shapes
from freewheel.bench.steps import (
    Activity,
    Between,
    Recorded,
    StepProfile,
    activities_of,
    between_graphs,
    host_seconds,
    profile_steps,
    since_mark,
    summarise,
    union,
    waits_of,
)
from freewheel.bench.systems import (
    SETTLED,
    Freewheel,
    FreewheelEngine,
    Reads,
    Setup,
    TransformersStatic,
    makers,
    random_transformers,
)
from freewheel.cli import main
from freewheel.models.spec import ModelSpec
from freewheel.sampling import Sampler, SampleRows, Samples

TINY = {
    "model_type": "qwen3",
    "vocab_size": 10_240,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
# Of the weights that the published checkpoints hold.
PARAMETERS = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-7b": 7_615_616_512,
}
SMALL = ["--batch", "1,3", "--prompt", "5", "--output", "4", "--repeats", "1"]
COLUMNS = {"tokens_per_s", "step_ms", "prompt_tokens_per_s", "first_token_ms", "load_s", "resident_mb"}


@pytest.fixture
def tiny_shape(tmp_path: Path) -> str:
    """A ``config.json``."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture
def setup(tiny_shape: str) -> Setup:
    return Setup(
        model="",
        shape=tiny_shape,
        dtype="float32",
        device="cpu",
        batch=3,
        prompt=5,
        output=40,
        sampling={"temperature": 0.0, "top_k": 0, "top_p": 1.0},
        engine={"lookahead": 1},
    )


def prompts(setup: Setup) -> list[list[int]]:
    return [[number * 7 + i for i in range(setup.prompt)] for number in range(setup.batch)]


# --- shapes


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_published_number_of_weights(name: str) -> None:
    assert sum(map(prod, weight_shapes(ModelSpec.from_config(SHAPES[name])).values())) == PARAMETERS[name]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "gemma3_text"])
def test_random_weights_are_all_that_a_decoder_takes(family: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"model_type": family, "tie_word_embeddings": family != "qwen2"}))
    model = dummy_model(str(path), "bfloat16", "cpu")
    assert model.decoder.dtype == torch.bfloat16
    assert model.tokenizer.vocab_size == TINY["vocab_size"]
    assert not model.tokenizer.eos_token_ids
    with pytest.raises(ValueError, match="no text"):
        model.tokenizer.encode("a")


def test_random_weights_are_those_of_a_new_model_and_the_same_every_time() -> None:
    spec = ModelSpec.from_config({**TINY, "model_type": "qwen2"})
    first, second = (DummyWeights(spec, torch.float32, torch.device("cpu")) for _ in range(2))
    embedding = first["model.embed_tokens.weight"]
    assert torch.equal(embedding, second["model.embed_tokens.weight"])
    assert embedding.std().item() == pytest.approx(STD, rel=0.02)
    assert embedding.mean().abs() < 1e-3
    down = [first[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in range(2)]
    assert not torch.equal(*down)
    assert first["model.norm.weight"].unique().tolist() == [1.0]
    assert first["model.layers.0.self_attn.q_proj.bias"].unique().tolist() == [0.0]


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="shape: 'other' is neither"):
        shape_config("other")


# --- the floor


def test_a_step_reads_weights_once_and_the_cache_of_each_row() -> None:
    spec = ModelSpec.from_config(TINY)
    reads = Reads.of(1000, spec, torch.bfloat16)
    token = 2 * 2 * 2 * 32 * 2  # layers, keys and values, heads, their size, bytes
    # The second token sees the prompt and the first, the last one all but itself.
    assert reads.cache_bytes(prompt=10, output=4) == token * (11 + 12 + 13) / 3
    assert reads.step_bytes(5, 10, 4) == 1000 + 5 * token * 12
    assert Reads(1000).step_bytes(5, 10, 4) == 1000


def test_a_window_bounds_what_is_read() -> None:
    assert Reads(0, ((8, None), (8, 12))).cache_bytes(prompt=10, output=4) == 8 * (12 + (11 + 12 + 12) / 3)


def test_the_floor_is_bytes_over_bandwidth() -> None:
    loaded = Loaded(1.0, 0.1, weight_bytes=1000, cache_bytes=10.0)
    assert floor_seconds(loaded, 8, 100.0, cache=True) == 10.8
    assert floor_seconds(loaded, 8, 100.0, cache=False) == 10.0
    assert floor_seconds(Loaded(1.0, None, None, None), 8, 100.0, cache=True) is None


# --- steps


def test_intervals_are_united() -> None:
    assert union([]) == []
    assert union([(5, 7), (0, 2), (1, 3), (3, 4), (5, 6)]) == [(0, 4), (5, 7)]


def test_a_profile_tells_what_ran_and_for_which_part_of_the_time() -> None:
    activities = [
        Activity("product", 1000, 3000, 7),
        Activity("draw", 2000, 4000, 7),  # beside the product
        Activity("Memcpy DtoH (Device -> Pinned)", 5000, 6000, 7),
        Activity("product", 9000, 11000, 8),
    ]
    profile = summarise(Recorded(activities, waits=1.5), batch=8, steps=2)
    assert (profile.batch, profile.steps) == (8, 2)
    assert (profile.kernels, profile.copies) == (1.5, 0.5)
    assert (profile.inside, profile.between, profile.occupancy) == (0.6, None, 0.6)
    assert profile.step_ms == pytest.approx(0.005)
    assert profile.longest_gap_us == 3.0
    assert list(profile.kernel_us) == ["product", "draw", "Memcpy DtoH (Device -> Pinned)"]
    assert profile.kernel_us["product"] == 2.0
    assert profile.kernel_counts["product"] == 1.0
    assert profile.waits == 1.5
    fed = summarise(Recorded(activities), 8, 2, Between(0.5, 7.0))  # the gap of 3 is outside of graphs
    assert (fed.inside, fed.occupancy) == (pytest.approx(4 / 5), pytest.approx(2 / 5))
    assert fed.step_ms == profile.step_ms
    with pytest.raises(RuntimeError, match="saw nothing"):
        summarise(Recorded(), 8, 2, Between(0.5, 7.0))
    assert (fed.between, fed.longest_gap_us) == (0.5, 7.0)
    with pytest.raises(RuntimeError, match="saw nothing"):
        summarise(Recorded(), batch=8, steps=2)


def test_gaps_between_graphs_are_those_between_their_events() -> None:
    @dataclass
    class Event:
        at: float  # milliseconds

        def elapsed_time(self, later: "Event") -> float:
            return later.at - self.at

    def between(*times: float) -> Between | None:
        return between_graphs([Event(time) for time in times])

    assert between(1.0, 2.0, 2.5, 4.0, 4.0, 6.0) == Between(0.9, 500.0, 0.005)
    assert between(1.0, 2.0) is None
    assert between() is None


def test_only_what_ran_on_the_device_counts() -> None:
    @dataclass
    class Event:
        what: str
        where: str
        annotation: bool = False

        def name(self) -> str:
            return self.what

        def device_type(self) -> Any:
            return SimpleNamespace(name=self.where)

        def is_user_annotation(self) -> bool:
            return self.annotation

        def start_ns(self) -> int:
            return 10

        def duration_ns(self) -> int:
            return 5

        def correlation_id(self) -> int:
            return 3

    events = [Event("cudaGraphLaunch", "CPU"), Event("draw", "CUDA"), Event("Engine.step", "CUDA", annotation=True)]
    assert activities_of(events) == [Activity("draw", 10, 15, 3)]


def test_calls_that_wait_for_the_device_are_counted_up_to_the_last_graph() -> None:
    @dataclass
    class Event:
        what: str
        at: int
        where: str

        def name(self) -> str:
            return self.what

        def start_ns(self) -> int:
            return self.at

        def device_type(self) -> SimpleNamespace:
            return SimpleNamespace(name=self.where)

        def correlation_id(self) -> int:
            return self.at

    def waits(*names: str) -> float | None:
        calls = [Event(name.rstrip("0123456789"), at, "CPU") for at, name in enumerate(names)]
        kernels = [
            Event("", at, "CUDA") for at, name in enumerate(names) if name[-1:].isdigit() for _ in range(int(name[-1:]))
        ]
        return waits_of(calls + kernels)

    graph, message, wait = "cudaGraphLaunch9", "cudaGraphLaunch1", "cudaEventSynchronize"
    assert waits(graph, graph, wait, graph, wait, wait, "cudaDeviceSynchronize") == pytest.approx(1 / 3)
    assert waits(graph, "Memcpy DtoH (Device -> Pageable)", "cudaStreamSynchronize", message, graph) == 0.5
    assert waits(graph, wait, message) == 0.0, "what comes after the last step"
    assert waits(wait, message, "cudaLaunchKernel1") is None


def test_what_ran_before_the_mark_does_not_count() -> None:
    marks = [Activity("spin_kernel(long)", at, at + 1) for at in (5, 20)]
    recorded = Recorded([Activity("embed", at, at + 3, at) for at in (1, 10, 21, 30)] + marks, waits=0.5)
    since = since_mark(recorded)
    assert [one.start for one in since.activities] == [21, 30]
    assert since.waits == 0.5
    with pytest.raises(RuntimeError, match="mark"):
        since_mark(Recorded())


def test_the_engine_is_driven_alone(setup: Setup) -> None:
    system = FreewheelEngine(setup)
    assert system.generate(prompts(setup), 7) == [7, 7, 7]
    assert system.start_s > 0
    assert system.reads.weights == system.reads.step_bytes(0, 5, 40) > 0
    assert sum(token for token, _ in system.reads.cache) == 2 * 2 * 2 * 32 * 4


def test_the_middle_of_decoding_brings_every_prompt_a_token_a_step(setup: Setup) -> None:
    system = FreewheelEngine(setup)
    steps = system.start(prompts(setup), setup.output)
    assert 10 < steps <= setup.output - SETTLED
    for _ in range(steps):
        assert sorted(output.request_id for output in system.engine.step() if output.token_ids) == ["0", "1", "2"]
    system.drain()
    assert not system.engine.has_unfinished
    assert system.start(prompts(setup), 3) == 0


def test_the_host_s_part_of_a_step_is_measured_with_look_ahead(setup: Setup) -> None:
    system = FreewheelEngine(setup)
    seconds = host_seconds(system, prompts(setup), setup.output)
    assert seconds is not None
    assert seconds > 0
    assert not system.engine.has_unfinished
    assert host_seconds(system, prompts(setup), 3) is None


def test_no_host_time_without_look_ahead(setup: Setup) -> None:
    setup.engine["lookahead"] = 0
    assert host_seconds(FreewheelEngine(setup), prompts(setup), setup.output) is None


def test_too_few_tokens_are_not_profiled(setup: Setup) -> None:
    system = FreewheelEngine(setup)
    assert profile_steps(system, prompts(setup), 3) is None
    assert not system.engine.has_unfinished


# --- variants


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtype of the logits of every draw."""
    dtypes: list[torch.dtype] = []
    sample = Sampler.sample

    def listen(self: Sampler, logits: torch.Tensor, rows: SampleRows) -> Samples:
        dtypes.append(logits.dtype)
        return sample(self, logits, rows)

    monkeypatch.setattr(Sampler, "sample", listen)
    return dtypes


@pytest.mark.parametrize("copied", [False, True])
def test_logits_are_copied_to_float32_where_that_is_asked(
    setup: Setup, sampled: list[torch.dtype], copied: bool
) -> None:
    system = FreewheelEngine(replace(setup, dtype="bfloat16", float32_logits=copied))
    assert system.generate(prompts(setup), 3) == [3, 3, 3]
    assert set(sampled) == {torch.float32 if copied else torch.bfloat16}
    assert system.copied == (4 * TINY["vocab_size"] if copied else 0)


@pytest.mark.parametrize("draw", ["multinomial", "gumbel", "two_level"])
def test_a_copy_leaves_the_draw_as_it_is(setup: Setup, draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.sampling["temperature"] = 0.8
    setup.engine["draw"] = draw
    made: list[str] = []
    build = Sampler.__init__

    def listen(self: Sampler, state: Any, *, draw: Any = "two_level") -> None:
        made.append(draw)
        build(self, state, draw=draw)

    monkeypatch.setattr(Sampler, "__init__", listen)
    assert FreewheelEngine(replace(setup, float32_logits=True)).generate(prompts(setup), 3) == [3, 3, 3]
    assert made == [draw, draw]


def test_variants_share_one_model_and_are_measured_in_turn(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[FreewheelEngine] = []
    lengths: list[tuple[int, int]] = []
    generate = FreewheelEngine.generate

    def listen(self: FreewheelEngine, prompts: Any, tokens: int) -> list[int]:
        if self not in engines:
            engines.append(self)
        lengths.append((engines.index(self), tokens))
        return generate(self, prompts, tokens)

    monkeypatch.setattr(FreewheelEngine, "generate", listen)
    setups = {"plain": setup, "copied": replace(setup, float32_logits=True)}
    loaded, *results = measure("freewheel", setups, [1, 3], repeats=2)
    assert isinstance(loaded, Loaded)
    measured = [result for result in results if isinstance(result, DecodeResult)]
    assert [(one.variant, one.batch) for one in measured] == [
        (variant, batch) for batch in (1, 3) for variant in setups
    ]
    mib = 4 * TINY["vocab_size"] / 2**20
    assert [one.copied_mib for one in measured] == [None, mib, None, 3 * mib]
    once = [(0, 8), (1, 8), *[(0, 1), (0, 40), (1, 1), (1, 40)] * 2]
    assert lengths == once * 2
    tables = [engine.engine.runner._decoder.embedding.table for engine in engines]  # type: ignore[attr-defined]
    assert tables[0] is tables[1]


def test_a_variant_that_fails_leaves_the_others(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = FreewheelEngine.generate

    def fail(self: FreewheelEngine, prompts: Any, tokens: int) -> list[int]:
        if self.copied and len(prompts) > 1:
            raise MemoryError("no room\nfor more")
        return generate(self, prompts, tokens)

    monkeypatch.setattr(FreewheelEngine, "generate", fail)
    unbuilt = replace(setup, engine={"max_model_len": 10**6})
    setups = {"copied": replace(setup, float32_logits=True), "plain": setup, "long": unbuilt}
    messages = list(measure("freewheel", setups, [1, 3], repeats=1))
    [long, copied] = [message for message in messages if isinstance(message, Failed)]
    assert (long.variant, copied) == ("long", Failed("copied", "MemoryError: no room"))
    assert long.error.startswith("ValueError: max_model_len")
    measured = [(one.variant, one.batch) for one in messages if isinstance(one, DecodeResult)]
    assert measured == [("copied", 1), ("plain", 1), ("plain", 3)]


def test_only_a_single_variant_of_a_model_on_the_cpu_is_measured_behind_the_offline_api(
    setup: Setup, tiny_model: Path
) -> None:
    setup = replace(setup, model=str(tiny_model), shape="")
    [make] = makers("freewheel", {"": setup}).values()
    assert isinstance(make(), Freewheel)
    for setups in ({"": replace(setup, float32_logits=True)}, {"a": setup, "b": setup}):
        assert all(isinstance(make(), FreewheelEngine) for make in makers("freewheel", setups).values())


def test_variants_are_tabled_side_by_side(tiny_shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "plot.png"
    options = ["--draw", "multinomial,two_level", "--float32-logits", "--no-float32-logits", "--temperature", "0.8"]
    files = ["--shape", tiny_shape, "--json", str(report), "--plot", str(picture)]
    assert main(["bench", "decode", *SMALL, *options, *files]) == 0
    written = json.loads(report.read_text())
    names = [
        f"{draw}, {copies}"
        for draw in ("multinomial", "two_level")
        for copies in ("float32 logits", "no float32 logits")
    ]
    assert list(written["variants"]) == names
    assert written["variants"]["multinomial, no float32 logits"] == {
        "engine": {"draw": "multinomial"},
        "float32_logits": False,
    }
    results = written["results"]
    assert [(result["batch"], result["variant"]) for result in results] == [(b, name) for b in (1, 3) for name in names]
    printed = capsys.readouterr().out
    table = printed[printed.index("freewheel:float32, side by side") :].splitlines()[2:]
    assert [line.split("  ")[-1] for line in table] == names * 2
    firsts = [line.split() for line in table[::4]]
    assert [(first[0], *first[2:7:2]) for first in firsts] == [("1", *["1.000"] * 3), ("3", *["1.000"] * 3)]
    assert picture.exists()


# --- the others


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}], ids=["greedy", "drawn"])
def test_transformers_has_the_same_shape(setup: Setup, sampling: dict[str, Any]) -> None:
    setup.sampling.update(sampling)
    system = TransformersStatic(setup)
    for tokens in (7, 1, 40):  # in one cache
        assert system.generate(prompts(setup), tokens) == [tokens] * 3
    assert system.generate(prompts(setup)[:1], 7) == [7]
    assert system.reads == FreewheelEngine(setup).reads


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_makes_as_many_weights_of_every_shape(name: str) -> None:
    model = random_transformers(SHAPES[name], torch.bfloat16, "meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


# --- the command


def test_random_weights_are_measured(tiny_shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "plot.png"
    options = ["--shape", tiny_shape, "--json", str(report), "--plot", str(picture), "--temperature", "0.8"]
    assert main(["bench", "decode", *SMALL, *options, "--draw", "gumbel", "--lookahead", "1"]) == 0
    results = json.loads(report.read_text())["results"]
    assert [(result["system"], result["dtype"], result["batch"]) for result in results] == [
        ("freewheel", "float32", 1),
        ("freewheel", "float32", 3),
    ]
    for result in results:
        assert min(result[column] for column in COLUMNS) > 0
        assert result["floor_ms"] > 0
    printed = capsys.readouterr().out
    assert f"random weights of {tiny_shape}, prompt 5, output 4, temperature 0.8" in printed
    assert printed.index("bandwidth") < printed.index("floor ms") < printed.index("freewheel:float32")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_model_is_measured_by_name(tiny_shape: str, tmp_path: Path, tiny_model: Path) -> None:
    report = tmp_path / "report.json"
    prompts_fit = ["--model", str(tiny_model), "--json", str(report), "--systems", "freewheel,llamacpp"]
    assert main(["bench", "decode", *SMALL, *prompts_fit]) == 0
    # Its vocabulary is too small for the prompts, and so is the folder for llama.cpp: each failure is one line.
    errors = [result["error"] for result in json.loads(report.read_text())["results"]]
    assert len(errors) == 2
    assert "vocabulary" in errors[0]


@pytest.mark.parametrize(
    "bad",
    [
        ["--batch", "0"],
        ["--batch", "x"],
        ["--prompt", "0"],
        ["--output", "1"],
        ["--repeats", "0"],
        ["--systems", "other"],
        ["--device", "xpu"],
        ["--device", "cuda:x"],
        ["--device", "cuda:999"],
        ["--shape", "other"],
        ["--shape", "qwen3-0.6b", "--model", "smollm2"],
        ["--temperature", "-1"],
        ["--top_k", "-2"],
        ["--top_p", "0"],
        ["--draw", "other"],
        ["--draw", "gumbel,"],
        ["--draw", "gumbel,two_level"],  # greedy
        ["--graphs", "--no-fused"],
        ["--lookahead", "9"],
        ["--kv_cache_memory", "0"],
        ["--max_num_batched_tokens", "2"],
        ["--trace", "trace.json"],
    ],
)
def test_bad_options_are_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = [option.replace("_", "-") if option.startswith("--") else option for option in bad]
    where = [] if "--model" in bad or bad[0] in ("--shape", "--systems") else ["--shape", "qwen3-0.6b"]
    assert main(["bench", "decode", *options, *where]) == 2
    assert capsys.readouterr().err.startswith(f"freewheel: error: {bad[0].removeprefix('--')}")


@pytest.mark.parametrize("what", [["--shape", "qwen3-0.6b"], ["--temperature", "0.5"]])
def test_systems_that_only_run_greedy_and_with_a_model_are_refused_otherwise(
    what: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "decode", "--systems", "llamacpp", *what]) == 2
    assert "systems: llamacpp is measured on the CPU, with a model" in capsys.readouterr().err


def test_the_plot_shows_every_system_and_its_ceiling(tmp_path: Path) -> None:
    results: list[dict[str, Any]] = [
        {"system": system, "dtype": "bfloat16", "batch": batch, "tokens_per_s": 100.0 * batch, "floor_ms": floor}
        for system, floor in (("freewheel", 0.5), ("transformers", None))
        for batch in (1, 8)
    ]
    plot([*results, {"system": "llamacpp", "dtype": "file", "error": "no"}], "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_on_a_cuda_device_the_floor_comes_first(
    tiny_shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(system: str, setups: dict[str, Setup], *_: Any) -> Iterator[Loaded | DecodeResult | StepProfile]:
        [setup] = setups.values()
        assert (setup.device, setup.output, setup.engine) == ("cuda", 256, {})
        assert setup.dtype == "bfloat16"
        freewheel = system == "freewheel"
        yield Loaded(2.0, 0.25 if freewheel else None, 1_000_000, 1000.0)
        for batch in (1, 8):
            result = DecodeResult(system, setup.dtype, batch, 100.0 * batch, 10.0, 5000.0, 25.6, 2.0, 800.0)
            yield replace(result, device_mb=900.0, warmup_s=3.0, host_us=55.0 if freewheel else None)
        if freewheel:
            yield summarise(Recorded([Activity("draw", 0, 3), Activity("draw", 5, 7)]), 1, 2)
        raise RuntimeError("that was all")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(decode, "device_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(decode, "_device_name", lambda device: f"the {device} device")
    monkeypatch.setattr(decode, "measure_apart", measured)
    report = tmp_path / "report.json"
    options = ["--device", "cuda", "--batch", "1,8", "--systems", "freewheel,transformers", "--json", str(report)]
    assert main(["bench", "decode", "--shape", tiny_shape, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("freewheel:bfloat16  loaded in 2.00 s, engine built in 0.25 s")
    assert lines[at - 4 : at] == [
        "device     the cuda device",
        "bandwidth  1.0 GB/s copied, read and written bytes, measured now",
        f"model      random weights of {tiny_shape}, prompt 128, output 256, greedy, median of 3",
        "",
    ]
    assert lines[at + 2 : at + 4] == [
        "           batch 1: 1.001 ms a step, at most 999.0 tok/s",
        "           batch 8: 1.008 ms a step, at most 7936.5 tok/s",
    ]
    assert lines[at + 5].split() == ["1", "100.0", "10.000", "1.001", "10.0%", "55", "25.60", "5000", "3.00", "900"]
    assert lines[at + 8].split() == ["1", "1.0", "0.0", "71.4%", "-", "71.4%", "0.0", "0.000"]
    assert lines[at + 9] == f"{'freewheel:bfloat16':24}  failed: that was all"
    assert "transformers:bfloat16  loaded in 2.00 s" in lines
    first, *_ = json.loads(report.read_text())["results"]
    assert first["share"] == pytest.approx(0.1001)
    assert first["steps"]["kernels"] == 1.0


@pytest.mark.gpu
def test_steps_on_a_gpu_are_looked_into(tiny_shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    options = ["--device", "cuda", "--batch", "1,3", "--prompt", "20", "--output", "60", "--repeats", "1"]
    files = ["--json", str(report), "--trace", str(trace), "--plot", str(tmp_path / "plot.png")]
    systems = ["--systems", "freewheel,transformers"]
    assert main(["bench", "decode", "--shape", tiny_shape, *options, *systems, *files]) == 0
    results = json.loads(report.read_text())["results"]
    assert [result.get("error") for result in results] == [None] * 4
    assert {result["dtype"] for result in results} == {"bfloat16"}
    for result in results:
        assert min(result[column] for column in COLUMNS | {"floor_ms", "share", "warmup_s", "device_mb"}) > 0
    for result in results[:2]:
        assert result["host_us"] > 0
        assert result["start_s"] > 0
        steps = result["steps"]
        assert steps["batch"] == result["batch"]
        assert steps["kernels"] > TINY["num_hidden_layers"]
        assert 0 < steps["occupancy"] <= 1
        assert sum(steps["kernel_counts"].values()) == pytest.approx(steps["kernels"] + steps["copies"])
    printed = capsys.readouterr().out
    assert printed.index("floor  ") < printed.index("of ceiling") < printed.index("occupancy")
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.gpu
def test_variants_on_a_gpu_are_captured(tiny_shape: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--device", "cuda", "--batch", "3", "--prompt", "20", "--output", "60", "--repeats", "1"]
    variants = ["--draw", "multinomial,gumbel,two_level", "--float32-logits", "--no-float32-logits"]
    files = ["--shape", tiny_shape, "--json", str(report)]
    assert main(["bench", "decode", *options, *variants, "--temperature", "0.8", *files]) == 0
    results = json.loads(report.read_text())["results"]
    assert [result.get("error") for result in results] == [None] * 6
    kernels = {result["variant"]: result["steps"]["kernels"] for result in results}
    for draw in ("multinomial", "gumbel", "two_level"):
        copied, plain = (kernels[f"{draw}, {which}"] for which in ("float32 logits", "no float32 logits"))
        assert copied == pytest.approx(plain + 1, abs=0.5)
        assert draw == "two_level" or plain > kernels["two_level, no float32 logits"]
