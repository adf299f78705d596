"""verify() names what is wrong with a plan that was damaged on purpose; explain_plan() reports what is there."""

import json
from dataclasses import replace

import numpy as np
import pytest
from magi_core.bands import Bands
from magi_core.planner import Owners, PlanError, PlanOptions, explain_plan, plan_distributed, verify


@pytest.fixture
def plan():
    """Causal, 24 tokens, three ranks, zigzag, two stages."""
    owners = Owners([[(0, 4), (20, 24)], [(4, 8), (16, 20)], [(8, 16)]], 24)
    bands = Bands.from_slices([[0, 24]], [[0, 24]], [1])
    made = plan_distributed(bands, 24, 24, owners, owners, PlanOptions(degree=2, min_chunk_size=4))
    assert made.num_stages == 2
    verify(made)
    return made


def plans_of(plan):
    return [plan.rank_plan(r) for r in range(plan.world_size)]


def with_stage(plans, rank, stage, **changes):
    stages = list(plans[rank].stages)
    stages[stage] = replace(stages[stage], **changes)
    plans[rank] = replace(plans[rank], stages=tuple(stages))
    return plans


def edited(rows, index, **columns):
    rows = rows.copy()
    for column, value in columns.items():
        rows[index, int(column[1:])] = value
    return rows


def test_a_missing_local_band(plan):
    plans = plans_of(plan)
    plans[1] = replace(plans[1], local_bands=Bands(plans[1].local_bands.data[1:]))
    with pytest.raises(PlanError, match=r"pair \(q 4, k 4\) on rank 1 is computed 1 time\(s\) too few"):
        verify(plan, plans)


def test_a_band_twice(plan):
    plans = plans_of(plan)
    plans[0] = replace(plans[0], local_bands=Bands(np.repeat(plans[0].local_bands.data, 2, axis=0)))
    with pytest.raises(PlanError, match=r"pair \(q 0, k 0\) on rank 0 is computed 1 time\(s\) too often"):
        verify(plan, plans)


def test_a_diagonal_off_by_one(plan):
    plans = plans_of(plan)
    data = plans[2].local_bands.data.copy()
    data[0, 5] -= 1
    plans[2] = replace(plans[2], local_bands=Bands(data))
    with pytest.raises(PlanError, match=r"on rank 2 is computed 1 time\(s\) too few"):
        verify(plan, plans)


def test_a_band_outside_its_buffer(plan):
    plans = plans_of(plan)
    stage = plans[0].stages[0]
    bands = Bands(np.concatenate([stage.bands.data, [[0, 1, 0, 100, 0, 99]]]))
    with pytest.raises(
        PlanError, match=r"rank 0, stage 0: band q \[0, 1\) k \[0, 100\) is empty or lies outside 8 queries"
    ):
        verify(plan, with_stage(plans, 0, 0, bands=bands))


def test_a_receive_from_the_wrong_rank(plan):
    plans = plans_of(plan)
    recv = plans[0].stages[0].recv
    wrong = 2 if recv[0, 0] == 1 else 1
    with pytest.raises(PlanError, match=rf"rank 0, stage 0: receives key \d+ from rank {wrong}, its owner is rank"):
        verify(plan, with_stage(plans, 0, 0, recv=edited(recv, 0, c0=wrong)))


def test_a_receive_of_an_own_key(plan):
    plans = plans_of(plan)
    recv = np.array([[0, 0, 4], *plans[0].stages[0].recv.tolist()])
    with pytest.raises(PlanError, match="rank 0, stage 0: receives key 0, which it owns"):
        verify(plan, with_stage(plans, 0, 0, recv=recv))


def test_a_key_received_twice(plan):
    plans = plans_of(plan)
    first = plans[0].stages[0].recv
    with pytest.raises(PlanError, match=rf"rank 0, stage 1: receives key {first[0, 1]} twice"):
        verify(plan, with_stage(plans, 0, 1, recv=first))


def test_receives_out_of_order(plan):
    plans = plans_of(plan)
    stage = plans[0].stages[0]
    halves = np.array(
        [[*stage.recv[0, :2], stage.recv[0, 1] + 1], [stage.recv[0, 0], stage.recv[0, 1] + 1, stage.recv[0, 2]]]
    )
    with pytest.raises(PlanError, match="rank 0, stage 0: receives are not ascending at key"):
        verify(plan, with_stage(plans, 0, 0, recv=np.concatenate([halves[::-1], stage.recv[1:]])))


def test_a_missing_send(plan):
    plans = plans_of(plan)
    sender = next(r for r in range(3) if len(plans[r].stages[1].send))
    with pytest.raises(PlanError, match=rf"rank {sender}, stage 1: sends .* keys to rank .*, which expects"):
        verify(plan, with_stage(plans, sender, 1, send=plans[sender].stages[1].send[1:]))


def test_a_send_of_other_tokens(plan):
    plans = plans_of(plan)
    send = plans[0].stages[0].send
    moved = edited(send, 0, c1=send[0, 1] + 1, c2=send[0, 2] + 1)
    with pytest.raises(PlanError, match=r"rank 0, stage 0: sends .*; the first difference: key \d+ in place of \d+"):
        verify(plan, with_stage(plans, 0, 0, send=moved))


def test_a_send_past_the_local_keys(plan):
    plans = plans_of(plan)
    send = np.array([[1, 0, 9]])
    with pytest.raises(PlanError, match=r"rank 0, stage 0: sends local keys \[0, 9\) of 8"):
        verify(plan, with_stage(plans, 0, 0, send=send))


def test_a_send_to_nobody(plan):
    with pytest.raises(PlanError, match="rank 0, stage 0: sends to rank 3"):
        verify(plan, with_stage(plans_of(plan), 0, 0, send=np.array([[3, 0, 1]])))


def test_a_received_key_that_no_band_uses():
    """Rank 1 sees key 0 only; it is made to receive key 1 as well."""
    owners = Owners([[(0, 2)], [(2, 4)]], 4)
    bands = Bands.from_slices([[2, 4]], [[0, 1]], [0])
    plan = plan_distributed(bands, 4, 4, owners, owners)
    plans = with_stage(plans_of(plan), 1, 0, recv=np.array([[0, 0, 2]]))
    plans = with_stage(plans, 0, 0, send=np.array([[1, 0, 2]]))
    with pytest.raises(PlanError, match="rank 1, stage 0: receives key 1 and never uses it"):
        verify(plan, plans)


def test_a_missing_stage(plan):
    plans = plans_of(plan)
    plans[2] = replace(plans[2], stages=plans[2].stages[:1])
    with pytest.raises(PlanError, match="rank 2 has 1 stages, the plan 2"):
        verify(plan, plans)


def test_a_missing_rank(plan):
    with pytest.raises(PlanError, match=r"rank_plans must have one plan per rank \(3\), got 2"):
        verify(plan, plans_of(plan)[:2])


def test_explain_adds_up(plan):
    report = explain_plan(plan, bytes_per_token=256)
    assert report.areas.tolist() == report.stage_areas.sum(axis=0).tolist() == plan.balance.tolist()
    assert report.links.sum(axis=0).tolist() == report.received.tolist() == report.stage_received.sum(axis=0).tolist()
    assert report.links.sum(axis=1).tolist() == report.sent.tolist()
    assert np.all(np.diag(report.links) == 0)
    assert [r.num_keys for r in plan.rank_plan(0).stages] == report.stage_received[:, 0].tolist()
    assert report.balance == pytest.approx(int(plan.balance.max()) * 3 / 300)
    assert plan.received_bytes(256).tolist() == [256 * t for t in report.received.tolist()]
    assert np.all(report.exposed_fs >= 0)
    values = json.loads(json.dumps(report.to_dict()))
    assert values["critical_rank"] == report.critical_rank
    text = str(report)
    assert "3 ranks, 24 queries x 24 keys, 2 remote stage(s)" in text
    assert len(text.splitlines()) == 2 + 3 + 2


def test_explain_of_nothing():
    owners = Owners.contiguous(5, 3)
    report = explain_plan(plan_distributed(Bands(), 5, 5, owners, owners))
    assert report.balance == 1.0
    assert report.local_share == 1.0
    assert "0 remote stage(s)" in str(report)


def test_a_blocking_plan_exposes_its_whole_transfer():
    owners = Owners.contiguous(64, 2)
    bands = Bands.from_slices([[0, 64]], [[0, 64]], [0])
    report = explain_plan(plan_distributed(bands, 64, 64, owners, owners, PlanOptions(degree=0)))
    assert report.blocking
    assert report.exposed_fs.tolist() == report.transfer_fs.sum(axis=0).tolist()
