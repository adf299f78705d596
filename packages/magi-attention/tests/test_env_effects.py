"""Every honoured variable changes what it says it changes, and the key with it."""

import logging

import pytest
import torch
from magi_attention import api, env
from magi_attention.common.enum import MagiAttentionKernelBackend, MagiAttentionPrecision
from magi_attention.config import DistAttnConfig
from magi_attention.planning import solve
from magi_comm import SingleCommunicator
from magi_comm.testing import ThreadWorld
from magi_core.mask import Mask

MASK = Mask.causal(96)


def key_on(comm, mask: Mask = MASK, config: DistAttnConfig = DistAttnConfig()) -> api.DistAttnRuntimeKey:  # noqa: B008
    return api.magi_attn_flex_key(mask, None, None, mask.total_q, mask.total_k, 2, 1, 8, 0, comm, config)


def manager_of(comm):
    return api.dist_attn_runtime_dict_mgr.get(key_on(comm))


def attend(comm):
    key = key_on(comm)
    generator = torch.Generator().manual_seed(0)  # the global one is shared by the threads that are ranks
    x = torch.randn(96, 4, 8, generator=generator)
    q, k, v = (api.dispatch(part, key).requires_grad_() for part in x.split([2, 1, 1], dim=1))
    out, meta = api.calc_attn(q, k, v, key)
    out.sum().backward()
    return out, meta


@pytest.fixture
def world():
    yield ThreadWorld(2)
    api.clear_cache()


@pytest.mark.parametrize(
    "changes",
    [
        dict(kernel_backend=MagiAttentionKernelBackend.SDPA),
        dict(precision=MagiAttentionPrecision.FP64),
        dict(deterministic_mode=True),
        dict(sanity_check=True),
        dict(min_chunks_per_rank=2),
        dict(ffa_forward_sm_margin=0),
        dict(ffa_backward_sm_margin=0),
        dict(dsink_all_reduce_op="sum"),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_key_made_under_another_environment_is_another_key(changes, world):
    def keys(comm):
        return key_on(comm)

    before = world.run(keys)[0]
    with env.override(**changes):
        within = world.run(keys)[0]
    after = world.run(keys)[0]
    assert within != before
    assert after == before


def test_kernel_backend(world):
    assert manager_backend(world) is None
    with env.override(kernel_backend=MagiAttentionKernelBackend.SDPA_OL):
        assert manager_backend(world) == "reference"
    with env.override(kernel_backend=MagiAttentionKernelBackend.FA4):
        assert manager_backend(world) is None


def manager_backend(world):
    return world.run(lambda comm: manager_of(comm).runtime.backend)[0]


def test_precision_computes_wider_and_returns_what_came(world):
    narrow = world.run(attend)[0]
    with env.override(precision=MagiAttentionPrecision.FP64):
        wide = world.run(attend)[0]
    assert (narrow[0].dtype, narrow[1].lse.dtype) == (torch.float32, torch.float32)
    assert (wide[0].dtype, wide[1].lse.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(narrow[0], wide[0])


def test_deterministic_mode_and_sm_margins(world):
    def options(comm):
        runtime = manager_of(comm).runtime
        return runtime.deterministic, runtime.fwd_sm_margin, runtime.bwd_sm_margin

    assert world.run(options)[0] == (False, 4, 4)
    with env.override(deterministic_mode=True, ffa_forward_sm_margin=7, ffa_backward_sm_margin=9):
        assert world.run(options)[0] == (True, 7, 9)


def test_sanity_check_verifies_plans(world, monkeypatch):
    seen = []
    real = solve.verify
    monkeypatch.setattr(solve, "verify", lambda plan: seen.append(plan) or real(plan))
    world.run(key_on, Mask.causal(95))
    assert not seen
    with env.override(sanity_check=True):
        world.run(key_on, Mask.causal(94))
    assert seen


def test_min_chunks_per_rank_sets_the_automatic_chunk(world):
    assert world.run(lambda comm: key_on(comm).chunk_size) == [6, 6]  # ceil(96 / (8 * 2))
    with env.override(min_chunks_per_rank=2):
        assert world.run(lambda comm: key_on(comm).chunk_size) == [24, 24]


def test_dist_attn_runtime_dict_size_bounds_live_plans(world):
    def survivors(comm):
        keys = [key_on(comm, Mask.causal(32 + i)) for i in range(4)]
        return [key in api.dist_attn_runtime_dict_mgr for key in keys]

    with env.override(dist_attn_runtime_dict_size=2):
        assert world.run(survivors) == [[False, False, True, True]] * 2


def test_dsink_all_reduce_op_is_the_default_of_the_configuration(world):
    def chosen(comm):
        return [key_on(comm, MASK, DistAttnConfig(dsink_reduce=op)).dsink_reduce for op in (None, "none", "avg")]

    assert world.run(chosen)[0] == ["none", "none", "avg"]
    with env.override(dsink_all_reduce_op="sum"):
        assert world.run(chosen)[0] == ["sum", "none", "avg"]


def test_profile_mode_names_calls_and_stages():
    # torch.profiler sees the calling thread only; the ranks of a ThreadWorld are others.
    with env.override(profile_mode=True), torch.profiler.profile() as profile:
        attend(SingleCommunicator())
    names = {event.key for event in profile.key_averages()}
    assert {"attn_fwd stage 0", "DistAttnRuntimeMgr.calc_attn", "DistAttnRuntimeMgr.dispatch"} <= names


def test_log_level_shows_plans(world, caplog):
    with caplog.at_level(logging.INFO, logger="magi_attention"):
        world.run(key_on, Mask.causal(93))
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("magi_attention")]
    assert len(messages) == 2
    assert any("rank 1 of 2 planned 93 x 93 tokens" in message for message in messages)
