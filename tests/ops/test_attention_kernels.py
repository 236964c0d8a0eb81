"""The attention kernels against a definition in float64. Without a CUDA device they run in Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is made for Linux only")

from freewheel.ops.attention_gpu import (
    LayerAttention,
    Partials,
    attend_chunks,
    attend_decode,
    combine,
    decode_tile,
    default_splits,
    make_partials,
    plan_tiles,
    rotate_and_store,
    rows_per_tile,
)
from freewheel.ops.norm import RMSNorm
from freewheel.ops.rope import Rope, rotate_, rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SPLITS, TILE = 2, 16

COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from freewheel.ops import attention_gpu, attention_kernels

types = {
    "partials": attention_gpu.Partials("*fp32", "*fp32", "*fp32"), "qkv": "*fp32", "norm_weight": "*fp32",
    "rotations": "*fp32", "cache": "*bf16", "page_table": "*i32", "slots": "*i64", "positions": "*i64",
    "places": "*i64", "queries": "*bf16", "tiles": "*i32", "ancestors": "*i64", "out": "*bf16",
    "eps": "fp32", "scale": "fp32",
}
shape = {"HEADS": 6, "KV_HEADS": 2, "HEAD_DIM": 80, "DIM": 128, "PAGE_SIZE": 16, "WINDOW": 0, "CAP": 0.0,
         "TILE": 16, "PART": 8, "STAGES": 3, "EARLY": True, "SHARES": 1, "CHAINED": True}
small = {"num_pages": 1, "max_pages": 1}  # integers that are 1 are constants
for name, constants in [
    ("attend_decode", {"GROUP": 4, "SPLITS": 4, "WINDOW": 40, "out": None, "SHARES": 2}),
    ("attend_decode", {"GROUP": 1, "SPLITS": 1, "CAP": 50.0, "norm_weight": None, "partials": None,
                       "EARLY": False, **small}),
    ("rotate_and_store", {}),
    ("rotate_and_store", {"norm_weight": None, **small}),
    ("attend_chunks", {"M": 64, "SPLITS": 1, "partials": None, "ancestors": None}),
    ("attend_chunks", {"M": 16, "SPLITS": 4, "out": None, "WINDOW": 40, **small}),
    ("combine", {"SPLITS": 4}),
]:
    kernel = getattr(attention_kernels, name)
    constants = {key: value for key, value in {**shape, **constants}.items() if key in kernel.arg_names}
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    compile(ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    print(name)
"""


def make_layer(
    heads: int = 4, kv_heads: int = 2, head_dim: int = 64, norm: bool = True, **options: Any
) -> LayerAttention:
    weight = torch.randn(heads + kv_heads, head_dim, device=DEVICE) if norm else None
    scale = 1.5 * head_dim**-0.5
    return LayerAttention(heads, kv_heads, head_dim, scale, norm_weight=weight, eps=1e-5, **options)


class Step:
    """Rows of sequences that have ``prefixes`` in shuffled pages; the rest of the cache is NaN. None: an idle row.

    ``parents``, for a draft tree, is the row that each row of the only sequence follows, -1 for the first.
    """

    def __init__(
        self,
        layer: LayerAttention,
        prefixes: Sequence[int | None],
        counts: Sequence[int] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        page: int = 4,
        parents: Sequence[int] | None = None,
    ) -> None:
        self.layer, self.dtype, self.page, self.prefixes = layer, dtype, page, prefixes
        self.counts = counts = counts or [1] * len(prefixes)
        rows = sum(counts)
        ends = [(prefix or 0) + count for prefix, count in zip(prefixes, counts)]
        max_pages = max(-(-end // page) for end in ends)
        num_pages = max_pages * len(prefixes) + 1
        # Slots are not in the order of rows.
        self.table = torch.randperm(num_pages - 1)[: max_pages * len(prefixes)].view(-1, max_pages).int() + 1
        self.slot_of = [-1 if prefix is None else len(prefixes) - 1 - s for s, prefix in enumerate(prefixes)]
        self.cache = torch.full((2, layer.kv_heads, num_pages, page, layer.head_dim), torch.nan, dtype=dtype)
        self.contents: list[Tensor] = []
        for slot, prefix in zip(self.slot_of, prefixes):
            content = torch.randn(2, layer.kv_heads, prefix or 0, layer.head_dim).to(dtype)
            self.contents.append(content)
            self.cache.flatten(2, 3)[:, :, self.entries(slot, torch.arange(prefix or 0))] = content
        self.qkv = torch.randn(rows, layer.columns)
        self.places = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, counts)])
        self.slots = torch.tensor(self.slot_of).repeat_interleave(torch.tensor(counts))
        self.positions = self.places.clone()
        self.sees = [torch.ones(count, count, dtype=torch.bool).tril() for count in counts]
        if parents is not None:
            self.sees[0] = torch.eye(len(parents), dtype=torch.bool)
            for row, parent in enumerate(parents):
                if parent >= 0:
                    self.sees[0][row] |= self.sees[0][parent]
            self.positions = self.places[0] + self.sees[0].sum(1) - 1
        bits = [(sees.long() << torch.arange(len(sees))).sum(1) for sees in self.sees if len(sees) < 64]
        self.ancestors = torch.cat(bits) if len(bits) == len(counts) else torch.full((rows,), -1)
        frequencies = Rope(100.0).frequencies(layer.head_dim)
        self.rotations = torch.view_as_real(rotation(self.positions, frequencies, 1.1))[:, 0].contiguous()
        for name in ("table", "cache", "qkv", "places", "slots", "positions", "rotations", "ancestors"):
            setattr(self, name, getattr(self, name).to(DEVICE))

    def entries(self, slot: int, places: Tensor) -> Tensor:
        pages = self.table.to(places.device)[slot, places // self.page]
        return pages.long() * self.page + places % self.page

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, the cache after the step, and attended rows, float64 but for the cache."""
        layer = self.layer
        heads, qkv = layer.heads, self.qkv.double().view(len(self.qkv), -1, layer.head_dim)
        query_key, value = qkv[:, : heads + layer.kv_heads], qkv[:, heads + layer.kv_heads :]
        if layer.norm_weight is not None:
            mean = query_key.square().mean(-1, keepdim=True)
            query_key = query_key / (mean + layer.eps).sqrt() * layer.norm_weight.double()
        turned = torch.view_as_complex(query_key.unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(turned * torch.view_as_complex(self.rotations.double())[:, None])
        query, key = turned.flatten(2).split([heads, layer.kv_heads], 1)
        new = torch.stack([key, value]).transpose(1, 2).to(self.dtype)  # [2, kv_heads, rows, head_dim]
        cache, attended = self.cache.clone(), torch.zeros_like(query)
        for s, (first, count) in enumerate(zip(torch.tensor([0, *self.counts]).cumsum(0).tolist(), self.counts)):
            rows, slot = slice(first, first + count), self.slot_of[s]
            if slot < 0:
                continue
            cache.flatten(2, 3)[:, :, self.entries(slot, self.places[rows])] = new[:, :, rows]
            prefix = self.contents[s].to(DEVICE)
            keys, values = torch.cat([prefix, new[:, :, rows]], 2).double().repeat_interleave(layer.group, 1)
            scores = torch.einsum("rhd,hpd->rhp", query[rows], keys) * layer.scale
            if layer.soft_cap:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            position = self.positions[rows]
            at = torch.cat([torch.arange(prefix.shape[2], device=DEVICE), position])
            visible = torch.ones(count, len(at), dtype=torch.bool, device=DEVICE)
            visible[:, prefix.shape[2] :] = self.sees[s].to(DEVICE)
            if layer.window:
                visible &= at > position[:, None] - layer.window
            weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
            attended[rows] = torch.einsum("rhp,hpd->rhd", weights, values)
        return query, cache, attended.flatten(1)

    def assert_cache(self, expected: Tensor) -> None:
        """The new entries are right, and all others have the bits that they had."""
        written = expected.isnan() != self.cache_before.isnan()
        torch.testing.assert_close(self.cache[written], expected[written], atol=1e-5, rtol=TOLERANCE[self.dtype])
        whole = torch.int32 if self.dtype == torch.float32 else torch.int16
        assert torch.equal(self.cache.view(whole)[~written], self.cache_before.view(whole)[~written])

    def decode(self, splits: int = SPLITS, rows: slice = slice(None), shares: int = 1, **options: Any) -> Tensor:
        self.cache_before = self.cache.clone()
        qkv, slots, positions, rotations = self.qkv[rows], self.slots[rows], self.positions[rows], self.rotations[rows]
        out = torch.full((len(qkv), self.layer.heads * self.layer.head_dim), torch.nan, device=DEVICE)
        kept = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        partials = poisoned(make_partials(len(qkv), self.layer, splits, DEVICE, kept)) if splits else None
        options = {"tile": TILE, **options}
        qkv = in_shares(qkv, shares)
        attend_decode(self.layer, qkv, rotations, self.cache, self.table, slots, positions, partials or out, **options)
        return combine(self.layer, partials, positions, out, tile=options["tile"]) if partials else out

    def store(self, shares: int = 1) -> Tensor:
        self.cache_before = self.cache.clone()
        queries = torch.full((len(self.qkv), self.layer.heads, self.layer.head_dim), torch.nan, device=DEVICE)
        qkv = in_shares(self.qkv, shares)
        return rotate_and_store(
            self.layer, qkv, self.rotations, self.cache, self.table, self.slots, self.places, queries
        )

    def chunks(
        self, queries: Tensor, tile_rows: int = 4, splits: int = 0, tree: bool = False, **options: Any
    ) -> Tensor:
        out = torch.full((len(self.qkv), self.layer.heads * self.layer.head_dim), torch.nan, device=DEVICE)
        partials = poisoned(make_partials(len(self.qkv), self.layer, splits, DEVICE)) if splits else None
        options = {"tile": TILE, **options}
        attend_chunks(
            self.layer, queries, self.cache, self.table,
            plan_tiles(self.counts, self.slot_of, tile_rows).to(DEVICE), self.positions, partials or out,
            tile_rows=tile_rows, places=self.places, ancestors=self.ancestors if tree else None,
            **options,
        )  # fmt: skip
        if not partials:
            return out
        return combine(self.layer, partials, self.positions, out, places=self.places, tile=options["tile"])


def in_shares(qkv: Tensor, shares: int) -> Tensor:
    """Several of which this is the sum."""
    if shares == 1:
        return qkv
    parts = torch.randn(shares - 1, *qkv.shape, device=DEVICE)
    return torch.cat([parts, (qkv.float() - parts.sum(0))[None]])


def poisoned(partials: Partials) -> Partials:
    """What is not written must not be read."""
    for tensor in partials:
        tensor.fill_(torch.nan)
    return partials


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# Lengths: nothing cached, a page but one, a page, a page and one, several tiles of each split, and an idle row.
@pytest.mark.parametrize(
    "options",
    [{}, {"norm": False, "window": 6}, {"window": 40, "soft_cap": 2.0}, {"window": 1}, {"window": 1000}],
)
def test_decode_equals_the_definition(options: dict[str, Any]) -> None:
    step = Step(make_layer(2, 1, **options), [0, 3, 4, None, 5, 70])
    _, cache, attended = step.expected()
    for splits, early in ((SPLITS, True), (0, True), (0, False)):
        assert_close(step.decode(splits, early=early), attended, torch.float32)
        step.assert_cache(cache)


def test_what_is_projected_may_come_in_shares() -> None:
    step = Step(make_layer(4, 2), [3, 20])
    _, cache, attended = step.expected()
    assert_close(step.decode(shares=3), attended, torch.float32)
    step.assert_cache(cache)
    step = Step(make_layer(4, 2), [3, 20], [5, 2])
    _, cache, attended = step.expected()
    assert_close(step.chunks(step.store(shares=2)), attended, torch.float32)
    step.assert_cache(cache)


@pytest.mark.parametrize("page", [1, 16, 24])
def test_decode_of_several_key_heads_with_other_pages(page: int) -> None:
    step = Step(make_layer(6, 3), [34, page], page=page)
    _, cache, attended = step.expected()
    for splits in (0, 4):
        assert_close(step.decode(splits=splits), attended, torch.float32)
        step.assert_cache(cache)


HEADS = [(1, 1, 64), (3, 1, 80), (5, 1, 96), (7, 1, 128), (4, 1, 256), (16, 1, 64)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_of_every_head_size(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    step = Step(make_layer(*heads), [37], dtype=dtype)
    if dtype == torch.bfloat16:
        step.qkv = step.qkv.to(dtype)
    _, cache, attended = step.expected()
    assert_close(step.decode(), attended, dtype)
    step.assert_cache(cache)


@pytest.mark.parametrize("splits", [0, SPLITS])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(splits: int) -> None:
    step = Step(make_layer(2, 1, window=50), [20, 75, None, 1])
    together = step.decode(splits)
    for row in range(4):
        assert torch.equal(step.decode(splits, rows=slice(row, row + 1))[0], together[row])
    assert not together[2].any()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum
def test_a_sick_row_stays_sick_and_alone() -> None:
    step = Step(make_layer(2, 1), [20, 40])
    healthy = step.decode()
    step.qkv[0] = torch.nan
    attended = step.decode()
    assert attended[0].isnan().all()
    assert torch.equal(attended[1], healthy[1])
    queries = step.store()
    for splits in (0, 2):
        attended = step.chunks(queries, splits=splits)
        assert attended[0].isnan().all()
        assert attended[1].isfinite().all()


@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 80)])
@pytest.mark.parametrize("norm", [False, True])
def test_rows_are_rotated_and_stored(heads: tuple[int, int, int], norm: bool) -> None:
    step = Step(make_layer(*heads, norm=norm), [2, None, 9], [4, 1, 1])
    query, cache, _ = step.expected()
    stored = step.store()
    assert_close(stored[step.slots >= 0], query[step.slots >= 0], torch.float32)
    assert not stored[step.slots < 0].any()
    step.assert_cache(cache)


def test_rows_are_rotated_as_by_the_torch_path() -> None:
    layer = make_layer(2, 1)
    step = Step(layer, [1], [3])
    assert layer.norm_weight is not None
    query_key = RMSNorm(layer.norm_weight, layer.eps)(step.qkv.view(3, -1, 64)[:, :3].contiguous())
    expected = rotate_(query_key, torch.view_as_complex(step.rotations)[:, None])
    torch.testing.assert_close(step.store(), expected[:, :2], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize(
    "options", [{}, {"window": 5}, {"window": 30, "soft_cap": 2.0}, {"window": 1000, "norm": False}]
)
def test_chunks_equal_the_definition(options: dict[str, Any], splits: int) -> None:
    step = Step(make_layer(2, 1, **options), [0, 40, None, 33], [6, 7, 2, 1])
    _, cache, attended = step.expected()
    queries = step.store()
    assert_close(step.chunks(queries, splits=splits), attended, torch.float32)
    step.assert_cache(cache)


@pytest.mark.parametrize("heads", [*HEADS, (6, 2, 64)])
def test_chunks_of_every_head_size(heads: tuple[int, int, int]) -> None:
    step = Step(make_layer(*heads), [15], [4], dtype=torch.bfloat16, page=16)
    _, cache, attended = step.expected()
    assert_close(step.chunks(step.store().bfloat16(), tile_rows=3), attended, torch.bfloat16)
    step.assert_cache(cache)


@pytest.mark.parametrize("splits", [0, 2])
def test_how_a_chunk_is_cut_changes_no_bits(splits: int) -> None:
    step = Step(make_layer(2, 1, window=20), [30], [6])
    queries = step.store()
    whole = step.chunks(queries, tile_rows=8, splits=splits)
    cut = step.chunks(queries, tile_rows=5, splits=splits)
    if DEVICE == "cuda":
        assert torch.equal(cut, whole)
    else:  # interpreted, products are NumPy's, in which a row's last bits follow from its place on some processors
        torch.testing.assert_close(cut, whole, rtol=0, atol=36 * 2**-24)  # of so many keys


PARENTS = [-1, 0, 0, 1, 1, 2, 5, 3, 7]


@pytest.mark.parametrize("splits", [0, 2])
@pytest.mark.parametrize("window", [None, 2, 20])
def test_rows_of_a_tree_see_their_ancestors(window: int | None, splits: int) -> None:
    step = Step(make_layer(2, 1, window=window), [29], [len(PARENTS)], parents=PARENTS)
    _, cache, attended = step.expected()
    queries = step.store()
    assert_close(step.chunks(queries, tile_rows=8, splits=splits, tree=True), attended, torch.float32)
    step.assert_cache(cache)


def test_chunks_and_trees_go_together() -> None:
    step = Step(make_layer(2, 1, window=60), [14, 2, 0], [len(PARENTS), 66, 1])
    step.positions[: len(PARENTS)] = 14 + torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 4], device=DEVICE)
    tree = Step(step.layer, [14], [len(PARENTS)], parents=PARENTS)
    assert torch.equal(tree.positions, step.positions[: len(PARENTS)])
    step.sees[0], step.ancestors[: len(PARENTS)] = tree.sees[0], tree.ancestors
    _, _, attended = step.expected()
    queries = step.store()
    assert_close(step.chunks(queries, tile_rows=32, tree=True, tile=32), attended, torch.float32)


def test_tiles_cover_all_rows() -> None:
    tiles = plan_tiles([5, 1, 4], [7, -1, 2], 2)
    assert tiles.dtype == torch.int32
    assert tiles.tolist() == [[0, 2, 7, 0], [2, 2, 7, 0], [4, 1, 7, 0], [5, 1, -1, 5], [6, 2, 2, 6], [8, 2, 2, 6]]
    assert plan_tiles([], [], 2).shape == (0, 4)
    assert [rows_per_tile(make_layer(heads, 1, 16)) for heads in (1, 3, 7, 16)] == [64, 21, 9, 4]


def test_splits_occupy_the_processors() -> None:
    assert [default_splits(1, kv_heads) for kv_heads in (1, 2, 4, 8, 16, 32, 200)] == [64, 64, 32, 16, 8, 4, 1]
    assert [default_splits(rows, 8) for rows in (1, 2, 4, 8, 16, 32, 256)] == [16, 8, 4, 4, 2, 1, 1]


def test_splits_are_read_as_they_are_added_up() -> None:
    """``combine`` takes tiles to have ``layer.tile`` places."""
    layer = LayerAttention(16, 8, 64, 1.0)
    for splits in (2, 4, 64):
        assert all(decode_tile(layer, splits, rows).places == layer.tile for rows in (1, 32, 33, 256))


@pytest.mark.parametrize("wrong", ["columns", "stride", "weight", "rotations"])
def test_what_the_kernels_cannot_read_is_refused(wrong: str) -> None:
    layer = make_layer()
    step = Step(layer, [3])
    if wrong == "columns":
        step.qkv = step.qkv[:, 1:].contiguous()
    elif wrong == "stride":
        step.qkv = step.qkv.repeat(3, 1)[:, ::2].repeat(1, 2)[:, : layer.columns].mT.contiguous().mT
    elif wrong == "weight":
        step.layer = LayerAttention(4, 2, 64, 1.0, norm_weight=torch.ones(6, 64, dtype=torch.bfloat16))
    else:
        step.rotations = step.rotations.double()
    with pytest.raises(ValueError, match="must be"):
        step.decode()


def test_kernels_compile_for_a_gpu() -> None:
    """The interpreter knows no types and no registers: the compiler does, and needs no GPU."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=COMPILED, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [
        "attend_decode",
        "attend_decode",
        "rotate_and_store",
        "rotate_and_store",
        "attend_chunks",
        "attend_chunks",
        "combine",
    ]


def test_the_torch_path_needs_no_triton() -> None:
    script = "import sys, freewheel.ops.attention; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


# Qwen3-0.6B, SmolLM2-135M, Gemma 3 270M's local layers, Qwen2.5-7B.
FULL: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
    ((16, 8, 128), {}),
    ((9, 3, 64), {"norm": False}),
    ((4, 1, 256), {"window": 512}),
    ((28, 4, 128), {"norm": False}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("heads", "options"), FULL)
def test_full_size_decode(heads: tuple[int, int, int], options: dict[str, Any], early: bool) -> None:
    step = Step(
        make_layer(*heads, **options), [0, 15, 16, 17, 511, 512, None, 4096, 9001], dtype=torch.bfloat16, page=16
    )
    _, cache, attended = step.expected()
    for splits in (0, default_splits(1, heads[1])):
        together = step.decode(splits, tile=None, early=early)
        assert_close(together, attended, torch.bfloat16)
        step.assert_cache(cache)
        for row in range(len(together)):
            assert torch.equal(step.decode(splits, slice(row, row + 1), tile=None, early=early)[0], together[row])


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "options"), FULL)
def test_full_size_chunks(heads: tuple[int, int, int], options: dict[str, Any]) -> None:
    step = Step(make_layer(*heads, **options), [0, 1000, 5000], [700, 333, 5], dtype=torch.bfloat16, page=16)
    _, cache, attended = step.expected()
    queries = step.store().bfloat16()
    for splits in (0, 16):
        out = step.chunks(queries, rows_per_tile(step.layer), splits, tile=None)
        assert_close(out, attended, torch.bfloat16)
    step.assert_cache(cache)


@pytest.mark.gpu
def test_a_graph_of_chained_launches_serves_changing_rows() -> None:
    layer = make_layer(16, 8, 128)
    step = Step(layer, [700, 3, 64, 5000], dtype=torch.bfloat16, page=16)
    expected = step.decode(16, tile=None)
    partials = make_partials(4, layer, 16, DEVICE, torch.bfloat16)
    slots, positions = torch.full_like(step.slots, -1), torch.zeros_like(step.positions)
    qkv, rotations = torch.zeros_like(step.qkv), torch.zeros_like(step.rotations)
    out = torch.zeros(4, 16 * 128, device=DEVICE)

    def launch() -> None:
        attend_decode(layer, qkv, rotations, step.cache, step.table, slots, positions, partials, chained=True)
        combine(layer, partials, positions, out, chained=True)

    launch()
    torch.cuda.synchronize()
    assert not out.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launch()
    slots.copy_(step.slots)
    positions.copy_(step.positions)
    qkv.copy_(step.qkv)
    rotations.copy_(step.rotations)
    graph.replay()
    assert torch.equal(out, expected)
