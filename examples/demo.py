"""The demo: four ranks on a CPU attend over one sequence of mixed masks, and agree with one rank.

    python examples/demo.py [--ranks 4] [--tokens 3072] [--out out/demo.png]

The sequence packs text documents (causal) and a video (block-causal: a frame sees itself and all frames before it).
Rows of the mask are shared out over the ranks by area, so that all have equal work; a rank receives exactly the keys
that its rows see. Forward and backward run in float64 and in float32 and are compared with one rank in float64.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.multiprocessing as mp
from magi_attention import explain
from magi_attention.api import (
    calc_attn,
    dispatch,
    flex_flash_attn_func,
    get_position_ids,
    magi_attn_flex_key,
    undispatch,
)
from magi_attention.utils import clearup_dist_env, setup_dist_env
from magi_core import Mask

NUM_HEADS_Q, NUM_HEADS_KV, HEAD_DIM, SEQLEN_SINK = 8, 2, 64, 4
NAMES = ("out", "dq", "dk", "dv", "dsink")


def make_mask(total: int) -> Mask:
    """Four documents in the first half, a video of eight frames in the second."""
    half = total // 2
    shares = [0.45, 0.1, 0.3]
    lengths = [int(half * share) for share in shares]
    documents = Mask.documents([*lengths, half - sum(lengths)], causal=True).slices()
    video = Mask.block_causal([total - half], block_size=max(1, (total - half) // 8)).slices()
    return Mask.from_slices(
        np.concatenate([documents.q_ranges, video.q_ranges + half]),
        np.concatenate([documents.k_ranges, video.k_ranges + half]),
        np.concatenate([documents.mask_types, video.mask_types]),
        total_q=total,
        total_k=total,
    )


def make_tensors(total: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v, sink that require gradients, and dout; the same on every rank."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q = normal(total, NUM_HEADS_Q, HEAD_DIM).to(dtype).requires_grad_()
    k = normal(total, NUM_HEADS_KV, HEAD_DIM).to(dtype).requires_grad_()
    v = normal(total, NUM_HEADS_KV, HEAD_DIM).to(dtype).requires_grad_()
    sink = normal(SEQLEN_SINK, NUM_HEADS_Q).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return q, k, v, sink.requires_grad_(), normal(total, NUM_HEADS_Q, HEAD_DIM).to(dtype)


def one_rank(mask: Mask) -> dict[str, torch.Tensor]:
    """The plain operator over the whole sequence, in float64."""
    q, k, v, sink, dout = make_tensors(mask.total_q, torch.float64)
    slices = mask.slices()
    out, _ = flex_flash_attn_func(q, k, v, slices.q_ranges, slices.k_ranges, slices.mask_types, sink=sink)
    out.backward(dout)
    return dict(zip(NAMES, (out.detach(), q.grad, k.grad, v.grad, sink.grad)))


def worker(rank: int, ranks: int, total: int, folder: str, begun: float) -> None:
    """One rank: plan, attend in both precisions, write what it found into ``folder``."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    *_, group, _device, _seed = setup_dist_env("gloo")

    def say(text: str) -> None:
        if rank == 0:
            print(f"[{time.monotonic() - begun:5.1f} s] {text}", flush=True)

    mask = make_mask(total)
    slices = mask.slices()
    say(f"{ranks} ranks have met; planning {len(slices.q_ranges)} slices")
    key = magi_attn_flex_key(
        q_ranges=slices.q_ranges,
        k_ranges=slices.k_ranges,
        attn_mask_type=slices.mask_types.tolist(),
        total_seqlen_q=total,
        total_seqlen_k=total,
        num_heads_q=NUM_HEADS_Q,
        num_heads_kv=NUM_HEADS_KV,
        head_dim=HEAD_DIM,
        pad_size=0,
        cp_group_or_mesh=group,
    )
    found: dict[str, object] = {"positions": get_position_ids(key)}
    for dtype in (torch.float64, torch.float32):
        q, k, v, sink, dout = make_tensors(total, dtype)
        say(f"{dtype}: forward")
        local_q, local_k, local_v = (dispatch(tensor, key) for tensor in (q, k, v))
        local_out, _meta = calc_attn(local_q, local_k, local_v, key, sink=sink)
        out = undispatch(local_out, key)
        say(f"{dtype}: backward")
        out.backward(dout)
        # q.grad is whole on every rank; the sink is a parameter, so its gradient is this rank's share.
        found[str(dtype)] = dict(zip(NAMES, (out.detach(), q.grad, k.grad, v.grad, sink.grad)))
    if rank == 0:
        found["explanation"] = explain(key, dtype=torch.float32, height=24, width=72)
    torch.save(found, f"{folder}/{rank}.pt")
    clearup_dist_env()


def main() -> int:
    """Run the demo; the exit status is 1 when the ranks disagree with one rank."""
    parser = argparse.ArgumentParser(description="Four ranks on a CPU against one: packed documents and a video.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=3072)
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="the picture (PNG or SVG)")
    args = parser.parse_args()
    begun = time.monotonic()
    warnings.filterwarnings("ignore", message=".*fork.*")
    torch.set_num_threads(1)  # no pool of threads before the fork below
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    # Forked ranks start in a second; spawned ones would import torch again, one after another on two cores.
    context = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=worker, args=(rank, args.ranks, args.tokens, folder, begun), daemon=True)
            for rank in range(args.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            print(f"ranks ended with {[process.exitcode for process in processes]}", file=sys.stderr)
            return 1
        results = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(args.ranks)]
    print(f"[{time.monotonic() - begun:5.1f} s] one rank, float64, for comparison", flush=True)
    torch.set_num_threads(2)
    mask = make_mask(args.tokens)
    exact = one_rank(mask)

    print(f"\n{results[0]['explanation']}\n")
    agreed = True
    for dtype, budget in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        print(f"largest difference to one rank in float64, {args.ranks} ranks in {str(dtype).removeprefix('torch.')}:")
        for name in NAMES:
            parts = [result[str(dtype)][name].double() for result in results]
            got = sum(parts) if name == "dsink" else parts[0]
            difference = (got - exact[name]).abs().max().item()
            agreed &= difference <= budget
            print(f"    {name:6}{difference:10.2e}")
    owner = np.empty(args.tokens, dtype=np.int64)
    for rank, result in enumerate(results):
        owner[result["positions"].numpy()] = rank
    args.out.parent.mkdir(parents=True, exist_ok=True)
    title = f"documents and a video, {args.tokens} tokens on {args.ranks} ranks"
    mask.show(args.out, ranks=owner, title=title)
    print(f"\npicture of the mask, coloured by rank: {args.out}")
    print(f"{'all agree' if agreed else 'DISAGREE'}; {time.monotonic() - begun:.1f} s")
    return 0 if agreed else 1


def free_port() -> int:
    """A TCP port of this machine that nothing listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
