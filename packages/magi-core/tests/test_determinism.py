"""The same bits every time (contract item 10)."""

from functools import partial

import pytest
import torch
from magi_core.flex_attn import flex_flash_attn_func
from magi_core.testing import masks


@pytest.mark.parametrize(
    ("dtype", "deterministic", "num_threads"),
    [(torch.float32, True, 1), (torch.bfloat16, True, 1), (torch.bfloat16, False, 1), (torch.float32, True, 2)],
    ids=str,
)
def test_thirty_repeats_are_equal(dtype, deterministic, num_threads, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    total = 150
    table = torch.tensor(masks.make("prefix_tree", total), dtype=torch.int32)
    q, k, v = (torch.randn(total, h, 16).to(dtype).requires_grad_() for h in (4, 2, 2))
    sink = torch.randn(2, 4, requires_grad=True)
    dout = torch.randn(total, 4, 16).to(dtype)
    first = None
    for _ in range(30):
        out, meta = flex_flash_attn_func(
            *(q, k, v, table[:, :2], table[:, 2:4], table[:, 4]),
            sink=sink,
            deterministic=deterministic,
            return_max_logits=True,
        )
        grads = torch.autograd.grad((out, meta.lse), (q, k, v, sink), (dout, meta.lse.detach()))
        results = (out.detach(), meta.lse.detach(), meta.max_logits, *grads)
        first = results if first is None else first
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))
