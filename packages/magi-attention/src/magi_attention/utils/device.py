"""What GPU this is. Every question has an answer without one."""

import torch


def _capability() -> tuple[int, int] | None:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def get_num_sms(device_idx: int | None = None) -> int:
    """Streaming multiprocessors of a CUDA device, the current one when None.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("get_num_sms needs a CUDA device, and torch.cuda sees none")
    index = torch.cuda.current_device() if device_idx is None else device_idx
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def is_ampere() -> bool:
    """Whether the current device is of compute capability 8.0, 8.6 or 8.7; False without one."""
    return _capability() in ((8, 0), (8, 6), (8, 7))


def is_hopper() -> bool:
    """Whether the current device is of compute capability 9.0; False without one."""
    return _capability() == (9, 0)


def is_blackwell() -> bool:
    """Whether the current device is of compute capability 10.x; False without one."""
    capability = _capability()
    return capability is not None and capability[0] == 10
