"""Temperature and softmax: torch's numbers, rows that sum to 1, at any temperature, by either kernel."""

import pytest
import torch
from torch import Tensor

from freewheel.sampling import probabilities as module
from freewheel.sampling import softmax
from freewheel.sampling.draw import BLOCK

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def exact(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """In float64."""
    temperatures = torch.as_tensor(temperature, dtype=torch.float64, device=logits.device).reshape(-1, 1)
    return ((logits.double() - logits.double().amax(1, keepdim=True)) / temperatures).softmax(1)


@pytest.fixture(params=["torch", "one pass", "two passes"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernels run, each of them on every width."""
    if request.param != "torch":
        pytest.importorskip("triton", reason="Triton is made for Linux only")
        monkeypatch.setattr("freewheel.sampling.probabilities.ONE_PASS", 2**20 if request.param == "one pass" else 0)
    return request.param != "torch"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5000])
def test_probabilities_are_those_of_float64(path: bool, dtype: torch.dtype, vocab: int) -> None:
    logits = (torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(DEVICE, dtype)
    for temperature in (1.0, 0.7, torch.tensor([0.5, 1.0, 2.0], device=DEVICE)):
        probabilities = softmax(logits, temperature, fused=path)
        expected = exact(logits, temperature)
        # Float32 carries 24 bits. The exponent is rounded twice, and exponential, sum and quotient cost a few bits.
        exponents = expected.log() - expected.log().amax(1, keepdim=True)
        bound = expected * (2 * exponents.abs() + 8) * 2**-24
        assert ((probabilities.double() - expected).abs() <= bound).all()
        assert (probabilities.double().sum(1) - 1).abs().max() < 1e-6


def test_results_may_go_where_the_logits_are(path: bool) -> None:
    logits = torch.randn(40, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected, other = exact(logits, 0.7), exact(logits.t(), 0.7)
    transposed, square = logits.clone(), logits.clone()
    torch.testing.assert_close(softmax(logits, 0.7, logits, fused=path).double(), expected, rtol=1e-6, atol=0)
    if not path:  # each row is read whole before it is written, but others may be written before
        torch.testing.assert_close(
            softmax(transposed.t(), 0.7, square.copy_(transposed), fused=path).double(), other, rtol=1e-6, atol=0
        )
        torch.testing.assert_close(
            softmax(transposed.t(), 0.7, transposed, fused=path).double(), other, rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("vocab", [49_152, 262_144])
def test_wide_rows_sum_to_one(vocab: int) -> None:
    logits = (torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(DEVICE)
    for temperature in (1e-3, 0.7, 5.0):
        probabilities = softmax(logits, temperature)
        assert (probabilities.double().sum(1) - 1).abs().max() < 1e-6
        assert probabilities.max() <= 1
        torch.testing.assert_close(probabilities.double(), exact(logits, temperature), rtol=1e-5, atol=1e-12)


def test_a_low_temperature_keeps_rows_normalised(path: bool) -> None:
    logits = torch.full((2, 3 * BLOCK + 1), 0.1, device=DEVICE)
    logits[0, 300], logits[1] = 0.1 + 1e-3, 7.7
    for temperature in (1e-3, torch.tensor([1e-3, 1e-8], device=DEVICE)):
        probabilities = softmax(logits, temperature, fused=path)
        assert probabilities.max() <= 1
        torch.testing.assert_close(probabilities.sum(1), torch.ones(2, device=DEVICE), rtol=2e-6, atol=0)
        torch.testing.assert_close(probabilities.double(), exact(logits, temperature), rtol=1e-5, atol=1e-12)


def test_huge_logits_at_tiny_temperatures_give_one_and_zeros(path: bool) -> None:
    logits = torch.tensor([[1e4, -1e4, 9999.0], [-1e30, -1e30, 1e30]], device=DEVICE)
    assert softmax(logits, 1e-8, fused=path).tolist() == [[1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize("index", [0, BLOCK - 1, BLOCK, 2 * BLOCK])
def test_one_finite_logit_has_all_the_mass(path: bool, index: int) -> None:
    logits = torch.full((1, 2 * BLOCK + 1), -torch.inf, device=DEVICE)
    logits[0, index] = -5.0
    assert softmax(logits, 0.5, fused=path)[0].nonzero().flatten().tolist() == [index]


@pytest.mark.parametrize("vocab", [BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK])
def test_rows_with_little_left_have_mass_there_alone(path: bool, vocab: int) -> None:
    """At one id, or in one block: what a program of the kernels sees may be nothing but -inf."""
    logits = torch.full((4, vocab), -torch.inf, device=DEVICE)
    logits[[0, 1, 2], [0, vocab // 2, vocab - 1]] = -7.0
    logits[3, -9:] = torch.arange(9.0, device=DEVICE)
    probabilities = softmax(logits, 2.0, fused=path)
    torch.testing.assert_close(probabilities.double(), exact(logits, 2.0), rtol=2e-6, atol=0)
    assert torch.equal(probabilities > 0, logits > -torch.inf)


def test_rows_without_a_distribution_give_nan_and_leave_their_neighbours_alone(path: bool) -> None:
    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    healthy = softmax(logits, fused=path)
    logits[0], logits[1, 5], logits[2, 599] = -torch.inf, torch.nan, torch.inf
    probabilities = softmax(logits, fused=path)
    assert probabilities[:3].isnan().any(1).all()
    assert probabilities[3].equal(healthy[3])


def test_the_result_goes_where_it_is_wanted(path: bool) -> None:
    out = torch.full((2, 300), torch.nan, device=DEVICE)
    logits = torch.randn(2, 400, device=DEVICE)[:, :300]
    assert softmax(logits, 0.9, out, fused=path) is out
    torch.testing.assert_close(out.double(), exact(logits, 0.9), rtol=2e-6, atol=1e-12)


def test_logits_and_temperatures_may_lie_in_memory_in_any_way(path: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    columns = torch.randn(600, 4, generator=generator).to(DEVICE)
    wide = torch.randn(2, 1200, generator=generator).to(DEVICE, torch.bfloat16)
    temperatures = torch.tensor([0.5, 9.0, 1.0, 9.0, 2.0, 9.0, 0.7], device=DEVICE)[::2]
    cases = [(columns.t(), temperatures), (wide[:, ::2], 0.8), (wide[:1].expand(4, -1), temperatures)]
    for logits, temperature in cases:
        probabilities = softmax(logits, temperature, fused=path)
        torch.testing.assert_close(probabilities.double(), exact(logits, temperature), rtol=2e-6, atol=1e-12)


def test_types_make_no_difference(path: bool) -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    temperatures = torch.tensor([0.5, 1.0, 2.0], device=DEVICE)
    expected = softmax(logits, temperatures, fused=path)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        assert softmax(logits, temperatures.to(dtype), fused=path).equal(expected)
    assert softmax(logits.double(), temperatures, fused=path).equal(expected)
    assert not softmax(logits.requires_grad_(), temperatures, fused=path).requires_grad


@pytest.mark.parametrize("temperature", [1e-30, 1e30])
def test_the_limits_of_temperature(path: bool, temperature: float) -> None:
    logits = torch.tensor([[1.0, 1.0, 0.5, -torch.inf], [-3e38, 3e38, 3e38, 0.0]], device=DEVICE)
    expected = [[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0]] if temperature < 1 else [[1 / 3, 1 / 3, 1 / 3, 0]]
    for given in (temperature, torch.full((2,), temperature, device=DEVICE)):
        found = softmax(logits, given, fused=path)[: len(expected)]
        torch.testing.assert_close(found, torch.tensor(expected, device=DEVICE), rtol=2e-6, atol=0)


def test_one_pass_serves_rows_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the choice that is made without a test's help."""
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    passes: list[bool] = []
    chosen = module.softmax_into

    def noted(out: Tensor, logits: Tensor, temperature: float | Tensor, one_pass: bool) -> None:
        passes.append(one_pass)
        chosen(out, logits, temperature, one_pass)

    monkeypatch.setattr(module, "softmax_into", noted)
    for vocab in (16_384, 16_385):
        logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab)).to(DEVICE) * 3
        torch.testing.assert_close(softmax(logits, 0.8, fused=True).double(), exact(logits, 0.8), rtol=2e-6, atol=1e-12)
    assert passes == [True, False]


def test_bad_arguments_are_named(path: bool) -> None:
    logits = torch.zeros(2, 4, device=DEVICE)
    for bad in (0, -1.0, 1e-39, 1e39, float("nan"), float("inf"), True, "1"):
        with pytest.raises(ValueError, match="temperature must be a number from 1e-30 to 1e"):
            softmax(logits, bad, fused=path)  # pyright: ignore[reportArgumentType]
    for shape in ((), (1,), (3,), (2, 1)):
        with pytest.raises(ValueError, match=r"temperature must be a number or a float tensor of shape \(2,\)"):
            softmax(logits, torch.ones(shape, device=DEVICE), fused=path)
    for temperatures in (torch.ones(2, dtype=torch.int64, device=DEVICE), torch.ones(2, device="meta")):
        with pytest.raises(ValueError, match="temperature must be a number or a float tensor"):
            softmax(logits, temperatures, fused=path)
    for out in (
        torch.empty(8, device=DEVICE),
        torch.empty(2, 4, dtype=torch.float64, device=DEVICE),
        torch.empty(4, 2, device=DEVICE).t(),
        torch.empty(2, 4, device="meta"),
    ):
        with pytest.raises(ValueError, match="out must be a contiguous float32 tensor"):
            softmax(logits, 1.0, out, fused=path)
    for wrong in (logits[0], logits[None], logits.long()):
        with pytest.raises(ValueError, match="logits must be floats"):
            softmax(wrong, 1.0, fused=path)
