"""What one attention call is: options that are plain data, tensors beside q, k, v, and what a provider gives back."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Extras", "Forward", "Options", "ProviderModule", "refuse"]


@dataclass(frozen=True)
class Extras:
    """Tensors that a call may have beside q, k, v and sink, in the order of the operator's schema.

    ``cu_q`` and ``cu_k``, int32 ``(batch + 1,)``, make the tensors packed: ``(total, heads, dim)`` and not
    ``(batch, seqlen, heads, dim)``.
    """

    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    block_table: Tensor | None = None
    qv: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Options:
    """Plain data of a call, in the order of the operator's schema. ``window``: -1 is open; ``pack_gqa``: -1 is auto."""

    provider: str
    max_q: int
    max_k: int
    softmax_scale: float
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    return_probs: bool = False
    sink_layout: str = "sh"
    attention_chunk: int = 0
    num_splits: int = 1
    pack_gqa: int = -1
    sm_margin: int = 0

    def values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Forward:
    """``out`` like q; ``lse (batch, heads, seqlen)`` or ``(heads, total)``; what the backward needs to drop the same
    pairs; and the probabilities where they were asked for."""

    out: Tensor
    lse: Tensor
    rng_state: Tensor
    probs: Tensor | None = None


class ProviderModule(Protocol):
    """What a provider's module has. ``EMPTY_IS_PLUS_INF``: its lse of a row without keys is +inf."""

    EMPTY_IS_PLUS_INF: bool

    def check(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options, needs_grad: bool) -> None:
        """Refuse what the provider cannot do."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options) -> Forward: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rng_state: Tensor,
        extras: Extras, options: Options,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


def refuse(provider: str, what: str, instead: str) -> None:
    raise NotImplementedError(f"provider {provider!r} has no {what}; {instead}")
