"""tools/run_tests.py: the inventory, mistakes, and one operator run for real."""

import json
import subprocess
import sys
from pathlib import Path

import magi_triton
import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "run_tests.py"
pytestmark = pytest.mark.skipif(not TOOL.is_file(), reason="needs a source tree")


def run(*arguments):
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True)


def test_list_ops_is_the_registry():
    done = run("--list-ops")
    assert done.returncode == 0
    assert tuple(line.split()[0] for line in done.stdout.splitlines()) == magi_triton.operators()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "nothing"], "operator must be one of"),
        (["--stages", "gamma"], "stages must be among"),
        (["--stages", "all", "--start", "nothing"], "start must be one of"),
        (["--ops", "recompute_mask", "--op-list-file", "x"], "not allowed with"),
    ],
)
def test_mistakes_exit_with_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_one_operator(tmp_path):
    done = run("--ops", "recompute_mask", "--skip-benchmarks", "--output-dir", str(tmp_path), "--color", "never")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    result = summary["recompute_mask"]["accuracy"]
    assert result["status"] in ("Passed", "Skipped")
    assert result["tests"] > 0
    assert (tmp_path / "recompute_mask" / "accuracy_junit.xml").is_file()
