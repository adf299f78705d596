"""A toy model under FSDP2 on a dp x cp mesh has the gradients of one device, its sink included."""

from __future__ import annotations

from typing import Any

import magi_attention.api as api
import torch
from magi_core.testing import reference_attention
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCAB, WIDTH, HEADS, KV_HEADS, TOTAL = 11, 24, 4, 2, 37
DIM = WIDTH // HEADS
DP, CP = 2, 4
CU_SEQLENS = [[0, 20, 37], [0, 5, 6, 37]]  # a packing for each data-parallel rank


class Toy(nn.Module):
    """Embedding, one attention layer with a sink, a head. ``attend`` is the only thing that differs between runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.sink = nn.Parameter(torch.randn(3, HEADS))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.double()

    def forward(self, tokens: Tensor, position: Tensor, attend: Any) -> Tensor:
        x = self.embedding(tokens) + 0.01 * position[:, None]
        q, k, v = (
            part.reshape(len(x), -1, DIM)
            for part in self.qkv(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
        )
        return self.head(attend(q, k, v, self.sink).reshape(len(x), WIDTH))


def batch(dp_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(dp_rank)
    return torch.randint(VOCAB, (TOTAL,), generator=generator)


def one_device() -> dict[str, Tensor]:
    """The mean loss of all sequences, on one device, with the dense reference."""
    model = Toy()
    loss = torch.zeros((), dtype=torch.float64)
    for dp_rank in range(DP):
        tokens, cu = batch(dp_rank), CU_SEQLENS[dp_rank]
        slices = [(a, b, a, b, 1) for a, b in zip(cu, cu[1:], strict=False)]
        logits = model(
            tokens,
            torch.arange(TOTAL),
            lambda q, k, v, sink, slices=slices: reference_attention(q, k, v, slices, sink=sink)[0],
        )
        loss = loss + nn.functional.cross_entropy(logits, tokens.roll(-1)) / DP
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}


def train_rank(comm: Any) -> dict[str, Tensor]:
    """One step of FSDP2 over all ranks of the mesh; gradients are gathered whole."""
    mesh = init_device_mesh("cpu", (DP, CP), mesh_dim_names=("dp", "cp"))
    dp_rank, cp_mesh = mesh.get_local_rank("dp"), mesh["cp"]
    model = Toy()
    fully_shard(model, mesh=mesh["dp", "cp"]._flatten("dp_cp"))

    tokens, cu = batch(dp_rank), CU_SEQLENS[dp_rank]
    key = api.magi_attn_varlen_key(cu, cu, HEADS, KV_HEADS, DIM, 0, cp_mesh, causal=True)
    assert api.get_most_recent_key(cp_mesh) is key
    local, position = api.dispatch(tokens, key), api.get_position_ids(key)
    labels = api.roll(local, -1, 0, key)
    logits = model(local, position, lambda q, k, v, sink: api.calc_attn(q, k, v, key, sink)[0])
    is_token = torch.arange(len(local)) < int(api.dispatch(torch.ones(TOTAL), key).sum())
    # FSDP averages over all ranks: a rank's loss is its tokens' share, times the ranks that share the sequence.
    loss = CP * nn.functional.cross_entropy(logits[is_token], labels[is_token], reduction="sum") / TOTAL
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        gradients[name] = parameter.grad.full_tensor()
    total = loss.detach().clone()
    comm.all_reduce(total, "avg").wait()
    return gradients | {"loss": total}


def test_gradients_are_those_of_one_device(process_pool: Any) -> None:
    expected = one_device()
    for rank, got in enumerate(process_pool.run(train_rank, world_size=DP * CP)):
        assert got.keys() == expected.keys()
        for name, value in got.items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-10, atol=1e-12, msg=lambda m, name=name, rank=rank: f"{rank} {name}: {m}"
            )
