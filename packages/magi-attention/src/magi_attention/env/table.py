"""Every public environment variable, and what it does here; ``ci/env_table.toml`` says the same, held by a test.

Three kinds, so that nothing is silently ignored:

- *honoured*: read once and part of ``EnvSnapshot``; at most twelve;
- *mapped*: an old name of an option; takes effect through that option, with one warning;
- *no effect*: what it switched does not exist here or is always on; one warning says which.

Names without our prefix that other programs define (``CC``, ``MAX_JOBS``, ...) are *foreign*: listed, never warned
about, since whoever sets them speaks to somebody else.
"""

from dataclasses import dataclass
from enum import Enum

PREFIX = "MAGI_ATTENTION_"


class Status(Enum):
    """What setting a variable does."""

    HONOURED = "honoured"
    MAPPED = "mapped"
    NO_EFFECT = "no effect"
    FOREIGN = "foreign"


@dataclass(frozen=True)
class Variable:
    """One variable.

    Args:
        name: full name; a trailing ``*`` names a family.
        status: what setting it does.
        default: value when unset, as text; empty when there is none.
        meaning: what it does, or why it does nothing; ends the warning, and fills ``python -m magi_attention env``.
    """

    name: str
    status: Status
    default: str
    meaning: str


def _ours(status: Status, *rows: tuple[str, str, str]) -> tuple[Variable, ...]:
    return tuple(Variable(PREFIX + name, status, default, meaning) for name, default, meaning in rows)


def _full(status: Status, *rows: tuple[str, str]) -> tuple[Variable, ...]:
    return tuple(Variable(name, status, "", meaning) for name, meaning in rows)


_PLANS_MERGE = "a plan always groups the slices of a query tile"
_KERNEL_CHOOSES = "the kernel packs query heads itself"
_QUERIES_STAY = "queries stay where they are dispatched; only keys and values travel"
_NO_JIT = "kernels come compiled in the wheels magi-core-sm80, -sm90 and -sm100; nothing is built at run time"
_NO_BUILD = "the build is scikit-build-core with CMake; pass -C options to pip instead"
_NO_TRANSPORT = "the transport is torch.distributed's"
_TEST_ONLY = "a switch of another project's test harness"

VARIABLES: tuple[Variable, ...] = (
    *_ours(
        Status.HONOURED,
        ("LOG_LEVEL", "WARN", "level of the logger 'magi_attention'; when set, the logger also writes to stderr"),
        ("SANITY_CHECK", "0", "verify every plan by brute force when it is made (slow)"),
        (
            "KERNEL_BACKEND",
            "ffa",
            "ffa or fa4: the fastest backend of the device; sdpa or sdpa_ol: the torch reference",
        ),
        ("PRECISION", "", "calc_attn computes in bf16, fp16, fp32 or fp64, and returns the dtype of its input"),
        ("DETERMINISTIC_MODE", "0", "bitwise repeatable backward"),
        ("PROFILE_MODE", "0", "name ranges for a profiler (NVTX)"),
        ("DIST_ATTN_RUNTIME_DICT_SIZE", "1000", "plans kept per group; 0 or less keeps the newest only"),
        ("MIN_CHUNKS_PER_RANK", "8", "chunks per rank when no chunk_size is configured"),
        ("FFA_FORWARD_SM_MARGIN", "4", "SMs the forward kernel leaves to communication"),
        ("FFA_BACKWARD_SM_MARGIN", "4", "SMs the backward kernel leaves to communication"),
        ("DSINK_ALL_REDUCE_OP", "none", "none, sum or avg: reduce the gradient of a sink over the group"),
        ("TEST_*", "", "filters a parametrised dimension of our tests; read by the test suite only"),
    ),
    *_ours(
        Status.MAPPED,
        ("SDPA_BACKEND", "0", "use MAGI_ATTENTION_KERNEL_BACKEND=sdpa"),
        ("FA4_BACKEND", "0", "use MAGI_ATTENTION_KERNEL_BACKEND=fa4"),
    ),
    *_ours(
        Status.NO_EFFECT,
        ("AUTO_RANGE_MERGE", "0", _PLANS_MERGE),
        ("CATGQA", "0", _KERNEL_CHOOSES),
        ("FLATTEN_HEAD_GROUPS", "0", _QUERIES_STAY),
        ("BWD_HIDE_TAIL_REDUCE", "0", "the order of backward stages is the plan's"),
        ("CPP_BACKEND", "0", "ranges and plans are always computed by the host library"),
        ("HIERARCHICAL_COMM", "0", "pass a 2-D DeviceMesh (inter-node, intra-node) instead"),
        ("QO_COMM", "0", _QUERIES_STAY),
        ("FORWARD_HIGH_PRECISION_REDUCE", "0", "no partial out travels; stages share a float32 one"),
        ("BACKWARD_HIGH_PRECISION_REDUCE", "0", "gradients travel in the dtype of k and are summed in float32"),
        ("NATIVE_GRPCOLL", "0", _NO_TRANSPORT),
        ("WORKSPACE_BASE", "", _NO_JIT),
        ("NO_BUILD_CACHE", "0", _NO_JIT),
        ("FORCE_JIT_BUILD", "0", _NO_JIT),
        ("BUILD_VERBOSE", "0", _NO_BUILD),
        ("BUILD_DEBUG", "0", _NO_BUILD),
        ("PREBUILD_FFA", "1", _NO_BUILD),
        ("PREBUILD_FFA_JOBS", "", _NO_BUILD),
        ("MAX_JOBS", "", _NO_BUILD),
        ("SKIP_CUDA_BUILD", "0", _NO_BUILD),
        ("SKIP_MAGI_ATTN_EXT_BUILD", "0", _NO_BUILD),
        ("SKIP_MAGI_ATTN_COMM_BUILD", "0", _NO_BUILD),
        ("BUILD_COMPUTE_CAPABILITY", "", "each architecture is a wheel of its own"),
        ("ALLOW_BUILD_WITH_CUDA12", "0", _NO_BUILD),
        ("FFA_FA4_CACHE_DIR", "", _NO_JIT),
        ("FORCE_CXX11_ABI", "0", "no library of ours links torch"),
        ("HOME", "", "nothing is looked up in a source directory"),
        ("ENABLE_REMOTE_DEBUG", "false", "attach a debugger to the rank instead"),
        ("PARAMETERIZE_RUN_IN_MP", "0", _TEST_ONLY),
        ("UNITEST_PROFILE_MODE", "0", _TEST_ONLY),
    ),
    *_full(
        Status.NO_EFFECT,
        ("MAGI_EXTRA_LDFLAGS", _NO_BUILD),
        ("DISABLE_SM90_FEATURES", _NO_TRANSPORT),
        ("DISABLE_AGGRESSIVE_PTX_INSTRS", _NO_TRANSPORT),
    ),
    *_full(
        Status.FOREIGN,
        ("CUDA_DEVICE_MAX_CONNECTIONS", "read by CUDA; stages are ordered by the plan whatever it is"),
        ("NVCC_THREADS", "read by compilers' drivers"),
        ("CC", "read by CMake when a wheel is built"),
        ("CXX", "read by CMake when a wheel is built"),
        ("PYTORCH_NVCC", "read by torch's extension builder"),
        ("MAX_JOBS", "read by torch's extension builder"),
        ("NVSHMEM_DIR", "read by NVSHMEM's builds"),
    ),
)

BY_NAME = {variable.name: variable for variable in VARIABLES}


def find(name: str) -> Variable | None:
    """The entry of ``name``, families included; None when there is none."""
    if name in BY_NAME:
        return BY_NAME[name]
    families = (variable for variable in VARIABLES if variable.name.endswith("*"))
    return next((family for family in families if name.startswith(family.name[:-1])), None)
