"""What is handed to the FlashAttention libraries: modules with their signatures, computing with the CPU provider.

The signatures are those of flash_attn 2.8, of ``hopper/flash_attn_interface.py`` 3.0 and of
``flash_attn.cute.interface`` 4.0; a library that changes one fails on a GPU, not here.
"""

from types import SimpleNamespace

import pytest
import torch
from magi_attn_extensions.flash import provider_fa3, provider_fa4, provider_flash_attn, provider_reference, run
from magi_attn_extensions.flash.call import Extras, Options


def _options(softmax_scale, causal, left, right, softcap, **rest):
    left, right = (-1 if side is None else side for side in (left, right))
    return Options("reference", rest.pop("max_q", 0), rest.pop("max_k", 0), softmax_scale, causal, left, right, softcap)


def _plus_infinity(lse):
    return torch.where(lse == -torch.inf, torch.inf, lse)  # as these libraries write a row without keys


def _fa2_forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
                 return_softmax):  # fmt: skip
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap)
    got = provider_reference.forward(q, k, v, Extras(alibi_slopes=alibi_slopes), options)
    return got.out, _plus_infinity(got.lse), torch.empty(0), got.rng_state


def _fa2_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
                        causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
                        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None):  # fmt: skip
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap)
    got = provider_reference.forward(q, k, v, Extras(cu_seqlens_q, cu_seqlens_k, alibi_slopes=alibi_slopes), options)
    return got.out, _plus_infinity(got.lse), torch.empty(0), got.rng_state


def _fa2_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
                  window_size_right, softcap, alibi_slopes, deterministic, rng_state=None):  # fmt: skip
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap)
    extras = Extras(alibi_slopes=alibi_slopes)
    grads = provider_reference.backward(dout, q, k, v, out, softmax_lse, rng_state, extras, options)
    for into, grad in zip((dq, dk, dv), grads):
        into.copy_(grad)


def _fa2_varlen_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                         max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
                         alibi_slopes, deterministic, rng_state=None):  # fmt: skip
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap)
    extras = Extras(cu_seqlens_q, cu_seqlens_k, alibi_slopes=alibi_slopes)
    grads = provider_reference.backward(dout, q, k, v, out, softmax_lse, rng_state, extras, options)
    for into, grad in zip((dq, dk, dv), grads):
        into.copy_(grad)


def _fa3_forward(q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
                 cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
                 page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
                 seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
                 window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
                 scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0):  # fmt: skip
    assert pack_gqa in (None, True, False) and (max_seqlen_q is None) == (cu_seqlens_q is None)
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap)
    got = provider_reference.forward(q, k, v, Extras(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), options)
    return got.out, got.lse, torch.empty(0), torch.empty(0)


def _fa3_backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
                  max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
                  window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False,
                  sm_margin=0):  # fmt: skip
    assert (max_seqlen_q is None) == (cu_seqlens_q is None)
    options = _options(softmax_scale, is_causal, window_size_left, window_size_right, softcap)
    extras = Extras(cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k)
    grads = provider_reference.backward(dout, q, k, v, out, softmax_lse, None, extras, options)
    for into, grad in zip((dq, dk, dv), grads):
        into.copy_(grad)


def _fa4_forward(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
                 max_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
                 window_size_left=None, window_size_right=None, learnable_sink=None, num_splits=1, pack_gqa=None,
                 return_lse=False):  # fmt: skip
    assert return_lse and pack_gqa in (None, True, False)
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap or 0.0)
    got = provider_reference.forward(q, k, v, Extras(cu_seqlens_q, cu_seqlens_k), options)
    return got.out, got.lse


def _fa4_backward(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
                  window_size_right=None, deterministic=False, cu_seqlens_q=None, cu_seqlens_k=None):  # fmt: skip
    options = _options(softmax_scale, causal, window_size_left, window_size_right, softcap)
    return provider_reference.backward(dout, q, k, v, out, lse, None, Extras(cu_seqlens_q, cu_seqlens_k), options)


LIBRARIES = {
    "flash_attn": (
        provider_flash_attn,
        SimpleNamespace(
            _flash_attn_forward=_fa2_forward,
            _flash_attn_varlen_forward=_fa2_varlen_forward,
            _flash_attn_backward=_fa2_backward,
            _flash_attn_varlen_backward=_fa2_varlen_backward,
        ),
    ),
    "flash_attn_3": (
        provider_fa3,
        SimpleNamespace(_flash_attn_forward=_fa3_forward, _flash_attn_backward=_fa3_backward),
    ),
    "flash_attn_4": (provider_fa4, SimpleNamespace(_flash_attn_fwd=_fa4_forward, _flash_attn_bwd=_fa4_backward)),
}


@pytest.mark.parametrize("is_packed", [False, True], ids=["batched", "varlen"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_gives_what_the_reference_gives(library, is_packed, monkeypatch):
    module, fake = LIBRARIES[library]
    monkeypatch.setattr(module, "_interface", lambda: fake)
    generator = torch.Generator().manual_seed(0)
    shapes = [(9, 4, 8), (6, 2, 8), (6, 2, 8)] if is_packed else [(2, 9, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)]
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    sink = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    extras = Extras()
    if is_packed:  # the second sequence has rows that see nothing
        extras = Extras(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 9], [0, 4, 6])))
    window = {} if library == "flash_attn_4" else {"window_left": 3}
    results = []
    for choice in (library, "reference"):
        options = Options(choice, 9, 6, 0.3, causal=True, **window)
        result = run.forward(q, k, v, sink, extras, options)
        plain = run.forward(q, k, v, None, extras, options)
        assert (plain.lse == -torch.inf).any() and not (plain.lse == torch.inf).any()
        dout, dlse = torch.cos(result.out), torch.sin(result.lse)
        grads = run.backward(dout, dlse, q, k, v, sink, result.out, result.lse, result.rng_state, extras, options)
        results.append((result.out, result.lse, plain.out, plain.lse, *grads))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_what_fa4_asserts_is_an_error_of_the_caller(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("varlen backward is not yet supported on sm90")

    monkeypatch.setattr(
        provider_fa4, "_interface", lambda: SimpleNamespace(_flash_attn_fwd=refuse, _flash_attn_bwd=refuse)
    )
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(NotImplementedError, match="'flash_attn_4' refuses: varlen backward is not yet"):
        provider_fa4.backward(q, q, q, q, q, q[..., 0], q, Extras(), Options("flash_attn_4", 4, 4, 1.0))
    with pytest.raises(NotImplementedError, match="'flash_attn_4' refuses"):
        provider_fa4.forward(q, q, q, Extras(), Options("flash_attn_4", 4, 4, 1.0))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_on_a_cpu_is_refused(library):
    q = torch.zeros(1, 4, 2, 8, dtype=torch.float16)
    with pytest.raises(NotImplementedError, match=f"provider '{library}' takes .* got"):
        LIBRARIES[library][0].check(q, q, q, Extras(), Options(library, 4, 4, 1.0), False)
