"""A tiny FlexPlan builder in numpy, independent of the C++ one: brings kernels up and cross-checks the format."""

from __future__ import annotations

import numpy as np

BAND, TILE, JOB, ITEM = 6, 8, 4, 8


def bands_of(slices):
    """Slices (q0, q1, k0, k1, type) as bands (q0, q1, k0, k1, lo, hi)."""
    out = []
    for q0, q1, k0, k1, kind in slices:
        lo, hi = k0 - (q1 - 1), k1 - 1 - q0
        if kind in (1, 3):
            hi = k1 - q1
        if kind in (2, 3):
            lo = k0 - q0
        rows = np.arange(q0, q1)
        first, last = np.maximum(k0, rows + lo), np.minimum(k1 - 1, rows + hi)
        seen = rows[first <= last]
        if len(seen):
            q0, q1 = int(seen[0]), int(seen[-1]) + 1
            first, last = first[first <= last], last[first <= last]
            out.append((q0, q1, int(first.min()), int(last.max()) + 1, lo, hi))
    return out


def dense(bands, total_q, total_k):
    seen = np.zeros((total_q, total_k), np.int32)
    for q0, q1, k0, k1, lo, hi in bands:
        d = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
        seen[q0:q1, k0:k1] += (d >= lo) & (d <= hi)
    return seen


def _jobs(begin, end, bands, step, many):
    """Key jobs of query rows [begin, end)."""
    jobs, masks = [], []
    for index, (q0, q1, k0, k1, lo, hi) in enumerate(bands):
        r0, r1 = max(begin, q0), min(end, q1)
        if r0 >= r1:
            continue
        c0, c1 = max(k0, r0 + lo), min(k1, r1 - 1 + hi + 1)
        if c0 >= c1:
            continue
        f0, f1 = max(k0, r1 - 1 + lo), min(k1, r0 + hi + 1)  # seen by every row of the band in the tile
        if (r0, r1) != (begin, end) or f1 - f0 < step:
            f0 = f1 = c1
        parts = [(c0, f0, 1), (f0, f1, 0), (f1, c1, 1)]
        for a, b, kind in parts:
            if a >= b:
                continue
            if kind == 1 and many:
                for a0 in range(a, b, 128):
                    a1 = min(a0 + 128, b)
                    m = np.zeros((128, 128), bool)
                    r, c = np.arange(begin, begin + 128)[:, None], np.arange(a0, a0 + 128)[None, :]
                    m |= (r >= r0) & (r < r1) & (c >= a0) & (c < a1) & (c - r >= lo) & (c - r <= hi)
                    jobs.append((a0, a1, 2, len(masks)))
                    masks.append(m)
            else:
                jobs.append((a, b, kind, index))
    return jobs, masks


def build(slices, total_q, total_k, *, block_m=128, step=128, many=False, flags=3, section_heads=0):
    bands = bands_of(slices)
    tiles, jobs, masks = [], [], []
    for begin in range(0, total_q, block_m):
        end = min(begin + block_m, total_q)
        mine, bits = _jobs(begin, end, bands, step, many)
        mine = [(a, b, kind, index + (len(masks) if kind == 2 else 0)) for a, b, kind, index in mine]
        cost = sum(b - a for a, b, _, _ in mine)
        tiles.append((begin, end, len(jobs), len(jobs) + len(mine), flags, 1, -1, cost))
        jobs += mine
        masks += bits
    order = sorted(range(len(tiles)), key=lambda i: -tiles[i][7])
    items = [(i, tiles[i][2], tiles[i][3], 0, total_k, 0, 1 << 20, 0) for i in order]
    words = np.zeros(64, np.int64)
    parts, at = [], 64

    def put(rows, width, count_word, offset_word, align=4):
        nonlocal at
        at = -(-at // align) * align
        a = np.array(rows, np.int64).reshape(-1, width)
        words[count_word], words[offset_word] = len(a), at
        parts.append((at, a.reshape(-1).astype(np.int32)))
        at += a.size

    words[0], words[1], words[8], words[9], words[12], words[14] = 0x4947414D, 1, total_q, total_k, section_heads, 1
    put(bands, BAND, 15, 16)
    words[19], words[20] = block_m, step
    put(tiles, TILE, 21, 22)
    put(jobs, JOB, 23, 24)
    put(items, ITEM, 25, 26)
    packed = []
    for m in masks:
        bits = m.reshape(128, 4, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
        packed.append(bits.sum(-1).astype(np.uint32).view(np.int32).reshape(-1))
    at = -(-at // 32) * 32
    words[17], words[18] = len(packed), at
    if packed:
        parts.append((at, np.concatenate(packed)))
        at += 512 * len(packed)
    words[4] = at
    out = np.zeros(at, np.int32)
    out[:64] = words.astype(np.int64).astype(np.int32)
    for offset, data in parts:
        out[offset : offset + len(data)] = data
    return out
