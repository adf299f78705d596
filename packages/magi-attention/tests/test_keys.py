"""Keys: what makes two equal, how long they live, what is refused when one is made."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from dataclasses import replace

import magi_attention.api as api
import numpy as np
import pytest
import torch
from magi_attention import env
from magi_attention.api import (
    AttnMaskType,
    AttnRanges,
    BalancedDispatchAlg,
    DispatchConfig,
    DistAttnConfig,
    DPDispatchAlg,
    LBDispatchAlg,
    MinHeapDispatchAlg,
    OverlapConfig,
    SequentialDispatchAlg,
    magi_attn_flex_key,
    magi_attn_varlen_key,
)
from magi_attention.common.enum import MagiAttentionPrecision
from magi_attention.planning.registry import DistAttnRuntimeDictManager
from magi_comm.groups import SingleCommunicator
from magi_comm.testing import ThreadWorld
from magi_core.mask import Mask
from magi_core.planner import verify


class OneRank(SingleCommunicator):
    """A group of its own, so that tests do not see each other's plans."""


@pytest.fixture
def group():
    return OneRank()


def key_of(group, q=((0, 8), (8, 16)), k=((0, 8), (8, 16)), types="causal", total=16, **options):
    options = {"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 8, **options}
    config = options.pop("dist_attn_config", DistAttnConfig())
    return magi_attn_flex_key(
        q,
        k,
        types,
        total,
        options.pop("total_k", total),
        options.pop("num_heads_q"),
        options.pop("num_heads_kv"),
        options.pop("head_dim"),
        0,
        group,
        config,
        **options,
    )


@pytest.mark.parametrize(
    "form",
    [
        lambda r: AttnRanges.from_ranges(r),
        lambda r: np.array(r),
        lambda r: np.array(r, np.int32),
        lambda r: torch.tensor(r),
        lambda r: torch.tensor(r, dtype=torch.int32),
        lambda r: r,
    ],
    ids=["AttnRanges", "array", "int32_array", "tensor", "int32_tensor", "pairs"],
)
@pytest.mark.parametrize("types", ["causal", [AttnMaskType.CAUSAL] * 2, ["causal", 1], torch.tensor([1, 1])], ids=str)
def test_ranges_and_types_in_any_form_make_the_same_key(group, form, types) -> None:
    ranges = [(0, 8), (8, 16)]
    assert key_of(group, form(ranges), form(ranges), types) is key_of(group)


def test_slices_that_show_the_same_pairs_make_the_same_key(group) -> None:
    assert key_of(group, [(8, 16), (0, 8)], [(8, 16), (0, 8)]) is key_of(group)
    assert key_of(group, [(0, 4), (4, 16)], [(0, 16), (0, 16)], "full") is key_of(group, [(0, 16)], [(0, 16)], "full")
    mask = Mask.from_slices([(0, 8), (8, 16)], [(0, 8), (8, 16)], [1, 1], total_q=16, total_k=16)
    assert key_of(group, mask, None, None) is key_of(group)
    assert magi_attn_varlen_key([0, 8, 16], [0, 8, 16], 4, 2, 8, 0, group, causal=True) is key_of(group)


def test_whatever_changes_behaviour_changes_the_key(group) -> None:
    keys = [
        key_of(group),
        key_of(group, types="full"),
        key_of(group, num_heads_q=2),
        key_of(group, num_heads_kv=4),
        key_of(group, head_dim=16),
        key_of(group, total=17),
        key_of(group, total_k=17),
        key_of(group, dist_attn_config=DistAttnConfig(overlap_config=OverlapConfig(degree=0))),
        key_of(group, dist_attn_config=DistAttnConfig(overlap_config=OverlapConfig(max_num_chunks=1))),
        key_of(group, dist_attn_config=DistAttnConfig(dsink_reduce="sum")),
        key_of(group, dist_attn_config=DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=3))),
        key_of(group, dist_attn_config=DistAttnConfig(dispatch_config=DispatchConfig(uneven_shard=True))),
        key_of(OneRank()),
    ]
    for change in (
        {"deterministic_mode": True},
        {"precision": MagiAttentionPrecision.BF16},
        {"ffa_forward_sm_margin": 7},
        {"dsink_all_reduce_op": "sum"},
    ):
        with env.override(**change):
            keys.append(key_of(group))
    assert len(set(keys)) == len(keys)
    assert len({int(key.handle) for key in keys}) == len(keys)


def test_the_placement_a_new_mask_lies_on_is_part_of_its_key() -> None:
    def rank(comm):
        slices = ([(0, 4), (4, 64)], [(0, 4), (4, 64)], "causal")
        balanced = key_of(comm, *slices, total=64)
        config = DistAttnConfig(dispatch_config=DispatchConfig(alg=SequentialDispatchAlg()))
        contiguous = key_of(comm, *slices, total=64, dist_attn_config=config)
        new = [
            api.make_flex_key_for_new_mask_after_dispatch([(0, 64)], [(0, 64)], "full", key)
            for key in (balanced, contiguous)
        ]
        assert balanced.placement != contiguous.placement
        assert [key.placement for key in new] == [balanced.placement, contiguous.placement]
        assert new[0] != new[1] and new[0] != balanced
        x = torch.arange(64)
        assert all(torch.equal(api.dispatch(x, a), api.dispatch(x, b)) for a, b in zip(new, (balanced, contiguous)))

    ThreadWorld(2).run(rank)


def test_a_new_mask_takes_heads_and_overlap_from_where_it_is_told(group) -> None:
    old = key_of(group, dist_attn_config=DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=2)))
    new = api.make_flex_key_for_new_mask_after_dispatch([(0, 16)], [(0, 16)], "full", old)
    assert (new.num_heads_q, new.num_heads_kv, new.head_dim) == (4, 2, 8)
    assert new.dist_attn_config == old.dist_attn_config
    other = api.make_flex_key_for_new_mask_after_dispatch(
        [(0, 16)],
        [(0, 16)],
        "full",
        old,
        num_heads_q=8,
        num_heads_kv=8,
        head_dim=4,
        dist_attn_config=DistAttnConfig(overlap_config=OverlapConfig(degree=3), dsink_reduce="sum"),
    )
    assert (other.num_heads_q, other.num_heads_kv, other.head_dim) == (8, 8, 4)
    assert other.dist_attn_config.overlap_config.degree == 3
    assert other.dist_attn_config.dispatch_config == old.dist_attn_config.dispatch_config
    assert other.dsink_reduce == "sum"
    varlen = api.make_varlen_key_for_new_mask_after_dispatch([0, 8, 16], [0, 8, 16], old, causal=True)
    assert varlen.attn_mask_type == (AttnMaskType.CAUSAL, AttnMaskType.CAUSAL)
    with pytest.raises(ValueError, match=r"must end at the totals of key_for_dispatch \(16, 16\), got \(15, 15\)"):
        api.make_varlen_key_for_new_mask_after_dispatch([0, 15], [0, 15], old)


def test_attributes_tell_what_was_planned(group) -> None:
    key = key_of(group, total=16)
    assert (key.total_seqlen_q, key.total_seqlen_k, key.cp_size, key.cp_rank) == (16, 16, 1, 0)
    assert key.q_ranges.to_naive_ranges() == [(0, 8), (8, 16)] == key.k_ranges.to_naive_ranges()
    assert key.attn_mask_type == (AttnMaskType.CAUSAL,) * 2
    assert key.shard_q == key.shard_k == key.padded_q == 16 and key.pad_size == 0
    assert key.handle.dtype == torch.int64 and key.handle.dim() == 0 and key.handle.device.type == "cpu"


def test_the_automatic_chunk_size_caps_the_configured_one() -> None:
    def rank(comm):
        sizes = []
        for chunk_size in (None, 2, 1000):
            config = DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=chunk_size))
            key = key_of(comm, [(0, 100)], [(0, 100)], total=100, dist_attn_config=config)
            sizes.append((key.chunk_size, key.pad_size, key.shard_q))
            assert key.pad_size == api.compute_pad_size(100, 2, key.chunk_size)
        return sizes

    assert ThreadWorld(2).run(rank)[0] == [(7, 12, 56), (2, 0, 50), (7, 12, 56)]
    with env.override(min_chunks_per_rank=2):  # around the world: it is of the process, which all ranks share
        assert ThreadWorld(2).run(rank)[0][::2] == [(25, 0, 50)] * 2


def test_a_free_chunk_size_follows_the_mask() -> None:
    """One document five chunks long and many short ones: eight chunks a rank cannot be balanced."""
    lengths = [1280] + [64] * 236
    cu = np.cumsum([0, *lengths]).tolist()
    pairs = list(zip(cu, cu[1:], strict=False))

    def rank(comm):
        out = []
        for dispatch in (
            DispatchConfig(),
            DispatchConfig(alg=BalancedDispatchAlg(balance_slack=0.0)),
            DispatchConfig(alg=MinHeapDispatchAlg()),
            DispatchConfig(chunk_size=4096),
        ):
            key = key_of(comm, pairs, pairs, "causal", total=cu[-1], dist_attn_config=DistAttnConfig(dispatch))
            plan = api.dist_attn_runtime_dict_mgr.get(key).dist_plan
            out.append((key.chunk_size, float(plan.balance.max() / plan.balance.mean())))
        return out

    free, strict, heap, given = ThreadWorld(8).run(rank)[0]
    assert heap[0] == given[0] == 256  # ceil(16384 / (8 * 8)): who names an algorithm or a size gets the public rule
    assert free[0] == strict[0] == 64
    assert strict[1] <= free[1] <= 1.06
    assert heap[1] > 1.5 and given[1] > 1.5


@pytest.mark.parametrize("alg", [LBDispatchAlg(), DPDispatchAlg(), BalancedDispatchAlg()], ids=lambda a: a.type.value)
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_algorithms_that_others_refuse_place_chunks(alg, uneven) -> None:
    def rank(comm):
        config = DistAttnConfig(DispatchConfig(chunk_size=8, uneven_shard=uneven, alg=alg))
        key = key_of(comm, [(0, 60), (60, 100)], [(0, 60), (60, 100)], "causal", total=100, dist_attn_config=config)
        plan = api.dist_attn_runtime_dict_mgr.get(key).dist_plan
        verify(plan)
        x = torch.arange(100.0)[:, None]
        assert torch.equal(api.undispatch(api.dispatch(x, key), key), x)
        return plan.digest

    assert len({*ThreadWorld(3).run(rank)}) == 1


def test_a_key_is_an_identity_of_this_process(group) -> None:
    key = key_of(group)
    assert copy.deepcopy(key) is key
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(key)


# -- life ----------------------------------------------------------------------------------------------------------


def test_most_recent_is_what_was_last_made_or_used(group) -> None:
    with pytest.raises(ValueError, match="cp_group has no key yet"):
        api.get_most_recent_key(group)
    with pytest.raises(ValueError, match="cp_group must name a group, got None"):
        api.get_most_recent_key(None)
    first, second = key_of(group), key_of(group, types="full")
    assert api.get_most_recent_key(group) is second
    api.dispatch(torch.zeros(16), first)
    assert api.get_most_recent_key(group) is first
    assert key_of(group, types="full") is second and api.get_most_recent_key(group) is second


def test_cleared_keys_are_refused_and_can_be_made_again(group) -> None:
    other = OneRank()
    key, kept = key_of(group), key_of(other)
    api.clear_cache(group)
    for call in (
        lambda: api.dispatch(torch.zeros(16), key),
        lambda: api.undispatch(torch.zeros(16), key),
        lambda: api.roll(torch.zeros(16), 1, 0, key),
        lambda: api.get_position_ids(key),
        lambda: api.calc_attn(*(torch.zeros(16, h, 8) for h in (4, 2, 2)), key),
        lambda: api.make_flex_key_for_new_mask_after_dispatch([], [], [], key),
        lambda: torch.ops.magi_attention.dispatch(torch.zeros(16), key.handle, "q", 0.0, 16),
    ):
        with pytest.raises(ValueError, match="names no plan of this process: it was cleared, or evicted"):
            call()
    assert api.dispatch(torch.zeros(16), kept).shape == (16,)
    again = key_of(group)
    assert again == key and int(again.handle) != int(key.handle)
    assert api.dispatch(torch.zeros(16), key).shape == (16,)  # equal keys name the same plan
    api.clear_cache()
    with pytest.raises(ValueError, match="names no plan"):
        api.dispatch(torch.zeros(16), kept)


def test_the_least_recently_used_plan_of_a_group_is_evicted(group) -> None:
    with env.override(dist_attn_runtime_dict_size=2):
        first, second = key_of(group), key_of(group, types="full")
        api.dispatch(torch.zeros(16), first)
        key_of(OneRank())
        third = key_of(group, types="inv_causal")
    manager = api.dist_attn_runtime_dict_mgr
    assert (first in manager, second in manager, third in manager) == (True, False, True)
    assert list(manager.keys(group)) == [first, third]
    with pytest.raises(ValueError, match="names no plan"):
        api.dispatch(torch.zeros(16), second)


def test_a_backward_pass_outlives_its_plan(group) -> None:
    key = key_of(group)
    q, k, v = (torch.randn(16, h, 8, requires_grad=True) for h in (4, 2, 2))
    out, _ = api.calc_attn(q, k, v, key)
    api.clear_cache(group)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_plans_go_with_their_group() -> None:
    group = OneRank()
    key = key_of(group)
    manager = weakref.ref(api.dist_attn_runtime_dict_mgr.get(key))
    del key, group
    gc.collect()
    assert manager() is None


def test_a_manager_of_plans_may_have_its_own_size(group) -> None:
    plans = DistAttnRuntimeDictManager(max_size=1)
    keys = [key_of(group), key_of(group, types="full")]
    made = [plans.get_or_make(key, lambda key=key: api.dist_attn_runtime_dict_mgr.get(key)) for key in keys]
    assert keys[0] not in plans and plans.get(keys[1]) is made[1] and plans.most_recent(group) is keys[1]
    with pytest.raises(TypeError, match="key must be a DistAttnRuntimeKey, got str"):
        plans.get("key")


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"q": [(0, 17), (8, 16)]},
            ValueError,
            r"q_ranges\[0\] must be within \[0, 16\) with start <= end, got \[0, 17\)",
        ),
        (
            {"k": [(0, 8), (-1, 16)]},
            ValueError,
            r"k_ranges\[1\] must be within \[0, 16\) with start <= end, got \[-1, 16\)",
        ),
        ({"q": np.array([(8, 0), (8, 16)])}, ValueError, r"q_ranges\[0\] must be within .*, got \[8, 0\)"),
        ({"q": [(0, 8)]}, ValueError, r"q_ranges and k_ranges must have the same length, got 1 and 2"),
        ({"q": [(0, 8, 1)]}, ValueError, r"q_ranges must have shape"),
        ({"q": 5}, TypeError, r"q_ranges must be"),
        ({"q": [(0.0, 8.0), (8.0, 16.0)]}, TypeError, r"q_ranges must"),
        ({"types": "diagonal"}, ValueError, r"mask type must be one of 'full', 'causal', .*got 'diagonal'"),
        ({"types": ["full"]}, ValueError, r"attn_mask_type must have one type per slice \(2\), got 1"),
        ({"types": 4}, ValueError, r"int_type must be 0, 1, 2 or 3, got 4"),
        ({"types": 1.5}, TypeError, r"attn_mask_type must be a mask type"),
        ({"q": [(0, 8), (4, 16)], "k": [(0, 8), (4, 16)], "types": "full"}, ValueError, r"slice"),
        ({"total": -1, "q": [], "k": []}, ValueError, r"total_seqlen_q must not be negative, got -1"),
        ({"total": 16.0}, TypeError, r"total_seqlen_q must be an int, got 16.0 of float"),
        ({"num_heads_q": 3}, ValueError, r"num_heads_q must be a multiple of num_heads_kv \(2\), got 3"),
        ({"num_heads_kv": 0}, ValueError, r"num_heads_kv must be at least 1, got 0"),
        ({"head_dim": 8.0}, TypeError, r"head_dim must be an int, got 8.0 of float"),
        ({"is_same_source": 1}, TypeError, r"is_same_source must be a bool, got 1 of int"),
        ({"dist_attn_config": {}}, TypeError, r"dist_attn_config must be a DistAttnConfig, got dict"),
    ],
)
def test_wrong_arguments_are_refused(group, change, error, message) -> None:
    with pytest.raises(error, match=message):
        key_of(group, **change)


def test_unknown_keywords_and_groups_are_refused(group) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        key_of(group, colour=1)
    with pytest.raises(
        TypeError, match="cp_group_or_mesh must be a ProcessGroup, a DeviceMesh or a Communicator, got int"
    ):
        key_of(5)
    mask = Mask.from_slices([(0, 8)], [(0, 8)], [0], total_q=8, total_k=8)
    with pytest.raises(ValueError, match="k_ranges and attn_mask_type must be None when q_ranges is a Mask"):
        key_of(group, mask, [(0, 8)], "full", total=8)
    with pytest.raises(ValueError, match=r"must be the mask's \(8, 8\), got \(16, 16\)"):
        key_of(group, mask, None, None)


def test_a_double_cover_is_refused_unless_allowed(group) -> None:
    slices = ([(0, 16), (8, 16)], [(0, 16), (8, 12)], "full")
    with pytest.raises(ValueError, match=r"0.*1"):
        key_of(group, *slices)
    assert key_of(group, *slices, allow_overlap=True).total_seqlen_q == 16


def test_deprecated_arguments_warn_and_still_work(group) -> None:
    with pytest.warns(DeprecationWarning, match="pad_size=3 has no effect"):
        key = magi_attn_varlen_key([0, 16], [0, 16], 4, 2, 8, 3, group)
    with pytest.warns(DeprecationWarning, match="chunk_size is deprecated"):
        chunked = magi_attn_varlen_key([0, 16], [0, 16], 4, 2, 8, 0, group, chunk_size=1)
    assert chunked.chunk_size == 1 and chunked != key
    config = DistAttnConfig(dispatch_config=DispatchConfig(chunk_size=2))
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(ValueError, match=r"chunk_size must agree with DispatchConfig.chunk_size \(2\), got 3"),
    ):
        magi_attn_varlen_key([0, 16], [0, 16], 4, 2, 8, 0, group, dist_attn_config=config, chunk_size=3)
    x = torch.arange(16)
    with pytest.warns(DeprecationWarning, match="magi_attn_varlen_dispatch is deprecated"):
        local, same = api.magi_attn_varlen_dispatch(x, [0, 16], [0, 16], 4, 2, 8, 0, group)
    assert same is key and torch.equal(local, api.dispatch(x, key))
    with pytest.warns(DeprecationWarning, match="magi_attn_flex_dispatch is deprecated"):
        local, same = api.magi_attn_flex_dispatch(x, [(0, 16)], [(0, 16)], "full", 16, 16, 4, 2, 8, 0, group)
    assert same is key
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert magi_attn_varlen_key([0, 16], [0, 16], 4, 2, 8, 0, group) is key


def test_two_threads_that_plan_the_same_share_the_first_key(group):
    """The one that comes second must not replace the plan, and with it the handle, that the first has handed out."""
    key = key_of(group)
    plans = DistAttnRuntimeDictManager()
    manager = api.dist_attn_runtime_dict_mgr.get(key)
    late = copy.copy(manager)
    late.key = replace(key, handle=torch.tensor(-1))

    def make_late():
        plans.get_or_make(key, lambda: manager)  # meanwhile, in another thread
        return late

    assert plans.get_or_make(late.key, make_late) is manager


@pytest.mark.parametrize("window, error", [((1.5, 0), TypeError), ((1, 0, 3), ValueError), ((-2, 0), ValueError)])
def test_windows_are_two_integers(group, window, error):
    with pytest.raises(error, match="window_size must be two integers of at least -1"):
        magi_attn_varlen_key([0, 10], [0, 10], 2, 1, 8, 0, group, window_size=window)


def test_flags_of_a_key_are_bools(group):
    with pytest.raises(TypeError, match="causal must be a bool, got 'no' of str"):
        magi_attn_varlen_key([0, 10], [0, 10], 2, 1, 8, 0, group, causal="no")
    with pytest.raises(TypeError, match="allow_overlap must be a bool, got 'no' of str"):
        key_of(group, allow_overlap="no")
