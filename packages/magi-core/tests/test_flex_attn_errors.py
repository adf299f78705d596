"""Every mistake of a caller names the argument, the expectation and what came (contract item 12)."""

import types as python_types

import pytest
import torch
from magi_core import FlexPlan
from magi_core.backends import arch, select
from magi_core.bands import Bands
from magi_core.flex_attn import flex_flash_attn_func
from magi_core.sink import check_sink

Q, K, V = (torch.randn(8, h, 4) for h in (4, 2, 2))
R = [[0, 8]]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (dict(q=[1.0]), TypeError, "q must be a tensor, got list"),
        (dict(q=Q[0]), ValueError, r"q must have 3 dims \(tokens, heads, head_dim\), got shape \(4, 4\)"),
        (dict(v=V[None]), ValueError, r"v must have 3 dims .* got shape \(1, 8, 2, 4\)"),
        (dict(q=Q.long()), TypeError, "q must be float16, bfloat16, float32 or float64, got torch.int64"),
        (dict(q=Q.to(torch.complex64)), TypeError, "q must be float16, .* got torch.complex64"),
        (dict(k=K.double()), TypeError, r"k must have the dtype of q \(torch.float32\), got torch.float64"),
        (dict(v=V.half()), TypeError, r"v must have the dtype of q \(torch.float32\), got torch.float16"),
        (dict(k=K.to("meta")), ValueError, r"k must be on the device of q \(cpu\), got meta"),
        (dict(k=K[..., :3]), ValueError, r"k must have the head_dim of q \(4\), got 3"),
        (dict(v=V[:7]), ValueError, r"v must have as many tokens as k \(8\), got 7"),
        (dict(v=V[:, :1]), ValueError, r"v must have as many heads as k \(2\), got 1"),
        (dict(q=Q[:, :3]), ValueError, "num_heads_q must be a multiple of num_heads_kv, got 3 heads of q and 2 of k"),
        (dict(q=Q[:, :0]), ValueError, "q, k and v need heads and a head_dim"),
        (dict(v=V[..., :0]), ValueError, "q, k and v need heads and a head_dim"),
        (dict(softmax_scale="1"), TypeError, "softmax_scale must be a float, got str '1'"),
        (dict(softmax_scale=True), TypeError, "softmax_scale must be a float, got bool True"),
        (dict(softmax_scale=float("nan")), ValueError, "softmax_scale must be finite, got nan"),
        (dict(softcap=float("inf")), ValueError, "softcap must be finite, got inf"),
        (dict(softcap=-1.0), ValueError, r"softcap must be 0 \(off\) or positive, got -1.0"),
        (dict(sink_layout="shd"), ValueError, "sink_layout must be one of sh, ssh, got 'shd'"),
        (dict(sink=torch.zeros(1, 4), sink_layout="shd"), ValueError, "sink_layout must be one of sh, ssh, got 'shd'"),
        (dict(sink=0.0), TypeError, "sink must be a tensor, got float"),
        (dict(sink=torch.zeros(1, 4).half()), TypeError, r"sink must be float32 \(or float64\), got torch.float16"),
        (dict(sink=torch.zeros(1, 4, device="meta")), ValueError, r"sink must be on the device of q \(cpu\), got meta"),
        (dict(sink=torch.zeros(1, 2)), ValueError, r"sink of layout 'sh' must have shape \(s_sink, num_heads_q=4\)"),
        (dict(sink=torch.zeros(0, 4)), ValueError, r"s_sink >= 1, got \(0, 4\)"),
        (
            dict(sink=torch.zeros(7, 1, 4), sink_layout="ssh"),
            ValueError,
            r"sink of layout 'ssh' must have shape \(total_q=8, s_sink, num_heads_q=4\) .* got \(7, 1, 4\)",
        ),
        (dict(deterministic=1), TypeError, "deterministic must be a bool, got int 1"),
        (dict(return_max_logits="yes"), TypeError, "return_max_logits must be a bool, got str 'yes'"),
        (dict(allow_overlap=None), TypeError, "allow_overlap must be a bool, got NoneType None"),
        (dict(sm_margin=1.5), TypeError, "sm_margin must be an integer, got float 1.5"),
        (dict(sm_margin=-1), ValueError, "sm_margin must be at least 0, got -1"),
        (dict(max_seqlen_q="8"), TypeError, "max_seqlen_q must be an integer, got str '8'"),
        (dict(max_seqlen_q=-8), ValueError, "max_seqlen_q must be at least 0, got -8"),
        (dict(ref_block_size=128), TypeError, "ref_block_size must be None or a pair of ints, got 128"),
        (dict(ref_block_size=(128, 0)), ValueError, r"ref_block_size\[1\] must be at least 1, got 0"),
        (dict(q_block_size=0), ValueError, "q_block_size must be at least 1, got 0"),
        *(
            ({name: 2}, TypeError, f"{name} must be a bool, got int 2")
            for name in (
                "disable_fwd_atomic_reduction",
                "disable_bwd_dkv_atomic_reduction",
                "auto_range_merge",
                "swap_ab",
                "pack_gqa",
                "cat_gqa",
                "sparse_load",
                "index_attn",
                "swap_bwd_qk_loop",
            )
        ),
        (dict(q_ranges=None), ValueError, "q_ranges and k_ranges must be given together, got q_ranges=None"),
        (dict(k_ranges=None), ValueError, "q_ranges and k_ranges must be given together, got k_ranges=None"),
        (dict(q_ranges=None, k_ranges=None), ValueError, "exactly one of q_ranges and k_ranges, .* got none"),
        (
            dict(plan=FlexPlan.build(Bands.from_slices(R, R), 8, 8)),
            ValueError,
            "exactly one of .* must be given, got q_ranges and k_ranges; plan",
        ),
        (
            dict(plan=3, q_ranges=None, k_ranges=None),
            TypeError,
            "plan must be a FlexPlan or an int32 tensor .* got int",
        ),
        (
            dict(plan=FlexPlan.build(Bands.from_slices(R, R), 8, 8), q_ranges=None, k_ranges=None, attn_type_map=[0]),
            ValueError,
            "attn_type_map must be None when plan is given",
        ),
        (
            dict(plan=FlexPlan.build(Bands.from_slices(R, R), 9, 8), q_ranges=None, k_ranges=None),
            ValueError,
            r"plan must be for the tokens of q \(8\), got a plan for 9",
        ),
        (dict(q_ranges=[[0, 9]]), ValueError, r"q_ranges\[0\] must lie inside the 8 tokens of q, got \[0, 9\)"),
        (dict(k_ranges=[[3, 2**30]]), ValueError, r"k_ranges\[0\] must lie inside the 8 tokens of k, got \[3, 1073"),
        (dict(k_ranges=[[0, 4], [4, 8]]), ValueError, r"k_ranges must have as many ranges as q_ranges \(1\), got 2"),
        (dict(q_ranges=[[5, 3]]), ValueError, "q_ranges"),
        (dict(q_ranges=[[-2, 3]]), ValueError, "q_ranges"),
        (dict(q_ranges=torch.tensor([[0.0, 8.0]])), TypeError, "q_ranges"),
        (dict(attn_type_map=[4]), ValueError, "4"),
        (dict(attn_type_map=[0, 1]), ValueError, r"attn_type_map must have one type per slice \(1\), got 2"),
        (dict(attn_type_map="diagonal"), ValueError, "'diagonal'"),
        (dict(q_ranges=R * 2, k_ranges=R * 2), ValueError, "slice"),
        (
            dict(backend="cuda"),
            ValueError,
            "backend must be None or one of reference, ffa, sdpa, sdpa_ol, fa4, got 'cuda'",
        ),
        (dict(backend=1), TypeError, "backend must be None or a str, got int 1"),
        (dict(backend="fa4"), NotImplementedError, 'backend="fa4" is not in this release'),
        (dict(backend="ffa"), NotImplementedError, 'backend="ffa" runs on cuda tensors, got cpu'),
        (dict(colour="red"), TypeError, "colour"),
        (dict(window_size=(1, 1)), TypeError, "window_size"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refused(changed, error, message):
    arguments = {"q": Q, "k": K, "v": V, "q_ranges": R, "k_ranges": R, **changed}
    with pytest.raises(error, match=message):
        flex_flash_attn_func(**arguments)


def test_ranges_outside_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match=r"k_ranges\[1\] must lie inside the 8 tokens of k, got \[9, 9\)"):
        flex_flash_attn_func(Q, K, V, [[0, 4], [4, 4]], [[0, 8], [9, 9]])


def test_device_plan_reports_ranges_past_the_tensor():
    plan = FlexPlan.build(Bands.from_slices(R, R), 8, 8)
    buffer = plan.tensor().clone()
    from magi_core.plan import plan_format

    header, constants = plan_format()
    buffer[header["status"]] = constants["range_outside"]
    buffer[header["status_slice"]] = 3
    from magi_core.plan_cache import DevicePlan

    with pytest.raises(ValueError, match="slice 3 of q_ranges"):
        DevicePlan(buffer, 8, 8).check()


class _Device:
    """A CUDA device as ``select_backend`` sees it, on a machine that may have none."""

    type = "cuda"

    def __str__(self):
        return "cuda:0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_on_cuda_name_the_reference(dtype):
    with pytest.raises(NotImplementedError, match=r'float16 and bfloat16, got .* on cuda:0.*backend="reference"'):
        select.select_backend(None, _Device(), dtype)
    assert select.select_backend("reference", _Device(), dtype) is None


def test_other_devices_name_the_reference():
    with pytest.raises(NotImplementedError, match='serves cpu and cuda tensors, got meta; backend="reference"'):
        select.select_backend(None, torch.device("meta"), torch.float32)


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that a device of a compute capability is there."""

    def pretend(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    arch.load_arch.cache_clear()
    yield pretend
    arch.load_arch.cache_clear()


@pytest.mark.parametrize(("capability", "extra"), [((8, 6), "sm80"), ((9, 0), "sm90"), ((10, 0), "sm100")])
def test_a_missing_wheel_names_its_extra(capability, extra, gpu, monkeypatch):
    gpu(*capability)
    monkeypatch.setattr(arch, "_entry_points", dict)
    with pytest.raises(arch.ArchNotInstalledError, match=rf"pip install 'magi-core\[{extra}\]' \(installed: none\)"):
        select.select_backend(None, _Device(), torch.bfloat16)
    assert issubclass(arch.ArchNotInstalledError, ImportError)


def test_an_unknown_device_is_refused(gpu):
    gpu(7, 5)
    with pytest.raises(NotImplementedError, match="no magi-core arch wheel serves compute capability 7.5"):
        select.select_backend(None, _Device(), torch.bfloat16)


class _Point:
    def __init__(self, **attributes):
        self.module = python_types.SimpleNamespace(
            **{
                "__version__": arch._core_version(),
                "PLAN_FORMAT": arch.PLAN_FORMAT,
                "COMPUTE_CAPABILITIES": ((9, 0),),
                "load": lambda: {"attn_fwd": print},
                **attributes,
            }
        )

    def load(self):
        if isinstance(self.module.load, ImportError):
            raise self.module.load
        return self.module


def _fail():
    raise OSError("libcudart.so.13: cannot open shared object file")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (dict(__version__="0.0.0"), r"magi-core-sm90 0.0.0 does not fit magi-core .*pip install 'magi-core\[sm90\]=="),
        (dict(PLAN_FORMAT=99), "reads plan format 99, magi-core .* writes 1"),
        (dict(load=_fail), "the library of magi-core-sm90 does not load .*libcudart"),
        (dict(load=ImportError("broken")), "the sm90 wheel does not import .*broken"),
    ],
    ids=["version", "plan-format", "library", "module"],
)
def test_a_wheel_that_does_not_fit_is_refused(attributes, message, gpu, monkeypatch):
    monkeypatch.setattr(arch, "_entry_points", lambda: {"sm90": _Point(**attributes)})
    with pytest.raises(arch.ArchNotInstalledError, match=message):
        arch.load_arch("sm90")


def test_a_wheel_without_a_kernel_or_a_capability(gpu, monkeypatch):
    monkeypatch.setattr(arch, "_entry_points", lambda: {"sm90": _Point()})
    library = arch.load_arch("sm90")
    assert library.has("attn_fwd") and library.function("attn_fwd") is print and not library.has("attn_bwd")
    with pytest.raises(
        NotImplementedError, match="magi-core-sm90 .* has no 'attn_bwd' kernel; pass backend=\"reference\""
    ):
        library.function("attn_bwd")
    assert arch.installed_archs() == ("sm90",)
    gpu(9, 1)
    with pytest.raises(NotImplementedError, match="magi-core-sm90 serves compute capabilities 9.0, got 9.1"):
        arch.library_for_device(torch.device("cpu"))


def test_plan_format_is_that_of_the_host_library():
    from magi_core.plan import plan_format

    assert plan_format().constants["version"] == arch.PLAN_FORMAT


def test_check_sink_takes_what_fits():
    for shape, layout in (((9, 4), "sh"), ((8, 9, 4), "ssh")):
        check_sink(torch.zeros(shape), layout, 8, 4, torch.device("cpu"))
