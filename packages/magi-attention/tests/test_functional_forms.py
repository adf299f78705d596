"""The functional forms are the calls of the API, on the same plan; the FA4 name is the plain operator."""

import pytest
import torch
from magi_attention import api, functional
from magi_attention.functional import fa4
from magi_comm.testing import ThreadWorld
from magi_core.mask import Mask

MASK = Mask.documents([30, 19], causal=True)


@pytest.fixture
def world():
    yield ThreadWorld(3)
    api.clear_cache()


def make_key(comm):
    return api.magi_attn_flex_key(MASK, None, None, 49, 49, 2, 1, 8, 0, comm)


@pytest.mark.parametrize("by_manager", [False, True], ids=["key", "manager"])
def test_functional_forms_are_the_api(by_manager, world):
    x = torch.randn(49, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def rank(comm):
        key = make_key(comm)
        runtime = api.dist_attn_runtime_dict_mgr.get(key) if by_manager else key
        local = functional.dispatch_func(x, runtime)
        assert torch.equal(local, api.dispatch(x, key))
        q, k, v = local.split([2, 1, 1], dim=1)
        out, meta = functional.dist_attn_func(q, k, v, runtime, None, 0.3, 5.0, True)
        expected, expected_meta = api.calc_attn(q, k, v, key, softmax_scale=0.3, softcap=5.0, return_max_logits=True)
        assert torch.equal(out, expected)
        assert torch.equal(meta.lse, expected_meta.lse)
        assert torch.equal(meta.max_logits, expected_meta.max_logits)
        rolled = functional.roll_func(local, 5, 0, runtime)
        assert torch.equal(functional.roll_simple_func(local, 5, 0, runtime), rolled)
        return functional.undispatch_func(out, runtime), functional.undispatch_func(rolled, runtime)

    for out, rolled in world.run(rank):
        assert torch.equal(rolled, torch.roll(x, 5, 0))
        slices = [torch.from_numpy(part.copy()) for part in MASK.slices()]
        q, k, v = x.split([2, 1, 1], dim=1)
        whole, _ = functional.flex_flash_attn_func(q, k, v, *slices, softmax_scale=0.3, softcap=5.0)
        torch.testing.assert_close(out, whole, rtol=0, atol=1e-12)


def test_a_runtime_must_be_one():
    with pytest.raises(TypeError, match="dist_attn_runtime must be a DistAttnRuntimeMgr or .*, got int"):
        functional.dispatch_func(torch.zeros(3), 3)


def test_fa4_is_the_plain_operator_with_the_lse_bare():
    q, k = torch.randn(20, 4, 16), torch.randn(24, 2, 16)
    ranges = torch.tensor([[0, 12], [12, 20]]).int(), torch.tensor([[0, 16], [16, 24]]).int()
    types = torch.tensor([1, 0]).int()
    out, lse = fa4.ffa_fa4_func(q, k, k, *ranges, types, softcap=2.0, reuse_attn_arg=True)
    expected, meta = functional.flex_flash_attn_func(q, k, k, *ranges, types, softcap=2.0)
    assert torch.equal(out, expected)
    assert torch.equal(lse, meta.lse)
    other, _ = fa4.ffa_fa4_func(q, k, k, *ranges, torch.tensor([0, 0]).int(), softcap=2.0, reuse_attn_arg=True)
    assert not torch.equal(other, out)  # the public hint reuses the mask of another call
    with pytest.raises(TypeError, match="reuse_attn_arg must be a bool, got 1"):
        fa4.ffa_fa4_func(q, k, k, *ranges, reuse_attn_arg=1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([torch.float32], [64], [1], [1]), NotImplementedError, "dtypes must be float16 or bfloat16 on CUDA"),
        (([torch.float16], [320], [1], [1]), NotImplementedError, "head_dims must be at most 256"),
        (([torch.float16], [64], [0], [1]), ValueError, "qhead_per_kvhead must be at least 1"),
        (([torch.float16], [64], [1], [0]), ValueError, "func_nums must be at least 1"),
    ],
)
def test_precompiling_refuses_what_has_no_kernel(arguments, error, message):
    with pytest.raises(error, match=message):
        fa4.precompile_ffa_fa4(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_precompiling_without_a_gpu_has_nothing_to_do():
    assert fa4.precompile_ffa_fa4([torch.bfloat16], [64, 128], [1, 4], [1, 3]) is None
