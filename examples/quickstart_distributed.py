"""Distributed attention: a block-causal mask over all ranks, with a sink.

    torchrun --standalone --nproc_per_node=2 examples/quickstart_distributed.py

Runs with gloo where there is no GPU. On GPUs: the sizes in the comments.
"""

import magi_attention
import torch
import torch.distributed as dist
import torch.nn as nn
from magi_attention.api import calc_attn, compute_pad_size, dispatch, magi_attn_flex_key, undispatch
from magi_attention.common import AttnRanges
from magi_attention.common.enum import AttnMaskType
from magi_attention.utils import clearup_dist_env, setup_dist_env

rank, local_rank, world_size, num_nodes, num_local_ranks, world_group, device, seed = setup_dist_env()

# Sizes. On 8 GPUs: 32768 tokens, blocks of 4096, chunks of 512, 48 and 8 heads, head_dim 128, embed_dim 4096.
total_seqlen = 512
block_size = 64
chunk_size = 16
seqlen_sink = 4
num_heads_q = 6
num_heads_kv = 2
head_dim = 32
embed_dim = 64
dtype = torch.bfloat16

# Token embeddings: every rank has all of them, as after a data loader that gives each rank of a group the same batch.
x = torch.randn(total_seqlen, embed_dim, device=device, dtype=dtype, requires_grad=True)

# The mask: block i of the queries sees blocks 0 to i of the keys, whole.
starts = range(0, total_seqlen, block_size)
q_ranges = AttnRanges.from_ranges([[start, start + block_size] for start in starts])
k_ranges = AttnRanges.from_ranges([[0, start + block_size] for start in starts])
attn_mask_type = [AttnMaskType.FULL] * len(q_ranges)
total_seqlen_q = total_seqlen_k = total_seqlen
pad_size = compute_pad_size(total_seqlen_q=total_seqlen_q, cp_size=world_size, chunk_size=chunk_size)

# Plan once per mask. The key names the plan in every other call.
key = magi_attn_flex_key(
    q_ranges=q_ranges,
    k_ranges=k_ranges,
    attn_mask_type=attn_mask_type,
    total_seqlen_q=total_seqlen_q,
    total_seqlen_k=total_seqlen_k,
    num_heads_q=num_heads_q,
    num_heads_kv=num_heads_kv,
    head_dim=head_dim,
    pad_size=pad_size,
    chunk_size=chunk_size,
    cp_group_or_mesh=world_group,
)

# This rank's tokens. They are not in order: work token by token until undispatch, or ask get_position_ids(key).
local_x = dispatch(x, key=key)

q_proj = nn.Linear(embed_dim, num_heads_q * head_dim, dtype=dtype, device=device)
k_proj = nn.Linear(embed_dim, num_heads_kv * head_dim, dtype=dtype, device=device)
v_proj = nn.Linear(embed_dim, num_heads_kv * head_dim, dtype=dtype, device=device)
local_q = q_proj(local_x).view(-1, num_heads_q, head_dim)
local_k = k_proj(local_x).view(-1, num_heads_kv, head_dim)
local_v = v_proj(local_x).view(-1, num_heads_kv, head_dim)

# The sink is a parameter that every rank holds.
global_sink = nn.Parameter(torch.randn(seqlen_sink, num_heads_q, dtype=torch.float32, device=device))

local_out, meta = calc_attn(q=local_q, k=local_k, v=local_v, key=key, sink=global_sink)
local_lse = meta.lse

# All tokens again, in order.
total_out = undispatch(x=local_out, key=key)
loss = total_out.sum()
loss.backward()

dx = x.grad
dq_proj, dk_proj, dv_proj = q_proj.weight.grad, k_proj.weight.grad, v_proj.weight.grad
dsink = global_sink.grad

# As for every parameter, a rank has its share of the gradient, for a framework (FSDP, Megatron) to sum over ranks.
# Here there is none; and had MAGI_ATTENTION_DSINK_ALL_REDUCE_OP asked for it, calc_attn would have reduced it already.
if magi_attention.env.comm.dsink_all_reduce_op() == "none":
    dist.all_reduce(dsink, op=dist.ReduceOp.SUM, group=world_group)

print(
    f"rank {rank} of {world_size} on {device}: {local_x.shape[0]} of {total_seqlen} tokens, "
    f"out {tuple(total_out.shape)}, lse {tuple(local_lse.shape)}, dx {tuple(dx.shape)}, dsink {tuple(dsink.shape)}",
    flush=True,
)
clearup_dist_env()
