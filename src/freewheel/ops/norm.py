"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

import math

import torch
from torch import Tensor


class RMSNorm:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, computed in float32.

    ``weight`` is [..., n] and broadcasts against the last dimensions of ``x``: several heads with weights of their own
    are normalised by one call. It is the effective weight (Gemma checkpoints store it less 1).
    """

    def __init__(self, weight: Tensor, eps: float):
        n = weight.shape[-1]
        # mean(x²) + eps = (‖x‖² + n·eps) / n, so two fused reductions replace the chain square, mean, add, root.
        self.weight = weight.to(torch.float32) * math.sqrt(n)
        self.floor = torch.tensor(math.sqrt(n * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., n] -> [..., n] in the dtype of ``x``."""
        # float() and type_as() cost a third of to() where there is nothing to convert, and less where there is.
        x32 = x.float()
        norm = torch.linalg.vector_norm(x32, 2, -1, True).hypot_(self.floor)
        return (x32 * self.weight).div_(norm).type_as(x)
