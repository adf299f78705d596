"""Published figures (H100, 8k tokens a GPU, 64:8 heads of 128, bf16) and how far the model is from them.

TFLOP/s per GPU at 8, 16, 32 and 64 GPUs, read off bar charts to about 1 % (reference "distributed", section 10). The
rates of ``machine.H100`` were fitted to all of these figures by ``fit``: the errors say how well the model's *shape*
holds, not that it foretells unseen machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .machine import H100, Machine
from .masks import Documents
from .shapes import METHODS, Ranks, ours, predict

WORLDS = (8, 16, 32, 64)
TOKENS = 8192
MASKS = ("full", "causal", "varlen_full", "varlen_causal")
PASSES = ("forward", "backward")

# method -> (mask, pass) in the order of MASKS x PASSES -> by WORLDS
_TFLOPS = {
    "ulysses": "605/576/583/620 576/577/583/577 602/558/581/583 582/562/573/585 "
    "389/306/284/259 425/399/378/345 278/201/186/163 331/294/276/248",
    "ring_p2p": "511/536/518/513 497/519/513/505 422/455/452/447 434/474/469/457 "
    "159/135/92/57 160/161/102/49 89/69/48/29 97/86/57/29",
    "ring_allgather": "607/595/587/584 534/543/540/536 602/593/592/581 517/525/522/523 "
    "387/386/324/250 230/191/125/65 289/293/242/181 178/155/105/56",
    "usp": "580/603/594/604 570/588/587/581 594/589/594/586 572/570/574/571 "
    "373/370/373/293 419/407/375/282 261/251/255/192 324/308/284/196",
    "loongtrain": "578/602/597/604 570/577/572/576 593/587/578/589 567/549/547/560 "
    "371/371/316/293 415/364/276/250 259/251/209/193 319/254/180/171",
    "magi": "665/654/645/629 535/546/548/549 645/647/622/595 529/531/539/528 "
    "535/539/455/402 447/462/455/424 458/427/317/238 360/370/333/264",
}


@dataclass(frozen=True)
class Figure:
    """One published bar."""

    method: str
    mask: str
    is_backward: bool
    world: int
    tflops: float


@dataclass(frozen=True)
class Error:
    """A figure beside its prediction; ``relative`` is predicted over published, less one."""

    figure: Figure
    predicted: float

    @property
    def relative(self) -> float:
        """Signed relative error."""
        return self.predicted / self.figure.tflops - 1


def figures() -> list[Figure]:
    """All of them."""
    out = []
    for method, text in _TFLOPS.items():
        for group, (mask, direction) in zip(text.split(), ((m, p) for m in MASKS for p in PASSES), strict=True):
            for world, value in zip(WORLDS, group.split("/"), strict=True):
                out.append(Figure(method, mask, direction == "backward", world, float(value)))
    return out


def _published_plan(m: Machine, mask: Documents, world: int) -> Ranks:
    """Their settings: min heap, chunks of 1024, two stages."""
    return ours(m, mask, world, alg="min_heap", chunk_size=1024, degree=2, relay=False)


Built = list[tuple[int, Ranks]]  # of each pack its area and the steps of its ranks


def cases(packs: int, progress: Callable[[str], None] = lambda text: None) -> dict[tuple[str, str, int], Built]:
    """``(method, mask, world)`` -> for each pack its area and the ranks' steps; none of it depends on rates."""
    found: dict[tuple[str, str, int], Built] = {}
    for world in WORLDS:
        total = TOKENS * world
        for mask in MASKS:
            causal = mask.endswith("causal")
            data = Documents.packs(total, causal, packs) if mask.startswith("varlen") else [Documents((total,), causal)]
            for method in _TFLOPS:
                build = _published_plan if method == "magi" else METHODS[method]
                built = [(pack.area, build(H100, pack, world)) for pack in data]
                found[method, mask, world] = [(area, ranks) for area, ranks in built if ranks is not None]
            progress(f"{mask} on {world}")
    return found


def tflops(m: Machine, built: Built, world: int, backward: bool) -> float:
    """Mean over the packs of TFLOP/s per GPU of the slowest rank, as published figures count."""
    work = m.pair_flops * (2.5 if backward else 1.0)
    each = [area * work / world / predict(m, ranks, backward=backward).total_s / 1e12 for area, ranks in built]
    return float(np.mean(each))


def errors(m: Machine = H100, packs: int = 6, progress: Callable[[str], None] = lambda text: None) -> list[Error]:
    """Every published figure beside the model's."""
    built = cases(packs, progress)
    return [Error(f, tflops(m, built[f.method, f.mask, f.world], f.world, f.is_backward)) for f in figures()]


FITTED = (
    "forward_tflops", "backward_tflops", "row_cost", "col_cost", "backward_row_cost", "backward_col_cost",
    "segment_us", "backward_segment_us", "block_ns", "nvlink_gbs", "network_gbs", "alltoall_share",
    "memory_gbs", "launch_us",
)  # fmt: skip


def fit(m: Machine = H100, packs: int = 6, rounds: int = 12) -> Machine:
    """Rates that make the errors small: single rates and random directions are tried, in ever smaller steps."""
    built, known = cases(packs), figures()

    def loss(candidate: Machine) -> float:
        if candidate.network_gbs > 50 or candidate.nvlink_gbs > 450:
            return np.inf  # no faster than the wires
        got = [tflops(candidate, built[f.method, f.mask, f.world], f.world, f.is_backward) / f.tflops for f in known]
        each = np.abs(np.array(got) - 1)
        return float(np.mean(each) + np.median(each) + each.max())

    rng = np.random.default_rng(0)
    best, step = loss(m), 1.4
    for _ in range(rounds):
        single = [[power if other == name else 0.0 for other in FITTED] for name in FITTED for power in (1.0, -1.0)]
        for powers in [*single, *rng.normal(0, 0.7, (40, len(FITTED))).tolist()]:
            tried = replace(m, **{n: getattr(m, n) * step**p for n, p in zip(FITTED, powers, strict=True)})
            value = loss(tried)
            if value < best:
                best, m = value, tried
        step = 1 + (step - 1) * 0.84
    return m


__all__ = ["FITTED", "MASKS", "TOKENS", "WORLDS", "Error", "Figure", "cases", "errors", "figures", "fit", "tflops"]
