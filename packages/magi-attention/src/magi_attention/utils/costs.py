"""Cost factors of the overlap model (``OverlapConfig.calc_cost_factor``, ``comm_cost_factor``) from hardware figures.

A stage takes ``calc_cost_factor * area`` to compute and ``comm_cost_factor * tokens`` to receive, in microseconds with
the default ``sec_ratio``.
"""


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")


def get_calc_cost_factor(
    num_heads_q: int, head_dim: int, tflops: float, mfu: float, sec_ratio: float = 1e6, is_fwd: bool = True
) -> float:
    """Time per visible (query, key) pair: ``4 * num_heads_q * head_dim`` operations forward, 2.5 times that backward.

    Args:
        num_heads_q, head_dim: sizes.
        tflops: peak of the device, in TFLOP/s (989.5 for bf16 on an H100).
        mfu: share of the peak that is reached, 0 to 1.
        sec_ratio: units of the result per second; 1e6 for microseconds.
        is_fwd: forward, or backward.

    Raises:
        ValueError: a value that is not positive, or ``tflops`` beyond 1e6 (it is given in FLOP/s).
    """
    _positive(num_heads_q=num_heads_q, head_dim=head_dim, tflops=tflops, mfu=mfu, sec_ratio=sec_ratio)
    if tflops > 1e6:
        raise ValueError(f"tflops must be in TFLOP/s, e.g. 989.5, got {tflops:g}")
    return 4 * num_heads_q * head_dim * (1.0 if is_fwd else 2.5) / (tflops * 1e12 * mfu) * sec_ratio


def get_comm_cost_factor(
    num_heads_kv: int,
    head_dim: int,
    bandwidth: float,
    bwu: float,
    corr_factor: float,
    sec_ratio: float = 1e6,
    *,
    element_bytes: int = 2,
) -> float:
    """Time per key token received, key and value together.

    Args:
        num_heads_kv, head_dim: sizes.
        bandwidth: of a rank in one direction, in bytes/s (450e9 for NVLink 4).
        bwu: share of the bandwidth that is reached, 0 to 1.
        corr_factor: ``get_a2a_corr_factor(world_size)``.
        sec_ratio: units of the result per second; 1e6 for microseconds.
        element_bytes: bytes of an element, which the public helper forgets: 2 for bf16.

    Raises:
        ValueError: a value that is not positive, or ``bandwidth`` below 1e6 (it is given in GB/s).
    """
    _positive(
        num_heads_kv=num_heads_kv, head_dim=head_dim, bandwidth=bandwidth, bwu=bwu, corr_factor=corr_factor,
        sec_ratio=sec_ratio, element_bytes=element_bytes,
    )  # fmt: skip
    if bandwidth < 1e6:
        raise ValueError(f"bandwidth must be in bytes/s, e.g. 450e9, got {bandwidth:g}")
    return 2 * num_heads_kv * head_dim * element_bytes / (bandwidth * corr_factor * bwu) * sec_ratio


def get_a2a_corr_factor(world_size: int) -> float:
    """Share of an all-to-all that leaves a rank: ``(world_size - 1) / world_size``; 1 for one rank."""
    _positive(world_size=world_size)
    return (world_size - 1) / world_size if world_size > 1 else 1.0
