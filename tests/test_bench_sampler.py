"""``freewheel bench sampler``: what it measures, and that torch's ways draw from the same distribution."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from freewheel.bench.sampler import CASES, EVERYTHING, ONE, SamplerResult, freewheel_draw, plot, torch_draw
from freewheel.cli import main


def test_every_case_is_measured_beside_the_floor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    arguments = ["--vocab", "300", "--batch", "1,3", "--dtype", "bfloat16", "--rounds", "1", "--json", str(report)]
    assert main(["bench", "sampler", *arguments]) == 0
    results = json.loads(report.read_text())["results"]
    assert [(result["batch"], result["case"]) for result in results] == [
        *((1, case) for case in CASES if case != ONE),
        *((3, case) for case in CASES),
    ]
    for result in results:
        assert min(result["floor"], result["torch"], result["freewheel"]) > 0
        assert (result["gumbel"] is not None) == (result["case"] == "temperature")
    printed = capsys.readouterr().out
    assert printed.index("bandwidth") < printed.index("floor") < printed.index("greedy")


@pytest.mark.parametrize("bad", [["--batch", "0"], ["--batch", "x"], ["--vocab", "10"], ["--rounds", "0"]])
def test_bad_options_are_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sampler", *bad]) == 2
    assert bad[0].removeprefix("--") in capsys.readouterr().err


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_torch_draws_as_often_what_freewheel_draws(fields: dict[str, Any]) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 3
    rows = logits.expand(2000, -1)
    torch.manual_seed(0)
    ours = freewheel_draw([fields] * len(rows), rows)(rows)
    theirs = torch_draw(fields, rows)(rows)
    shares = [torch.bincount(tokens.flatten(), minlength=300) / len(rows) for tokens in (ours, theirs)]
    assert (shares[0] - shares[1]).abs().max() < 0.05
    if fields is EVERYTHING:
        plain = torch_draw({"temperature": 0.8}, rows)(rows)
        assert (torch.bincount(plain.flatten(), minlength=300) / len(rows) - shares[0]).abs().max() > 0.05


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    results = [
        SamplerResult(case=case, vocab=1000, batch=batch, floor=1e-6, torch=1e-3, gumbel=None, freewheel=1e-4)
        for case in CASES
        for batch in (1, 8)
    ]
    plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
