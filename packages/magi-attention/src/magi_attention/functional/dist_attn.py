"""The calls on a key as functions of its runtime.

``dist_attn_runtime`` is a key, or the manager that it names (``init_dist_attn_runtime_mgr``).
"""

from typing import TypeAlias

from magi_core.flex_attn import AttnForwardMeta
from torch import Tensor

from ..planning.key import DistAttnRuntimeKey
from ..planning.manager import DistAttnRuntimeMgr
from ..planning.registry import dist_attn_runtime_dict_mgr

__all__ = ["dispatch_func", "dist_attn_func", "roll_func", "roll_simple_func", "undispatch_func"]

Runtime: TypeAlias = "DistAttnRuntimeMgr | DistAttnRuntimeKey"


def _manager(dist_attn_runtime: Runtime) -> DistAttnRuntimeMgr:
    if isinstance(dist_attn_runtime, DistAttnRuntimeMgr):
        return dist_attn_runtime
    if not isinstance(dist_attn_runtime, DistAttnRuntimeKey):
        raise TypeError(
            "dist_attn_runtime must be a DistAttnRuntimeMgr or a DistAttnRuntimeKey, "
            f"got {type(dist_attn_runtime).__name__}"
        )
    return dist_attn_runtime_dict_mgr.get(dist_attn_runtime)


def dist_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dist_attn_runtime: Runtime,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    return_max_logits: bool = False,
) -> tuple[Tensor, AttnForwardMeta]:
    """``magi_attention.api.calc_attn`` on a runtime."""
    return _manager(dist_attn_runtime).calc_attn(q, k, v, sink, softmax_scale, softcap, return_max_logits)


def dispatch_func(x: Tensor, dist_attn_runtime: Runtime, pad_value: float = 0.0, *, role: str = "q") -> Tensor:
    """``magi_attention.api.dispatch`` on a runtime."""
    return _manager(dist_attn_runtime).dispatch(x, pad_value, role)


def undispatch_func(x: Tensor, dist_attn_runtime: Runtime, is_partial_grad: bool = False, *, role: str = "q") -> Tensor:
    """``magi_attention.api.undispatch`` on a runtime."""
    return _manager(dist_attn_runtime).undispatch(x, is_partial_grad, role)


def roll_func(
    x: Tensor, shift: int, dim: int, dist_attn_runtime: Runtime, *, role: str = "q", pad_value: float = 0.0
) -> Tensor:
    """``magi_attention.api.roll`` on a runtime."""
    return _manager(dist_attn_runtime).roll(x, shift, dim, role, pad_value)


def roll_simple_func(
    x: Tensor, shift: int, dim: int, dist_attn_runtime: Runtime, *, role: str = "q", pad_value: float = 0.0
) -> Tensor:
    """The same as ``roll_func``."""
    return roll_func(x, shift, dim, dist_attn_runtime, role=role, pad_value=pad_value)
