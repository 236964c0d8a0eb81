"""Temperature and softmax in one operation."""

from typing import Any

import torch
from torch import Tensor

from freewheel.ops.launch import power
from freewheel.sampling.draw import BLOCK
from freewheel.sampling.params import check_temperature

# Up to here a GPU program holds a row in its registers and reads it once; above, blocks are summed, then read again. On
# an H200 one pass is the faster way at 8,192 and 16,384 entries, and two are at 32,768; see docs/benchmarks.md.
ONE_PASS = 16_384


def softmax(
    logits: Tensor, temperature: float | Tensor = 1.0, out: Tensor | None = None, *, fused: bool | None = None
) -> Tensor:
    """Probabilities of each row at its temperature; no gradients flow through it.

    Rows sum to 1 and no probability exceeds 1, at any temperature: the largest logit weighs 1 before the division. A
    row of nothing but -inf, or with NaN or +inf, gives NaN, as torch's own does.

    Args:
        logits: [rows, vocab], any float type (float64 is rounded to float32).
        temperature: 1e-30 to 1e30, as in ``SamplingParams``; one for all rows, or a float tensor [rows] on the logits'
            device, whose values are not checked.
        out: float32 [rows, vocab], contiguous, on the logits' device, for the result.
        fused: use the Triton kernels. None does so for CUDA devices.

    Returns:
        float32 [rows, vocab].

    Raises:
        ValueError: an argument is not as described; it is named.
    """
    logits, device = logits.detach(), logits.device
    if logits.ndim != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floats [rows, vocab], not {logits.dtype} {list(logits.shape)}")
    if not isinstance(temperature, Tensor):
        check_temperature(temperature)
    elif temperature.shape != logits.shape[:1] or temperature.device != device or not temperature.is_floating_point():
        raise ValueError(f"temperature must be a number or a float tensor of shape ({len(logits)},) on {device}")
    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=device)
    elif (out.shape, out.dtype, out.device, out.is_contiguous()) != (logits.shape, torch.float32, device, True):
        raise ValueError(f"out must be a contiguous float32 tensor of shape {tuple(logits.shape)} on {device}")
    if logits.is_cuda if fused is None else fused:
        softmax_into(out, logits, temperature, one_pass=logits.shape[1] <= ONE_PASS)
        return out
    scales = temperature.float()[:, None] if isinstance(temperature, Tensor) else temperature
    # Relative to the peak first: a small temperature must not make infinities of large logits. And not by torch's own
    # softmax: where vectors are short, as with AVX2, its sums of wide rows are 4e-5 off, those of torch.sum 1e-7.
    values = logits.float()
    weights = (values - values.amax(1, keepdim=True)).div_(scales).exp_()
    return torch.div(weights, weights.sum(1, keepdim=True), out=out)


def softmax_into(out: Tensor, logits: Tensor, temperature: float | Tensor, one_pass: bool) -> None:
    """``softmax`` by kernels, in one pass over the logits or in two."""
    from freewheel.sampling import softmax_kernels  # only here: it imports Triton

    kernels: Any = softmax_kernels  # whose constants are numbers here
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, vocab), stride = logits.shape, logits.stride(0)
    varied = isinstance(temperature, Tensor)
    temperatures = (
        temperature.contiguous() if varied else torch.full((1,), temperature, dtype=torch.float64, device=logits.device)
    )
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
