"""The declaration of a weight, from which its shape, random init and loading follow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Param:
    """One weight of a model.

    Args:
      shape: as the step sees it; projections are (out, in).
      axes: one logical axis a dimension (D, F, N, K, H, V, ...), from which shardings follow.
      checkpoint: Hugging Face names of the parts, joined along the first dimension.
      scale: standard deviation of the random init around `mean`.
      matmul: whether it is the right operand of a matmul (or the embedding), which may be kept packed.
      gated: whether its first half gates its second (a fused gate and up projection).
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    checkpoint: tuple[str, ...]
    scale: float = 0.02
    mean: float = 0.0
    matmul: bool = False
    gated: bool = False
