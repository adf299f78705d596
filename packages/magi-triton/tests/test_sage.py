"""SageAttention: tight against dequantised inputs, loose against full precision."""

import math

import pytest
import torch
from magi_triton.sage_attention import forward, per_block_int8
from magi_triton.sage_attention import reference as plain
from magi_triton.testing import attention

HALF, BF16 = torch.float16, torch.bfloat16


def tensors(b, hq, hkv, m, n, d, dtype, device):
    generator = torch.Generator().manual_seed(0)
    shapes = ((b, hq, m, d), (b, hkv, n, d), (b, hkv, n, d))
    return [torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("smooth", [False, True])
def test_quantiser(layout, smooth, device):
    q, k, _ = tensors(1, 2, 1, 70, 40, 32, HALF, device)
    k[:, :, 32:] = 0.0  # the second block is all zero
    mean = k.mean(2, keepdim=True) if smooth else None
    expected = [*plain.per_block_int8(q, 32, 32**-0.5 * math.log2(math.e)), *plain.per_block_int8(k, 32, 1.0, mean)]
    if layout == "NHD":
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        mean = None if mean is None else mean.transpose(1, 2)
    q8, q_scale, k8, k_scale = per_block_int8(q, k, mean, 32, 32, tensor_layout=layout)
    got = [q8, q_scale, k8, k_scale]
    if layout == "NHD":
        got[0], got[2] = q8.transpose(1, 2), k8.transpose(1, 2)
    for a, b in zip(got, expected):
        assert a.dtype == b.dtype
        # a product one rounding away may fall on the other side of a half
        assert (a.double() - b.double()).abs().max() <= (1 if a.dtype == torch.int8 else 1e-6)
    assert (got[0] == expected[0]).double().mean() > 0.99
    if not smooth:
        assert not got[2][:, :, 32:].any()
        assert k_scale[..., 1].item() == 0.0


CASES = {
    "full": ((1, 2, 2, 70, 40, 64, HALF), {}),
    "causal, group of 3": ((1, 3, 1, 40, 70, 32, HALF), {"is_causal": True}),
    "causal, rows that see nothing": ((1, 1, 1, 50, 20, 16, BF16), {"is_causal": True}),
    "bool mask": ((1, 2, 1, 33, 40, 32, HALF), {"mask": "bool"}),
    "added mask, causal": ((1, 1, 1, 33, 40, 32, HALF), {"mask": "add", "is_causal": True}),
    "other blocks": ((1, 1, 1, 100, 70, 32, HALF), {"BLKQ": 64, "BLKK": 32}),
}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_forward(case, layout, device):
    shape, options = CASES[case]
    options = dict(options)
    kind = options.pop("mask", None)
    blocks = {name: options[name] for name in ("BLKQ", "BLKK") if name in options}
    q, k, v = tensors(*shape, device)
    mask = None
    if kind == "bool":
        mask = (torch.arange(k.shape[2], device=device) % 3 != 0).view(1, 1, 1, -1)
        mask = mask & (torch.arange(q.shape[2], device=device) != 5).view(1, 1, -1, 1)  # row 5 sees nothing
    elif kind == "add":
        mask = torch.randn(1, 1, q.shape[2], k.shape[2], generator=torch.Generator().manual_seed(4)).to(device)
    dtype = shape[-1]
    q8, q_scale, k8, k_scale = per_block_int8(q, k, **blocks)
    exact, exact_lse = plain.forward(q8, k8, v, q_scale, k_scale, mask, **options)
    inputs = [x.transpose(1, 2).contiguous() for x in (q8, k8, v)] if layout == "NHD" else [q8, k8, v]
    out, lse = forward(*inputs, q_scale, k_scale, layout, mask, dtype, True, 168, **options)
    out = out.transpose(1, 2) if layout == "NHD" else out
    assert out.dtype == dtype
    tight = 4 * torch.finfo(dtype).eps
    assert (out.double() - exact).abs().max() <= tight * exact.abs().max()
    assert torch.equal(lse.isfinite(), exact_lse.isfinite())
    assert torch.where(exact_lse.isfinite(), lse - exact_lse, 0.0).abs().max() <= 1e-4
    if kind is None:
        whole = attention(q.double(), k.double(), v.double(), options.get("is_causal", False))[0]
        assert (out.double() - whole).norm() / whole.norm() <= 0.05


def test_lse_is_empty_unless_asked_for(device):
    q, k, v = tensors(1, 1, 1, 5, 7, 32, HALF, device)
    q8, q_scale, k8, k_scale = per_block_int8(q, k)
    out, lse = forward(q8, k8, v, q_scale, k_scale, output_dtype=torch.float32)
    assert out.dtype == torch.float32
    assert (lse.numel(), lse.device.type) == (0, "cpu")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"BLKQ": 64}, ValueError, "q_scale must have shape .* for BLKQ 64"),
        ({"BLKK": 48}, ValueError, "BLKK must be a power of two"),
        ({"tensor_layout": "DNH"}, ValueError, "tensor_layout must be 'HND' or 'NHD'"),
        ({"q": torch.zeros(1, 2, 100, 32, dtype=HALF)}, TypeError, "q must be int8"),
        ({"maxnreg": 0}, ValueError, "maxnreg must be positive"),
        ({"attn_mask": torch.ones(1, 1, 3, 100, dtype=torch.bool)}, ValueError, "attn_mask must broadcast to"),
        ({"attn_mask": torch.ones(1, 1, 1, 100, dtype=torch.int32)}, TypeError, "attn_mask must be bool or"),
        ({"output_dtype": torch.int8}, TypeError, "output_dtype must be"),
    ],
)
def test_mistakes_are_named(change, error, message):
    x = torch.zeros(1, 2, 100, 32, dtype=torch.int8)
    call = {"q": x, "k": x, "v": x.half(), "q_scale": torch.ones(1, 2, 1), "k_scale": torch.ones(1, 2, 2)}
    with pytest.raises(error, match=message):
        forward(**{**call, **change})
