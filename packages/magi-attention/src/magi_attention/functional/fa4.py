"""The public entry point of the FA4 backend. Here every GPU is served by the arch wheels of ``magi_core``, so it is
``flex_flash_attn_func`` with the lse bare."""

from collections.abc import Sequence

import torch
from magi_core.flex_attn import flex_flash_attn_func
from torch import Tensor

__all__ = ["ffa_fa4_func", "load_precompiled_ffa_fa4", "precompile_ffa_fa4"]


def ffa_fa4_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ranges: Tensor,
    k_ranges: Tensor,
    attn_type_map: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    reuse_attn_arg: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend over slices; returns ``(out, lse)``.

    Args:
        q, k, v, q_ranges, k_ranges, attn_type_map, softmax_scale, softcap, deterministic: of ``flex_flash_attn_func``.
        reuse_attn_arg: a hint without effect: a plan is reused exactly when the mask is the same, and never otherwise.
    """
    if not isinstance(reuse_attn_arg, bool):
        raise TypeError(f"reuse_attn_arg must be a bool, got {reuse_attn_arg!r}")
    out, meta = flex_flash_attn_func(
        q, k, v, q_ranges, k_ranges, attn_type_map,
        softmax_scale=softmax_scale, softcap=softcap, deterministic=deterministic,
    )  # fmt: skip
    assert meta.lse is not None
    return out, meta.lse


def load_precompiled_ffa_fa4() -> None:
    """Load the kernels of the current device now instead of at the first call. Does nothing without a CUDA device.

    Raises:
        ArchNotInstalledError: the wheel for this GPU is missing; names the extra to install.
    """
    if torch.cuda.is_available():
        from magi_core.backends.arch import library_for_device

        library_for_device(torch.device("cuda", torch.cuda.current_device()))


def precompile_ffa_fa4(
    dtypes: Sequence[torch.dtype], head_dims: Sequence[int], qhead_per_kvhead: Sequence[int], func_nums: Sequence[int]
) -> None:
    """Check that these shapes have kernels, and load them. Nothing is compiled: kernels come in the arch wheels, and a
    mask of any number of intervals (``func_nums``) needs no kernel of its own.

    Args:
        dtypes: float16, bfloat16. head_dims: 1 to 256. qhead_per_kvhead: query heads of a kv head, at least 1.
        func_nums: intervals per row, at least 1.

    Raises:
        NotImplementedError: a dtype or a head dim without a kernel. ValueError: a number that is not positive.
        ArchNotInstalledError: the wheel for this GPU is missing.
    """
    for dtype in dtypes:
        if dtype not in (torch.float16, torch.bfloat16):
            raise NotImplementedError(f"dtypes must be float16 or bfloat16 on CUDA, got {dtype}")
    for name, values in (("head_dims", head_dims), ("qhead_per_kvhead", qhead_per_kvhead), ("func_nums", func_nums)):
        if any(value < 1 for value in values):
            raise ValueError(f"{name} must be at least 1, got {list(values)}")
    if any(head_dim > 256 for head_dim in head_dims):
        raise NotImplementedError(f"head_dims must be at most 256, got {list(head_dims)}")
    load_precompiled_ffa_fa4()
