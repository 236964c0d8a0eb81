"""The decoder by kernels against transformers: every family, tiny weights, float32; interpreted without a GPU."""

from typing import Any

import pytest
import torch
from test_decoder import MODELS, PAGE, expected, make_pair, prompt
from torch import Tensor

from freewheel.models.decoder import Decoder, kv_cache_shape
from freewheel.ops import attention_gpu
from freewheel.ops.attention_gpu import plan_tiles
from freewheel.speculative import DraftTree

pytest.importorskip("triton", reason="Triton is made for Linux only")

from freewheel.models.fused_decoder import FusedDecoder, Rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGES = 40


pytestmark = pytest.mark.usefixtures("few_programs")


def assert_close(actual: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), right, rtol=1e-4, atol=1e-4 * right.abs().max().item())
    assert torch.equal(actual.cpu().argmax(-1), right.argmax(-1))


def fused(decoder: Decoder, texts: list[list[int]]) -> FusedDecoder:
    """With the tokens of each slot in its history and pages for all of them, shuffled; unused cache is NaN."""
    history = torch.zeros(len(texts), 32, dtype=torch.int64)
    for slot, text in enumerate(texts):
        history[slot, : len(text)] = torch.tensor(text)
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(2))[: len(texts) * 8]
    shape = kv_cache_shape(decoder.spec, PAGES, PAGE)
    kv = [torch.full(shape, torch.nan, device=DEVICE) for _ in range(decoder.spec.num_layers)]
    return FusedDecoder(decoder, history.to(DEVICE), pages.view(len(texts), 8).int().to(DEVICE), kv)


def rows(places: list[tuple[int, int]], **options: Any) -> Rows:
    slots, positions = torch.tensor(places, device=DEVICE).T.contiguous()
    return Rows(slots, positions, **options)


INTERPRETED = ["llama-biases", "mistral-window", "qwen2", "qwen3-biases", "gemma3-softcap-linear"]


@pytest.mark.parametrize(
    "name", [name if name in INTERPRETED else pytest.param(name, marks=pytest.mark.gpu) for name in MODELS]
)
@torch.inference_mode()
def test_prefill_in_chunks_then_steps_of_a_few_rows_and_of_many(name: str) -> None:
    reference, decoder = make_pair(name, DEVICE)
    texts = [prompt(24, seed=1), prompt(13, seed=2)]
    right = [expected(reference, text) for text in texts]
    model = fused(decoder, texts)
    for first, last in (([0, 0], [11, 3]), ([11, 3], [19, 9])):  # both sequences, in two chunks
        places = [(slot, position) for slot in (0, 1) for position in range(first[slot], last[slot])]
        counts = [last[slot] - first[slot] for slot in (0, 1)]
        tiles = plan_tiles(counts, [0, 1], model.tile_rows).to(DEVICE)
        wanted = torch.tensor([0, len(places) - 1], device=DEVICE)
        logits = model(rows(places, tiles=tiles), wanted)
        assert_close(logits, torch.stack([right[0][first[0]], right[1][last[1] - 1]]))
    for step, count in enumerate((2, 3, 17)):  # idle rows fill up the last two
        places = [(1, 9 + step), *[(-1, 0)] * (count - 2), (0, 19 + step)]
        logits = model(rows(places))
        assert logits.shape == (count, decoder.spec.vocab_size)
        assert_close(logits[[0, -1]], torch.stack([right[1][9 + step], right[0][19 + step]]))


@pytest.mark.parametrize("name", ["qwen3", "gemma3-softcap-linear"])
@pytest.mark.parametrize("count", [10, 140])
@torch.inference_mode()
def test_rows_of_draft_trees(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees what is known and its own path, and stands where its path ends; idle rows have no tile."""
    if DEVICE == "cpu" and count == 10:
        monkeypatch.setattr(attention_gpu, "default_splits", lambda rows, kv_heads: 2)
    reference, decoder = make_pair(name, DEVICE)
    texts = [prompt(20, seed=1), prompt(9, seed=2)]
    model = fused(decoder, texts)
    known = [len(text) - 1 for text in texts]
    tiles = plan_tiles(known, [0, 1], model.tile_rows).to(DEVICE)
    model(rows([(slot, at) for slot in (0, 1) for at in range(known[slot])], tiles=tiles), torch.tensor([0]))
    trees = [DraftTree((7, 3, 5, 3), (-1, 0, -1, 2)), DraftTree((4, 6), (-1, 0))]
    slots, positions, places, ancestors, right = [], [], [], [], []
    for slot, (text, tree) in enumerate(zip(texts, trees)):
        model._history[slot, len(text) : len(text) + len(tree.tokens)] = torch.tensor(tree.tokens)
        slots += [slot] * tree.rows
        positions += [known[slot] + depth for depth in tree.links.depths]
        places += range(known[slot], known[slot] + tree.rows)
        ancestors += tree.ancestors.tolist()
        paths = [[token for token in path if token >= 0] for path in tree.paths.tolist()]
        right += [expected(reference, text + path)[-1] for path in paths]
    wanted = len(slots)
    columns = zip([slots, positions, places, ancestors], [-1, 0, 0, 1])
    numbers = torch.tensor([column + [idle] * (count - wanted) for column, idle in columns], device=DEVICE).unbind()
    tiles = torch.tensor([[0, 5, 0, 0], [5, 3, 1, 5], [0, 0, -1, 0]], dtype=torch.int32, device=DEVICE)
    logits = model(Rows(numbers[0], numbers[1], tiles, numbers[2], numbers[3]))
    assert_close(logits[:wanted], torch.stack(right))


@torch.inference_mode()
def test_a_row_has_the_same_bits_whatever_the_others_are() -> None:
    _, decoder = make_pair("qwen3", DEVICE)
    texts = [prompt(8, seed=seed) for seed in range(4)]
    together = fused(decoder, texts)
    alone = [fused(decoder, texts) for _ in texts]
    for position in range(3):
        logits = together(rows([(slot, position) for slot in range(4)]))
        for slot, model in enumerate(alone):
            idle = [(slot, position) if other == slot else (-1, 0) for other in range(4)]
            assert torch.equal(model(rows(idle))[slot], logits[slot])
