"""Masks and their builders against masks written cell by cell."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from magi_core.bands import Bands
from magi_core.mask import Mask
from magi_core.mask_type import AttnMaskType
from magi_core.ranges import AttnRanges

lengths_strategy = st.lists(st.integers(0, 7), max_size=5)


def by_document(lengths_q, lengths_k, visible):
    """Dense mask where row i of document n sees column j iff ``visible(n, i, j, sq, sk)``."""
    dense = np.zeros((sum(lengths_q), sum(lengths_k)), bool)
    q = k = 0
    for n, (sq, sk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        for i in range(sq):
            for j in range(sk):
                dense[q + i, k + j] = visible(n, i, j, sq, sk)
        q, k = q + sq, k + sk
    return dense


def check(mask, dense):
    assert (mask.total_q, mask.total_k) == dense.shape
    assert (mask.to_dense() == dense).all()
    assert mask.area() == dense.sum()
    mask.check()
    same = Mask.from_dense(dense)
    assert mask == same and mask.digest == same.digest and hash(mask) == hash(same)
    again = Mask.from_slices(*mask.slices(), total_q=mask.total_q, total_k=mask.total_k)
    assert again == mask


@given(lengths_strategy, st.data())
def test_documents_and_causal(lengths, data):
    lengths_k = [data.draw(st.integers(0, 7)) for _ in lengths]
    check(Mask.documents(lengths, lengths_k), by_document(lengths, lengths_k, lambda n, i, j, sq, sk: True))
    causal = by_document(lengths, lengths_k, lambda n, i, j, sq, sk: j <= i + sk - sq)
    check(Mask.documents(lengths, lengths_k, causal=True), causal)
    cu_q, cu_k = np.cumsum([0, *lengths]), np.cumsum([0, *lengths_k])
    assert Mask.from_cu_seqlens(cu_q, cu_k, causal=True) == Mask.documents(lengths, lengths_k, causal=True)
    assert Mask.from_cu_seqlens(cu_q, cu_k) == Mask.documents(lengths, lengths_k)


def in_window(left, right):
    def visible(n, i, j, sq, sk):
        p = i + sk - sq
        return p >= 0 and (left == -1 or p - left <= j) and (right == -1 or j <= p + right)

    return visible


@given(lengths_strategy, st.integers(-1, 9), st.integers(-1, 9), st.data())
def test_window(lengths, left, right, data):
    lengths_k = [data.draw(st.integers(0, 7)) for _ in lengths]
    mask = Mask.window(lengths, (left, right), lengths_k)
    check(mask, by_document(lengths, lengths_k, in_window(left, right)))
    assert len(mask.bands) <= len(lengths), "a window is one band"
    if (left, right) != (-1, -1):
        cu_q, cu_k = np.cumsum([0, *lengths]), np.cumsum([0, *lengths_k])
        assert Mask.from_cu_seqlens(cu_q, cu_k, window=(left, right)) == mask


@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 100])
def test_windows_of_exactly_w_keys(width):
    """Inclusive and one-sided: how many keys a row sees, counted."""
    causal = Mask.window(32, width)
    assert causal.to_dense().sum(axis=1).tolist() == [min(i + 1, width) for i in range(32)]
    assert causal == Mask.window(32, (width - 1, 0)) == Mask.from_cu_seqlens([0, 32], window=width)
    left_only = Mask.window(32, (width - 1, -1)).to_dense()
    assert left_only.sum(axis=1).tolist() == [min(i, width - 1) + 32 - i for i in range(32)]
    right_only = Mask.window(32, (-1, width - 1)).to_dense()
    assert right_only.sum(axis=1).tolist() == [i + min(width, 32 - i) for i in range(32)]
    both = Mask.window(32, (width, width)).to_dense()
    assert both.sum(axis=1).tolist() == [min(i, width) + 1 + min(31 - i, width) for i in range(32)]
    # As public slices: rows that see all they may first, then rows of exactly `width` keys.
    if 1 < width < 32:
        by_hand = Mask.from_slices([(0, width), (width, 32)], [(0, width), (1, 32)], ["causal", "bi_causal"])
        assert by_hand == causal and by_hand.digest == causal.digest


def test_windows_with_more_queries_than_keys():
    """Rows above the bottom-right square see nothing, even where the right side would reach into the keys."""
    mask = Mask.window(6, (1, 2), 4)
    assert mask.to_dense().sum(axis=1).tolist() == [0, 0, 3, 4, 3, 2]


@given(lengths_strategy, st.integers(0, 9))
def test_prefix_lm(lengths, prefix):
    check(Mask.prefix_lm(lengths, prefix), by_document(lengths, lengths, lambda n, i, j, sq, sk: j < prefix or j <= i))
    each = [(prefix + n) % 5 for n in range(len(lengths))]
    if len(each) > 1:
        want = by_document(lengths, lengths, lambda n, i, j, sq, sk: j < each[n] or j <= i)
        check(Mask.prefix_lm(lengths, each), want)


@given(lengths_strategy, st.integers(1, 9))
def test_block_causal(lengths, block):
    want = by_document(lengths, lengths, lambda n, i, j, sq, sk: j // block <= i // block)
    check(Mask.block_causal(lengths, block), want)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_prefix_tree(lengths, data):
    parents = [data.draw(st.integers(-1, n - 1)) for n in range(len(lengths))]
    node = np.repeat(np.arange(len(lengths)), lengths)
    dense = np.zeros((len(node),) * 2, bool)
    for q, mine in enumerate(node):
        path = set()
        at = parents[mine]
        while at >= 0:
            path.add(at)
            at = parents[at]
        dense[q] = np.isin(node, list(path)) | ((node == mine) & (np.arange(len(node)) <= q))
    check(Mask.prefix_tree(parents, lengths), dense)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_from_dense(rows, columns, seed, share):
    dense = np.random.default_rng(seed).random((rows, columns)) < share
    check(Mask.from_dense(dense), dense)


def test_from_dense_finds_the_bands():
    for mask in (
        Mask.causal(20, 30),
        Mask.window([40, 9], (5, 3)),
        Mask.block_causal(30, 7),
        Mask.documents([3, 9, 1]),
    ):
        assert Mask.from_dense(mask.to_dense()).bands == mask.bands
    torch = pytest.importorskip("torch")
    lower = torch.ones(12, 12, dtype=torch.bool).tril()
    assert Mask.from_dense(lower) == Mask.causal(12)
    assert Mask.from_dense(lower.t()[::2]).to_dense().tolist() == lower.t()[::2].tolist()


def flex_masks(torch):
    document = torch.arange(400) // 90
    return {
        "causal": lambda b, h, q, k: q >= k,
        "documents": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
        "window and sinks": lambda b, h, q, k: (q >= k) & ((q - k <= 50) | (k < 4)),
        "stripes": lambda b, h, q, k: (q + k) % 3 == 0,
        "nothing": lambda b, h, q, k: q < 0,
        "no keys late": lambda b, h, q, k: (q < 130) & (k < 65),
    }


@pytest.mark.parametrize("name", ["causal", "documents", "window and sinks", "stripes", "nothing", "no keys late"])
@pytest.mark.parametrize("sizes", [(256, 256, 64), (300, 200, 128), (130, 391, (32, 64))], ids=str)
def test_from_block_mask(name, sizes):
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mod = flex_masks(torch)[name]
    total_q, total_k, block = sizes
    block_mask = flex.create_block_mask(mod, None, None, total_q, total_k, device="cpu", BLOCK_SIZE=block)
    q, k = torch.arange(total_q)[:, None], torch.arange(total_k)[None, :]
    want = mod(None, None, q, k).expand(total_q, total_k).numpy()
    check(Mask.from_block_mask(block_mask), want)


def test_from_block_mask_of_heads():
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    widths = torch.tensor([3, 20])
    block_mask = flex.create_block_mask(
        lambda b, h, q, k: (q - k).abs() < widths[h], None, 2, 100, 100, device="cpu", BLOCK_SIZE=32
    )
    assert Mask.from_block_mask(block_mask, head=1) == Mask.window(100, (19, 19))
    assert Mask.from_block_mask(block_mask, head=0) == Mask.window(100, (2, 2))
    with pytest.raises(ValueError, match="head must say which of the 2 masks"):
        Mask.from_block_mask(block_mask)
    with pytest.raises(ValueError, match="head must be at most 1"):
        Mask.from_block_mask(block_mask, head=2)


def test_full_blocks_are_taken_as_they_are():
    """A block that the BlockMask calls full is visible, whatever mask_mod says of it."""
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    count, index = torch.zeros(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    one = torch.ones(1, 1, 2, dtype=torch.int32)
    second = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    block_mask = flex.BlockMask.from_kv_blocks(
        count, index, one, second, BLOCK_SIZE=16, mask_mod=lambda b, h, q, k: q < 0
    )
    want = np.zeros((32, 32), bool)
    want[:16, 16:] = want[16:, :16] = True
    check(Mask.from_block_mask(block_mask), want)


def test_from_slices_keeps_the_slices():
    q, k = AttnRanges.from_ranges([(0, 4), (4, 4), (4, 8)]), [(0, 4), (0, 8), (0, 8)]
    mask = Mask.from_slices(q, k, ["causal", AttnMaskType.FULL, 1])
    assert (mask.total_q, mask.total_k) == (8, 8)
    slices = mask.slices()
    assert slices.q_ranges.tolist() == [[0, 4], [4, 4], [4, 8]] and slices.mask_types.tolist() == [1, 0, 1]
    assert mask == Mask.causal(8) and mask.digest == Mask.causal(8).digest
    with pytest.raises(ValueError, match="read-only"):
        slices.q_ranges[0, 0] = 1


def test_double_cover():
    mask = Mask.from_slices([(0, 4), (6, 8), (2, 6)], [(0, 4), (0, 1), (1, 3)])
    assert mask.area() == 16 + 2 + 8 and mask.to_dense().sum() == 16 + 2 + 4
    with pytest.raises(ValueError, match=r"slice 0 \(visible in q \[0, 4\), k \[0, 4\)\) and slice 2 .* q 2, k 1"):
        mask.check()


def test_other_totals_are_other_masks():
    a, b = Mask.from_slices([(0, 2)], [(0, 2)]), Mask.from_slices([(0, 2)], [(0, 2)], total_q=3)
    assert a != b and a.digest != b.digest and a != "mask"
    assert Mask.full(3) == Mask.full(3, 3) and Mask.causal(2, 4).area() == 7


def test_empty_masks():
    for mask in (Mask.documents([]), Mask.full(0), Mask.from_slices([], []), Mask.from_dense(np.zeros((0, 0), bool))):
        assert mask.area() == 0 and mask.to_dense().shape == (0, 0) and mask == Mask(Bands(), 0, 0)
        assert "empty" in mask.picture()
        mask.check()


def test_picture(capsys):
    assert Mask.causal(3).picture() == "█··\n██·\n███"
    assert Mask.window(4, 2).picture() == "█···\n██··\n·██·\n··██"
    big = Mask.documents([5000, 3000], causal=True)
    lines = big.picture(width=32).splitlines()
    assert len(lines) == 16 and all(len(line) == 32 for line in lines)
    assert lines[-1].startswith("·" * 20) and lines[-1][20] == "█"
    big.show(width=32, title="two documents")
    assert capsys.readouterr().out.splitlines() == ["two documents", *lines]


def test_drawing(tmp_path):
    pytest.importorskip("matplotlib")
    from magi_core.drawing import coverage
    from matplotlib.figure import Figure

    mask = Mask.block_causal([300, 700], 64)
    path = tmp_path / "mask.png"
    mask.show(path, ranks=np.arange(1000) // 250, title="four ranks")
    assert path.read_bytes().startswith(b"\x89PNG")
    ax = Figure().add_subplot()
    mask.show(ax=ax, ranks=np.arange(1000) // 250)
    image = ax.images[0].get_array()
    colours = {tuple(image[row, 0]) for row in (10, 150)} | {tuple(image[row, 200]) for row in (300, 500)}
    assert len(colours) == 4, "a colour for each rank"
    assert tuple(image[0, 500]) == (1, 1, 1), "white where nothing is visible"
    share = coverage(mask, 100, 100)
    assert np.isclose(share.sum() * 100, mask.area())
    with pytest.raises(ValueError, match=r"ranks must have one entry per query \(1000\)"):
        mask.show(path, ranks=[0, 1])
    with pytest.raises(ValueError, match="ranks need a path"):
        mask.show(ranks=np.zeros(1000, int))


def test_drawing_without_matplotlib(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"magi-core\[draw\]"):
        Mask.causal(8).show(tmp_path / "mask.png")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Mask.window(8, (-2, 0)), ValueError, r"window must have sides of at least 0, or -1 .* got \(-2, 0\)"),
        (lambda: Mask.window(8, (3, -7)), ValueError, r"got \(3, -7\)"),
        (lambda: Mask.window(8, 0), ValueError, "window must be at least 1, got 0"),
        (lambda: Mask.window(8, -1), ValueError, "window must be at least 1, got -1"),
        (lambda: Mask.window(8, (1, 2, 3)), ValueError, "window must have two sides"),
        (lambda: Mask.window(8, 1.5), TypeError, "window must be an int or a pair"),
        (lambda: Mask.window(8, (1.0, 2)), TypeError, "window left must be an integer"),
        (lambda: Mask.from_cu_seqlens([0, 8], causal=True, window=(3, 0)), ValueError, "causal must be False"),
        (lambda: Mask.from_cu_seqlens([1, 8]), ValueError, "cu_seqlens_q must start at 0"),
        (lambda: Mask.from_cu_seqlens([0, 8, 5]), ValueError, "cu_seqlens_q must start at 0 and never fall"),
        (lambda: Mask.from_cu_seqlens([]), ValueError, "cu_seqlens_q must start at 0"),
        (lambda: Mask.from_cu_seqlens([0, 8], [0, 4, 8]), ValueError, "cu_seqlens_k must have as many entries"),
        (lambda: Mask.documents([3, -1]), ValueError, "lengths must not be negative"),
        (lambda: Mask.documents([2**30, 2**30]), ValueError, "lengths must sum to less than"),
        (lambda: Mask.documents(3.0), TypeError, "lengths must hold integers"),
        (lambda: Mask.documents([3], [3, 4]), ValueError, "lengths_k must have as many documents"),
        (lambda: Mask.prefix_lm([3, 4, 5], [1, 2]), ValueError, "prefix must be one length or one per document"),
        (lambda: Mask.block_causal([3], 0), ValueError, "block_size must be at least 1"),
        (lambda: Mask.prefix_tree([0], [3]), ValueError, r"parents\[0\] must be -1 or a node before 0"),
        (lambda: Mask.prefix_tree([-1, 0], [3]), ValueError, "lengths must have one entry per parent"),
        (lambda: Mask.from_dense(np.zeros((2, 2))), TypeError, "dense must be bool"),
        (lambda: Mask.from_dense(np.zeros(2, bool)), ValueError, "dense must have shape"),
        (lambda: Mask.from_block_mask(np.zeros((2, 2), bool)), TypeError, "block_mask must be a torch"),
        (lambda: Mask.from_slices([(0, 2)], [(0, 2)], ["ful"]), ValueError, "'full', 'causal'"),
        (lambda: Mask.from_slices([(0, 2**31)], [(0, 2)]), ValueError, "q_ranges must fit int32"),
        (lambda: Mask.from_slices([(0, 2)], [(0, 2)], total_q=-1), ValueError, "total_q must be at least 0"),
        (lambda: Mask(Bands([[0, 4, 0, 4, -9, 9]]), 3, 4), ValueError, r"bands must lie within total_q \(3\)"),
        (lambda: Mask("bands", 3, 4), TypeError, "bands must be Bands"),
        (lambda: Mask.causal(8).picture(width=0), ValueError, "width must be at least 1"),
    ],
)  # fmt: skip
def test_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()
