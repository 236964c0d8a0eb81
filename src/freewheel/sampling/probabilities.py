"""Temperature and softmax in one operation."""

from typing import Any

import torch
from torch import Tensor

from freewheel.ops.launch import power
from freewheel.sampling.draw import BLOCK

# Up to here a GPU program holds a row in its registers and reads it once; above, blocks are summed, then read again. On
# an H200 one pass is the faster way at 8,192 entries, and two are at 32,768; sizes in between were not measured.
ONE_PASS = 8_192


def softmax(
    logits: Tensor, temperature: float | Tensor = 1.0, out: Tensor | None = None, *, fused: bool | None = None
) -> Tensor:
    """Probabilities of each row at its temperature.

    Rows sum to 1 and no probability exceeds 1, at any temperature: the largest logit weighs 1 before the division. A
    row of nothing but -inf, or with NaN or +inf, gives NaN, as torch's own does.

    Args:
        logits: [rows, vocab], any float type, the last dimension contiguous.
        temperature: above 0; one for all rows, or a float tensor [rows] on the logits' device, which is not checked.
        out: float32 [rows, vocab], contiguous, for the result.
        fused: use the Triton kernels. None does so for CUDA devices.

    Returns:
        float32 [rows, vocab].

    Raises:
        ValueError: a temperature that is not above 0, or ``out`` of another shape or type.
    """
    if not isinstance(temperature, Tensor) and not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature must be a number above 0, not {temperature!r}")
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    elif out.shape != logits.shape or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous float32 tensor of shape {tuple(logits.shape)}")
    if logits.is_cuda if fused is None else fused:
        softmax_into(out, logits, temperature, one_pass=logits.shape[1] <= ONE_PASS)
        return out
    scales = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    # Relative to the peak first: a small temperature must not make infinities of large logits.
    peaks = logits.amax(1, keepdim=True).float()
    return torch.softmax((logits.float() - peaks) / scales, 1, out=out)


def softmax_into(out: Tensor, logits: Tensor, temperature: float | Tensor, one_pass: bool) -> None:
    """``softmax`` by kernels, in one pass over the logits or in two."""
    from freewheel.sampling import softmax_kernels  # only here: it imports Triton

    kernels: Any = softmax_kernels  # whose constants are numbers here
    (rows, vocab), stride = logits.shape, logits.stride(0)
    varied = isinstance(temperature, Tensor)
    temperatures = temperature if varied else torch.full((1,), temperature, dtype=torch.float64, device=logits.device)
    if one_pass:
        size = power(vocab)
        warps = min(max(size // 2048, 1), 16)
        kernels.softmax_row[(rows,)](out, logits, stride, temperatures, vocab, varied, size, num_warps=warps)
        return
    blocks = -(-vocab // BLOCK)
    maxima, sums = (torch.empty(rows, blocks, device=logits.device) for _ in range(2))
    tile = 4 if rows < 8 else 16
    grid = -(-blocks // tile), rows
    kernels.softmax_stats[grid](maxima, sums, logits, stride, temperatures, vocab, blocks, varied, tile)
    kernels.softmax_write[grid](
        out, maxima, sums, logits, stride, temperatures, vocab, blocks, varied, tile, power(blocks)
    )
