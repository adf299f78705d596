"""``explain``: its numbers are the plan's, its picture the mask's."""

from __future__ import annotations

import json
import zlib

import magi_attention
import magi_attention.api as api
import pytest
import torch
from magi_attention.api import DistAttnConfig, OverlapConfig
from magi_comm.testing import ThreadWorld


def explained(comm, **options):
    config = DistAttnConfig(overlap_config=OverlapConfig(degree=2, min_chunk_size=1))
    key = api.magi_attn_flex_key([(0, 50)], [(0, 50)], "causal", 50, 50, 4, 2, 8, 0, comm, config)
    return key, magi_attention.explain(key, **options)


@pytest.fixture(autouse=True)
def forget_plans():
    yield
    api.clear_cache()


def test_numbers_are_those_of_the_plan_on_every_rank() -> None:
    def rank(comm):
        key, told = explained(comm, dtype=torch.float32, head_dim_v=16)
        assert told.report.bytes_per_token == 2 * (8 + 16) * 4
        assert sum(told.report.areas.tolist()) == 50 * 51 // 2
        links = told.link_bytes
        assert [sum(row) for row in links] == told.sent_bytes
        assert [sum(column) for column in zip(*links, strict=True)] == told.received_bytes
        assert told.shard_q == told.shard_k == (key.shard_q,) * 3
        return json.dumps(told.to_dict())

    first, *others = ThreadWorld(3).run(rank)
    assert all(other == first for other in others)
    assert json.loads(first)["num_stages"] == 2


def test_text_has_a_row_per_rank_the_links_and_the_picture() -> None:
    def rank(comm):
        _, told = explained(comm, height=10, width=10)
        text = str(told)
        assert "3 ranks, 50 queries x 50 keys, 2 remote stage(s)" in text
        assert "shards of queries are padded by" in text and "KiB from\\to" in text
        picture = told.picture().split("\n")
        assert len(picture) == 10 and all(len(line) == 10 for line in picture)
        assert set("".join(picture)) == {".", "0", "1", "2"}
        assert all(line[i + 1 :] == "." * (9 - i) and "." not in line[: i + 1] for i, line in enumerate(picture))
        return text

    texts = ThreadWorld(3).run(rank)
    assert len(set(texts)) == 1


def test_the_png_shows_the_grid(tmp_path) -> None:
    def rank(comm):
        _, told = explained(comm, height=8, width=6)
        path = tmp_path / f"{comm.rank}.png"
        told.save_png(path, scale=3)
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(data[16:20], "big") == 18 and int.from_bytes(data[20:24], "big") == 24
        at = data.index(b"IDAT")
        size = int.from_bytes(data[at - 4 : at], "big")
        pixels = zlib.decompress(data[at + 4 : at + 4 + size])
        assert len(pixels) == 24 * (1 + 3 * 18)
        assert pixels[1 + 3 * 17 : 1 + 3 * 18] == b"\xff\xff\xff"  # the last key is hidden from the first row
        assert pixels[1:4] != b"\xff\xff\xff"

    ThreadWorld(2).run(rank)


def test_a_cleared_key_is_refused() -> None:
    def rank(comm):
        key, _ = explained(comm)
        api.clear_cache(comm)
        with pytest.raises(ValueError, match="key names no plan of this process"):
            magi_attention.explain(key)

    ThreadWorld(1).run(rank)
