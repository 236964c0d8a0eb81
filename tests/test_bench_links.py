"""``freewheel bench links``. Without a CUDA device kernels are interpreted."""

import random
from pathlib import Path

import pytest
import torch

from freewheel.cli import main

pytest.importorskip("triton", reason="Triton is made for Linux only")

from freewheel.bench import links
from freewheel.cache.pool import KVPool
from freewheel.config import EngineConfig
from freewheel.engine.build import runner_for
from freewheel.engine.engine import Engine
from freewheel.grammar import Compiler
from freewheel.models.decoder import kv_cache_shape
from freewheel.models.load import load, load_tokenizer
from freewheel.sampling import Grammar
from freewheel.speculative import DraftTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT, OUTPUT = 20, 2


@pytest.fixture
def engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, list[list[int]]]:
    """Two sequences, and their scripts."""
    monkeypatch.setattr(links, "PERIOD", 9)
    model = load(tiny_model, dtype="float32", device=DEVICE)
    told = links.scripts(2, PROMPT, 48, 0.9, 90)  # printable ones
    config = EngineConfig(
        max_num_seqs=2,
        enable_prefix_caching=False,
        fused=True,
        speculation=True,
        draft_nodes=5,
        draft_width=2,
        draft_depth=5,
    )
    make = runner_for(config, "cuda")
    storage = torch.zeros(model.spec.num_layers, *kv_cache_shape(model.spec, 16, 16), device=DEVICE)
    built = Engine(
        model.decoder,
        KVPool(storage, slots=2),
        config,
        max_model_len=48,
        vocab_size=model.spec.vocab_size,
        runner=lambda decoder, pool, sampler: make(decoder, pool, links.read_out(sampler, told)),
    )
    return built, told


@pytest.mark.usefixtures("few_programs")
def test_all_ways_say_what_the_scripts_tell(engine: tuple[Engine, list[list[int]]]) -> None:
    built, told = engine
    for read_back in (False, True):
        links.begin(built, told, PROMPT)
        drafts = links.HostDrafts(built, read_back)
        came = drafts.step() + drafts.step()
        assert came > 4, "drafts were accepted"
        for one in drafts.sequences:
            assert one.tokens == told[one.slot][: len(one.tokens)]
        for slot in range(2):
            built.abort(str(slot))
        built.step()
        built.check()
    results = links.measure(built, told, PROMPT, OUTPUT, 1)
    assert [result.variant for result in results] == list(links.VARIANTS)
    assert all(result.accepted >= 1 for result in results)


@pytest.mark.usefixtures("few_programs")
def test_each_row_may_have_a_mask(engine: tuple[Engine, list[list[int]]], tiny_model: Path) -> None:
    """By a grammar of what the scripts tell: what it forbids would leave nothing to draw."""
    built, told = engine
    built.grammars = Compiler(load_tokenizer(tiny_model), built.limits.logits)
    for variant in links.VARIANTS:
        seconds, steps = links.run_variant(built, variant, told, PROMPT, OUTPUT, Grammar.regex("[!-~]*"))
        assert seconds > 0
        assert 1 <= steps <= OUTPUT


def test_links_read_from_the_device_are_those_of_the_trees() -> None:
    rng = random.Random(0)
    trees = [
        DraftTree.merge([[rng.randrange(2) for _ in range(4)] for _ in range(4)], rng.randint(1, 9), 4, 4)
        for _ in range(20)
    ]
    counts = torch.tensor([len(tree.tokens) for tree in trees], dtype=torch.int32)
    masks = torch.full((20, 9), 3, dtype=torch.int64)  # what lies behind means nothing
    for row, tree in enumerate(trees):
        masks[row, : len(tree.tokens)] = torch.from_numpy(tree.ancestors[1:])
    children, siblings = links.links_on_device(masks.to(DEVICE), counts.to(DEVICE)).tolist()
    for row, tree in enumerate(trees):
        assert children[row][: tree.rows] == tree.links.first_child
        assert siblings[row][: tree.rows] == tree.links.next_sibling


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--device", "cpu"], "device"),
        (["--batch", "x"], "batch"),
        (["--accept", "2"], "accept"),
        (["--nodes", "0"], "nodes"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "links", *arguments]) != 0
    assert named in capsys.readouterr().err
