"""Zero redundancy: a rank receives its distinct remote keys, each once, and nothing else travels."""

from __future__ import annotations

from typing import Any

import magi_attention.api as api
import numpy as np
import pipeline_cases as cases
import pytest
import torch
from env_filter import is_nightly
from magi_comm.counting import CountingCommunicator
from magi_core.planner import verify
from magi_core.testing import dense_counts
from pipeline_cases import Case

CASES = [
    Case(w, mask, 300, overlap, variant)
    for w, mask, overlap, variant in (
        [
            (w, m, o, v)
            for w in (2, 4, 8)
            for m in cases.MASKS
            for o in cases.OVERLAPS
            for v in ("plain", "small_chunks")
        ]
        if is_nightly()
        else [
            (2, "causal", "1", "plain"),
            (4, "varlen_causal", "2", "small_chunks"),
            (8, "prefix_tree", "4", "plain"),
            (3, "random_bands", "auto", "uneven"),
            (8, "swa_causal", "3", "plain"),
            (5, "cross", "2", "plain"),
            (4, "full", "0", "plain"),
            (6, "varlen_block_causal", "2", "plain"),
            (7, "blind_rows", "1", "plain"),
        ]
    )
]


@pytest.fixture(autouse=True)
def forget_plans() -> Any:
    yield
    api.clear_cache()


def remote_keys(case: Case, key: api.DistAttnRuntimeKey) -> np.ndarray:
    """Distinct keys that this rank's queries see and that it does not own, by brute force on the dense mask."""
    seen = dense_counts(case.slices, case.total, case.total_k).numpy() > 0
    manager = api.dist_attn_runtime_dict_mgr.get(key)
    queries, keys = (manager.transport(role).placement.tokens(key.cp_rank) for role in ("q", "k"))
    needed = seen[queries].any(0)
    needed[keys] = False
    return np.flatnonzero(needed)


def count_rank(comm: Any, case: Case) -> tuple[int, int, dict[str, int], dict[str, int]]:
    counting = CountingCommunicator(comm)
    key = cases.make_key(case, counting)
    needed = len(remote_keys(case, key))
    stages = len(api.dist_attn_runtime_dict_mgr.get(key).runtime.remote)
    tensors = cases.tensors_of(case)
    q = api.dispatch(tensors["q"], key).requires_grad_()
    k, v = (api.dispatch(tensors[n], key, role="k").requires_grad_() for n in "kv")
    assert counting.total.calls == 0  # neither planning nor dispatch talks
    out, _ = api.calc_attn(q, k, v, key)
    forward = vars(counting.total).copy()
    assert set(counting.traffic) <= {"all_to_all_single"}
    counting.reset()
    out.backward(api.dispatch(tensors["dout"], key))
    backward = vars(counting.total).copy()
    assert forward["calls"] == stages and backward["calls"] == 2 * stages
    row = k[0].numel() * k.element_size() + v[0].numel() * v.element_size()
    assert forward["bytes_received"] == needed * row  # keys and values, not a byte more
    return needed, stages, forward, backward


@pytest.mark.parametrize("case", CASES, ids=str)
def test_received_tokens_are_the_distinct_remote_keys(case: Case, thread_world: Any) -> None:
    results = thread_world(case.world_size).run(count_rank, case)
    assert len({stages for _, stages, _, _ in results}) == 1
    sent = [0] * case.world_size
    for needed, _, forward, backward in results:
        assert forward["tokens_received"] == needed
        # Backward: the same keys again, and for each a partial gradient back to its owner.
        assert backward["tokens_received"] == needed + forward["tokens_sent"]
        assert backward["tokens_sent"] == forward["tokens_sent"] + needed
        sent = [a + b for a, b in zip(sent, forward["tokens_received_from"] or sent, strict=True)]
    assert sent == [forward["tokens_sent"] for _, _, forward, _ in results]


def test_a_mask_without_remote_keys_moves_nothing(thread_world: Any) -> None:
    def rank(comm: Any) -> None:
        counting = CountingCommunicator(comm)
        cu = list(range(0, 65, 16))
        key = api.magi_attn_varlen_key(
            cu,
            cu,
            2,
            1,
            8,
            0,
            counting,
            causal=True,
            dist_attn_config=api.DistAttnConfig(dispatch_config=api.DispatchConfig(alg=api.SequentialDispatchAlg())),
        )
        q, k, v = (torch.randn(16, h, 8, requires_grad=True) for h in (2, 1, 1))
        api.calc_attn(q, k, v, key)[0].sum().backward()
        assert counting.total.calls == 0

    thread_world(4).run(rank)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_verifier_accepts_every_plan(case: Case, thread_world: Any) -> None:
    def rank(comm: Any) -> int:
        plan = api.dist_attn_runtime_dict_mgr.get(cases.make_key(case, comm)).dist_plan
        if comm.rank == 0:
            verify(plan)
        return plan.digest

    assert len(set(thread_world(case.world_size).run(rank))) == 1
