"""The kernels around products say what torch says. Without a CUDA device they run in Triton's interpreter."""

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from freewheel.ops.activation import gated as gated_reference
from freewheel.ops.rope import Rope, rotation

pytest.importorskip("triton", reason="Triton is made for Linux only")

from freewheel.ops import products
from freewheel.ops.attention_gpu import LayerAttention, Partials
from freewheel.ops.products import MOST_ROWS, Tile, WideTile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN and infinity
ROWS = range(1, MOST_ROWS + 1)
TILES = [
    Tile(8, 16, 2, 4),
    Tile(2, 64, 3, 1),
]

COMPILED = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from freewheel.ops import product_kernels as kernels

types = {name: "*fp32" for name in "y norm bias peaks sums stream delta_norm attended x".split()}
types |= {name: "*fp32" for name in "frequencies factors rotations".split()}
types |= {name: "*bf16" for name in "weight table out delta gate_up".split()}
types |= {name: "*i64" for name in "history slots positions places".split()}
types |= {name: "fp32" for name in "eps cap scale".split()}
plain = {"peaks": None, "sums": None, "positions": None, "ACTIVATION": None, "ADD": False, "SPLITS": None}
plain |= {"HEAD_DIM": None, "TILE": 64, "WINDOW": None}
everything = {"CHAINED": True, "EARLY": False, "INPUTS": 320, "OUTPUTS": 4, "COLUMNS": 256, "AHEAD": 1, "SPLITS": 4}
everything |= {"HEAD_DIM": 64, "ROPES": 2, "PAIRS": 40, "PADDED": 64, "SHARES": 2}
for name, constants in [
    ("product", plain | {"ROWS": 1, "norm": None, "bias": None, "cap": None, "ADD": True}),
    ("product", plain | {"ROWS": 3, "ACTIVATION": "gelu_tanh"}),
    ("product", plain | {"ROWS": 2, "peaks": "*fp32", "sums": "*fp32", "positions": "*i64", "norm": None, "cap": None,
                         "ADD": True, "SPLITS": 8, "HEAD_DIM": 64, "WINDOW": 0}),
    ("product", plain | {"ROWS": 4, "weight": "*fp16"}),
    ("product", plain | {"ROWS": 1, "weight": "*fp32", "norm": None}),
    ("product", plain | {"ROWS": 1, "AHEAD": 0, "EARLY": True}),
    ("wide_product", {"ROWS": 16, "LINES": 64, "SHARE": 128, "COLUMNS": 64, "ACTIVATION": None, "STAGES": 3,
                      "x": "*bf16"}),
    ("wide_product", {"ROWS": 32, "LINES": 64, "SHARE": 320, "COLUMNS": 64, "ACTIVATION": "silu", "STAGES": 3,
                      "x": "*bf16", "y": "*bf16", "bias": None}),
    ("embed", {}), ("add_norm", {}), ("add_norm", {"delta": None, "delta_norm": None}),
    ("gated", {"ACTIVATION": "silu"}),
]:
    kernel = getattr(kernels, name)
    given = {key: value for key, value in {**everything, **constants}.items() if key in kernel.arg_names}
    kinds = types | {key: value for key, value in given.items() if str(value).startswith("*")}
    given = {key: value for key, value in given.items() if key not in types or value is None}
    signature = {arg: "constexpr" if arg in given else kinds.get(arg, "i32") for arg in kernel.arg_names}
    compile(ASTSource(kernel, signature, constexprs=given), target=GPUTarget("cuda", 90, 32))
    print(name)
"""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def close(ours: Tensor, reference: Tensor, tolerance: float = 2e-5) -> None:
    """Within ``tolerance`` of the reference's size."""
    assert ours.isfinite().all()
    assert (ours.double() - reference).norm() <= tolerance * reference.norm()


def expected(
    x: Tensor,
    weight: Tensor,
    *,
    y: Tensor | None = None,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Any = None,
    cap: float | None = None,
) -> Tensor:
    """The product and what surrounds it in float64."""
    h = x.double()
    if norm is not None:
        h = rms(h, norm.double())
    result = functional.linear(h, weight.double(), None if bias is None else bias.double())
    if activation is not None:
        result = gated_reference(result, activation)
    if cap is not None:
        result = torch.tanh(result / cap) * cap
    return result if y is None else y.double() + result


def run(
    x: Tensor, weight: Tensor, *, y: Tensor | None = None, dtype: torch.dtype = torch.float32, **parts: Any
) -> Tensor:
    """``products.product`` into fresh memory, or added to ``y``."""
    outputs = len(weight) // (2 if parts.get("activation") else 1)
    result = torch.full((len(x), outputs), torch.nan, dtype=dtype, device=DEVICE) if y is None else y.clone()
    products.product(result, x, weight, eps=EPS, add=y is not None, **parts)
    return result


def partials(layer: LayerAttention, rows: int, splits: int) -> tuple[Partials, Tensor, Tensor]:
    """Attention in splits, unwritten where a row sees nothing of them; positions; and the sum of the splits, float64.

    The last row is idle.
    """
    heads, head_dim = layer.heads, layer.head_dim
    positions = torch.randint(64 * splits, (rows,), generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    tiles = torch.arange(0, 64 * splits, 64, device=DEVICE)
    unseen = (tiles > positions[:, None]) | (tiles + 64 <= positions[:, None] + 1 - (layer.window or 1 << 30))
    scores = 3 * random(rows, heads, splits, 5)
    values = random(rows, heads, splits, 5, head_dim, seed=2)
    peaks = scores.amax(-1)
    weights = (scores - peaks[..., None]).exp()
    sums, attended = weights.sum(-1), (weights[..., None] * values).sum(-2)
    shares = scores.double().masked_fill(unseen[:, None, :, None], -torch.inf).flatten(2).softmax(-1)
    whole = (shares[..., None] * values.double().flatten(2, 3)).sum(-2).flatten(1)
    given = Partials(peaks / math.log(2), sums, attended)
    for tensor in given:
        tensor.masked_fill_(unseen[:, None, :, None] if tensor.ndim == 4 else unseen[:, None], torch.nan)
    positions[-1] = 0
    for tensor, nothing in zip(given, (-torch.inf, 0.0, 0.0)):
        tensor[-1] = nothing
    whole[-1] = 0
    return given, positions, whole


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("part", ["nothing", "norm", "bias", "silu", "gelu_tanh", "cap", "add", "everything"])
def test_a_product_and_its_parts(part: str, tile: Tile) -> None:
    rows, outputs, inputs = 2, 11, 72
    all_parts: dict[str, Any] = {
        "norm": 1 + 0.1 * random(inputs),
        "bias": random(outputs),
        "activation": part,
        "cap": 3.0,
        "y": random(rows, outputs, seed=3),
    }
    asked: dict[str, Any]
    if part == "everything":
        asked = {**all_parts, "activation": "gelu_tanh"}
    else:
        names = {"silu": ["activation"], "gelu_tanh": ["activation"], "add": ["y"], "nothing": []}.get(part, [part])
        asked = {name: all_parts[name] for name in names}
    width = 2 * outputs if "activation" in asked else outputs
    if "bias" in asked:
        asked["bias"] = random(width)
    x, weight = 2 * random(rows, inputs, seed=4), random(width, inputs, seed=5) / inputs**0.5
    close(run(x, weight, tile=tile, **asked), expected(x, weight, **asked))


@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(rows: int) -> None:
    x, weight, norm = random(rows, 40), random(5, 40), random(40)
    close(run(x, weight, norm=norm), expected(x, weight, norm=norm))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (3, 17), (33, 24), (7, 640), (2, 1536), (2, 3072), (3, 2500)])
def test_any_size(outputs: int, inputs: int) -> None:
    x, weight, norm = random(2, inputs), random(outputs, inputs), random(inputs)
    close(run(x, weight, norm=norm), expected(x, weight, norm=norm))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_type(dtype: torch.dtype) -> None:
    """Of the weight, of rows and of results."""
    x, weight, norm = random(2, 48), random(16, 48, dtype=dtype), random(48)
    choices: list[dict[str, Any]] = [{}, {"norm": norm}, {"activation": "silu"}]
    for parts in choices:
        close(run(x, weight, **parts), expected(x, weight, **parts))
        narrow = run(x.to(dtype), weight, dtype=dtype, **parts)
        close(narrow, expected(x.to(dtype), weight, **parts), 2e-5 + torch.finfo(dtype).eps)


def test_large_rows_stay_within_float16() -> None:
    """A residual stream may leave float16's range; its norm does not."""
    x, weight, norm = 1e5 * random(2, 48), random(16, 48, dtype=torch.float16), 10 + random(48)
    close(run(x, weight, norm=norm), expected(x, weight, norm=norm), 1e-3)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_rows_do_not_see_each_other(tile: Tile) -> None:
    """Not even what is not finite."""
    x, weight, norm = random(4, 72), random(9, 72), random(72)
    whole = run(x, weight, norm=norm, tile=tile)
    x[1], x[2] = torch.nan, torch.inf
    assert torch.equal(run(x, weight, norm=norm, tile=tile)[[0, 3]], whole[[0, 3]])


@pytest.mark.parametrize("parts", [[], ["norm", "bias", "cap"]])
@pytest.mark.parametrize(("outputs", "inputs"), [(9, 16), (3, 72), (8, 200)])
def test_a_weight_in_words(outputs: int, inputs: int, parts: list[str]) -> None:
    """Each of two bfloat16 numbers."""
    all_parts: dict[str, Any] = {"norm": 1 + 0.1 * random(inputs), "bias": random(outputs), "cap": 3.0}
    asked = {name: all_parts[name] for name in parts}
    x, weight = 2 * random(1, inputs, seed=4), (random(outputs, inputs, seed=5) / inputs**0.5).bfloat16()
    close(run(x, weight, tile=Tile(8, 64, 0, 4), **asked), expected(x, weight, **asked))


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "splits", "head_dim"), [(3, 1, 16), (5, 8, 32)])
def test_products_of_attention_in_splits(heads: int, splits: int, head_dim: int, window: int | None) -> None:
    layer = LayerAttention(heads, 1, head_dim, 1.0, window=window)
    given, positions, attention = partials(layer, MOST_ROWS, splits)
    weight, stream = random(6, heads * head_dim), random(MOST_ROWS, 6)
    for tile in (None, Tile(4, head_dim, 1, 4)):
        for bias in (None, random(6)):
            result = torch.full_like(stream, torch.nan)
            products.combine_product(result, layer, given, positions, weight, bias=bias, tile=tile)
            close(result + 1, expected(attention, weight, bias=bias) + 1)
    result = stream.clone()
    products.combine_product(result, layer, given, positions, weight, add=True)
    close(result, expected(attention, weight, y=stream))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 3, 17), (5, 70, 64), (17, 33, 400), (200, 16, 128)])
def test_wide_products(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype)
    tolerance = 2e-5 + (0 if dtype == torch.float32 else torch.finfo(dtype).eps)
    tiles = [None, WideTile(16, inputs + -inputs % 64, 64, 1, 4, 3), WideTile(16, inputs + -inputs % 16, 16, 8, 4, 2)]
    for tile in tiles:
        for bias in (None, random(outputs)):
            result = torch.full((rows, outputs), torch.nan, dtype=dtype, device=DEVICE)
            products.wide_product(result, x, weight, bias=bias, tile=tile)
            close(result, expected(x, weight, bias=bias), tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_wide_products_with_gates(activation: Any) -> None:
    x, weight, bias = random(6, 80), random(2 * 37, 80) / 9, random(2 * 37)
    for tile in (None, WideTile(16, 96, 32, 1, 4, 3)):
        result = torch.full((6, 37), torch.nan, device=DEVICE)
        products.wide_product(result, x, weight, bias=bias, activation=activation, tile=tile)
        close(result, expected(x, weight, bias=bias, activation=activation))


@pytest.mark.parametrize(
    ("outputs", "inputs", "tile"),
    [
        (8, 2048, None),
        (24, 700, None),
        (8, 512, WideTile(16, 192, 64, 1, 4, 3)),
        (8, 64, WideTile(16, 48, 16, 0, 4, 3)),
    ],
)
def test_wide_products_in_shares_add_up(outputs: int, inputs: int, tile: WideTile | None) -> None:
    x, weight, bias, stream = random(7, inputs), random(outputs, inputs), random(outputs), random(7, outputs, seed=1)
    count = products.shares(weight, 7) if tile is None else -(-inputs // tile.share)
    assert count > 1
    parts = torch.full((count, 7, outputs), torch.nan, device=DEVICE)
    products.wide_product(parts, x, weight, bias=bias, tile=tile)
    whole = expected(x, weight, bias=bias)
    close(parts.sum(0), whole)
    products.add_norm(stream, parts, eps=EPS)
    close(stream, random(7, outputs, seed=1).double() + whole)
    x[1:] = torch.nan
    again = parts.clone()
    products.wide_product(again, x, weight, bias=bias, tile=tile)
    assert torch.equal(again[:, 0], parts[:, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embeddings(dtype: torch.dtype) -> None:
    table, history = random(50, 24, dtype=dtype), torch.randint(50, (3, 9), device=DEVICE)
    slots, positions = torch.tensor([2, -1, 0, 2], device=DEVICE), torch.tensor([8, -7, 0, 1], device=DEVICE)
    ropes = [Rope(1e4), Rope(1e6)]
    frequencies = torch.stack([rope.frequencies(24) for rope in ropes]).to(DEVICE)
    stream, rotations = torch.full((4, 24), torch.nan, device=DEVICE), torch.empty(2, 4, 12, 2, device=DEVICE)
    factors = torch.tensor([1.0, 1.1], device=DEVICE)
    products.embed(stream, rotations, table, history, slots, positions, frequencies, factors, 24**0.5)
    reference = table[history[slots, positions.clamp(min=0)]].float() * 24**0.5
    reference[1] = 0
    assert torch.equal(stream, reference)


def test_rotations_equal_the_torch_path_at_far_positions() -> None:
    positions = torch.tensor([0, 4095, 131_071, 1_000_003], device=DEVICE)
    ropes, factors = [Rope(1e4), Rope(1e6)], [1.0, 1.1]
    frequencies = [rope.frequencies(24).to(DEVICE) for rope in ropes]
    stream, rotations = torch.empty(4, 24, device=DEVICE), torch.full((2, 4, 12, 2), torch.nan, device=DEVICE)
    slots, history = torch.full_like(positions, -1), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    products.embed(
        stream, rotations, random(50, 24), history, slots, positions, torch.stack(frequencies),
        torch.tensor(factors, device=DEVICE),
    )  # fmt: skip
    expected = [rotation(positions, each, factor)[:, 0] for each, factor in zip(frequencies, factors)]
    torch.testing.assert_close(torch.view_as_complex(rotations), torch.stack(expected), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("size", [24, 640])
def test_norms_and_additions(size: int) -> None:
    stream, delta, weights = random(5, size), random(5, size, seed=1).bfloat16(), (random(size), random(size, seed=2))
    out = torch.empty(5, size, dtype=torch.bfloat16, device=DEVICE)
    products.norm(out, stream, weights[0], EPS)
    close(out, rms(stream.double(), weights[0].double()), 4e-3)
    for delta_norm in (None, weights[1]):
        added = delta.double() if delta_norm is None else rms(delta.double(), delta_norm.double())
        for norm in (None, weights[0]):
            ours, normalised = stream.clone(), None if norm is None else torch.empty_like(stream)
            products.add_norm(ours, delta, eps=EPS, delta_norm=delta_norm, norm=norm, out=normalised)
            close(ours, stream.double() + added)
            if norm is not None and normalised is not None:
                close(normalised, rms(stream.double() + added, norm.double()))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates(activation: Any) -> None:
    gate_up = 4 * random(3, 2 * 1100)
    gate_up[0, :3] = torch.tensor([-200.0, 0.0, 200.0])
    out = torch.empty(3, 1100, device=DEVICE)
    products.gated(out, gate_up, activation)
    close(out, gated_reference(gate_up.double(), activation))


def test_what_does_not_fit_is_refused() -> None:
    x, weight, y = random(2, 8), random(6, 8), random(2, 6)
    bad: list[tuple[Any, ...]] = [
        (y, x[:, :7], weight), (y, x, weight[:5]), (y, x, random(8, 6).T), (random(5, 6), random(5, 8), weight),
    ]  # fmt: skip
    for args in bad:
        with pytest.raises(ValueError, match=r"expected|rows"):
            products.product(*args)
    with pytest.raises(ValueError, match="expected"):
        products.product(y, x, weight, norm=random(7))
    for others in ({"weight": weight}, {"activation": "silu", "y": y[:1, :3].contiguous()}, {"x": x[:1].bfloat16()}):
        one: dict[str, Any] = {"y": y[:1], "x": x[:1], "weight": weight.bfloat16(), **others}
        with pytest.raises(ValueError, match="words"):
            products.product(**one, tile=Tile(8, 64, 0, 4))
    with pytest.raises(ValueError, match="stream"):
        products.product(y.bfloat16(), x, weight, add=True)
    layer = LayerAttention(2, 1, 3, 1.0)
    three = Partials(random(2, 2, 1), random(2, 2, 1), random(2, 2, 1, 3))
    with pytest.raises(ValueError, match="powers of two"):
        products.combine_product(y, layer, three, torch.zeros(2, dtype=torch.int64), random(6, 6))
    with pytest.raises(ValueError, match="together"):
        products.add_norm(y, y, eps=EPS, norm=random(6))


def test_tiles_cover_what_models_need() -> None:
    for outputs, inputs in [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (640, 1024), (151_936, 1024)]:
        for rows in ROWS:
            assert outputs / products.tile_for(rows, outputs, inputs).outputs >= (80 if rows > 2 else 128)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(("outputs", "inputs"), [(576, 1536), (1024, 3072), (2048, 8192), (3584, 18_944)])
def test_what_is_read_ahead_fits_into_registers(outputs: int, inputs: int, itemsize: int) -> None:
    """Of 255 a thread has; the others hold rows, sums and places."""
    for rows in ROWS:
        tile = products.tile_for(rows, outputs, inputs, itemsize=itemsize)
        assert tile.outputs * tile.columns * tile.ahead * itemsize / (4 * 32 * tile.warps) <= 192


@pytest.mark.parametrize("memory", [99 << 10, 163 << 10, 227 << 10])  # of an RTX 5090, an A100 and an H200
@pytest.mark.parametrize("shared", [False, True])
def test_wide_tiles_fit_into_shared_memory(shared: bool, memory: int) -> None:
    for rows, itemsize in [(5, 2), (32, 4), (64, 2), (128, 2), (128, 4)]:
        tile = products.wide_tile_for(rows, 1024, 3072, itemsize, shared, memory)
        assert tile.stages >= 2
        assert tile.stages * tile.columns * (tile.lines + max(rows, 16)) * itemsize <= memory
        assert products.wide_tile_for(rows, 1024, 3072, itemsize, shared) == tile._replace(stages=3 if shared else 4)


def test_kernels_compile_for_a_gpu() -> None:
    """The interpreter knows no types and no registers: the compiler does, and needs no GPU."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=COMPILED, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == 6 * ["product"] + 2 * ["wide_product"] + ["embed", "add_norm", "add_norm", "gated"]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "activation"),
    [(4096, 1024, None), (1024, 2048, None), (3072, 1024, "silu"), (1024, 3072, None), (151_936, 1024, None)],
)
@pytest.mark.parametrize("chained", [False, True])
def test_the_sizes_of_a_model(rows: int, outputs: int, inputs: int, activation: Any, chained: bool) -> None:
    x, norm = random(rows, inputs), 1 + 0.1 * random(inputs)
    weight = (random(outputs * (2 if activation else 1), inputs) / inputs**0.5).bfloat16()
    ours = run(x, weight, norm=norm, activation=activation, chained=chained)
    close(ours, expected(x, weight, norm=norm, activation=activation), 2e-5)
    others = x[torch.arange(rows, device=DEVICE).flip(0)]
    others[0] = x[0]
    assert torch.equal(run(others, weight, norm=norm, activation=activation, chained=chained)[0], ours[0])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4])
def test_a_chain_of_launches_waits_for_each_before(rows: int) -> None:
    """A layer's worth of launches in a captured graph, replayed: each reads what the one before it wrote."""
    hidden = 1024
    gate_up, down = (random(*shape, dtype=torch.bfloat16) / 32 for shape in ((6144, 2048), (hidden, 3072)))
    turn, norm, start = random(2048, hidden, dtype=torch.bfloat16) / 32, 1 + 0.1 * random(2048), random(rows, hidden)
    turned = torch.empty(rows, 2048, device=DEVICE)
    stream, inner = start.clone(), torch.empty(rows, 3072, dtype=torch.bfloat16, device=DEVICE)

    def step() -> None:
        stream.copy_(start)
        for layer in range(20):
            products.product(turned, stream, turn, chained=layer > 0, early=layer > 0)  # in words, if it is one row
            products.product(inner, turned, gate_up, norm=norm, eps=EPS, activation="silu", chained=True)
            products.product(stream, inner, down, add=True, chained=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    reference = start.double()
    for _ in range(20):
        normed = rms(reference @ turn.double().T, norm.double())
        reference = reference + gated_reference(normed @ gate_up.double().T, "silu") @ down.double().T
    first = None
    for _ in range(20):
        graph.replay()
        close(stream, reference, 2e-2)
        first = stream.clone() if first is None else first
        assert torch.equal(stream, first)
