"""The simulator: counts that can be done by hand, the published figures, and the command line."""

import json

import numpy as np
import pytest
from magi_attention.cli import main
from magi_attention.cli.simulate import published_errors, simulate
from magi_attention.simulation import H100, H200, METHODS, Documents, Step, Work, figures, ours, predict
from magi_attention.simulation.shapes import ring_allgather, ring_p2p, ulysses, usp
from magi_core.mask import Mask


def moved(steps, link):
    return sum(step.count * getattr(step, link) for step in steps)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 5])
def test_documents_are_the_masks_they_say(causal, window):
    if window and not causal:
        return
    documents = Documents((7, 1, 30), causal, window)
    expected = Mask.window([7, 1, 30], window) if window else Mask.documents([7, 1, 30], causal=causal)
    assert documents.area == expected.area() == documents.bands().area()
    assert documents.total == 38


def test_packs_fill_their_tokens_with_documents_of_at_most_a_quarter():
    packs = Documents.packs(65536, True, 5)
    assert [p.total for p in packs] == [65536] * 5
    assert max(max(p.lengths) for p in packs) <= 16384
    assert min(min(p.lengths) for p in packs) >= 1
    assert packs == Documents.packs(65536, True, 5) != Documents.packs(65536, True, 5, seed=1)


def test_volumes_are_those_of_the_methods():
    world, tokens = 16, 8192
    mask = Documents((world * tokens,), True)
    kv, q = H100.kv_bytes, H100.q_bytes
    assert kv == 2 * 8 * 128 * 2 and q == 64 * 128 * 2
    (ring,) = ring_p2p(H100, mask, world)
    assert moved(ring, "network_bytes") == (world - 1) * tokens * kv and moved(ring, "nvlink_bytes") == 0
    (gather,) = ring_allgather(H100, mask, world)
    assert moved(gather, "nvlink_bytes") == (world - 1) * tokens * kv
    assert moved(gather, "network_bytes") == world * tokens * kv / 2 / 8  # the other node's half, by eight GPUs
    (heads,) = ulysses(H100, mask, world)
    both = tokens * (2 * q + 2 * kv) * 15 / 16  # 8 kv heads are repeated for 16 ranks
    assert moved(heads, "nvlink_bytes") + moved(heads, "network_bytes") == both
    (hybrid,) = usp(H100, mask, world)
    assert moved(hybrid, "nvlink_bytes") == tokens * (2 * q + kv) * 7 / 8
    assert moved(hybrid, "network_bytes") == tokens * kv  # one step of the ring of two nodes
    assert ulysses(H100, mask, 128) is None


def test_our_volume_is_the_plans():
    mask = Documents((4096, 2048, 2048) * 8, True)
    from magi_core.planner import Owners, chunk_areas, dispatch_chunks, plan_distributed

    areas = chunk_areas(mask.bands(), 512, mask.total)
    chunks = dispatch_chunks(areas, 4, bands=mask.bands(), chunk_size=512, total_q=mask.total)
    owners = Owners.from_chunks(chunks, 512, mask.total)
    plan = plan_distributed(mask.bands(), mask.total, mask.total, owners, owners)
    ranks = ours(H100, mask, 4, chunk_size=512, degree=1)
    largest = max(moved(steps, "nvlink_bytes") for steps in ranks)
    assert largest == H100.kv_bytes * max(plan.num_received().max(), plan.num_sent().max())


def test_a_relay_crosses_between_nodes_at_most_as_often():
    mask = Documents.packs(16 * 2048, True, 1)[0]
    plain, relayed = (ours(H100, mask, 16, relay=relay, degree=1, look_at=16) for relay in (False, True))
    assert len(plain) == len(relayed) == 16
    assert sum(moved(s, "network_bytes") for s in relayed) < sum(moved(s, "network_bytes") for s in plain)


def test_hidden_transfers_cost_only_what_sticks_out():
    kernel = H100.kernel_s(Work(1e6, 1e3, 1e3), False)
    slow, fast = 1e9 * H100.nvlink_gbs, 1e3
    hidden = H100.rank([Step(Work(1e6, 1e3, 1e3), slow, is_hidden=True)], False)
    assert hidden.total_s == pytest.approx(1.0, rel=1e-3) and hidden.exposed_s == pytest.approx(1 - kernel, rel=1e-3)
    assert H100.rank([Step(Work(1e6, 1e3, 1e3), fast, is_hidden=True)], False).exposed_s == 0
    assert H100.rank([Step(Work(1e6, 1e3, 1e3), slow)], False).total_s > hidden.total_s
    assert H100.rank([], False).total_s == 0


def test_the_model_reproduces_the_published_figures():
    found = published_errors()
    assert found["figures"] == len(figures()) == 192
    assert found["median"] <= 0.15
    assert found["worst"] <= 0.30


@pytest.mark.parametrize("world", [2, 8, 64, 256])
def test_every_method_predicts_at_every_size(world):
    rows = simulate([world], ["varlen_causal", "window"], list(METHODS), tokens=2048, packs=1, machine=H200)
    assert len(rows) == 2 * 2 * len(METHODS)
    for row in rows:
        if row["tflops"] is None:
            assert row["method"] == "ulysses" and world > 64
        else:
            assert 0 < row["tflops"] < 700 and 0 <= row["exposed_s"] <= row["total_s"]


def test_more_network_is_never_slower():
    mask = Documents.packs(32 * 2048, True, 1)[0]
    from dataclasses import replace

    for name, method in METHODS.items():
        ranks = method(H200, mask, 32)
        times = [predict(replace(H200, network_gbs=g), ranks, backward=False).total_s for g in (10, 50, 400)]
        assert times == sorted(times, reverse=True), name


def test_the_command_prints_draws_and_writes_json(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    common = ["simulate", "--ranks", "2,8", "--masks", "causal", "--packs", "1", "--tokens", "1024"]
    assert main([*common, "--plot", str(path), "--errors"]) == 0
    out = capsys.readouterr().out
    assert "published figures" in out and "TFLOP/s/GPU" in out and "loongtrain" in out
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main([*common, "--json", "--methods", "magi,usp", "--network-gbs", "25"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["method"] for row in data["predictions"]} == {"magi", "usp"}
    assert data["machine"]["network_gbs"] == 25
    assert np.isfinite(data["published"]["median"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "1"], "must be within 2 and 4096"),
        (["--ranks", "8192"], "must be within 2 and 4096"),
        (["--ranks", "a"], "must be integers"),
        (["--masks", "dense"], "must be among full, causal"),
        (["--methods", "magic"], "must be among magi"),
        (["--tokens", "0"], "must be at least 1, got 0"),
        (["--network-gbs", "0"], "must be above 0"),
        (
            ["--num-heads-q", "6", "--num-heads-kv", "4"],
            "must be a multiple of --num-heads-kv (4), got 6",
        ),
    ],
)
def test_a_wrong_argument_ends_with_2(argv, message, capsys):
    try:
        code = main(["simulate", *argv])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
