"""Group-quantised weights against their definition."""

import torch

from freewheel.ops.quantize import GroupQuantized

WEIGHT = GroupQuantized(
    values=torch.tensor([[0, 15, 3, 1], [7, 7, 0, 2]], dtype=torch.uint8),
    scale=torch.tensor([[0.5, 2.0], [1.0, 0.1]]),
    offset=torch.tensor([[-1.0, 0.0], [3.0, 1.0]]),
    bits=4,
    group=2,
)
DENSE = torch.tensor([[-1.0, 6.5, 6.0, 2.0], [10.0, 10.0, 1.0, 1.2]])


def test_dequantises_by_its_definition() -> None:
    torch.testing.assert_close(WEIGHT.dequantize(), DENSE)


def test_rows_by_slice_share_memory_and_by_number_do_not() -> None:
    assert WEIGHT[1:].values.data_ptr() == WEIGHT.values[1:].data_ptr()
    torch.testing.assert_close(WEIGHT[1:].dequantize(), DENSE[1:])
    torch.testing.assert_close(WEIGHT[torch.tensor([1, 0, 1])].dequantize(), DENSE[[1, 0, 1]])


def test_compacting_shortens_only_what_loses_nothing() -> None:
    compact = WEIGHT.compact()
    assert (compact.scale.dtype, compact.offset.dtype) == (torch.float32, torch.float16)
    assert torch.equal(compact.dequantize(), WEIGHT.dequantize())
    assert (WEIGHT.nbytes, compact.nbytes) == (8 + 16 + 16, 8 + 16 + 8)
