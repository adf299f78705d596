"""``piecewise_attention``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import checks


def piecewise_attention(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    dist_threshold: int,
    causal: bool = False,
    sm_scale: float | None = None,
) -> Tensor:
    """Softmax attention with one pair of queries and keys for near positions and another for far ones (NLPE).

    ``s[m,n] = sm_scale * (q2[m].k2[n] if m + N - M - n >= dist_threshold else q1[m].k1[n])``. A distance equal to the
    threshold is far; keys after the row (without ``causal``) are near. Forward and backward (first order).

    Args:
        q1, q2: ``(B, Hq, M, D)``, float16 or bfloat16, ``D <= 256``; any strides.
        k1, k2, v: ``(B, Hkv, N, D)``; ``Hkv`` divides ``Hq``.
        dist_threshold: in tokens; changing it compiles nothing anew.
        causal: row ``m`` sees keys ``n <= m + N - M``.
        sm_scale: factor on the products, any finite number; ``D ** -0.5`` when None.

    Returns:
        ``out`` with shape, dtype and strides of q1; rows that see no key are 0.

    Raises:
        ValueError, TypeError: an argument does not fit; named. RuntimeError: no kernel can run here.

    Does not synchronise. Deterministic, the backward too.
    """
    checks.check_dense(q1, k1, v)
    tensors = {"q1": q1, "k1": k1, "q2": q2, "k2": k2}
    checks.check_tensors(tensors, 4)
    checks.check_dtypes(tensors)
    if q2.shape != q1.shape:
        raise ValueError(f"q2 must have the shape of q1 {tuple(q1.shape)}, got {tuple(q2.shape)}")
    if k2.shape != k1.shape:
        raise ValueError(f"k2 must have the shape of k1 {tuple(k1.shape)}, got {tuple(k2.shape)}")
    if not isinstance(dist_threshold, int):
        raise TypeError(f"dist_threshold must be an int, got {type(dist_threshold).__name__}")
    scale = checks.softmax_scale(sm_scale, q1.shape[3])
    from . import ops  # noqa: F401  (registers the operators)

    out, _ = torch.ops.magi_triton.piecewise_fwd(q1, k1, q2, k2, v, dist_threshold, scale, causal)
    return out  # type: ignore[no-any-return]
