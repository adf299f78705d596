"""The programs under examples/ run as they are, and compute what they say."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from magi_core.testing import assert_within_budget, reference_attention, same_precision_attention

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(*command: str) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=240, env=environ, cwd=EXAMPLES.parent
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_quickstart_on_one_device():
    names = runpy.run_path(str(EXAMPLES / "quickstart_ffa.py"))
    inputs = [names[name].detach() for name in ("q", "k", "v", "sink")]
    slices = [(0, 128, 0, 128, 0), (128, 256, 0, 256, 1)]

    def results(attend, dtype):
        q, k, v = (tensor.to(dtype).requires_grad_() for tensor in inputs[:3])
        sink = inputs[3].clone().requires_grad_()  # float32 in both
        out, lse, *_ = attend(q, k, v, slices, sink=sink)
        grads = torch.autograd.grad(out, (q, k, v, sink), names["do"].to(out.dtype))
        return dict(zip(("out", "lse", "dq", "dk", "dv", "dsink"), (out, lse, *grads)))

    exact = results(reference_attention, torch.float64)
    plain = results(same_precision_attention, torch.bfloat16)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_within_budget(names[name], plain[name], exact[name], name=name)
    assert_within_budget(names["dsink"], plain["dsink"], exact["dsink"], name="dsink", rounding=torch.bfloat16)


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_quickstart_on_several_ranks(ranks):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    output = run(*launcher, str(EXAMPLES / "quickstart_distributed.py"))
    # The ranks share one pipe, and a report and its newline are two writes: two reports can stand on one line.
    report = (
        rf"rank (\d+) of {ranks} on cpu: (\d+) of 512 tokens, out \(512, 6, 32\), lse \((\d+), 6\), "
        r"dx \(512, 64\), dsink \(4, 6\)"
    )
    found = re.findall(report, output)
    assert re.sub(report, "", output).strip() == "", output
    assert sorted(int(rank) for rank, _, _ in found) == list(range(ranks)), output
    assert all(tokens == rows for _, tokens, rows in found), output
    assert sum(int(tokens) for _, tokens, _ in found) >= 512, output


@pytest.mark.distributed
def test_demo_agrees_with_one_rank_and_draws(tmp_path):
    picture = tmp_path / "demo.png"
    output = run(str(EXAMPLES / "demo.py"), "--ranks", "3", "--tokens", "509", "--out", str(picture))
    assert "all agree" in output
    assert len(re.findall(r"^    (?:out|dq|dk|dv|dsink) ", output, re.M)) == 10
    assert "balance (largest area / mean)" in output
    assert picture.read_bytes().startswith(b"\x89PNG")
