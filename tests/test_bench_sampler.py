"""``freewheel bench sampler``: what it measures, and that other ways draw from the same distribution."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from freewheel.bench.counters import COUNTED, READ, WRITTEN, Traffic, count, find_ncu, parse, print_counts
from freewheel.bench.draws import CASES, EVERYTHING, ONE, SYSTEMS, freewheel_draw, torch_draw, transformers_draw
from freewheel.bench.logits import PROMPTS, random_logits, read_recording, record, recorded_logits
from freewheel.bench.sampler import SamplerResult, Timing, measure_softmax, plot, print_softmax
from freewheel.bench.timing import host_time, timed
from freewheel.cli import main

SMALL = ["--vocab", "300", "--batch", "1,3", "--dtype", "bfloat16", "--rounds", "1"]


def test_every_case_is_measured_beside_the_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main(["bench", "sampler", *SMALL, "--json", str(report)]) == 0
    results = json.loads(report.read_text())["results"]
    assert [(result["batch"], result["case"]) for result in results] == [
        *((1, case) for case in CASES if case != ONE),
        *((3, case) for case in CASES),
    ]
    for result in results:
        everywhere = {"torch", "transformers", "freewheel"}
        assert result["systems"].keys() == everywhere | ({"gumbel"} if result["case"] == "temperature" else set())
        assert min(result["floor"], *(timing["seconds"] for timing in result["systems"].values())) > 0
    printed = capsys.readouterr().out
    assert printed.index("bandwidth") < printed.index("floor") < printed.index("greedy")
    assert "skipped    flashinfer" in printed


def test_only_the_named_systems_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sampler", *SMALL, "--systems", "freewheel"]) == 0
    printed = capsys.readouterr().out
    assert "freewheel" in printed
    assert "gumbel" not in printed


@pytest.mark.parametrize(
    "bad",
    [
        ["--batch", "0"],
        ["--batch", "x"],
        ["--vocab", "10"],
        ["--rounds", "0"],
        ["--systems", "torch,other"],
        ["--systems", "flashinfer"],
        ["--device", "xpu"],
        ["--softmax"],
        ["--bytes"],
        ["--bytes", "--softmax"],
        ["--bytes", "--record", "new.safetensors"],
        ["--logits", "missing.safetensors"],
        ["--vocab", "300", "--logits", "missing.safetensors"],
        ["--positions", "0", "--record", "new.safetensors"],
        ["--record", "missing/new.safetensors"],
    ],
)
def test_bad_options_are_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sampler", *bad]) == 2
    assert capsys.readouterr().err.startswith(f"freewheel: error: {bad[0].removeprefix('--')}")


def test_a_model_s_logits_are_recorded_and_measured(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, positions = tmp_path / "logits.safetensors", len(PROMPTS) + 3
    options = ["--model", str(tiny_model), "--positions", str(positions)]
    assert main(["bench", "sampler", "--record", str(path), *options]) == 0
    recording = read_recording(path)
    assert recording.model == str(tiny_model)
    assert recording.rows.shape == (positions, 261)
    assert recording.rows.dtype == torch.bfloat16
    assert recording.rows.isfinite().all()
    assert len(recording.rows.unique(dim=0)) == positions
    with safe_open(path, framework="pt") as file:
        for text, prompt in zip(json.loads(file.metadata()["texts"]), PROMPTS, strict=True):
            assert f"user\n{prompt}<|end|>" in text
    capsys.readouterr()
    assert main(["bench", "sampler", "--logits", str(path), "--batch", "2", "--rounds", "1", "--systems", "torch"]) == 0
    assert f"bfloat16, {positions} recorded rows of {tiny_model}, repeated" in capsys.readouterr().out


def test_recorded_logits_are_those_of_the_model(tmp_path: Path, tiny_model: Path) -> None:
    from freewheel.bench.divergence import logits_of
    from freewheel.models.load import load

    record(tmp_path / "logits.safetensors", str(tiny_model), 2 * len(PROMPTS))
    rows = read_recording(tmp_path / "logits.safetensors").rows.float()
    model = load(tiny_model)
    prompts = [model.tokenizer.encode_chat([{"role": "user", "content": text}])[0] for text in PROMPTS]
    expected = [logits_of(model.decoder, prompt)[-1] for prompt in prompts]
    torch.testing.assert_close(rows[: len(PROMPTS)], torch.stack(expected), rtol=2**-8, atol=1e-4)


def test_more_positions_than_the_context_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="positions must be at most"):
        record(tmp_path / "logits.safetensors", str(tiny_model), 10_000)


def test_recorded_rows_repeat_and_buffers_begin_at_different_ones() -> None:
    rows = torch.arange(6.0)[:, None].expand(6, 300).contiguous()
    logits = recorded_logits(rows, 8, "bfloat16", "cpu")
    assert logits.dtype == torch.bfloat16
    starts = [0, 1, 3, 4]
    assert logits[:, :, 0].tolist() == [[(start + row) % 6 for row in range(8)] for start in starts]


def test_a_file_without_logits_is_refused(tmp_path: Path) -> None:
    for rows in (torch.zeros(0, 300), torch.zeros(300), torch.zeros(2, 10), torch.zeros(2, 300, dtype=torch.int64)):
        save_file({"logits": rows}, tmp_path / "file")
        with pytest.raises(ValueError, match="logits"):
            read_recording(tmp_path / "file")


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_others_draw_as_often_what_freewheel_draws(fields: dict[str, Any]) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 3
    rows = logits.expand(2000, -1)

    def shares(tokens: torch.Tensor) -> torch.Tensor:
        return torch.bincount(tokens.flatten(), minlength=300) / len(rows)

    torch.manual_seed(0)
    ours = shares(freewheel_draw([fields] * len(rows), rows)(rows))
    theirs = shares(torch_draw([fields], rows)(rows))
    assert (ours - theirs).abs().max() < 0.05
    if fields is EVERYTHING:
        plain = shares(torch_draw([{"temperature": 0.8}], rows)(rows))
        assert (plain - ours).abs().max() > 0.05
        theirs = shares(torch_draw([{**fields, "frequency_penalty": 0.0, "presence_penalty": 0.0}], rows)(rows))
    assert (shares(transformers_draw([fields], rows)(rows)) - theirs).abs().max() < 0.05


def test_softmax_is_measured_apart_and_fused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def source(vocab: int, batch: int) -> torch.Tensor:
        return random_logits(batch, vocab, "float32", "cuda" if torch.cuda.is_available() else "cpu")

    sizes = [(300, 1), (301, 1)]
    monkeypatch.setattr("freewheel.bench.sampler.MOST_ONE_PASS", 300)
    results = print_softmax(measure_softmax(sizes, source, 1, 1e9))
    assert [(result.vocab, result.batch) for result in results] == sizes
    for result in results:
        assert min(result.floor, result.apart, result.fused, result.two_pass) > 0
    assert [result.one_pass is None for result in results] == [False, True]
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.endswith("one pass two passes")
    assert [line.split()[-2] == "-" for line in lines] == [False, True]


def test_measuring_softmax_leaves_the_logits_as_they_are() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = random_logits(1, 300, "float32", device)
    before = logits.clone()
    list(measure_softmax([(300, 1)], lambda vocab, batch: logits, 1, 1e9))
    assert torch.equal(logits, before)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    timings = {name: Timing(1e-3, captured=True, host=None) for name in SYSTEMS}
    results = [
        SamplerResult(case=case, vocab=vocab, batch=batch, floor=1e-6, systems=timings)
        for case in CASES
        for vocab in (1000, 2000)
        for batch in (1, 8)
    ]
    plot(results, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def ncu_line(number: int, kernel: str, metric: str, value: str) -> str:
    cells = [str(number), "466", "python3.12", "127.0.0.1", kernel, "1", "7", "(128, 1, 1)", "(19, 32, 1)", "0", "9.0"]
    return ",".join(f'"{cell}"' for cell in [*cells, "Command line profiler metrics", metric, "sector", value]) + "\n"


def ncu_output(*kernels: tuple[str, str, str]) -> str:
    """What ncu prints about kernels: the name of each, and how many sectors it read and wrote."""
    lines = [
        "==PROF== Connected to process 466 (/usr/bin/python3.12)\n",
        'the program\'s own line, with "quotes"\n',
        "==PROF== Disconnected from process 466\n",
        '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
        '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"\n',
    ]
    for number, (kernel, read, written) in enumerate(kernels):
        lines += [ncu_line(number, kernel, READ, read), ncu_line(number, kernel, WRITTEN, written)]
    return "".join(lines)


NCU_MARKER = ("at::cuda::<unnamed>::spin_kernel(long)", "0", "0")


def ncu_that_prints(folder: Path, output: str, status: int = 0) -> str:
    """A program that prints this, whatever it is to run."""
    (folder / "output").write_text(output)
    (folder / "ncu").write_text(f"#!/bin/sh\ncat '{folder}/output'\nexit {status}\n")
    (folder / "ncu").chmod(0o755)
    return str(folder / "ncu")


def test_counts_are_read_from_the_output_of_ncu() -> None:
    output = ncu_output(
        ("elementwise_kernel", "7", "7"),  # before the first call
        NCU_MARKER,
        ("draw_plain", "311,257", "5,760"),
        ("spin_kernel", "0", "0"),
        ("draw", "1,313,970", "8,576"),
        ("void <unnamed>::elementwise_kernel_with_index<int, at::arange_cuda_out(at::Tensor &)>(T1, T2)", "1", "0"),
        ("draw", "30", "4"),
    )
    assert parse(output + "==WARNING== a last word\n") == [
        {"draw_plain": Traffic(32 * 311257, 32 * 5760)},
        {"draw": Traffic(32 * 1314000, 32 * 8580), "elementwise_kernel_with_index": Traffic(32, 0)},
    ]
    assert (
        parse("==PROF== Connected to process 466 (/usr/bin/python3.12)\n==WARNING== No kernels were profiled.\n") == []
    )
    with pytest.raises(RuntimeError, match="does not count"):
        parse(ncu_output(NCU_MARKER, ("draw", "n/a", "n/a")))


def test_counts_are_shared_out_among_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [kernel for _ in COUNTED for kernel in (NCU_MARKER, ("draw", "1,000", "4"), ("finish", "200", "6"))]
    results = count(ncu_that_prints(tmp_path, ncu_output(*calls)), 300, 2, "bfloat16", "cuda", None)
    assert [result.case for result in print_counts(results)] == list(COUNTED)
    for result in results:
        assert (result.vocab, result.batch, result.logits) == (300, 2, 600)
        assert result.kernels == {"draw": Traffic(16000, 64), "finish": Traffic(3200, 96)}
        assert result.total == Traffic(19200, 160)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["greedy", "300", "2", "600", "19200", "160", "32.267"]
    assert printed[2].split() == ["draw", "16000", "64", "26.773"]


def test_what_keeps_ncu_from_counting_is_said(tmp_path: Path) -> None:
    refusal = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
    output = f"==PROF== Connected to process 466 (/usr/bin/python3.12)\n{refusal} on device 0.\n"
    with pytest.raises(RuntimeError, match=f"counted 0 of {len(COUNTED)} calls: {refusal}"):
        count(ncu_that_prints(tmp_path, output, 1), 300, 2, "bfloat16", "cuda", None)
    with pytest.raises(RuntimeError, match=f"counted 1 of {len(COUNTED) - 1} calls"):
        count(ncu_that_prints(tmp_path, ncu_output(NCU_MARKER, ("draw", "1", "1"))), 300, 1, "bfloat16", "cuda", None)


def test_a_missing_ncu_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="bytes: NVIDIA's ncu is neither on the PATH nor in /usr/local/cuda/bin"):
        find_ncu()


def test_bytes_of_others_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for option in ("--systems", "--plot"):
        assert main(["bench", "sampler", "--device", "cuda", "--bytes", option, "torch"]) == 2
        assert capsys.readouterr().err.startswith(f"freewheel: error: {option[2:]}")


@pytest.mark.gpu
@pytest.mark.skipif(not (shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")), reason="needs NVIDIA's ncu")
def test_a_gpu_counts_what_is_read_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    options = ["--device", "cuda", "--vocab", "151936", "--dtype", "bfloat16", "--json", str(path)]
    assert main(["bench", "sampler", "--bytes", *options]) == 0
    results = json.loads(path.read_text())["results"]
    assert [result["case"] for result in results] == list(COUNTED)
    for result in results:
        read, written = result["total"]["read"], result["total"]["written"]
        assert result["logits"] == 2 * 151936
        assert result["logits"] <= read < 3 * result["logits"]
        assert 0 < written < result["logits"] / 5
        if result["case"] in ("greedy", "temperature"):
            assert result["kernels"].keys() == {"draw_plain"}
            assert read + written < 1.1 * result["logits"]
    assert "draw_plain" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_gpu_s_host_time_and_launches_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    options = ["--device", "cuda", "--vocab", "50000", "--batch", "3", "--rounds", "1", "--json", str(path)]
    assert main(["bench", "sampler", *options]) == 0
    report = json.loads(path.read_text())
    for result in report["results"]:
        for timing in result["systems"].values():
            assert timing["host"] > 0
        assert result["systems"]["freewheel"]["captured"]
        launches = report["launches"][result["case"]]
        assert launches.keys() == result["systems"].keys()
        assert min(launches.values()) >= 1
    assert "kernels of a call" in capsys.readouterr().out
    assert main(["bench", "sampler", *options, "--dtype", "bfloat16", "--softmax"]) == 0


@pytest.mark.gpu
def test_a_draw_that_waits_for_the_device_is_timed_without_a_graph() -> None:
    logits = torch.randn(4, 2, 300, device="cuda")
    measure, captured = timed(lambda logits: logits.amax().item(), logits)
    assert not captured
    assert measure() > 0
    assert host_time(lambda logits: logits.softmax(-1).multinomial(1), logits) > 0  # torch's generator still works
    assert timed(lambda logits: logits.softmax(-1).multinomial(1), logits)[1]
