"""``flash_attention_split_kv``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..common import checks


def flash_attention_split_kv(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, sm_scale: float | None = None, *, num_splits: int = 0
) -> Tensor:
    """:func:`magi_triton.flash_attention` for few queries: the keys are split over programs, then merged.

    Args:
        q: ``(B, Hq, M, D)``, float16 or bfloat16, ``D <= 256``. k, v: ``(B, Hkv, N, D)``.
        causal: row ``m`` sees keys ``n <= m + N - M``.
        sm_scale: factor on ``q k^T``; ``D ** -0.5`` when None.
        num_splits: 0 chooses by the number of multiprocessors. Partial results are float32 whatever their number.

    Returns:
        ``out`` with shape, dtype and strides of q; rows that see no key are 0.

    Raises:
        ValueError, TypeError: an argument does not fit; named. RuntimeError: no kernel can run here.
        NotImplementedError: a tensor requires a gradient; this operator has none.

    Does not synchronise; safe under CUDA graph capture.
    """
    checks.check_dense(q, k, v)
    checks.check_no_grad("flash_attention_split_kv", q=q, k=k, v=v)
    scale = checks.softmax_scale(sm_scale, q.shape[3])
    checks.check_splits(num_splits)
    from ..decode import ops  # noqa: F401  (registers the operators)

    right = 0 if causal else -1
    out, _ = torch.ops.magi_triton.decode(q, k, v, None, None, None, None, k.shape[2], num_splits, scale, -1, right)
    return out  # type: ignore[no-any-return]
