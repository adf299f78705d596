"""Flex flash attention on one device: a mask made of slices, grouped heads, an attention sink, gradients.

    python examples/quickstart_ffa.py

For a GPU: device = "cuda", and the sizes in the comments.
"""

import torch
from magi_attention.api import flex_flash_attn_func

# Sizes. On a GPU: 2048 tokens, head_dim 128.
total_seqlen = 256
seqlen_sink = 4
num_heads_q = 8
num_heads_kv = 2
head_dim = 64
dtype = torch.bfloat16
device = "cpu"

q = torch.randn(total_seqlen, num_heads_q, head_dim, dtype=dtype, device=device, requires_grad=True)
k = torch.randn(total_seqlen, num_heads_kv, head_dim, dtype=dtype, device=device, requires_grad=True)
v = torch.randn(total_seqlen, num_heads_kv, head_dim, dtype=dtype, device=device, requires_grad=True)
do = torch.randn_like(q)
sink = torch.randn(seqlen_sink, num_heads_q, dtype=torch.float32, device=device, requires_grad=True)

# The mask, as slices (* is visible): the first half of the queries sees the first half of the keys, all of it; the
# second half is causal over everything.
#
#      keys ------>
#     * * * * . . . .
#     * * * * . . . .
#     * * * * . . . .
#     * * * * . . . .
#     * * * * * . . .
#     * * * * * * . .
#     * * * * * * * .
#     * * * * * * * *
half = total_seqlen // 2
q_ranges = torch.tensor([[0, half], [half, total_seqlen]], dtype=torch.int32, device=device)
k_ranges = torch.tensor([[0, half], [0, total_seqlen]], dtype=torch.int32, device=device)
attn_type_map = torch.tensor([0, 1], dtype=torch.int32, device=device)  # 0: full, 1: causal

out, meta = flex_flash_attn_func(
    q=q,
    k=k,
    v=v,
    q_ranges=q_ranges,
    k_ranges=k_ranges,
    attn_type_map=attn_type_map,
    sink=sink,
    softmax_scale=None,  # head_dim ** -0.5
    softcap=0,
)
lse = meta.lse

out.backward(do)
dq, dk, dv, dsink = q.grad, k.grad, v.grad, sink.grad

print(f"out {tuple(out.shape)} {out.dtype}, lse {tuple(lse.shape)} {lse.dtype}")
print(f"dq {tuple(dq.shape)}, dk {tuple(dk.shape)}, dv {tuple(dv.shape)}, dsink {tuple(dsink.shape)}")
