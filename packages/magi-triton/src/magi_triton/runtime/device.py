"""The device that kernels run on, found at first use."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from .. import env


@dataclass(frozen=True)
class BackendInfo:
    """Facts about the machine.

    Attributes:
        vendor_name: ``"nvidia"``, ``"amd"``, or ``"cpu"`` where torch sees no GPU.
        device: torch's device type for kernels: ``"cuda"`` or ``"cpu"``.
        device_name: the marketing name; empty on a CPU.
        capability: compute capability ``(major, minor)``; None without a GPU.
        num_sms: streaming multiprocessors; 0 without a GPU.
        triton_version: None where Triton is not installed.
        interpreted: kernels run in Triton's interpreter.
    """

    vendor_name: str
    device: str
    device_name: str
    capability: tuple[int, int] | None
    num_sms: int
    triton_version: str | None
    interpreted: bool

    def why_not(self) -> str | None:
        """Why no kernel of this package can run here; None when one can."""
        if self.triton_version is None:
            return "Triton is not installed: pip install 'magi-triton[triton]'"
        if self.device == "cpu" and not self.interpreted:
            return "torch sees no GPU; set TRITON_INTERPRET=1 to run kernels in Triton's interpreter (slow)"
        return None


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    for distribution in ("triton", "pytorch-triton"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def backend_info() -> BackendInfo:
    """Look at the machine, once.

    Raises:
        ImportError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError("magi-triton needs torch to look at the device: pip install torch") from error
    if not torch.cuda.is_available():
        return BackendInfo("cpu", "cpu", "", None, 0, _triton_version(), env.interpreted())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    vendor = "amd" if torch.version.hip else "nvidia"
    capability = (properties.major, properties.minor)
    sms = properties.multi_processor_count
    return BackendInfo(vendor, "cuda", properties.name, capability, sms, _triton_version(), env.interpreted())
