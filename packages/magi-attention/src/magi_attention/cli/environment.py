"""``python -m magi_attention env``: what runs here, what is missing, and which extra brings it.

Every probe stands alone and survives the absence of what it asks for: torch, CUDA, NCCL, nvcc, our own host library.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from typing import Any

from .. import env
from .._version import __version__

OK, MISSING, BROKEN, INFO = "ok", "missing", "broken", "info"
_MARKS = {OK: "+", MISSING: "-", BROKEN: "!", INFO: " "}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        section: heading it stands under.
        name: what was looked for.
        status: ``ok``, ``missing``, ``broken`` or ``info``.
        detail: what was found, or why it cannot run.
        fix: what to do about it; empty when nothing is to be done.
    """

    section: str
    name: str
    status: str
    detail: str
    fix: str = ""


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(distribution: str, module: str) -> str:
    """Version of an installed distribution, or of a module that stands in the source tree."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        try:
            return str(getattr(import_module(module), "__version__", "in the source tree"))
        except Exception as error:
            return f"unreadable: {_reason(error)}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}" if str(error) else type(error).__name__


_OURS = (
    # distribution, module, what it is for, how to get it
    ("magi-core", "magi_core", "masks, plans, attention", "pip install magi-attention"),
    ("magi-comm", "magi_comm", "group collectives", "pip install magi-attention"),
    ("magi-triton", "magi_triton", "Triton operators", "pip install 'magi-attention[triton]'"),
    (
        "magi-extensions",
        "magi_attn_extensions",
        "FlashAttention with sink",
        "pip install 'magi-attention[extensions]'",
    ),
)
_OTHERS = (
    ("torch", "torch", "tensors", "pip install torch"),
    ("numpy", "numpy", "host arrays", "pip install numpy"),
    ("apache-tvm-ffi", "tvm_ffi", "loads native libraries", "pip install apache-tvm-ffi"),
    ("triton", "triton", "compiles Triton kernels", "pip install 'magi-attention[triton]'"),
    ("matplotlib", "matplotlib", "pictures of matrices", "pip install 'magi-attention[draw]'"),
)


def _packages() -> list[Finding]:
    found = [Finding("packages", "magi-attention", OK, __version__)]
    for distribution, module, purpose, fix in _OURS:
        if not _has(module):
            found.append(Finding("packages", distribution, MISSING, purpose, fix))
            continue
        version = _version(distribution, module)
        is_equal = version in (__version__, "in the source tree")
        detail = version if is_equal else f"{version}, but magi-attention is {__version__}"
        fix = "" if is_equal else f"pip install {distribution}=={__version__}"
        found.append(Finding("packages", distribution, OK if is_equal else BROKEN, detail, fix))
    for distribution, module, purpose, fix in _OTHERS:
        if _has(module):
            found.append(Finding("packages", distribution, OK, _version(distribution, module)))
        else:
            found.append(Finding("packages", distribution, MISSING, purpose, fix))
    return found


def _machine() -> list[Finding]:
    nvcc = shutil.which("nvcc")
    affinity = getattr(os, "sched_getaffinity", None)
    num_cpus = len(affinity(0)) if affinity else os.cpu_count()
    return [
        Finding("machine", "python", INFO, f"{platform.python_version()} ({sys.executable})"),
        Finding("machine", "platform", INFO, f"{platform.system()} {platform.machine()}, {num_cpus} CPUs"),
        Finding("machine", "nvcc", INFO, nvcc or "not found; only building from source would need it"),
    ]


def _torch() -> Any:
    """torch, or None when it cannot be imported."""
    if not _has("torch"):
        return None
    try:
        return import_module("torch")
    except Exception:  # a broken installation is a finding, not a crash
        return None


def _devices(torch: Any) -> list[Finding]:
    if torch is None:
        return []
    cuda = getattr(torch.version, "cuda", None)
    build = f"torch {torch.__version__}, " + (f"built for CUDA {cuda}" if cuda else "built without CUDA")
    if not torch.cuda.is_available():
        why = "torch sees no device" if cuda else "torch has no CUDA"
        return [Finding("devices", "CUDA", MISSING, f"{build}; {why}")]
    found = [Finding("devices", "CUDA", OK, build)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        detail = (
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs"
        )
        found.append(Finding("devices", f"cuda:{index}", INFO, detail))
    return found


def _host_library() -> Finding:
    name = "host library"
    if not _has("magi_core"):
        return Finding("what runs", name, MISSING, "magi-core is not installed", "pip install magi-attention")
    try:
        host = import_module("magi_core._host")
        host.lib()
    except Exception as error:
        return Finding("what runs", name, BROKEN, _reason(error), "reinstall magi-core, or build it from source")
    return Finding("what runs", name, OK, str(getattr(host, "LIBRARY_PATH", "loaded")))


def _attend(torch: Any, device: Any, dtype: Any) -> None:
    """Attend once, and look at what comes out: whether something runs is seen, not deduced."""
    flex_flash_attn_func = import_module("magi_core.flex_attn").flex_flash_attn_func
    q = torch.ones(8, 2, 64, device=device, dtype=dtype)
    ranges = torch.tensor([[0, 8]], device=device, dtype=torch.int32)
    out, _ = flex_flash_attn_func(q, q, q, ranges, ranges, torch.ones(1, device=device, dtype=torch.int32))
    if not bool((out == 1).all()):
        raise RuntimeError("attention over equal values did not give that value")


def _attention(torch: Any, host: Finding) -> list[Finding]:
    section = "what runs"
    if torch is None:
        return [Finding(section, "attention", MISSING, "torch cannot be imported", "pip install torch")]
    if host.status != OK:
        return [Finding(section, "attention", BROKEN, "the host library does not load", host.fix)]
    try:
        _attend(torch, torch.device("cpu"), torch.float32)
    except Exception as error:
        found = [Finding(section, "attention on CPU", BROKEN, _reason(error))]
    else:
        detail = "torch reference backend: any head_dim; bfloat16, float16, float32, float64"
        found = [Finding(section, "attention on CPU", OK, detail)]
    arch = import_module("magi_core.backends.arch")
    installed = ", ".join(arch.installed_archs()) or "none"
    found.append(Finding(section, "arch wheels installed", INFO, installed))
    if not torch.cuda.is_available():
        found.append(Finding(section, "attention on CUDA", MISSING, "there is no CUDA device"))
        return found
    for index in range(torch.cuda.device_count()):
        name = f"attention on cuda:{index}"
        capability = torch.cuda.get_device_capability(index)
        try:
            wanted = arch.arch_for_capability(*capability)
            library = arch.library_for_device(torch.device("cuda", index))
            _attend(torch, torch.device("cuda", index), torch.bfloat16)
        except arch.ArchNotInstalledError as error:
            found.append(Finding(section, name, MISSING, _reason(error), f"pip install 'magi-attention[{wanted}]'"))
        except Exception as error:
            found.append(Finding(section, name, BROKEN, _reason(error)))
        else:
            found.append(Finding(section, name, OK, f"kernels of magi-core-{library.name} {library.version}"))
    return found


def _distributed(torch: Any) -> list[Finding]:
    section = "what runs"
    if torch is None:
        return []
    dist = import_module("torch.distributed")
    if not dist.is_available():
        return [Finding(section, "several ranks", MISSING, "torch was built without torch.distributed")]
    found = []
    for name, available, where in (
        ("ranks over gloo", dist.is_gloo_available(), "CPU"),
        ("ranks over NCCL", dist.is_nccl_available(), "CUDA"),
    ):
        if not available:
            found.append(Finding(section, name, MISSING, f"torch was built without it ({where})"))
        elif where == "CUDA" and not torch.cuda.is_available():
            found.append(Finding(section, name, MISSING, "there is no CUDA device"))
        else:
            found.append(Finding(section, name, OK, where))
    return found


def _triton(torch: Any) -> list[Finding]:
    section, name = "what runs", "Triton operators"
    lacking = [p for p, m in (("magi-triton", "magi_triton"), ("triton", "triton")) if not _has(m)]
    if lacking:
        detail = f"{' and '.join(lacking)} not installed"
        return [Finding(section, name, MISSING, detail, "pip install 'magi-attention[triton]'")]
    if torch is None:
        return [Finding(section, name, MISSING, "torch cannot be imported", "pip install torch")]
    package = import_module("magi_triton")
    supported = {operator: package.supports(operator) for operator in package.operators()}
    why_not = next((support.reason for support in supported.values() if not support), "")
    runs = [operator for operator, support in supported.items() if support]
    if not runs:
        return [Finding(section, name, MISSING, why_not or "this release has none")]
    return [Finding(section, name, OK, ", ".join(runs))]


def _extensions() -> list[Finding]:
    section, name = "what runs", "FlashAttention with sink"
    if not _has("magi_attn_extensions"):
        fix = "pip install 'magi-attention[extensions]'"
        return [Finding(section, name, MISSING, "magi-extensions not installed", fix)]
    providers = import_module("magi_attn_extensions.providers").PROVIDERS
    found = []
    for provider in providers.values():
        where = f"{name} ({provider.name})"
        if provider.installed():
            found.append(Finding(section, where, OK, provider.module))
        else:
            found.append(Finding(section, where, MISSING, f"{provider.module} not installed", provider.install))
    return found


def _variables() -> list[Finding]:
    given = env.variables_set()
    section = "environment"
    try:
        _, remarks = env.parse(given)
    except ValueError as error:
        return [Finding(section, "variables", BROKEN, str(error), "correct or unset it")]
    found = []
    for name, text in given.items():
        entry = env.find(name)
        status = BROKEN if entry is None else OK if entry.status is env.Status.HONOURED else INFO
        detail = f"={text}: {remarks[name]}" if name in remarks else f"={text}: {entry.meaning if entry else ''}"
        found.append(Finding(section, name, status, detail))
    return found or [Finding(section, "variables", INFO, "none of MAGI_ATTENTION_* is set")]


def collect() -> list[Finding]:
    """All findings. A probe that fails in an unforeseen way becomes a finding itself."""
    found: list[Finding] = []

    def probe(section: str, name: str, look: Callable[[], list[Finding]]) -> None:
        try:
            found.extend(look())
        except Exception as error:
            found.append(Finding(section, name, BROKEN, _reason(error)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report is about findings, not about what importing torch has to say
        torch = _torch()
        host = _host_library()
        probe("machine", "machine", _machine)
        probe("packages", "packages", _packages)
        probe("devices", "devices", lambda: _devices(torch))
        found.append(host)
        probe("what runs", "attention", lambda: _attention(torch, host))
        probe("what runs", "several ranks", lambda: _distributed(torch))
        probe("what runs", "Triton operators", lambda: _triton(torch))
        probe("what runs", "FlashAttention with sink", _extensions)
        probe("environment", "variables", _variables)
    return found


def render(found: list[Finding]) -> str:
    """The findings as text, under their headings, in order."""
    width = max(len(finding.name) for finding in found)
    lines: list[str] = []
    section = None
    for finding in found:
        if finding.section != section:
            section = finding.section
            lines += [*([""] if lines else []), section]
        line = f"  {_MARKS[finding.status]} {finding.name:<{width}}  {finding.detail}"
        lines.append(line + (f"  ->  {finding.fix}" if finding.fix else ""))
    lines += ["", "+ runs   - missing   ! does not work"]
    return "\n".join(lines)


def _table() -> str:
    width = max(len(variable.name) for variable in env.VARIABLES)
    return "\n".join(
        f"{v.name:<{width}}  {v.status.value:<9}  {v.meaning}" + (f" (default {v.default})" if v.default else "")
        for v in env.VARIABLES
    )


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    if args.variables:
        if args.json:
            rows = [asdict(variable) | {"status": variable.status.value} for variable in env.VARIABLES]
            print(json.dumps(rows, indent=2))
        else:
            print(_table())
        return 0
    found = collect()
    print(json.dumps([asdict(finding) for finding in found], indent=2) if args.json else render(found))
    return 0


def add_parser(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "env",
        help="what runs here, what is missing, and which extra brings it",
        description="What runs on this machine, what is missing, and which extra brings it.",
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.add_argument(
        "--variables", action="store_true", help="list every environment variable and what it does here"
    )
    parser.set_defaults(run=run)
