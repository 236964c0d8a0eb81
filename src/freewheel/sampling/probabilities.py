"""Temperature and softmax in one operation."""

import torch
from torch import Tensor

# Up to here a GPU program holds a row in its registers and reads it once; above, blocks are summed, then read again.
ONE_PASS = 32_768


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
        from freewheel.sampling.fused import softmax_into  # only here: it imports Triton

        softmax_into(out, logits, temperature, one_pass=logits.shape[1] <= ONE_PASS)
        return out
    scales = temperature[:, None] if isinstance(temperature, Tensor) else temperature
    # Relative to the peak first: a small temperature must not make infinities of large logits.
    peaks = logits.amax(1, keepdim=True).float()
    return torch.softmax((logits.float() - peaks) / scales, 1, out=out)
