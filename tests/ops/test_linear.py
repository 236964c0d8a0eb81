"""Products and embeddings against float64, and rows that do not feel their neighbours."""

import pytest
import torch
from torch import Tensor

from freewheel.ops import linear
from freewheel.ops.linear import Embedding, Linear
from freewheel.ops.quantize import GroupQuantized

BOUND = {torch.float32: 1e-6, torch.bfloat16: 3e-3}


def random_groups(out: int, columns: int, bits: int = 4, group: int = 32, *, seed: int = 0) -> GroupQuantized:
    """Scales spread over two powers of ten, offsets that centre the values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(2**bits, (out, columns), generator=generator, dtype=torch.uint8)
    scale = 10 ** -(torch.rand(out, columns // group, generator=generator) * 2) / 2**bits
    offset = -scale * 2 ** (bits - 1)
    return GroupQuantized(values, scale, offset, bits, group)


def random_rows(rows: int, columns: int, *, seed: int = 1) -> Tensor:
    """float32 with outliers, as the input of a down projection has."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(2, rows, columns, generator=generator)
    return normal[0] * normal[1].exp()


def relative_error(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """Root mean square of the error against float64, relative to that of the result."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    return float((result.double() - exact).norm() / exact.norm())


def assert_rows_independent(product: Linear, x: Tensor, rounding: float = 0.0) -> None:
    """Row 3, and rows 3 and 4, come out the same beside any number of others.

    Bit for bit where the kernel's own order of summing says so. MKL and oneDNN choose theirs by processor, number of
    threads and shape, and there rows may differ by ``rounding``, relative to the row.
    """

    def same(result: Tensor, expected: Tensor) -> bool:
        difference = (result.double() - expected.double()).norm()
        return torch.equal(result, expected) or bool(difference <= rounding * expected.double().norm())

    alone, pair = product(x[3:4]), product(x[3:5])
    assert same(alone, pair[:1])
    for rows in (6, 7, 8, 17, 32, 33, 64, 100, 257, 512):
        assert same(product(x[:rows])[3:5], pair), rows


class TestDense:
    @pytest.mark.parametrize(("out", "columns"), [(96, 64), (77, 63), (1, 1), (130, 1536)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_matches_float64(self, dtype: torch.dtype, out: int, columns: int) -> None:
        weight, x = random_rows(out, columns).to(dtype), random_rows(5, columns, seed=2).to(dtype)
        bias = random_rows(1, out, seed=3)[0].to(dtype)
        result = Linear.pack([weight], dtype, bias)(x)
        assert result.dtype == dtype
        assert relative_error(result, x, weight, bias) < BOUND[dtype]

    @pytest.mark.parametrize("columns", [64, 576, 2048])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rows_are_independent(self, dtype: torch.dtype, columns: int) -> None:
        weight, x = random_rows(96, columns).to(dtype), random_rows(512, columns).to(dtype)
        assert_rows_independent(Linear.pack([weight], dtype), x, BOUND[dtype])

    def test_fuses_parts_of_mixed_kinds(self) -> None:
        dense, quantized, x = random_rows(10, 64), random_groups(6, 64), random_rows(3, 64, seed=2)
        result = Linear.pack([dense, quantized], torch.float32)(x)
        assert relative_error(result, x, torch.cat([dense, quantized.dequantize()])) < 1e-6

    def test_works_without_onednn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        weight, x = random_rows(10, 64), random_rows(3, 64, seed=2)
        assert relative_error(Linear.pack([weight], torch.float32)(x), x, weight) < 1e-6

    def test_counts_its_bytes(self) -> None:
        assert Linear.pack([torch.zeros(10, 64)], torch.float32, torch.zeros(10)).nbytes == 4 * (640 + 10)
        assert Linear.pack([torch.zeros(10, 64)], torch.bfloat16).nbytes == 2 * 640


def pack_int8(parts: list[GroupQuantized], dtype: torch.dtype, bias: Tensor | None = None) -> Linear:
    return Linear.pack(parts, dtype, bias, int4=False)


INT4 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.mark.skipif(not INT4, reason="the processor lacks the vector instructions")
class TestInt4:
    @pytest.mark.parametrize(("out", "columns", "group"), [(192, 576, 32), (16, 64, 64), (48, 1536, 128), (80, 96, 32)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_error_is_that_of_bfloat16(self, dtype: torch.dtype, out: int, columns: int, group: int) -> None:
        weight, x = random_groups(out, columns, 4, group), random_rows(33, columns).to(dtype)
        bias = random_rows(1, out, seed=3)[0]
        product = Linear.pack([weight], dtype, bias)
        assert product(x).dtype == torch.bfloat16
        assert product.nbytes == out * columns // 2 + out * columns // group * 4 + out * 2
        assert relative_error(product(x), x, weight.dequantize(), bias) < 6e-3

    def test_is_closer_than_int8(self) -> None:
        weight, x = random_groups(192, 576), random_rows(8, 576)
        exact = weight.dequantize()
        four, eight = Linear.pack([weight], torch.float32)(x), pack_int8([weight], torch.float32)(x)
        assert 3 * relative_error(four, x, exact) < relative_error(eight, x, exact)

    def test_fuses_parts(self) -> None:
        parts, x = [random_groups(16, 64), random_groups(32, 64, seed=1)], random_rows(5, 64)
        fused = Linear.pack(parts, torch.float32)(x)
        assert torch.equal(fused, torch.cat([Linear.pack([part], torch.float32)(x) for part in parts], dim=1))

    @pytest.mark.parametrize(("out", "columns"), [(96, 64), (576, 1536), (64, 2048)])
    @pytest.mark.parametrize("bias", [False, True])
    def test_rows_are_independent(self, out: int, columns: int, bias: bool) -> None:
        product = Linear.pack([random_groups(out, columns)], torch.float32, torch.randn(out) if bias else None)
        assert_rows_independent(product, random_rows(512, columns))

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite_stays_in_its_row_and_shows(self, value: float) -> None:
        product, x = Linear.pack([random_groups(16, 64)], torch.float32), random_rows(3, 64)
        clean = product(x)
        x[1, 5] = value
        assert torch.equal(product(x)[[0, 2]], clean[[0, 2]])
        assert not product(x)[1].isfinite().any()

    @pytest.mark.parametrize(
        "parts",
        [
            [random_groups(16, 64, bits=5)],
            [random_groups(16, 64, group=16)],
            [random_groups(20, 64)],
            [random_groups(16, 64), random_groups(16, 64, group=64)],
        ],
        ids=["5 bits", "groups of 16", "20 outputs", "mixed groups"],
    )
    def test_what_the_kernel_does_not_take_goes_another_way(self, parts: list[GroupQuantized]) -> None:
        x = random_rows(4, 64)
        result = Linear.pack(parts, torch.float32)(x)
        assert relative_error(result, x, torch.cat([part.dequantize() for part in parts])) < 0.03


@pytest.mark.skipif(not linear._int8_levels(), reason="torch has no FBGEMM here")
class TestInt8:
    @pytest.mark.parametrize(("bits", "group"), [(4, 32), (5, 32), (6, 16), (8, 32), (8, 64)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_error_is_that_of_int8(self, dtype: torch.dtype, bits: int, group: int) -> None:
        weight, x = random_groups(200, 576, bits, group), random_rows(33, 576).to(dtype)
        bias = random_rows(1, 200, seed=3)[0]
        result = pack_int8([weight], torch.float32, bias)(x)
        assert result.dtype == torch.float32
        # Largest value about 4.5 standard deviations: rounding adds 4.5 / levels / sqrt(12), of rows and of weights.
        bound = 0.016 * 127 / linear._int8_levels()
        assert 0.1 * bound < relative_error(result, x, weight.dequantize(), bias) < bound

    def test_one_outlier_does_not_drown_the_rest(self) -> None:
        weight, x = random_groups(96, 576), torch.randn(8, 576, generator=torch.Generator().manual_seed(5))
        x[:, 7] = 200.0
        without = weight.dequantize()
        without[:, 7] = 0
        quantized = pack_int8([weight], torch.float32)(x) - x[:, 7:8] * weight.dequantize()[:, 7]
        plain = x.abs().amax(1, keepdim=True) / linear._int8_levels()
        assert relative_error(quantized, x, without) < 0.5 * relative_error(
            (x / plain).round() * plain @ without.T, x, without
        )

    @pytest.mark.parametrize(("out", "columns", "group"), [(33, 48, 16), (5, 24, 8), (1, 64, 32), (257, 80, 16)])
    def test_odd_sizes(self, out: int, columns: int, group: int) -> None:
        weight, x = random_groups(out, columns, 4, group), random_rows(4, columns)
        assert relative_error(pack_int8([weight], torch.float32)(x), x, weight.dequantize()) < 0.03

    def test_fuses_parts_of_different_bits_and_groups(self) -> None:
        parts = [
            random_groups(64, 256, 4, 32),
            random_groups(7, 256, 6, 16, seed=1),
            random_groups(9, 256, 8, 64, seed=2),
        ]
        x = random_rows(5, 256)
        fused = pack_int8(parts, torch.float32)
        assert (fused.out_features, fused.in_features) == (80, 256)
        assert torch.equal(fused(x), torch.cat([pack_int8([part], torch.float32)(x) for part in parts], dim=1))

    @pytest.mark.parametrize(("out", "columns"), [(96, 64), (130, 576), (64, 2048), (20, 48)])
    @pytest.mark.parametrize("bias", [False, True])
    def test_rows_are_independent(self, out: int, columns: int, bias: bool) -> None:
        product = pack_int8([random_groups(out, columns, group=16)], torch.float32, torch.randn(out) if bias else None)
        # The sums are exact; the rotation before them is MKL's, and may tip a value to the next of its 127 levels.
        assert_rows_independent(product, random_rows(512, columns), 2e-3)

    def test_packing_in_pieces_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weight, x = random_groups(100, 128), random_rows(3, 128)
        whole = pack_int8([weight], torch.float32)(x)
        monkeypatch.setattr(linear, "_PACKING_ROWS", 32)
        assert torch.equal(pack_int8([weight], torch.float32)(x), whole)

    def test_rows_and_weights_of_zeros_give_the_bias(self) -> None:
        weight = random_groups(8, 64)
        weight.scale[2], weight.offset[2] = 0, 0
        bias = torch.arange(8.0)
        product = pack_int8([weight], torch.float32, bias)
        x = random_rows(3, 64)
        x[1] = 0
        assert torch.equal(product(x)[1], bias)
        assert torch.equal(product(x)[:, 2], bias[2].expand(3))

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_what_is_not_finite_stays_in_its_row_and_shows(self, value: float) -> None:
        product, x = pack_int8([random_groups(8, 64)], torch.float32), random_rows(3, 64)
        clean = product(x)
        x[1, 5] = value
        assert torch.equal(product(x)[[0, 2]], clean[[0, 2]])
        assert not product(x)[1].isfinite().any()

    def test_leaves_its_input_and_the_chosen_engine_alone(self) -> None:
        engine = torch.backends.quantized.engine
        x = random_rows(3, 24)
        before = x.clone()
        pack_int8([random_groups(8, 24, 4, 8)], torch.float32)(x)
        assert torch.equal(x, before)
        assert torch.backends.quantized.engine == engine

    def test_counts_a_byte_for_each_weight(self) -> None:
        assert pack_int8([random_groups(96, 64)], torch.float32).nbytes == 96 * (64 + 12)

    def test_is_dense_without_fbgemm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linear, "_int8_levels", lambda: 0)
        weight, x = random_groups(10, 64), random_rows(3, 64)
        assert relative_error(pack_int8([weight], torch.float32)(x), x, weight.dequantize()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantized", [False, True])
def test_no_rows_give_no_rows(dtype: torch.dtype, quantized: bool) -> None:
    weight = random_groups(10, 64) if quantized else random_rows(10, 64)
    assert Linear.pack([weight], dtype)(torch.empty(0, 64, dtype=dtype)).shape == (0, 10)
    assert Embedding.pack(weight, dtype)(torch.empty(0, dtype=torch.int64)).shape == (0, 64)


class TestEmbedding:
    IDS = torch.tensor([3, 0, 49, 3])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_looks_up_dense_rows(self, dtype: torch.dtype) -> None:
        table = random_rows(50, 64)
        assert torch.equal(Embedding.pack(table, dtype)(self.IDS), table[self.IDS].to(dtype))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_looks_up_quantised_rows_exactly(self, dtype: torch.dtype) -> None:
        table = random_groups(50, 64, 8)
        assert torch.equal(Embedding.pack(table, dtype)(self.IDS), table.dequantize()[self.IDS].to(dtype))

    def test_stays_quantised_with_half_precision_scales_where_they_suffice(self) -> None:
        table = random_groups(50, 64, 8)
        half = GroupQuantized(table.values, table.scale.half().float(), table.offset.half().float(), 8, 32)
        assert Embedding.pack(table, torch.float32).nbytes == 50 * (64 + 2 * 2 * 4)
        assert Embedding.pack(half, torch.float32).nbytes == 50 * (64 + 2 * 2 * 2)
        assert torch.equal(Embedding.pack(half, torch.float32)(self.IDS), half.dequantize()[self.IDS])
