"""Configurations: public defaults, validation on construction, equality that means equal behaviour."""

import dataclasses

import pytest
import torch
from magi_attention import config
from magi_attention.common.enum import AttnOverlapMode, DispatchAlgType, OverlapAlgType
from magi_attention.config import (
    BalancedDispatchAlg,
    BatchToppHeapDispatchAlg,
    BSDispatchAlg,
    BTPDispatchAlg,
    DispatchAlg,
    DispatchConfig,
    DistAttnConfig,
    DPDispatchAlg,
    GreedyOverlapAlg,
    GrpCollConfig,
    LBDispatchAlg,
    MinHeapDispatchAlg,
    OverlapAlg,
    OverlapConfig,
    RandomSelectDispatchAlg,
    SequentialDispatchAlg,
    SortedSequentialSelectAlg,
    ToppHeapDispatchAlg,
    UniformOverlapAlg,
)

DISPATCH_ALGS = {
    # class: (type, is_optimal, is_partitions_returned, is_equal_num_workloads); reference/kernel-and-api.md 3.8.
    # The public LB and DP give a bound only; ours place chunks as well. Balanced is ours alone.
    BalancedDispatchAlg: (DispatchAlgType.BALANCED, False, True, False),
    LBDispatchAlg: (DispatchAlgType.LOWER_BOUND, False, True, False),
    DPDispatchAlg: (DispatchAlgType.DYNAMIC_PROGRAMMING, True, True, False),
    BSDispatchAlg: (DispatchAlgType.BINARY_SEARCH, True, True, False),
    MinHeapDispatchAlg: (DispatchAlgType.MIN_HEAP, False, True, False),
    BTPDispatchAlg: (DispatchAlgType.BACKTRACKING_PRUNING, True, True, True),
    ToppHeapDispatchAlg: (DispatchAlgType.TOPP_HEAP, False, True, True),
    BatchToppHeapDispatchAlg: (DispatchAlgType.BATCH_TOPP_HEAP, False, True, True),
    RandomSelectDispatchAlg: (DispatchAlgType.RANDOM_SELECT, False, True, True),
    SequentialDispatchAlg: (DispatchAlgType.SEQUENTIAL_SELECT, False, True, False),
    SortedSequentialSelectAlg: (DispatchAlgType.SORTED_SEQUENTIAL_SELECT, False, True, True),
}
ALL = [getattr(config, name) for name in config.__all__]
CONCRETE = [kind for kind in ALL if kind not in (DispatchAlg, OverlapAlg)]


def test_public_defaults():
    default = DistAttnConfig()
    assert default.dispatch_config == DispatchConfig(chunk_size=None, uneven_shard=False, alg=BalancedDispatchAlg())
    assert default.overlap_config == OverlapConfig(
        mode=AttnOverlapMode.STATIC, degree=1, dynamic_max_degree=8, min_chunk_size=512, max_num_chunks=64,
        alg=UniformOverlapAlg(random_costs=False, random_seed=None), calc_cost_factor=1.0, comm_cost_factor=1.0,
    )  # fmt: skip
    assert default.grpcoll_config == GrpCollConfig(
        num_sms=24, nvl_chunk_size=8, nvl_buffer_size=256, rdma_chunk_size=16, rdma_buffer_size=128,
        num_nvl_bytes=2_000_000_000, num_rdma_bytes=0,
    )  # fmt: skip
    assert default.dsink_reduce is None
    assert BalancedDispatchAlg().balance_slack == 0.01
    assert ToppHeapDispatchAlg().top_p == BatchToppHeapDispatchAlg().top_p == 0.0
    assert BatchToppHeapDispatchAlg().num_of_select_chunk == 1
    assert SortedSequentialSelectAlg().allocation_ratio == 1.0


@pytest.mark.parametrize("kind", CONCRETE, ids=lambda k: k.__name__)
def test_frozen_hashable_equal_by_value_and_strict_about_keywords(kind):
    one, other = kind(), kind()
    assert one == other
    assert hash(one) == hash(other)
    assert dataclasses.replace(one) == one
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        one.anything = 1
    with pytest.raises(TypeError, match="unexpected keyword"):
        kind(chunksize=3)


@pytest.mark.parametrize("kind", DISPATCH_ALGS, ids=lambda k: k.__name__)
def test_dispatch_algorithms_declare_the_public_properties(kind):
    alg = kind()
    got = (alg.type, alg.is_optimal, alg.is_partitions_returned, alg.is_equal_num_workloads)
    assert got == DISPATCH_ALGS[kind]
    if alg.is_equal_num_workloads:
        with pytest.raises(ValueError, match=f"uneven_shard=True needs .* got {kind.__name__}"):
            DispatchConfig(uneven_shard=True, alg=alg)
    else:
        assert DispatchConfig(uneven_shard=True, alg=alg).uneven_shard


def test_every_dispatch_type_has_one_class_and_algorithms_of_different_class_differ():
    assert {kind.type for kind in DISPATCH_ALGS} == set(DispatchAlgType)
    algs = [kind() for kind in DISPATCH_ALGS]
    assert len({*algs}) == len(algs)
    assert {UniformOverlapAlg.type, GreedyOverlapAlg.type} == set(OverlapAlgType)


def test_overlap_degrees_never_compare_equal_and_are_never_rewritten():
    degrees = [0, 1, 2, 4, None]
    configs = [OverlapConfig(degree=degree) for degree in degrees]
    assert len({*configs}) == len(degrees)
    assert [c.degree for c in configs] == degrees
    assert OverlapConfig(degree=0) != OverlapConfig(degree=1, max_num_chunks=1)
    assert [c.enable for c in configs] == [False, True, True, True, True]
    assert [c.no_overlap for c in configs] == [True, False, False, False, False]
    assert [c.is_dynamic for c in configs] == [False, False, False, False, True]
    assert OverlapConfig(mode=AttnOverlapMode.DYNAMIC, degree=None).is_dynamic
    assert not OverlapConfig(mode=AttnOverlapMode.DYNAMIC, degree=1).is_dynamic


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DispatchAlg(), TypeError, "DispatchAlg is the base"),
        (lambda: OverlapAlg(), TypeError, "OverlapAlg is the base"),
        (lambda: DispatchConfig(chunk_size=0), ValueError, "DispatchConfig.chunk_size must be at least 1, got 0"),
        (lambda: DispatchConfig(chunk_size=1.5), TypeError, "DispatchConfig.chunk_size must be an int, got 1.5"),
        (lambda: DispatchConfig(chunk_size=True), TypeError, "DispatchConfig.chunk_size must be an int, got True"),
        (lambda: DispatchConfig(uneven_shard=1), TypeError, "DispatchConfig.uneven_shard must be a bool, got 1"),
        (lambda: DispatchConfig(alg="min_heap"), TypeError, "DispatchConfig.alg must be a DispatchAlg, got 'min_heap'"),
        (lambda: BalancedDispatchAlg(balance_slack=-0.1), ValueError, "balance_slack must be finite and within"),
        (lambda: DispatchConfig(alg=MinHeapDispatchAlg), TypeError, "pass an instance, not the class"),
        (lambda: ToppHeapDispatchAlg(top_p=1.5), ValueError, r"top_p must be finite and within \[0, 1\], got 1.5"),
        (lambda: BatchToppHeapDispatchAlg(num_of_select_chunk=0), ValueError, "num_of_select_chunk must be at least 1"),
        (lambda: RandomSelectDispatchAlg(random_seed=-1), ValueError, "random_seed must be at least 0, got -1"),
        (lambda: RandomSelectDispatchAlg(random_seed=None), TypeError, "random_seed must be an int, got None"),
        (lambda: SortedSequentialSelectAlg(allocation_ratio=0), ValueError, "allocation_ratio must be above 0"),
        (lambda: OverlapConfig(mode="static"), TypeError, "OverlapConfig.mode must be a AttnOverlapMode, got 'static'"),
        (lambda: OverlapConfig(degree=-1), ValueError, "OverlapConfig.degree must be at least 0, got -1"),
        (
            lambda: OverlapConfig(mode=AttnOverlapMode.DYNAMIC, degree=2),
            ValueError,
            "OverlapConfig.degree must be None with mode=DYNAMIC, which chooses it, got 2",
        ),
        (lambda: OverlapConfig(dynamic_max_degree=0), ValueError, "dynamic_max_degree must be at least 1, got 0"),
        (lambda: OverlapConfig(min_chunk_size=0), ValueError, "min_chunk_size must be at least 1, got 0"),
        (lambda: OverlapConfig(max_num_chunks=0), ValueError, "max_num_chunks must be at least 1, got 0"),
        (lambda: OverlapConfig(calc_cost_factor=float("nan")), ValueError, "calc_cost_factor must be finite"),
        (lambda: OverlapConfig(comm_cost_factor=-1.0), ValueError, "comm_cost_factor must be finite and at least 0"),
        (lambda: OverlapConfig(comm_cost_factor="1"), TypeError, "comm_cost_factor must be a number, got '1'"),
        (lambda: UniformOverlapAlg(random_seed=0.5), TypeError, "UniformOverlapAlg.random_seed must be an int"),
        (lambda: GrpCollConfig(num_sms=23), ValueError, "num_sms must be even .* got 23"),
        (lambda: GrpCollConfig(nvl_chunk_size=256), ValueError, "nvl_chunk_size must be below nvl_buffer_size=256"),
        (lambda: GrpCollConfig(rdma_chunk_size=65), ValueError, "at most half of rdma_buffer_size=128, got 65"),
        (lambda: GrpCollConfig(num_nvl_bytes=-1), ValueError, "num_nvl_bytes must be at least 0, got -1"),
        (lambda: GrpCollConfig(num_rdma_bytes=0.5), TypeError, "num_rdma_bytes must be an int, got 0.5"),
        (lambda: GrpCollConfig.get_default_group_cast_config(3), ValueError, "num_ranks must be one of .* got 3"),
        (lambda: DistAttnConfig(dispatch_config=None), TypeError, "dispatch_config must be a DispatchConfig, got None"),
        (lambda: DistAttnConfig(overlap_config=DispatchConfig()), TypeError, "overlap_config must be a OverlapConfig"),
        (lambda: DistAttnConfig(grpcoll_config=1), TypeError, "grpcoll_config must be a GrpCollConfig, got 1"),
        (lambda: DistAttnConfig(dsink_reduce="max"), ValueError, "dsink_reduce must be 'none', 'sum', 'avg' or None"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_group_collective_sizes():
    # 12 channels, 2 ranks, 256 tokens each of 8 x 2 bytes x 2 tensors + 4 (index) + 4 x 3 (lse); 16 for the counters.
    per_peer = 256 * (8 * 2 * 2 + 4 + 12) + 16
    default = GrpCollConfig()
    assert default.get_min_num_bytes_intranode(2, 8, torch.bfloat16, num_groups=2, num_heads=3) == 12 * 2 * per_peer
    rdma, nvl = default.get_min_num_bytes_internode(16, 8, torch.bfloat16, num_groups=2, num_heads=3)
    assert nvl == 12 * 8 * per_peer
    assert rdma == 2 * 12 * 2 * (128 * (8 * 2 * 2 + 4 + 12) + 16)
    with pytest.raises(ValueError, match="num_ranks must be a multiple of num_ranks_per_node=8, got 12"):
        default.get_min_num_bytes_internode(12, 8, torch.float32)
    assert default.to_buffer_args() == {"num_nvl_bytes": 2_000_000_000, "num_rdma_bytes": 0}
    assert default.to_kernel_config() == dict(
        num_sms=24, nvl_chunk_size=8, nvl_buffer_size=256, rdma_chunk_size=16, rdma_buffer_size=128
    )
    for num_ranks in (2, 4, 8, 16, 24, 32, 64, 128, 144, 160):
        for get in (GrpCollConfig.get_default_group_cast_config, GrpCollConfig.get_default_group_reduce_config):
            assert (get(num_ranks).num_rdma_bytes > 0) == (num_ranks > 8)
    assert GrpCollConfig(num_nvl_bytes=2e9) == GrpCollConfig()


def test_a_configuration_is_the_same_whatever_the_environment_says(monkeypatch):
    before = DistAttnConfig()
    monkeypatch.setenv("MAGI_ATTENTION_QO_COMM", "1")
    monkeypatch.setenv("MAGI_ATTENTION_DSINK_ALL_REDUCE_OP", "sum")
    assert DistAttnConfig() == before
    assert DistAttnConfig(overlap_config=OverlapConfig(degree=4)).overlap_config.degree == 4
