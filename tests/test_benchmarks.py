"""The benchmark driver: the gate comes first, lines say enough to repeat them, comparisons and pages are right."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import __main__ as driver
from benchmarks.case import REGISTRY, Case, Check, Setup, register
from benchmarks.measure import GateError, measure, outside_bounds
from benchmarks.record import append, lines, read
from benchmarks.report import comparison, results_page


def matmul_case(error=0.0, **changes):
    """Ours multiplies once, the rival four times; `error` spoils ours."""
    calls = []

    def setup():
        a = torch.randn(96, 96, dtype=torch.float64)
        exact = a @ a

        def ours():
            calls.append("magi")
            return a @ a + error

        def rival():
            calls.append("slow")
            for _ in range(40):
                out = a @ a
            return out

        return Setup(
            implementations={"magi": ours, "slow": rival},
            verify=lambda name, got: Check(float((got - exact).abs().max()), 1e-9, "fp64"),
            measures={"peak_extra_mib": lambda: 3.5},
        )

    options = {"name": "test/matmul", "operator": "matmul", "params": {"size": 96}, "flops": 2.0 * 96**3, **changes}
    return Case(setup=setup, **options), calls


@pytest.fixture
def registry():
    before = dict(REGISTRY)
    yield REGISTRY
    REGISTRY.clear()
    REGISTRY.update(before)


def test_a_red_gate_refuses_and_times_nothing():
    case, calls = matmul_case(error=1e-3)
    with pytest.raises(GateError, match=r"test/matmul: magi is off by 1\.000e-03 from fp64, allowed 1\.000e-09"):
        measure(case, case.setup(), 0.01)
    assert calls == ["magi"]


def test_nan_does_not_pass_the_gate():
    case, _ = matmul_case(error=float("nan"))
    with pytest.raises(GateError):
        measure(case, case.setup(), 0.01)


def test_implementations_alternate_and_ratios_have_two_repeats():
    case, calls = matmul_case(bounds={"ratio:slow": 1.0, "peak_extra_mib": 4.0})
    measured = measure(case, case.setup(), 0.01)
    assert calls == ["magi", "slow"] * (len(calls) // 2)
    assert len(calls) // 2 == 1 + 2 + 2 * 5  # the gate, the warm-up, two repeats of five rounds
    ratio, each = measured.ratios["slow"]
    assert len(each) == 2
    assert ratio < 1
    assert outside_bounds(case, measured) == []


def test_broken_promises_are_named():
    case, _ = matmul_case(bounds={"ratio:slow": 1e-6, "peak_extra_mib": 3.0, "ratio:absent": 1.0})
    broken = outside_bounds(case, measure(case, case.setup(), 0.01))
    assert [text.split(" is ")[0] for text in broken] == ["ratio:slow", "peak_extra_mib", "ratio:absent"]


def test_a_line_says_enough_to_repeat_it(tmp_path):
    case, _ = matmul_case(bounds={"ratio:slow": 1.0})
    measured = measure(case, case.setup(), 0.01)
    file = tmp_path / "out" / "lines.jsonl"
    append(file, lines(case, measured, []))
    append(file, lines(case, measured, []))  # a later line of one case replaces the earlier one
    ours, slow = read(file)
    assert ours["command"] == "python -m benchmarks run test/matmul"
    assert {"commit", "torch", "device", "threads", "min_ms", "max_ms", "error", "against"} <= set(ours)
    assert ours["size"] == 96
    assert ours["peak_extra_mib"] == 3.5
    assert slow["ours_over_this"] == pytest.approx(ours["median_ms"] / slow["median_ms"], rel=1e-2)
    assert ours["tflops"] == pytest.approx(2 * 96**3 / ours["median_ms"] / 1e9, abs=1e-3)
    assert "| test/matmul | magi |" in results_page({"lines": [ours, slow]})


def test_unreadable_lines_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"case": "x"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:1 is not a result line"):
        read(tmp_path / "a.jsonl")


def test_comparison_divides_out_the_machine():
    def pair(ours, rival):
        return [
            {"case": "c", "implementation": "magi", "median_ms": ours},
            {"case": "c", "implementation": "sdpa", "median_ms": rival},
        ]

    assert comparison(pair(1.0, 2.0), pair(2.0, 4.0), 0.1)[1] == []  # all is half as fast: another machine
    text, slower = comparison(pair(1.0, 2.0), pair(1.5, 2.0), 0.1)
    assert slower == ["c"]
    assert "SLOWER" in text
    assert comparison(pair(1.0, 2.0)[:1], pair(1.05, 2.0)[:1], 0.1)[1] == []


def test_names_are_unique(registry):
    case, _ = matmul_case()
    register(case)
    with pytest.raises(ValueError, match="'test/matmul' is registered twice"):
        register(case)


def test_the_command_line_runs_compares_draws_and_prints(registry, tmp_path, capsys):
    register(matmul_case(bounds={"ratio:slow": 1.0})[0])
    file, picture = tmp_path / "lines.jsonl", tmp_path / "picture.png"
    assert driver.main(["run", "test/*", "--seconds", "0.01", "--out", str(file)]) == 0
    assert [json.loads(text)["implementation"] for text in file.read_text().splitlines()] == ["magi", "slow"]
    assert driver.main(["compare", str(file), str(file)]) == 0
    assert driver.main(["table", str(file)]) == 0
    assert "| test/matmul | slow |" in capsys.readouterr().out
    assert driver.main(["plot", str(file), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_command_line_fails_where_it_should(registry, tmp_path, capsys):
    register(matmul_case(error=1.0)[0])
    file = tmp_path / "lines.jsonl"
    assert driver.main(["run", "test/matmul", "--out", str(file)]) == 1
    assert not file.exists()
    assert "REFUSED: test/matmul" in capsys.readouterr().out
    assert driver.main(["run", "nothing*"]) == 2
    assert "no case or operator matches 'nothing*'" in capsys.readouterr().err


def test_every_case_of_the_project_can_be_listed(registry, capsys):
    assert driver.main(["list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(REGISTRY)
