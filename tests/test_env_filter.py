"""The filters that choose parametrised tests from the environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from env_filter import filters, is_chosen, is_nightly, text_of
from magi_attention.common.enum import AttnMaskType
from pipeline_cases import MASKS, OVERLAPS, TOTALS, VARIANTS, WORLD_SIZES, Case, covering_cases


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4, "4"),
        ((8, 2), "8_2"),
        ({"name": "full_14k", "total": 1}, "full_14k"),
        (torch.bfloat16, "bfloat16"),
        (AttnMaskType.CAUSAL, "causal"),
        (None, "None"),
        (len, "len"),
    ],
    ids=str,
)
def test_text_of_values(value, text) -> None:
    assert text_of(value) == text


def test_patterns_are_comma_separated_and_dimensions_combine() -> None:
    chosen = filters({"MAGI_ATTENTION_TEST_WORLD_SIZE": "2, 4", "MAGI_ATTENTION_TEST_MASK": "VARLEN_*", "OTHER": "1"})
    assert chosen == {"WORLD_SIZE": ["2", "4"], "MASK": ["varlen_*"]}
    case = Case(4, "varlen_full", 7, "1", "plain")
    assert is_chosen({"case": case}, chosen)
    assert not is_chosen({"case": Case(3, "varlen_full", 7, "1", "plain")}, chosen)
    assert not is_chosen({"case": Case(4, "causal", 7, "1", "plain")}, chosen)
    assert is_chosen({"head_dim": 64}, chosen)  # no such dimension: not touched
    assert not is_chosen({"world_size": 8, "case": case}, chosen)
    assert is_chosen({"case": case}, {"CASE": ["varlen_full-7-w4-*"]})
    assert not filters({"MAGI_ATTENTION_TEST_NIGHTLY": "1", "MAGI_ATTENTION_TEST_DTYPE": " "})


def test_nightly_is_asked_for_by_one_variable() -> None:
    assert not is_nightly({}) and is_nightly({"MAGI_ATTENTION_TEST_NIGHTLY": "1"})
    with pytest.raises(ValueError, match="MAGI_ATTENTION_TEST_NIGHTLY must be 0 or 1, got 'weekly'"):
        is_nightly({"MAGI_ATTENTION_TEST_NIGHTLY": "weekly"})


def test_the_covering_set_lets_every_two_values_meet() -> None:
    dims = {"world_size": WORLD_SIZES, "mask": MASKS, "total": TOTALS, "overlap": OVERLAPS, "variant": VARIANTS}
    names = list(dims)
    cases = covering_cases()
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            met = {(getattr(c, one), getattr(c, other)) for c in cases}
            assert met == {(a, b) for a in dims[one] for b in dims[other]}, (one, other)
    assert len(cases) < 120


def test_pytest_runs_only_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI_ATTENTION_TEST_WORLD_SIZE", "2,4")
    monkeypatch.setenv("MAGI_ATTENTION_TEST_OVERLAP", "auto")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        str(Path(__file__).with_name("test_pipeline.py")),
    ]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ids = [line for line in listed.splitlines() if "::" in line]
    assert ids and all(("-w2-" in i or "-w4-" in i) and "-oauto-" in i for i in ids), listed
