"""RMS normalisation against its definition in float64."""

import pytest
import torch
from torch import Tensor

from freewheel.ops.norm import RMSNorm


def right(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(1, 576), (7, 48), (3, 5, 16)])
@pytest.mark.parametrize("size", [1e-20, 1e-3, 1.0, 1e16])
def test_float32_equals_the_definition(shape: tuple[int, ...], size: float) -> None:
    x, weight = size * torch.randn(shape), torch.randn(shape[-1])
    actual = RMSNorm(weight, 1e-6)(x)
    torch.testing.assert_close(actual.double(), right(x, weight, 1e-6), rtol=1e-6, atol=1e-30)


def test_bfloat16_rounds_only_the_result() -> None:
    x, weight = torch.randn(4, 576).bfloat16(), torch.randn(576)
    actual = RMSNorm(weight, 1e-5)(x)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), right(x, weight, 1e-5), rtol=2**-8, atol=0)


def test_heads_may_have_weights_of_their_own() -> None:
    x, weight = torch.randn(3, 5, 16), torch.randn(5, 16)
    heads = [RMSNorm(weight[head], 1e-6)(x[:, head]) for head in range(5)]
    torch.testing.assert_close(RMSNorm(weight, 1e-6)(x), torch.stack(heads, dim=1))


def test_a_row_of_zeros_stays_zero() -> None:
    assert not RMSNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)).any()
