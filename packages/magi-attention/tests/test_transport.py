"""dispatch, undispatch, roll and position ids on ranks as threads, against torch on the whole tensor."""

from __future__ import annotations

import magi_attention.api as api
import pytest
import torch
from magi_attention.api import DispatchConfig, DistAttnConfig, magi_attn_flex_key
from magi_attention.common.enum import AttnRole
from magi_comm.testing import ThreadWorld

WORLDS = {n: ThreadWorld(n) for n in (1, 2, 3, 5)}


def key_of(comm, total, total_k=None, *, uneven=False, chunk_size=None, causal=True):
    total_k = total if total_k is None else total_k
    config = DistAttnConfig(dispatch_config=DispatchConfig(uneven_shard=uneven, chunk_size=chunk_size))
    return magi_attn_flex_key(
        [(0, total)], [(0, total_k)], "causal" if causal else "full", total, total_k, 2, 1, 8, 0, comm, config
    )


@pytest.fixture(autouse=True)
def forget_plans():
    yield
    api.clear_cache()


PLACES = pytest.mark.parametrize(
    ("world", "total", "uneven"),
    [
        (1, 9, False),
        (2, 16, False),
        (2, 17, True),
        (3, 7, False),
        (3, 100, True),
        (5, 3, False),
        (5, 3, True),
        (2, 0, False),
    ],
)


@PLACES
def test_undispatch_undoes_dispatch(world, total, uneven) -> None:
    x = torch.randn(total, 2, 3, dtype=torch.float64)

    def rank(comm):
        key = key_of(comm, total, uneven=uneven)
        local = api.dispatch(x, key, pad_value=-7.0)
        assert local.shape == (key.shard_q, 2, 3)
        assert torch.equal(api.undispatch(local, key), x)
        for dtype in (torch.int64, torch.bool, torch.bfloat16):
            y = x[:, 0, 0].mul(3).to(dtype)
            assert torch.equal(api.undispatch(api.dispatch(y, key), key), y)
        return local

    locals_ = WORLDS[world].run(rank)
    tokens = torch.cat(locals_).flatten(1)
    pads = (tokens == -7).all(1)
    assert int((~pads).sum()) == total
    assert len({len(local) for local in locals_}) == 1 or uneven


@PLACES
def test_gradients_are_the_documented_transposes(world, total, uneven) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(total, 3, generator=generator, dtype=torch.float64)
    weights = torch.randn(world, total, 3, generator=generator, dtype=torch.float64)

    def rank(comm):
        key = key_of(comm, total, uneven=uneven)
        position = api.get_position_ids(key)
        is_token = torch.ones_like(position, dtype=torch.bool)
        is_token[int(api.dispatch(torch.ones(total), key).sum()) :] = False

        whole = x.clone().requires_grad_()
        local_weight = api.dispatch(weights[0], key, pad_value=99.0)
        api.dispatch(whole, key).backward(local_weight)
        assert torch.equal(whole.grad, weights[0])  # every rank has the whole gradient, and padding none

        local = api.dispatch(x, key).requires_grad_()
        api.undispatch(local, key).backward(weights[0])
        expected = torch.zeros_like(local)
        expected[is_token] = weights[0][position[is_token]]
        assert torch.equal(local.grad, expected)

        local = api.dispatch(x, key).requires_grad_()
        api.undispatch(local, key, is_partial_grad=True).backward(weights[comm.rank])
        expected[is_token] = weights.sum(0)[position[is_token]]
        torch.testing.assert_close(local.grad, expected, rtol=0, atol=1e-12)

    WORLDS[world].run(rank)


@PLACES
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_roll_is_undispatch_roll_dispatch(world, total, uneven, dim) -> None:
    whole = torch.randn(total, 2, dtype=torch.float64)
    labels = torch.arange(total)

    def along(x):
        return x.movedim(0, dim)

    def rank(comm):
        key = key_of(comm, total, uneven=uneven)
        for roll in (api.roll, api.roll_simple):
            for shift in (0, 1, -1, 2, total // 2, total, -3 * total - 2):
                local = along(api.dispatch(whole, key)).clone().requires_grad_()
                rolled = roll(local, shift, dim, key)
                expected = along(api.dispatch(torch.roll(whole, shift, 0), key))
                assert torch.equal(rolled, expected), shift
                rolled.backward(along(api.dispatch(whole, key, pad_value=5.0)))
                assert torch.equal(local.grad, along(api.dispatch(torch.roll(whole, -shift, 0), key)))
        local = api.dispatch(labels, key, pad_value=-100)
        rolled = api.roll(local, -1, 0, key, pad_value=-100)  # next-token labels
        assert torch.equal(rolled, api.dispatch(torch.roll(labels, -1), key, pad_value=-100))

    WORLDS[world].run(rank)


def test_roll_sends_only_tokens_that_change_rank() -> None:
    moved = []

    def rank(comm):
        key = key_of(comm, 72, chunk_size=3)  # 8 chunks a rank, no padding
        wire = []
        real = comm.all_to_all_single
        comm.all_to_all_single = lambda out, *a, **kw: (wire.append(out.shape[0]), real(out, *a, **kw))[1]
        try:
            tokens = api.roll(api.dispatch(torch.arange(72), key), 1, 0, key)
            api.roll(api.dispatch(torch.arange(72), key), 72, 0, key)
        finally:
            del comm.all_to_all_single
        before = set(api.get_position_ids(key).tolist())
        moved.append((wire, sum(int(t) not in before for t in tokens)))

    WORLDS[3].run(rank)
    for wire, arrived in moved:
        assert wire == [arrived]


def test_position_ids_are_global_and_padding_repeats_the_last() -> None:
    def rank(comm):
        key = key_of(comm, 7)
        ids = api.get_position_ids(key)
        assert ids.dtype == torch.int64 and ids.shape == (key.shard_q,)
        assert torch.equal(ids, api.dispatch(torch.arange(7), key, pad_value=6))
        ids.zero_()  # the caller's own copy
        assert torch.equal(api.get_position_ids(key), api.dispatch(torch.arange(7), key, pad_value=6))
        return key.shard_q

    assert WORLDS[3].run(rank) == [3, 3, 3]


def test_positions_inside_packed_documents_follow_dispatch() -> None:
    cu = [0, 4, 7, 7, 20]
    inside = torch.cat([torch.arange(b - a) for a, b in zip(cu, cu[1:], strict=False)])

    def rank(comm):
        key = api.magi_attn_varlen_key(cu, cu, 2, 1, 8, 0, comm, causal=True)
        ids = api.get_position_ids(key)
        assert torch.equal(api.dispatch(inside, key, pad_value=int(inside[-1])), inside[ids])
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(1))
        assert torch.equal(api.dispatch(x, key)[ids != 19], x[ids[ids != 19]])

    for world in (1, 2, 3, 5):
        WORLDS[world].run(rank)


def test_keys_of_cross_attention_have_a_placement_of_their_own() -> None:
    x, y = torch.arange(40), torch.arange(11)

    def rank(comm):
        key = key_of(comm, 40, 11)
        assert torch.equal(api.undispatch(api.dispatch(x, key), key), x)
        assert torch.equal(api.undispatch(api.dispatch(y, key, role="k"), key, role="k"), y)
        assert torch.equal(
            api.roll(api.dispatch(y, key, role="k"), 3, 0, key, role="k"), api.dispatch(y.roll(3), key, role="k")
        )
        assert torch.equal(api.get_position_ids(key, role="k"), api.dispatch(y, key, role="k", pad_value=10))
        manager = api.dist_attn_runtime_dict_mgr.get(key)
        assert torch.equal(manager.get_position_ids(AttnRole.VALUE), api.get_position_ids(key, role="k"))
        assert torch.equal(manager.dispatch_kv(y), api.dispatch(y, key, role="k"))
        assert torch.equal(manager.undispatch_qo(manager.dispatch_qo(x)), x)

    WORLDS[3].run(rank)


def test_tokens_stay_in_order_where_they_may_not_be_permuted() -> None:
    x = torch.arange(64)

    def rank(comm):
        for flags in ({"is_q_permutable": False}, {"is_k_permutable": False}):
            key = magi_attn_flex_key([(0, 64)], [(0, 64)], "causal", 64, 64, 2, 1, 8, 0, comm, **flags)
            assert api.dispatch(x, key).tolist() == list(range(32 * comm.rank, 32 * comm.rank + 32))
        assert api.dispatch(x, key_of(comm, 64)).tolist() != list(range(32 * comm.rank, 32 * comm.rank + 32))

    WORLDS[2].run(rank)


def test_wrong_tensors_are_refused() -> None:
    def rank(comm):
        key = key_of(comm, 7, 5)
        for call, error, message in (
            (lambda: api.dispatch(torch.zeros(8), key), ValueError, r"x must have the key's total_seqlen_q \(7\) rows"),
            (
                lambda: api.dispatch(torch.zeros(7), key, role="k"),
                ValueError,
                r"total_seqlen_k \(5\) rows, got shape \(7,\)",
            ),
            (
                lambda: api.dispatch(torch.zeros(7), key, role="v"),
                ValueError,
                r"role must be 'q' .* or 'k' .*, got 'v'",
            ),
            (
                lambda: api.dispatch([0.0] * 7, key),
                TypeError,
                "x must be a tensor, got list",
            ),
            (
                lambda: torch.ops.magi_attention.dispatch(torch.zeros(9), key.handle, "q", 0.0, key.shard_q),
                ValueError,
                r"total_seqlen_q \(7\) rows, got shape \(9,\)",  # longer: picking rows from it would pass unseen
            ),
            (
                lambda: torch.ops.magi_attention.undispatch(torch.zeros(9), key.handle, "q", False, 7),
                ValueError,
                r"x must have this rank's \d local tokens along dim 0",
            ),
            (
                lambda: api.undispatch(torch.zeros(9), key),
                ValueError,
                r"x must have this rank's \d local tokens along dim 0",
            ),
            (
                lambda: api.roll(torch.zeros(2, 9), 1, 1, key),
                ValueError,
                r"local tokens along dim 1, got shape \(2, 9\)",
            ),
            (
                lambda: api.roll(torch.zeros(9), 1, 1, key),
                ValueError,
                r"dim must be a dim of x, within \[-1, 1\), got 1",
            ),
            (lambda: api.get_position_ids(key, role="x"), ValueError, r"role must be"),
            (lambda: api.dispatch(torch.zeros(7), "key"), TypeError, r"key must be a DistAttnRuntimeKey, got str"),
        ):
            with pytest.raises(error, match=message):
                call()

    WORLDS[2].run(rank)
