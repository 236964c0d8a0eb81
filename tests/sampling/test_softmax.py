"""Temperature and softmax: torch's numbers, rows that sum to 1, at any temperature, by either kernel."""

import pytest
import torch
from torch import Tensor

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
        # Float32 carries 24 bits; the exponent's rounding costs up to five more at logits of this size.
        torch.testing.assert_close(probabilities.double(), exact(logits, temperature), rtol=2e-6, atol=1e-12)
        torch.testing.assert_close(probabilities.sum(1), torch.ones(3, device=DEVICE), rtol=2e-6, atol=0)


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


def test_bad_arguments_are_named() -> None:
    for temperature in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature must be a number above 0"):
            softmax(torch.zeros(1, 4), temperature)
    for out in (torch.empty(8), torch.empty(2, 4, dtype=torch.float64), torch.empty(4, 2).t()):
        with pytest.raises(ValueError, match="out must be a contiguous float32 tensor"):
            softmax(torch.zeros(2, 4), 1.0, out)
