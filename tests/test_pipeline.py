"""The whole road, key to gradients: any number of ranks gives what one rank gives.

``MAGI_ATTENTION_TEST_WORLD_SIZE=2,4 pytest tests/test_pipeline.py`` runs a part; README.md beside this file says which
dimensions there are. By default a covering set runs: every two values of different dimensions meet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import magi_attention.api as api
import pipeline_cases as cases
import pytest
import torch
from env_filter import is_nightly
from magi_comm.two_level import TwoLevelCommunicator
from magi_core.testing import assert_within_budget
from pipeline_cases import Case
from torch import Tensor

FP64 = cases.every_case() if is_nightly() else cases.covering_cases()
LOW_PRECISION = [
    Case(w, mask, 300, overlap, variant, dtype)
    for (w, mask, overlap, variant, dtype) in [
        (2, "causal", "1", "sink", "bfloat16"),
        (4, "varlen_causal", "2", "gqa_softcap", "bfloat16"),
        (8, "prefix_tree", "4", "plain", "bfloat16"),
        (3, "random_bands", "auto", "sink", "bfloat16"),
        (8, "full", "3", "uneven", "bfloat16"),
        (4, "swa_causal", "0", "plain", "float16"),
        (5, "cross", "2", "sink", "float16"),
        (5, "cross", "2", "sink", "float32"),
    ]
]


@pytest.fixture(autouse=True)
def forget_plans() -> Any:
    yield
    api.clear_cache()


def gathered(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One result of all ranks': they must agree bit for bit, and shares of dsink are summed."""
    first = dict(results[0])
    for rank, other in enumerate(results[1:], 1):
        for name, value in other.items():
            if name != "dsink":
                assert torch.equal(value, first[name]), f"rank {rank} has another {name} than rank 0"
    if "dsink" in first:
        first["dsink"] = torch.stack([r["dsink"] for r in results]).sum(0)
    return first


def assert_exact(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        finite = expected[name].isfinite()
        assert torch.equal(value[~finite], expected[name][~finite]), f"{name}: other infinities than one rank"
        error = (value[finite] - expected[name][finite]).abs()
        allowed = 1e-10 * expected[name][finite].abs().clamp_min(1)
        worst = float((error - allowed).max()) if error.numel() else 0.0
        assert worst <= 0, f"{name}: error {float(error.max()):.3e} over 1e-10"


@pytest.mark.parametrize("case", FP64, ids=str)
def test_any_world_gives_what_one_rank_gives(case: Case, thread_world: Any) -> None:
    results = thread_world(case.world_size).run(cases.run_rank, case, cases.tensors_of(case))
    assert_exact(gathered(results), cases.exact(case))


@pytest.mark.parametrize("case", LOW_PRECISION, ids=str)
def test_low_precision_stays_within_the_budget(case: Case, thread_world: Any) -> None:
    # Over several draws: a sink's gradient has one independent error per head, and a budget made of the largest of a
    # few is itself a matter of luck.
    draws = [replace(case, seed=seed) for seed in range(4)]
    got = [gathered(thread_world(c.world_size).run(cases.run_rank, c, cases.tensors_of(c))) for c in draws]
    same, exact = [cases.same_precision(c) for c in draws], [cases.exact(c) for c in draws]
    for name in got[0]:
        assert_within_budget(*(torch.stack([r[name] for r in results]) for results in (got, same, exact)), name=name)


def run_on_nodes(comm: Any, case: Case, node_size: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same on a grid of nodes, where rows cross between nodes once."""
    node, local = divmod(comm.rank, node_size)
    inter = [comm.new_group(range(i, comm.size, node_size)) for i in range(node_size)][local]
    intra = [comm.new_group(range(n * node_size, (n + 1) * node_size)) for n in range(comm.size // node_size)][node]
    return cases.run_rank(TwoLevelCommunicator(comm, inter, intra), case, tensors)


@pytest.mark.parametrize("node_size", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case(8, "causal", 1000, "2", "sink"),
        Case(8, "random_bands", 1000, "auto", "gqa_softcap"),
        Case(8, "varlen_block_causal", 7, "3", "uneven"),
        Case(4, "cross", 1000, "0", "small_chunks"),
    ],
    ids=str,
)
def test_nodes_give_what_one_rank_gives(case: Case, node_size: int, thread_world: Any) -> None:
    results = thread_world(case.world_size).run(run_on_nodes, case, node_size, cases.tensors_of(case))
    assert_exact(gathered(results), cases.exact(case))


def sample_for_processes() -> list[Case]:
    """Twenty of the covering set over worlds that processes form, spread over masks and degrees."""
    chosen: list[Case] = []
    for i, case in enumerate(cases.covering_cases(seed=1)):
        world_size = (2, 4, 8)[i % 3]
        chosen.append(Case(world_size, case.mask, min(case.total, 1000), case.overlap, case.variant))
    unique = list(dict.fromkeys(chosen))
    return unique[:: max(1, len(unique) // 20)][:20]


@pytest.mark.parametrize("case", sample_for_processes(), ids=str)
def test_gloo_processes_give_what_one_rank_gives(case: Case, process_pool: Any) -> None:
    results = process_pool.run(cases.run_rank, case, world_size=case.world_size)
    assert_exact(gathered(results), cases.exact(case))
