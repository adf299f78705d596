"""Pictures: every cell against the dense mask, and files that other programs read."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from magi_attention import drawing
from magi_core.bands import Bands

slices = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 3)),
    max_size=6,
)


@settings(deadline=None, max_examples=150)
@given(slices, st.integers(1, 25), st.integers(1, 25), st.integers(1, 4))
def test_a_cell_shows_exactly_whether_a_pair_of_it_is_visible(rows, height, width, world_size):
    q = [sorted((a, b)) for a, b, *_ in rows]
    k = [sorted((c, d)) for _, _, c, d, _ in rows]
    bands = Bands.from_slices(
        np.array(q).reshape(-1, 2), np.array(k).reshape(-1, 2), np.array([t for *_, t in rows], int)
    )
    dense = bands.to_dense(20, 20)
    ranges = [[(i, i + 1) for i in range(rank, 20, world_size)] for rank in range(world_size)]  # round robin
    grid = drawing.rank_grid(bands, 20, 20, ranges, height, width)
    height, width = min(height, 20), min(width, 20)
    assert grid.shape == (height, width)
    for i in range(height):
        q0, q1 = i * 20 // height, (i + 1) * 20 // height
        for j in range(width):
            k0, k1 = j * 20 // width, (j + 1) * 20 // width
            is_visible = dense[q0:q1, k0:k1].any()
            assert (grid[i, j] != drawing.HIDDEN) == is_visible
            if is_visible:
                assert grid[i, j] == ((q0 + q1 - 1) // 2) % world_size


def test_text_has_a_symbol_per_rank():
    grid = np.array([[0, -1, 10], [61, 62, 1]], np.int32)
    assert drawing.to_text(grid) == "0.a\nZ01"
    coloured = drawing.to_text(grid, colour=True)
    assert coloured.count("\x1b[0m") == 5
    assert drawing.to_text(np.zeros((0, 3), np.int32)) == ""


def test_neighbouring_ranks_have_different_colours():
    palette = drawing.colours(64)
    assert len({*palette}) == 64
    assert all(sum(abs(a - b) for a, b in zip(x, y, strict=True)) > 60 for x, y in pairwise(palette))


def test_a_png_is_read_back_pixel_by_pixel(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    grid = np.array([[0, -1, 2], [1, 1, -1]], np.int32)
    path = tmp_path / "mask.png"
    drawing.write_png(path, grid, scale=2)
    pixels = np.rint(image.imread(path)[..., :3] * 255).astype(int)
    palette = [(255, 255, 255), *drawing.colours(3)]
    expected = np.array([[palette[rank + 1] for rank in row] for row in grid.tolist()]).repeat(2, 0).repeat(2, 1)
    assert np.array_equal(pixels, expected)
    with pytest.raises(ValueError, match="grid must not be empty"):
        drawing.write_png(path, grid[:0])
    with pytest.raises(ValueError, match="height and width must be at least 1, got 0 and 3"):
        drawing.rank_grid(Bands(), 4, 4, [], 0, 3)
