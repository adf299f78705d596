"""FlexPlans, walked by a plain executor and compared with the counts of their bands, both directions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from magi_core.bands import Bands
from magi_core.mask import Mask
from magi_core.plan import FlexPlan, plan_format
from magi_core.testing import masks as suite

FULL, ONE_BAND, MANY = 0, 1, 2
FIRST, LAST = 1, 2


def mask_bits(words):
    return np.unpackbits(words.astype("<i4").view(np.uint8), bitorder="little").reshape(128, 128)


class Executor:
    """What a kernel does with a plan, in numpy: adds 1 to every pair that it would multiply."""

    def __init__(self, plan, direction):
        self.plan, self.direction = plan, direction
        self.tiles, self.jobs, self.items = (
            getattr(plan, f"{direction}_{records}") for records in ("tiles", "jobs", "items")
        )
        self.is_forward = direction == "fwd"
        self.counts = np.zeros((plan.total_q, plan.total_k), np.int64)
        self.read = np.zeros(plan.total_k if self.is_forward else plan.total_q, bool)

    def job(self, tile, job, clip_begin=0, clip_end=2**31 - 1):
        tile_begin, tile_end = self.tiles[tile, :2]
        job_begin, job_end, kind, index = self.jobs[job]
        begin, end = max(job_begin, clip_begin), min(job_end, clip_end)
        if begin >= end:
            return
        self.read[begin:end] = True
        q0, q1, k0, k1 = (tile_begin, tile_end, begin, end) if self.is_forward else (begin, end, tile_begin, tile_end)
        here = self.counts[q0:q1, k0:k1]
        if kind == FULL:
            here += 1
        elif kind == ONE_BAND:
            b = self.plan.bands[index]
            q, k = np.arange(q0, q1)[:, None], np.arange(k0, k1)
            here += (b[0] <= q) & (q < b[1]) & (b[2] <= k) & (k < b[3]) & (b[4] <= k - q) & (k - q <= b[5])
        else:
            assert kind == MANY and job_end - job_begin <= 128 and tile_end - tile_begin <= 128
            row, column = (tile_begin, job_begin) if self.is_forward else (job_begin, tile_begin)
            here += mask_bits(self.plan.masks[index])[q0 - row : q1 - row, k0 - column : k1 - column]

    def by_tiles(self):
        """Backends that ignore items."""
        for tile, (_, _, begin, end) in enumerate(self.tiles[:, :4]):
            for job in range(begin, end):
                self.job(tile, job)
        return self.counts

    def by_items(self, head=0):
        """Backends that take items from the queue, for one query head of a group."""
        for tile, begin, end, clip_begin, clip_end, head_begin, head_end, _ in self.items:
            if head_end > 0 and not head_begin <= head < head_end:
                continue
            for job in range(begin, end):
                self.job(tile, job, clip_begin, clip_end)
        return self.counts


def many_of(jobs, tile):
    mine = jobs[tile[2] : tile[3]]
    return mine[mine[:, 2] == MANY]


def item_steps(jobs, item, step):
    """Steps of the moving axis that an item walks."""
    _, job_begin, job_end, clip_begin, clip_end, *_ = item
    parts = [(max(b, clip_begin), min(e, clip_end)) for b, e in jobs[job_begin:job_end, :2].tolist()]
    return sum(-(-(e - b) // step) for b, e in parts if e > b)


def check_walk(plan, want, group=1):
    for direction in ("fwd", "bwd"):
        assert (Executor(plan, direction).by_tiles() == want).all()
        for head in {0, group - 1}:
            assert (Executor(plan, direction).by_items(head) == want).all()
    assert plan.area() == want.sum()


def check_records(plan):
    """Invariants of every plan: order, ranges, splits and workspace slots."""
    h = plan.header
    group = h["num_heads_q"] // h["num_heads_kv"] if h["num_heads_kv"] else 0
    for direction, total, block in (("fwd", plan.total_q, "fwd_block_m"), ("bwd", plan.total_k, "bwd_block_n")):
        tiles, jobs, items = (getattr(plan, f"{direction}_{x}") for x in ("tiles", "jobs", "items"))
        moving = plan.total_k if direction == "fwd" else plan.total_q
        step = h["fwd_block_n"] if direction == "fwd" else h["bwd_block_m"]
        assert (tiles[:, 0] < tiles[:, 1]).all() and (tiles[1:, 0] >= tiles[:-1, 1]).all()
        assert (tiles[:, 1] - tiles[:, 0] <= h[block]).all() and (tiles[:, 1] <= total).all()
        assert (np.concatenate([[0], tiles[:, 3]])[:-1] == tiles[:, 2]).all(), "jobs follow the tiles"
        assert len(jobs) == (tiles[-1, 3] if len(tiles) else 0)
        assert (jobs[:, 0] < jobs[:, 1]).all() and (jobs[:, 0] >= 0).all() and (jobs[:, 1] <= moving).all()
        assert (tiles[:, 7] >= 0).all()
        slots = 0
        for tile, record in enumerate(tiles):
            mine = items[items[:, 0] == tile]
            assert sorted(mine[:, 7].tolist()) == list(range(record[5])), "one item per split"
            if record[5] == 1:
                assert record[6] == -1
                assert mine[0, 1:7].tolist() == [record[2], record[3], 0, moving, 0, group]
            else:
                assert record[6] == slots
                slots += record[5]
                parts = {tuple(p) for p in mine[:, 3:5].tolist()}
                edges = sorted(p[0] for p in parts)
                assert edges[0] == 0 and sorted(p[1] for p in parts) == [*edges[1:], moving]
        assert slots == h[f"{direction}_split_slots"]
        many = jobs[jobs[:, 2] == MANY]
        for clip in np.unique(items[:, 3:5]):
            tiles_cut = items[(items[:, 3] == clip) | (items[:, 4] == clip), 0]
            mine = [many_of(jobs, tiles[t]) for t in np.unique(tiles_cut)] if len(many) else []
            assert not any(((m[:, 0] < clip) & (clip < m[:, 1])).any() for m in mine), "a bit mask is never cut"
        load = [item_steps(jobs, item, step) for item in items.tolist()]
        if direction == "bwd" and group:
            load = [n * (item[6] - item[5]) for n, item in zip(load, items.tolist())]
        assert load == sorted(load, reverse=True), "longest first"
    offsets = [
        h[name] for name in ("bands", "fwd_tiles", "fwd_jobs", "fwd_items", "bwd_tiles", "bwd_jobs", "bwd_items")
    ]
    assert all(offset % 4 == 0 for offset in offsets) and h["masks"] % 32 == 0
    assert h["num_words"] == len(plan.buffer)


@st.composite
def cases(draw):
    total_q, total_k = draw(st.integers(0, 300)), draw(st.integers(0, 300))
    rows = []
    for _ in range(draw(st.integers(0, 10))):
        q = sorted(draw(st.tuples(*[st.integers(0, total_q)] * 2)))
        k = sorted(draw(st.tuples(*[st.integers(0, total_k)] * 2)))
        if draw(st.booleans()):  # small pieces, which share jobs
            q[1], k[1] = min(q[1], q[0] + 9), min(k[1], k[0] + 9)
        low = draw(st.one_of(st.just(-400), st.integers(-300, 300)))
        high = draw(st.one_of(st.just(400), st.integers(-300, 300), st.just(low + 5)))
        rows.append((*q, *k, low, high))
    heads = draw(st.sampled_from([(0, 0), (1, 1), (4, 1), (6, 2), (7, 7)]))
    options = {
        "num_heads_q": heads[0],
        "num_heads_kv": heads[1],
        "block_m": draw(st.sampled_from([16, 37, 64, 128, 192])),
        "block_n": draw(st.sampled_from([8, 33, 64, 80, 128, 160])),
        "bwd_block_m": draw(st.sampled_from([7, 64, 128, 130])),
        "bwd_block_n": draw(st.sampled_from([16, 50, 128, 200])),
        "num_sms": draw(st.sampled_from([1, 7, 132, 1000])),
    }
    return Bands(rows), total_q, total_k, options


@given(cases())
def test_any_bands_any_blocks(case):
    bands, total_q, total_k, options = case
    plan = FlexPlan.build(bands, total_q, total_k, allow_overlap=True, **options)
    check_walk(plan, bands.to_counts(total_q, total_k), options["num_heads_q"] // max(1, options["num_heads_kv"]))
    check_records(plan)
    again = FlexPlan.build(bands.canonical(), total_q, total_k, allow_overlap=True, **options)
    assert (again.buffer == plan.buffer).all() and again.digest == plan.digest


@given(cases(), st.data())
def test_stages(case, data):
    """Any split of the keys into stages: together they are the whole, and flags say who is first and last."""
    bands, total_q, total_k, options = case
    num_stages = data.draw(st.integers(2, 4))
    cuts = sorted(data.draw(st.lists(st.integers(0, total_k), min_size=num_stages - 1, max_size=num_stages - 1)))
    edges = [0, *cuts, total_k]
    inner = data.draw(st.sets(st.integers(1, total_q - 1), max_size=12)) if total_q > 1 else set()
    starts = [0]
    for stop in [*sorted(inner), total_q]:
        while stop - starts[-1] > options["block_m"]:
            starts.append(starts[-1] + options["block_m"])
        if stop > starts[-1]:
            starts.append(stop)
    parts = [bands.clip(k=pair).shift(0, -pair[0]) for pair in zip(edges, edges[1:])]
    touched = np.array(
        [[len(part.clip(q=pair)) > 0 for pair in zip(starts, starts[1:])] for part in parts], bool
    ).reshape(num_stages, len(starts) - 1)
    flags = np.zeros(touched.shape, np.int32)
    for tile in range(touched.shape[1]):
        stages = np.flatnonzero(touched[:, tile]).tolist() or [0]
        flags[stages[0], tile] |= FIRST
        flags[stages[-1], tile] |= LAST
    seen = np.zeros((total_q, 2), int)
    for stage, (part, begin, end) in enumerate(zip(parts, edges, edges[1:])):
        plan = FlexPlan.build(
            part, total_q, end - begin, q_tile_starts=starts, tile_flags=flags[stage], stage=stage,
            num_stages=num_stages, allow_overlap=True, **options,
        )  # fmt: skip
        check_walk(plan, part.to_counts(total_q, end - begin))
        check_records(plan)
        assert plan.header["stage"] == stage and plan.header["num_stages"] == num_stages
        for begin_q, end_q, first_job, end_job, flag in plan.fwd_tiles[:, :5].tolist():
            seen[begin_q:end_q] += [bool(flag & FIRST), bool(flag & LAST)]
            assert first_job < end_job or (stage == 0 and flag == FIRST | LAST)
        assert plan.bwd_tiles[:, 1].max(initial=0) == end - begin, "every key has a backward tile"
    assert (seen == 1).all(), "each row is first once and last once"


@pytest.mark.parametrize("kind", [*suite.KINDS, *suite.ODD])
@pytest.mark.parametrize("total", [7, 1000, 1153], ids="t{}".format)
def test_mask_suite(kind, total):
    slices = np.array(suite.make(kind, total, window=100, block=96), np.int32)
    mask = Mask.from_slices(slices[:, :2], slices[:, 2:4], slices[:, 4], total_q=total, total_k=total)
    for options in ({}, {"block_m": 64, "block_n": 48, "bwd_block_m": 96, "bwd_block_n": 64}):
        plan = FlexPlan.build(mask, num_heads_q=4, num_heads_kv=2, **options)
        check_walk(plan, mask.bands.to_counts(total, total), group=2)
        check_records(plan)
        assert plan.area() == suite.area([tuple(s) for s in slices.tolist()])


def test_small_documents_share_jobs_and_masks():
    mask = Mask.documents([2] * 512)
    plan = FlexPlan.build(mask)
    assert len(plan.bands) == 512
    assert len(plan.fwd_jobs) == len(plan.fwd_tiles) == 8 and (plan.fwd_jobs[:, 2] == MANY).all()
    assert len(plan.bwd_jobs) <= 2 * len(plan.bwd_tiles)
    assert len(plan.masks) == 1, "equal bit masks are stored once"


def test_classes_of_a_causal_mask():
    plan = FlexPlan.build(Mask.causal(512))
    jobs = plan.fwd_jobs[:, :3].tolist()
    assert jobs[0] == [0, 128, ONE_BAND]
    assert jobs[1:] == [j for n in (1, 2, 3) for j in ([0, 128 * n, FULL], [128 * n, 128 * n + 128, ONE_BAND])]
    assert (FlexPlan.build(Mask.full(512)).fwd_jobs[:, :3] == [0, 512, FULL]).all()


def test_touching_pieces_that_fill_a_tile_need_no_mask():
    """Two bands whose pieces together show a whole tile and interval are one full job."""
    upper = (0, 128, 0, 100, 1, 2**31 - 1)
    lower = (0, 128, 0, 100, -(2**31), 0)
    beside = (0, 128, 100, 128, -(2**31), 2**31 - 1)
    plan = FlexPlan.build(Bands([upper, lower, beside]), 128, 128)
    assert plan.fwd_jobs[:, :3].tolist() == [[0, 128, FULL]]


def test_uncovered_keys_are_never_read():
    """Keys that no slice covers may hold NaN, so no job includes them."""
    rows = [(q, q + 1, 3 * q, 3 * q + 1, -(2**31), 2**31 - 1) for q in range(100)]
    bands = Bands(rows)
    plan = FlexPlan.build(bands, 128, 300)
    for direction, axis in (("fwd", 0), ("bwd", 1)):
        walk = Executor(plan, direction)
        walk.by_tiles()
        assert (walk.read == bands.to_dense(128, 300).any(axis=axis)).all()
    covered = FlexPlan.build(Bands([*rows, (100, 101, 0, 300, -(2**31), 2**31 - 1)]), 128, 300)
    assert len(covered.fwd_jobs) < len(plan.fwd_jobs), "keys that another row sees may lie inside a shared job"


def test_splits_of_few_tiles():
    """Few tiles: keys are split until the chip is filled, in bounded workspace; nothing else is split."""
    plan = FlexPlan.build(Mask.full(128, 65536), num_heads_q=8, num_heads_kv=8)
    assert plan.fwd_tiles[0, 5] > 8
    assert plan.header["fwd_split_slots"] * 8 <= 4 * 132
    check_records(plan)
    assert FlexPlan.build(Mask.full(8192), num_heads_q=32, num_heads_kv=8).header["fwd_split_slots"] == 0
    assert FlexPlan.build(Mask.full(128, 65536)).header["fwd_split_slots"] == 0, "head counts unknown"
    tiny = FlexPlan.build(Mask.full(128, 256), num_heads_q=1, num_heads_kv=1)
    assert tiny.header["fwd_split_slots"] == 0, "two steps are not worth a merge"


@pytest.mark.parametrize(
    ("mask", "heads"),
    [
        (Mask.causal(8192), (16, 16)),
        (Mask.causal(4096), (32, 2)),
        (Mask.full(65536, 128), (8, 1)),
        (Mask.full(4096, 128), (1, 1)),
    ],
    ids=["causal", "gqa", "one key tile", "one head"],
)
def test_backward_splits(mask, heads):
    """The longest item is at most half of an SM's mean load; heads are split before queries."""
    plan = FlexPlan.build(mask, num_heads_q=heads[0], num_heads_kv=heads[1])
    check_records(plan)
    group = heads[0] // heads[1]
    step = plan.header["bwd_block_m"]
    jobs = plan.bwd_jobs
    load = np.array([item_steps(jobs, item, step) * (item[6] - item[5]) for item in plan.bwd_items.tolist()])
    steps = sum(-(-(e - b) // step) for b, e, _, _ in jobs.tolist())
    mean = steps * group * heads[1] / 132
    assert load.sum() == steps * group
    assert load.max() <= max(np.ceil(mean / 2), 4) + 1
    inner = plan.bwd_items[(plan.bwd_items[:, 3] > 0) | (plan.bwd_items[:, 4] < plan.total_q)]
    assert (inner[:, 6] - inner[:, 5] <= 1).all(), "queries are split only when one head is too long already"


def test_splits_do_not_cut_bit_masks():
    """One key tile over many short documents, with steps shorter than the shared jobs."""
    pairs = [(q, q + 2, q % 128 // 2 * 2, q % 128 // 2 * 2 + 2, -(2**31), 2**31 - 1) for q in range(0, 4096, 2)]
    plan = FlexPlan.build(Bands(pairs), 4096, 128, num_heads_q=1, num_heads_kv=1, bwd_block_m=50)
    assert plan.bwd_tiles[0, 5] > 2 and (plan.bwd_jobs[:, 2] == MANY).any()
    check_records(plan)
    check_walk(plan, Bands(pairs).to_counts(4096, 128))


def test_splits_depend_on_arguments_only():
    arguments = {"num_heads_q": 8, "num_heads_kv": 2, "num_sms": 64}
    a = FlexPlan.build(Mask.causal(1024), **arguments)
    b = FlexPlan.build(Mask.causal(1024), **arguments)
    assert (a.buffer == b.buffer).all() and a.digest == b.digest
    others = [
        FlexPlan.build(Mask.causal(1024), num_heads_q=8, num_heads_kv=2, num_sms=132),
        FlexPlan.build(Mask.causal(1024), block_m=64, **arguments),
        FlexPlan.build(Mask.full(1024), **arguments),
        FlexPlan.build(Mask.causal(1024), stage=1, num_stages=2, **arguments),
        FlexPlan.build(Mask.causal(1024), q_tile_starts=range(0, 1025, 64), **arguments),
    ]
    assert len({p.digest for p in [a, *others]}) == 1 + len(others)


def test_sections_fit_l2():
    plan = FlexPlan.build(Mask.causal(8192), num_heads_q=64, num_heads_kv=64)
    assert plan.header["section_heads"] == 4  # 16 MiB at 4 MiB a head at head dim 128, 2 bytes an element
    assert FlexPlan.build(Mask.causal(128), num_heads_q=4, num_heads_kv=2).header["section_heads"] == 2


def test_areas_are_64_bit():
    end = 2**31 - 1
    starts = [0, end - 8, end]
    plan = FlexPlan.build(
        Bands.from_slices([(end - 8, end)], [(0, end)], "causal"), end, end, block_m=end, block_n=end,
        bwd_block_m=end, bwd_block_n=end, q_tile_starts=starts,
    )  # fmt: skip
    assert plan.area() == 8 * end - 28
    assert plan.fwd_tiles[1, 7] == -(-(8 * end - 28) // 128)
    whole = FlexPlan.build(Mask.full(end, end), block_m=end, block_n=end, bwd_block_m=end, bwd_block_n=end)
    assert whole.area() == end * end and whole.fwd_tiles[0, 7] == end, "the cost saturates"


def test_empty_plans():
    for total_q, total_k in ((0, 0), (0, 5), (5, 0), (300, 300)):
        plan = FlexPlan.build(Bands(), total_q, total_k, num_heads_q=2, num_heads_kv=1)
        check_walk(plan, np.zeros((total_q, total_k), int))
        check_records(plan)
        assert len(plan.fwd_items) == -(-total_q // 128) and len(plan.bwd_items) == -(-total_k // 128)
    staged = FlexPlan.build(Bands(), 300, 5, stage=1, num_stages=2, tile_flags=[0, 0, 0])
    assert len(staged.fwd_tiles) == 0 and len(staged.bwd_tiles) == 1


def test_tensors():
    torch = pytest.importorskip("torch")
    plan = FlexPlan.build(Mask.causal(300))
    tensor = plan.tensor("cpu")
    assert tensor.dtype == torch.int32 and tensor is plan.tensor(torch.device("cpu"))
    longer = torch.cat([tensor, torch.full((7,), -1, dtype=torch.int32)])  # fixed capacity: more room than words
    for other in (FlexPlan.from_tensor(tensor), FlexPlan.from_tensor(longer)):
        assert other.digest == plan.digest and other.header == plan.header
        assert (other.bands == plan.bands).all() and (other.fwd_items == plan.fwd_items).all()
        other.check()
    assert FlexPlan.from_tensor(longer).tensor("cpu") is longer
    with pytest.raises(ValueError, match="read-only"):
        plan.buffer[0] = 1


def test_check_of_a_buffer():
    """What device-made plans record is raised by check(), as is double cover."""
    pytest.importorskip("torch")
    header, constants = plan_format()
    plan = FlexPlan.build(Mask.causal(300))
    for name, message in (
        ("range_outside", "must lie within"),
        ("range_reversed", "start <= end"),
        ("bad_type", "type"),
    ):
        buffer = plan.tensor().clone()
        buffer[header["status"]] = constants[name]
        buffer[header["status_slice"]] = 3
        with pytest.raises(ValueError, match=f"slice 3 .*{message}"):
            FlexPlan.from_tensor(buffer).check()
    bands = Bands.from_slices([(0, 8), (4, 12)], [(0, 8), (0, 8)])
    twice = FlexPlan.build(bands, 12, 8, allow_overlap=True)
    assert twice.may_overlap
    twice.check()
    buffer = twice.tensor().clone()
    buffer[header["flags"]] = constants["device_made"]
    with pytest.raises(ValueError, match="band 0 .* and band 1"):
        FlexPlan.from_tensor(buffer).check()


@pytest.mark.parametrize(("kind", "other"), [(a, b) for a in range(4) for b in range(4)])
def test_double_cover_is_found_on_the_host(kind, other):
    """Overlapping and duplicate slices, all pairs of types."""
    q, k = [(0, 6), (8, 16), (2, 10)], [(0, 8), (8, 16), (0, 12)]
    overlapping = Bands.from_slices(q, k, [kind, 0, other], total_q=16, total_k=16)
    if (overlapping.to_counts(16, 16) > 1).any():
        with pytest.raises(ValueError, match=r"slice \d .* and slice 2 .* both covering q \d+, k \d+"):
            FlexPlan.build(overlapping, 16, 16)
    else:
        FlexPlan.build(overlapping, 16, 16)
    plan = FlexPlan.build(overlapping, 16, 16, allow_overlap=True)
    check_walk(plan, overlapping.to_counts(16, 16))
    duplicate = Mask.from_slices([(1, 3), (4, 8), (4, 8)], [(0, 1), (2, 9), (2, 9)], [0, kind, kind])
    with pytest.raises(ValueError, match="slice 1 .* and slice 2 .* both covering"):
        duplicate.check()
    with pytest.raises(ValueError, match="allow_overlap=True"):
        FlexPlan.build(duplicate)
    assert FlexPlan.build(duplicate, allow_overlap=True).area() == duplicate.area()


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ([(0, 4), (4, 9)], [(0, 4), (0, 4)], r"q_ranges\[1\] must lie within total_q \(8\), got \[4, 9\)"),
        ([(0, 4)], [(7, 12)], r"k_ranges\[0\] must lie within total_k \(8\), got \[7, 12\)"),
        ([(0, 4)], [(12, 12)], r"k_ranges\[0\] must lie within total_k \(8\), got \[12, 12\)"),
        ([(2, 1)], [(0, 4)], r"q_ranges\[0\] must satisfy 0 <= start <= end"),
    ],
)
def test_ranges_past_the_tensor(q, k, message):
    with pytest.raises(ValueError, match=message):
        Mask.from_slices(q, k, total_q=8, total_k=8)
    with pytest.raises(ValueError, match=message):
        Bands.from_slices(q, k, total_q=8, total_k=8)


def test_bands_past_the_totals():
    bands = Bands.from_slices([(0, 2), (0, 9)], [(0, 2), (2, 4)])
    with pytest.raises(ValueError, match=r"slice 1 must lie within total_q \(8\) and total_k \(8\), got q \[0, 9\)"):
        FlexPlan.build(bands, 8, 8)
    with pytest.raises(ValueError, match=r"bands must lie within total_q \(8\)"):
        Mask(bands, 8, 8)


MASK = Mask.causal(8)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FlexPlan.build("mask"), TypeError, "mask_or_bands must be a Mask or Bands"),
        (lambda: FlexPlan.build(Bands()), ValueError, "total_q must be given"),
        (lambda: FlexPlan.build(MASK, block_m=0), ValueError, "block_m must be at least 1"),
        (lambda: FlexPlan.build(MASK, block_n=1.5), TypeError, "block_n must be an integer"),
        (lambda: FlexPlan.build(MASK, bwd_block_n=2**31), ValueError, "bwd_block_n must be at most"),
        (lambda: FlexPlan.build(MASK, num_heads_q=3, num_heads_kv=2), ValueError, "multiple of num_heads_kv"),
        (lambda: FlexPlan.build(MASK, num_heads_q=3), ValueError, "multiple of num_heads_kv"),
        (lambda: FlexPlan.build(MASK, stage=2, num_stages=2), ValueError, "stage must be less than num_stages"),
        (lambda: FlexPlan.build(MASK, num_sms=0), ValueError, "num_sms must be at least 1"),
        (lambda: FlexPlan.build(MASK, q_tile_starts=[0, 4]), ValueError, "q_tile_starts must run from 0 to total_q"),
        (lambda: FlexPlan.build(MASK, q_tile_starts=[0, 4, 4, 8]), ValueError, "q_tile_starts must ascend"),
        (lambda: FlexPlan.build(MASK, q_tile_starts=[0, 8], block_m=4), ValueError, "q_tile_starts must ascend"),
        (lambda: FlexPlan.build(MASK, q_tile_starts=[]), ValueError, "q_tile_starts must have at least one entry"),
        (lambda: FlexPlan.build(MASK, q_tile_starts=[0.0, 8.0]), TypeError, "q_tile_starts must hold integers"),
        (lambda: FlexPlan.build(MASK, tile_flags=[1, 2]), ValueError, "tile_flags must have one entry per query tile"),
        (lambda: FlexPlan.build(MASK, tile_flags=[4]), ValueError, r"sum of FIRST \(1\) and LAST \(2\)"),
        (lambda: FlexPlan(np.zeros(100, np.int32)), ValueError, "must start with a FlexPlan header"),
        (lambda: FlexPlan(FlexPlan.build(MASK).buffer[:80]), ValueError, "must hold the"),
        (lambda: FlexPlan(np.zeros((2, 2), np.int32)), ValueError, "buffer must have shape"),
    ],
)
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_damaged_buffers_are_refused():
    header, _ = plan_format()
    for field, value in (("version", 99), ("fwd_jobs", -5), ("num_bwd_tiles", 2**30), ("num_words", 3)):
        buffer = FlexPlan.build(MASK).buffer.copy()
        buffer[header[field]] = value
        with pytest.raises(ValueError, match="buffer must"):
            FlexPlan(buffer)
