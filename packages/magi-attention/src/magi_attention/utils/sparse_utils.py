"""Block-sparse and token-sparse masks: random patterns, their slices, and their dense form.

A block mask is bool ``(num_heads, num_q_blocks, num_k_blocks)``. A kernel without a head axis in its mask sees heads as
more sequence: head ``h`` of ``q`` has the tokens ``[h * seqlen_q, (h + 1) * seqlen_q)`` (head-major), and so for k.
The ``..._triton`` names are the public ones of device-side variants: all functions here run on the device of what they
are given, without synchronising more than a result of unknown length needs.
"""

import torch
from torch import Tensor

from .sequences import ceil_div


def _check_mask(block_mask: Tensor, dims: int, name: str = "block_mask") -> None:
    if block_mask.dtype != torch.bool or block_mask.dim() != dims:
        raise ValueError(f"{name} must be bool with {dims} dims, got {block_mask.dtype} {tuple(block_mask.shape)}")


def generate_block_sparse_pattern(
    num_q_heads: int,
    num_kv_heads: int,
    num_q_blocks: int,
    num_kv_blocks: int,
    sparsity: float,
    mode: str = "per_kv_head",
    device: str | torch.device = "cpu",
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """A random block mask in which every query block sees the same number of key blocks.

    Args:
        num_q_heads, num_kv_heads, num_q_blocks, num_kv_blocks: sizes.
        sparsity: share of the key blocks that a query block sees, above 0 to 1; at least one block.
        mode: ``"per_kv_head"``: one pattern per kv head; ``"per_q_head"``: one per query head.
        device: of the result.
        generator: of the random scores; torch's default when None.

    Returns:
        ``block_mask`` bool ``(num_heads, num_q_blocks, num_kv_blocks)`` with the heads of ``mode``, and the scores it
        keeps the largest of, float32 of the same shape.
    """
    if mode not in ("per_kv_head", "per_q_head"):
        raise ValueError(f"mode must be 'per_kv_head' or 'per_q_head', got {mode!r}")
    if not 0 < sparsity <= 1:
        raise ValueError(f"sparsity must be above 0 and at most 1, got {sparsity}")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_q_heads must be a multiple of num_kv_heads={num_kv_heads}, got {num_q_heads}")
    num_heads = num_kv_heads if mode == "per_kv_head" else num_q_heads
    scores = torch.rand(num_heads, num_q_blocks, num_kv_blocks, device=device, generator=generator)
    kept = scores.topk(max(1, int(sparsity * num_kv_blocks)), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, kept, True), scores


def flatten_block_mask(block_mask: Tensor, num_q_heads: int, num_kv_heads: int) -> Tensor:
    """A mask per query head as one over head-major blocks: bool ``(num_q_heads * num_q_blocks, num_kv_heads *
    num_k_blocks)``; query head ``h`` sees only blocks of kv head ``h // (num_q_heads // num_kv_heads)``.

    ``block_mask`` has ``num_q_heads`` heads, or ``num_kv_heads``, each then serving its group.
    """
    _check_mask(block_mask, 3)
    if num_q_heads % num_kv_heads or block_mask.shape[0] not in (num_q_heads, num_kv_heads):
        raise ValueError(
            f"block_mask must have num_q_heads={num_q_heads} or num_kv_heads={num_kv_heads} (a divisor) heads, "
            f"got shape {tuple(block_mask.shape)}"
        )
    group = num_q_heads // num_kv_heads
    if block_mask.shape[0] != num_q_heads:
        block_mask = block_mask.repeat_interleave(group, dim=0)
    _, num_q_blocks, num_k_blocks = block_mask.shape
    flat = block_mask.new_zeros(num_q_heads, num_q_blocks, num_kv_heads, num_k_blocks)
    heads = torch.arange(num_q_heads, device=block_mask.device)
    flat[heads, :, heads // group] = block_mask
    return flat.reshape(num_q_heads * num_q_blocks, num_kv_heads * num_k_blocks)


def flatten_block_mask_to_kv_shape(block_mask: Tensor) -> Tensor:
    """A mask per kv head as one over head-major blocks, for queries whose group of heads stays a head axis: bool
    ``(num_kv_heads * num_q_blocks, num_kv_heads * num_k_blocks)``, block-diagonal."""
    _check_mask(block_mask, 3)
    return flatten_block_mask(block_mask, block_mask.shape[0], block_mask.shape[0])


def generate_ranges_from_var_block_mask(
    block_mask: Tensor, q_block_sizes: Tensor, k_block_sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """One full slice per True block, row by row: int32 ``(N, 2)`` query and key ranges.

    Args:
        block_mask: bool ``(num_q_blocks, num_k_blocks)``.
        q_block_sizes, k_block_sizes: ``(num_blocks,)`` tokens per block.
    """
    _check_mask(block_mask, 2)
    if (len(q_block_sizes), len(k_block_sizes)) != tuple(block_mask.shape):
        raise ValueError(
            f"q_block_sizes and k_block_sizes must have the lengths of block_mask {tuple(block_mask.shape)}, "
            f"got {len(q_block_sizes)} and {len(k_block_sizes)}"
        )
    rows, columns = block_mask.nonzero(as_tuple=True)

    def ranges(sizes: Tensor, blocks: Tensor) -> Tensor:
        ends = sizes.to(block_mask.device, torch.int64).cumsum(0)
        return torch.stack([ends - sizes.to(ends), ends], dim=1)[blocks].to(torch.int32)

    return ranges(q_block_sizes, rows), ranges(k_block_sizes, columns)


def generate_ranges_from_block_mask(block_mask: Tensor, block_m: int, block_n: int) -> tuple[Tensor, Tensor]:
    """One full slice per True block, row by row: int32 ``(N, 2)`` query and key ranges.

    Args:
        block_mask: bool ``(num_q_blocks, num_k_blocks)``.
        block_m, block_n: tokens of a query block and of a key block.
    """
    _check_mask(block_mask, 2)
    if block_m < 1 or block_n < 1:
        raise ValueError(f"block_m and block_n must be at least 1, got {block_m} and {block_n}")
    blocks = block_mask.nonzero() * torch.tensor([block_m, block_n], device=block_mask.device)
    sizes = torch.tensor([block_m, block_n], device=block_mask.device)
    starts, ends = blocks.to(torch.int32), (blocks + sizes).to(torch.int32)
    return torch.stack([starts[:, 0], ends[:, 0]], 1), torch.stack([starts[:, 1], ends[:, 1]], 1)


def generate_ranges_from_topk_indices(
    indices: Tensor, block_m: int, block_n: int, num_k_blocks: int
) -> tuple[Tensor, Tensor]:
    """One full slice per chosen key block: int32 ``(N, 2)`` query and key ranges over head-major tokens.

    Args:
        indices: ``(num_heads, num_q_blocks, topk)``, key blocks per query block; negative entries are none.
        block_m, block_n: tokens of a query block and of a key block.
        num_k_blocks: key blocks of a head.

    Raises:
        ValueError: another number of dims. Reading ``indices`` to find the entries that count synchronises.
    """
    if indices.dim() != 3 or indices.dtype.is_floating_point:
        raise ValueError(
            f"indices must be integers (num_heads, num_q_blocks, topk), got {indices.dtype} {tuple(indices.shape)}"
        )
    num_q_blocks = indices.shape[1]
    if indices.numel() and int(indices.max()) >= num_k_blocks:
        raise ValueError(f"indices must be below num_k_blocks={num_k_blocks}, got {int(indices.max())}")
    head, row, slot = (indices >= 0).nonzero(as_tuple=True)
    q_block = head * num_q_blocks + row
    k_block = head * num_k_blocks + indices[head, row, slot].to(torch.int64)
    q_ranges = torch.stack([q_block * block_m, (q_block + 1) * block_m], dim=1)
    k_ranges = torch.stack([k_block * block_n, (k_block + 1) * block_n], dim=1)
    return q_ranges.to(torch.int32), k_ranges.to(torch.int32)


generate_ranges_from_block_mask_triton = generate_ranges_from_block_mask
generate_ranges_from_topk_indices_triton = generate_ranges_from_topk_indices


def _random_sizes(total: int, num_blocks: int, smallest: int, device: str | torch.device) -> Tensor:
    if num_blocks * smallest > total:
        raise ValueError(f"{num_blocks} blocks of at least {smallest} tokens must fit in {total} tokens")
    cuts = torch.randint(0, total - num_blocks * smallest + 1, (num_blocks - 1,), device=device).sort().values
    edges = torch.nn.functional.pad(cuts, (1, 1))
    edges[-1] = total - num_blocks * smallest
    return edges.diff() + smallest


def generate_variable_block_sparse_pattern(
    num_q_heads: int,
    num_kv_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    num_q_blocks: int,
    num_kv_blocks: int,
    sparsity: float,
    min_q_block_size: int = 1,
    min_kv_block_size: int = 1,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """``generate_block_sparse_pattern`` per kv head, with blocks of random size.

    Returns:
        ``block_mask`` bool ``(num_kv_heads, num_q_blocks, num_kv_blocks)``, ``q_block_sizes`` int64 ``(num_kv_heads,
        num_q_blocks)`` of sum ``seqlen_q`` per head, and ``k_block_sizes`` of sum ``seqlen_k``.
    """
    block_mask, _ = generate_block_sparse_pattern(
        num_q_heads, num_kv_heads, num_q_blocks, num_kv_blocks, sparsity, device=device
    )
    q_sizes = [_random_sizes(seqlen_q, num_q_blocks, min_q_block_size, device) for _ in range(num_kv_heads)]
    k_sizes = [_random_sizes(seqlen_k, num_kv_blocks, min_kv_block_size, device) for _ in range(num_kv_heads)]
    return block_mask, torch.stack(q_sizes), torch.stack(k_sizes)


def build_index_attn_indices(index_map: Tensor, seqlen_k: int, multiple: int = 128) -> Tensor:
    """Key lists per kv head as the row ids that index attention takes: int32 ``(seqlen_q, num_kv_heads, max_topk)``.

    Args:
        index_map: integers ``(num_kv_heads, seqlen_q, topk)``, keys within the head's sequence, valid ones first,
            negative ones are none.
        seqlen_k: keys of a head; an id is ``key * num_kv_heads + head`` (token-major, heads within a token).
        multiple: ``max_topk`` is ``topk`` rounded up to this; the tail is -1.

    Raises:
        ValueError: another number of dims, or a key beyond ``seqlen_k``.
    """
    if index_map.dim() != 3 or index_map.dtype.is_floating_point:
        raise ValueError(
            f"index_map must be integers (num_kv_heads, seqlen_q, topk), got {index_map.dtype} {tuple(index_map.shape)}"
        )
    if index_map.numel() and int(index_map.max()) >= seqlen_k:
        raise ValueError(f"index_map must be below seqlen_k={seqlen_k}, got {int(index_map.max())}")
    num_kv_heads, _, topk = index_map.shape
    heads = torch.arange(num_kv_heads, device=index_map.device)[:, None, None]
    ids = torch.where(index_map >= 0, index_map * num_kv_heads + heads, -1).permute(1, 0, 2).to(torch.int32)
    return torch.nn.functional.pad(ids, (0, ceil_div(topk, multiple) * multiple - topk), value=-1).contiguous()


def get_sdpa_mask_from_var_block_mask(block_mask: Tensor, q_block_sizes: Tensor, k_block_sizes: Tensor) -> Tensor:
    """The dense mask: bool ``(num_heads, seqlen_q, seqlen_k)`` of a block mask ``(num_heads, num_q_blocks,
    num_k_blocks)`` with the tokens of each block ``(num_heads, num_blocks)``; the sums agree over heads."""
    _check_mask(block_mask, 3)
    return torch.stack(
        [
            head.repeat_interleave(q.to(head.device), dim=0).repeat_interleave(k.to(head.device), dim=1)
            for head, q, k in zip(block_mask, q_block_sizes, k_block_sizes, strict=True)
        ]
    )


def get_sdpa_mask_from_block_sparse_mask(
    block_mask: Tensor, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int
) -> Tensor:
    """The dense mask: bool ``(num_heads, seqlen_q, seqlen_k)``; the last block of an axis may be cut."""
    _check_mask(block_mask, 3)
    expected = (ceil_div(seqlen_q, block_m), ceil_div(seqlen_k, block_n))
    if tuple(block_mask.shape[1:]) != expected:
        raise ValueError(f"block_mask must have {expected} blocks per head, got shape {tuple(block_mask.shape)}")
    dense = block_mask.repeat_interleave(block_m, dim=1).repeat_interleave(block_n, dim=2)
    return dense[:, :seqlen_q, :seqlen_k]


def get_sdpa_mask_from_topk_indices(indices: Tensor, seqlen_k: int) -> Tensor:
    """The dense mask of token lists ``indices (num_heads, seqlen_q, topk)``: bool ``(num_heads, seqlen_q, seqlen_k)``.

    Negative entries are none.
    """
    if indices.dim() != 3:
        raise ValueError(f"indices must be (num_heads, seqlen_q, topk), got shape {tuple(indices.shape)}")
    extra = indices.new_zeros(*indices.shape[:2], seqlen_k + 1, dtype=torch.bool)
    return extra.scatter_(-1, torch.where(indices >= 0, indices, seqlen_k).to(torch.int64), True)[..., :seqlen_k]


def choose_ref_block(block_size: tuple[int, int], qhead_per_khead: int = 1) -> dict[str, object]:
    """Kernel hints for a block-sparse mask: keywords of ``flex_flash_attn_func``. Hints tune; results do not change.

    Args:
        block_size: tokens of a query block and of a key block.
        qhead_per_khead: query heads of a kv head.

    Returns:
        ``ref_block_size, swap_ab, pack_gqa, sparse_load, index_attn``. Key blocks below 64 tokens ask for sparse load
        with key tiles of 128. Query blocks below 128 tokens choose the tile from ``min(q_block * qhead_per_khead,
        128)``: up to 8 and 16 rows a swapped tile of that height (without sparse load), else the next multiple of 64.
    """
    q_block, k_block = block_size
    if q_block < 1 or k_block < 1 or qhead_per_khead < 1:
        raise ValueError(
            f"block_size and qhead_per_khead must be at least 1, got {tuple(block_size)} and {qhead_per_khead}"
        )
    sparse_load = k_block < 64
    rows = min(q_block * qhead_per_khead, 128) if q_block < 128 else 128
    swap_ab = not sparse_load and rows <= 16
    if swap_ab:
        ref_block_size = (8 if rows <= 8 else 16, 64)
    else:
        ref_block_size = (ceil_div(rows, 64) * 64, 128 if sparse_load or k_block >= 128 else 64)
    return {
        "ref_block_size": ref_block_size,
        "swap_ab": swap_ab,
        "pack_gqa": qhead_per_khead > 1,
        "sparse_load": sparse_load,
        "index_attn": False,
    }
