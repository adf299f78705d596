"""What the machine can run."""

from .device import BackendInfo, backend_info

__all__ = ["BackendInfo", "backend_info"]
