"""Grammars on a device, or with interpreted kernels: the masks of a step are made while its decoder runs."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from freewheel.engine.engine import Engine
from freewheel.engine.runner import Runner
from freewheel.grammar import Compiler
from freewheel.models.load import load_tokenizer
from freewheel.request import FinishReason, Request
from freewheel.sampling import Grammar, SamplingParams

pytest.importorskip("triton", reason="Triton is made for Linux only")

from mock_model import Collected, run
from test_device_runner import DEVICE, make_engine
from test_device_speculation import assert_same

from freewheel.engine.device_runner import DeviceRunner

pytestmark = pytest.mark.usefixtures("few_programs", "many_drafts")
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("ababab", {"temperature": 0.0, "grammar": Grammar.regex("(ab|ba){2,6}!"), "max_tokens": 10}),
    ("yes", {"temperature": 0.7, "grammar": Grammar.choice(["yes, yes", "no", "é€!"]), "logprobs": 1, "n": 2}),
    ("the the", {"temperature": 0.0, "max_tokens": 12}),
    ("aaaaaaaa", {"temperature": 0.2, "grammar": Grammar.regex("a*"), "frequency_penalty": 0.05, "max_tokens": 9}),
    ("aa", {"temperature": 0.0, "grammar": Grammar.regex("a{2,3}"), "ignore_eos": True, "max_tokens": 8}),
]


@lru_cache
def compiler(path: Path) -> Compiler:
    tokenizer = load_tokenizer(path)
    return Compiler(tokenizer, tokenizer.vocab_size)


def requests(path: Path) -> list[Request]:
    tokenizer = load_tokenizer(path)
    return [
        Request(f"r{i}", tuple(tokenizer.encode(text)), SamplingParams(seed=i, **params))
        for i, (text, params) in enumerate(ASKED)
    ]


def make(path: Path, device: str, runner: type[Runner], lookahead: int = 0, **options: Any) -> Engine:
    engine = make_engine(path, device, runner, lookahead, **options)
    engine.grammars = compiler(path)
    return engine


@pytest.fixture(scope="module")
def expected(copying_model: Path) -> dict[tuple[str, int], Collected]:
    return run(make(copying_model, "cpu", Runner), requests(copying_model))


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize(
    "drafts", [{}, {"draft_width": 2, "draft_depth": 3, "draft_nodes": 5}], ids=["plain", "drafts"]
)
def test_answers_are_those_of_the_cpu(
    copying_model: Path, expected: dict[tuple[str, int], Collected], drafts: dict[str, Any], lookahead: int
) -> None:
    engine = make(copying_model, DEVICE, DeviceRunner, lookahead, speculation=bool(drafts), **drafts)
    got = run(engine, requests(copying_model))
    assert got.keys() == expected.keys()
    for key, one in expected.items():
        assert_same(got[key], one)
    assert {one.finish_reason for one in got.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    if drafts:
        assert engine.speculation
        assert engine.speculation.accepted > 0
        assert any(got[f"r{i}", 0].drafted for i in (0, 3))
    engine.check()
