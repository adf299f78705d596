"""Public utilities: each against a plain computation, with its refusals."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_attention import env, utils
from magi_attention.utils import nvtx, sparse_utils

MASK_TYPES = {
    # type: is (i, j) of a slice of sq x sk visible; contract item 2
    0: lambda i, j, sq, sk: True,
    1: lambda i, j, sq, sk: j <= i + sk - sq,
    2: lambda i, j, sq, sk: j >= i,
    3: lambda i, j, sq, sk: i <= j <= i + sk - sq,
}


def test_sequences():
    assert [utils.ceil_div(a, 4) for a in (0, 1, 4, 5, -1, 2**60 + 1)] == [0, 1, 1, 2, 0, 2**58 + 1]
    assert utils.seqlens2cu_seqlens([]) == [0]
    assert utils.seqlens2cu_seqlens([3, 0, 4]) == [0, 3, 3, 7]
    assert utils.cu_seqlens2seqlens([0, 3, 3, 7]) == [3, 0, 4]
    assert utils.flatten_nested_list([1, [2, [], [3, [(4, 5)]]], "ab"]) == [1, 2, 3, (4, 5), "ab"]
    assert utils.perm_idxs2unperm_idxs([2, 0, 1]) == [1, 2, 0]
    assert utils.wrap_to_list(3, 2) == [3, 3]
    assert utils.wrap_to_list((1, 2), 5) == [1, 2]
    assert utils.transpose_matrix([[1, 2], [3, 4], [5, 6]]) == [[1, 3, 5], [2, 4, 6]]
    assert utils.transpose_matrix([]) == []
    assert (utils.argmin([3, 1, 1]), utils.argmax([3, 1, 3]), utils.argsort([3, 1, 1])) == (1, 0, [1, 2, 0])
    assert utils.argmin(["aaa", "b"], key=len) == 1


def test_lists_that_agree():
    assert utils.is_list_value_all([2, 2], 2)
    assert not utils.is_list_value_all([2, 3], 2)
    assert utils.is_list_value_all(["a", "a"], just_same=True)
    assert not utils.is_list_value_all([], 1)
    assert utils.is_list_value_all([], 1, allow_empty=True)
    assert utils.is_list_value_any([1, 2], 2)
    assert not utils.is_list_value_any([1, 3], 2)
    assert utils.is_list_value_any([1, 2, 1], just_same=True)
    assert not utils.is_list_value_any([1, 2], just_same=True)
    assert utils.is_list_type_all([1, 2], int)
    assert not utils.is_list_type_all([1, "a"], int)
    assert utils.is_list_type_all(["b", "a"], just_same=True)
    assert utils.is_list_type_all([], int, allow_empty=True)


@given(st.integers(1, 5000))
def test_factors(n):
    factors = [i for i in range(1, n + 1) if n % i == 0]
    assert utils.get_factors(n) == factors
    assert utils.find_factors_in_range(n, 3, 40) == [i for i in factors if 3 <= i <= 40]


def test_pad_and_pack():
    packed = utils.pad_and_pack_tensors([torch.tensor([1, 2, 3]), torch.tensor([4])], 4, padding_value=-1)
    assert packed.tolist() == [[1, 2, 3, -1], [4, -1, -1, -1]]
    assert utils.pad_and_pack_tensors([torch.tensor([1])], 2, dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: utils.ceil_div(1, 0), ValueError, "b must be positive, got 0"),
        (lambda: utils.seqlens2cu_seqlens([1, -1]), ValueError, "seqlens must not be negative"),
        (lambda: utils.cu_seqlens2seqlens([1, 2]), ValueError, "cu_seqlens must start at 0"),
        (lambda: utils.cu_seqlens2seqlens([0, 2, 1]), ValueError, "cu_seqlens must never fall"),
        (lambda: utils.perm_idxs2unperm_idxs([0, 0]), ValueError, "perm_idxs must be a permutation of 0 .. 1"),
        (lambda: utils.perm_idxs2unperm_idxs([-1, 0]), ValueError, "perm_idxs must be a permutation"),
        (lambda: utils.is_list_type_all([1]), TypeError, "_type must be given"),
        (lambda: utils.pad_and_pack_tensors([], 3), ValueError, "tensors must not be empty"),
        (lambda: utils.pad_and_pack_tensors([torch.zeros(4)], 3), ValueError, "at most 3 long"),
        (lambda: utils.get_factors(0), ValueError, "n must be positive, got 0"),
        (lambda: utils.transpose_matrix([[1], [1, 2]]), ValueError, "rows of one length"),
        (lambda: utils.fp_dtype_bits(torch.int32), TypeError, "dtype must be a floating point dtype, got"),
        (lambda: utils.max_fp_dtype(), ValueError, "dtypes must not be empty"),
        (lambda: utils.set_random_seed(-1), ValueError, r"seed must be within \[0, 2\*\*32\), got -1"),
        (lambda: utils.get_calc_cost_factor(8, 64, 989.5e12, 0.7), ValueError, "tflops must be in TFLOP/s"),
        (lambda: utils.get_calc_cost_factor(8, 64, 989.5, 0), ValueError, "mfu must be positive, got 0"),
        (lambda: utils.get_comm_cost_factor(8, 64, 450, 0.6, 1), ValueError, "bandwidth must be in bytes/s"),
        (lambda: utils.make_slice_mask_from_ffa_attn_type(1, 1, 4), ValueError, "must be 0, 1, 2 or 3, got 4"),
        (lambda: utils.make_attn_mask_from_ffa_args([[0, 3]], [[0, 1]], [0], 2, 2), ValueError, "within total_q"),
        (lambda: utils.make_attn_mask_from_ffa_args([[0, 1]], [], None, 2, 2), ValueError, r"as q_ranges \(1\), got 0"),
    ],
)  # fmt: skip
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("code", MASK_TYPES)
@pytest.mark.parametrize(("sq", "sk"), [(3, 5), (5, 3), (4, 4), (1, 1), (0, 3), (3, 0)])
def test_slice_masks_follow_the_contract(code, sq, sk):
    mask = utils.make_slice_mask_from_ffa_attn_type(sq, sk, code)
    assert mask.shape == (sq, sk)
    expected = [[MASK_TYPES[code](i, j, sq, sk) for j in range(sk)] for i in range(sq)]
    assert mask.tolist() == expected


def test_masks_are_the_union_of_slices_and_take_every_form_of_ranges():
    from magi_core.mask_type import AttnMaskType
    from magi_core.ranges import AttnRanges

    q, k = [[0, 4], [2, 6]], [[0, 4], [0, 4]]
    expected = torch.zeros(6, 5, dtype=torch.bool)
    for (q0, q1), (k0, k1), code in zip(q, k, (1, 3), strict=True):
        for i in range(q1 - q0):
            for j in range(k1 - k0):
                expected[q0 + i, k0 + j] |= MASK_TYPES[code](i, j, q1 - q0, k1 - k0)
    for ranges, types in (
        ((q, k), [1, 3]),
        ((torch.tensor(q), torch.tensor(k)), torch.tensor([1, 3])),
        ((AttnRanges.from_ranges(q), AttnRanges.from_ranges(k)), [AttnMaskType.CAUSAL, "bi_causal"]),
    ):
        got = utils.make_attn_mask_from_ffa_args(*ranges, types, 6, 5)
        assert torch.equal(got, expected)
    assert not utils.make_attn_mask_from_ffa_args([], [], [], 3, 2).any()
    assert utils.make_attn_mask_from_ffa_args([[1, 2]], [[0, 2]], None, 3, 2).sum() == 2


def test_pictures_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    figure = utils.vis_attn_mask(torch.eye(8, dtype=torch.bool), path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert figure.axes[0].get_xlabel() == "key"
    with pytest.raises(ValueError, match="matrix must have 2 dims"):
        utils.vis_matrix(np.zeros(3))


def test_dtypes():
    assert [utils.fp_dtype_bits(t) for t in (torch.bfloat16, torch.float32, torch.float64)] == [16, 32, 64]
    assert utils.is_fp_dtype_at_least(torch.float32, torch.bfloat16)
    assert not utils.is_fp_dtype_at_least(torch.zeros(1).half(), torch.float32)
    x = torch.zeros(2, dtype=torch.float64)
    assert utils.to_higher_fp_dtype(x, torch.float32) is x
    assert utils.to_higher_fp_dtype(x.half(), torch.float32).dtype == torch.float32
    assert utils.max_fp_dtype(torch.bfloat16, torch.float16, torch.float32) == torch.float32
    assert utils.max_fp_dtype(torch.float16, torch.bfloat16) == torch.float16


def test_triton_dtypes():
    tl = pytest.importorskip("triton.language")
    assert utils.to_triton_dtype(torch.bfloat16) is tl.bfloat16
    assert utils.to_triton_dtype(torch.bool) is tl.int1
    with pytest.raises(TypeError, match="dtype must be one of"):
        utils.to_triton_dtype(torch.complex64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_devices_have_answers_without_a_gpu():
    assert not (utils.is_ampere() or utils.is_hopper() or utils.is_blackwell())
    with pytest.raises(RuntimeError, match="get_num_sms needs a CUDA device"):
        utils.get_num_sms()


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "ampere"), ((9, 0), "hopper"), ((10, 0), "blackwell")])
def test_devices_are_told_by_capability(capability, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    got = {"ampere": utils.is_ampere(), "hopper": utils.is_hopper(), "blackwell": utils.is_blackwell()}
    assert [key for key, value in got.items() if value] == [name]


def test_seeds_are_the_same_in_every_process_and_restored():
    assert utils.str2seed("magi") == 258418946  # never hash(), which differs between processes
    assert utils.str2seed("a") != utils.str2seed("b")
    utils.set_random_seed(7)
    first = random.random(), np.random.rand(), torch.rand(1).item()
    utils.set_random_seed(7)
    with utils.sync_rng(3):
        inside = random.random(), np.random.rand(), torch.rand(1).item()
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == first
    with utils.sync_rng(3):
        assert (random.random(), np.random.rand(), torch.rand(1).item()) == inside


def test_costs_are_the_documented_formulas():
    assert utils.get_calc_cost_factor(64, 128, 989.5, 0.7) == pytest.approx(4 * 64 * 128 / (989.5e12 * 0.7) * 1e6)
    assert utils.get_calc_cost_factor(64, 128, 989.5, 0.7, is_fwd=False) == pytest.approx(
        2.5 * utils.get_calc_cost_factor(64, 128, 989.5, 0.7)
    )
    # A token's key and value of 8 heads x 128 in bf16 are 4096 bytes.
    corr = utils.get_a2a_corr_factor(8)
    assert corr == 7 / 8
    assert utils.get_a2a_corr_factor(1) == 1
    assert utils.get_comm_cost_factor(8, 128, 450e9, 0.6, corr) == pytest.approx(4096 / (450e9 * 0.6 * 7 / 8) * 1e6)
    assert utils.get_comm_cost_factor(8, 128, 450e9, 0.6, 1, element_bytes=4) == pytest.approx(
        8192 / (450e9 * 0.6) * 1e6
    )


def test_messages_name_their_rank(capsys, tmp_path):
    utils.rprint_rank("one\ntwo")
    utils.rprint_rank("silent", rank=1)
    utils.rprint_rank("chosen", rank=[0, 2])
    assert capsys.readouterr().out == "[rank 0] one\n[rank 0] two\n[rank 0] chosen\n"
    path = tmp_path / "log"
    utils.write_rank("a", path)
    utils.write_rank("b", path, rank=1)
    assert path.read_text() == "a\n"


def test_ranges_are_named_only_when_profiling():
    def label():
        raise AssertionError("a label must not be built without profiling")

    with nvtx.add_nvtx_event(label):
        pass

    @nvtx.instrument_nvtx
    def double(x, *, y=0):
        """Twice."""
        return 2 * x + y

    assert (double(2, y=1), double.__doc__) == (5, "Twice.")
    with env.override(profile_mode=True), torch.profiler.profile() as profile:
        assert double(3) == 6
        with nvtx.add_nvtx_event(lambda: "built"):
            pass
        with nvtx.add_nvtx_event("plain"):
            pass
    names = {event.key for event in profile.key_averages()}
    assert {"built", "plain"} <= names
    assert any(name.endswith("double") for name in names)
    with pytest.raises(ValueError, match="end must be after start=3, got 3"):
        nvtx.switch_profile(0, 3, 3, [0])
    nvtx.switch_profile(3, 3, 4, [0])


@pytest.fixture
def _no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "NNODES", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    yield
    utils.clearup_dist_env()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.usefixtures("_no_launcher")
def test_a_world_of_one_needs_no_launcher(monkeypatch):
    utils.clearup_dist_env()  # nothing to leave
    rank, local_rank, world_size, num_nodes, num_local_ranks, group, device, seed = utils.setup_dist_env(
        base_seed=5, seed_bias=lambda rank: rank + 2
    )
    assert (rank, local_rank, world_size, num_nodes, num_local_ranks) == (0, 0, 1, 1, 1)
    assert (device, seed) == (torch.device("cpu"), 7)
    assert dist.get_backend(group) == "gloo"
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), drawn)
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert x.item() == 1
    assert utils.is_same_process_group(group, group)
    assert not utils.is_same_process_group(group, None)
    assert utils.is_same_process_group(None, None)
    assert utils.setup_dist_env("gloo")[7] is None  # joined already
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    assert utils.is_same_device_mesh(mesh, dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",)))
    assert not utils.is_same_device_mesh(mesh, dist.device_mesh.init_device_mesh("cpu", (1,)))
    assert not utils.is_same_device_mesh(mesh, None)
    with pytest.raises(ValueError, match=r"backend='nccl' cannot run here: torch\.cuda sees no device"):
        utils.setup_dist_env("nccl")
    utils.clearup_dist_env()
    assert not dist.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="WORLD_SIZE=2 needs MASTER_ADDR"):
        utils.setup_dist_env()


def test_block_sparse_patterns_and_their_ranges():
    torch.manual_seed(0)
    block_mask, scores = sparse_utils.generate_block_sparse_pattern(4, 2, 3, 5, 0.4)
    assert block_mask.shape == scores.shape == (2, 3, 5)
    assert (block_mask.sum(-1) == 2).all()
    assert (scores.masked_fill(~block_mask, 2).amin(-1) >= scores.masked_fill(block_mask, -1).amax(-1)).all()
    per_q, _ = sparse_utils.generate_block_sparse_pattern(4, 2, 3, 5, 0.01, mode="per_q_head")
    assert per_q.shape == (4, 3, 5)
    assert (per_q.sum(-1) == 1).all()

    flat = sparse_utils.flatten_block_mask(block_mask, 4, 2)
    assert flat.shape == (12, 10)
    for h in range(4):
        for g in range(2):
            part = flat[h * 3 : (h + 1) * 3, g * 5 : (g + 1) * 5]
            assert torch.equal(part, block_mask[g] if g == h // 2 else torch.zeros_like(block_mask[0]))
    assert torch.equal(sparse_utils.flatten_block_mask_to_kv_shape(block_mask), torch.block_diag(*block_mask).bool())

    q_ranges, k_ranges = sparse_utils.generate_ranges_from_block_mask(flat, 4, 2)
    assert q_ranges.dtype == k_ranges.dtype == torch.int32
    dense = utils.make_attn_mask_from_ffa_args(q_ranges, k_ranges, None, 48, 20)
    assert torch.equal(dense, flat.repeat_interleave(4, 0).repeat_interleave(2, 1))
    assert torch.equal(
        sparse_utils.get_sdpa_mask_from_block_sparse_mask(block_mask, 11, 9, 4, 2),
        block_mask.repeat_interleave(4, 1).repeat_interleave(2, 2)[:, :11, :9],
    )
    twice = sparse_utils.generate_ranges_from_block_mask_triton(flat, 4, 2)
    assert torch.equal(twice[0], q_ranges)
    assert torch.equal(twice[1], k_ranges)


def test_top_k_lists_and_their_ranges():
    indices = torch.tensor([[[1, 0, -1], [2, -1, -1]], [[0, 2, 1], [-1, -1, -1]]])
    dense = sparse_utils.get_sdpa_mask_from_topk_indices(indices, 3)
    expected = torch.tensor([[[1, 1, 0], [0, 0, 1]], [[1, 1, 1], [0, 0, 0]]]).bool()
    assert torch.equal(dense, expected)
    q_ranges, k_ranges = sparse_utils.generate_ranges_from_topk_indices(indices, 2, 3, 3)
    got = utils.make_attn_mask_from_ffa_args(q_ranges, k_ranges, None, 8, 18)
    assert torch.equal(got, torch.block_diag(*expected).bool().repeat_interleave(2, 0).repeat_interleave(3, 1))
    ids = sparse_utils.build_index_attn_indices(indices, 3, multiple=4)
    assert ids.dtype == torch.int32
    assert ids.tolist() == [[[2, 0, -1, -1], [1, 5, 3, -1]], [[4, -1, -1, -1], [-1, -1, -1, -1]]]
    assert sparse_utils.build_index_attn_indices(indices, 3).shape == (2, 2, 128)
    with pytest.raises(ValueError, match="index_map must be below seqlen_k=2, got 2"):
        sparse_utils.build_index_attn_indices(indices, 2)
    with pytest.raises(ValueError, match="indices must be below num_k_blocks=2, got 2"):
        sparse_utils.generate_ranges_from_topk_indices(indices, 2, 3, 2)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 5))
def test_variable_blocks(seed, num_q_blocks, num_k_blocks):
    torch.manual_seed(seed)
    mask, q_sizes, k_sizes = sparse_utils.generate_variable_block_sparse_pattern(
        2, 2, 20, 15, num_q_blocks, num_k_blocks, 0.5, min_q_block_size=2, min_kv_block_size=3
    )
    assert (q_sizes.sum(1) == 20).all()
    assert (k_sizes.sum(1) == 15).all()
    assert q_sizes.min() >= 2
    assert k_sizes.min() >= 3
    dense = sparse_utils.get_sdpa_mask_from_var_block_mask(mask, q_sizes, k_sizes)
    for head in range(2):
        ranges = sparse_utils.generate_ranges_from_var_block_mask(mask[head], q_sizes[head], k_sizes[head])
        assert torch.equal(utils.make_attn_mask_from_ffa_args(*ranges, None, 20, 15), dense[head])


@pytest.mark.parametrize(
    ("block_size", "group", "expected"),
    [
        ((128, 128), 1, dict(ref_block_size=(128, 128), swap_ab=False, pack_gqa=False, sparse_load=False)),
        ((8, 64), 1, dict(ref_block_size=(8, 64), swap_ab=True, pack_gqa=False, sparse_load=False)),
        ((4, 64), 4, dict(ref_block_size=(16, 64), swap_ab=True, pack_gqa=True, sparse_load=False)),
        ((8, 64), 4, dict(ref_block_size=(64, 64), swap_ab=False, pack_gqa=True, sparse_load=False)),
        ((64, 128), 8, dict(ref_block_size=(128, 128), swap_ab=False, pack_gqa=True, sparse_load=False)),
        ((4, 1), 1, dict(ref_block_size=(64, 128), swap_ab=False, pack_gqa=False, sparse_load=True)),
    ],
)
def test_choose_ref_block(block_size, group, expected):
    assert sparse_utils.choose_ref_block(block_size, group) == expected | {"index_attn": False}
