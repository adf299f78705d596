"""The command line: what it prints is what is there, wrong arguments end with 2 and say why."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from magi_attention import env
from magi_attention.cli import environment, main
from magi_core.mask import Mask


def run(capsys, *argv: str) -> tuple[int, str, str]:
    try:
        code = main(argv)
    except SystemExit as stop:  # argparse
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def process(code: str, **environ: str) -> subprocess.CompletedProcess:
    import os

    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, timeout=120
    )


ENV_JSON = "from magi_attention.cli import main; raise SystemExit(main(['env', '--json']))"


def findings(text: str) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads(text)}


def test_env_says_what_runs(capsys):
    code, out, _ = run(capsys, "env", "--json")
    found = findings(out)
    assert code == 0
    assert {row["status"] for row in found.values()} <= {"ok", "missing", "broken", "info"}
    assert found["host library"]["status"] == "ok"
    assert found["attention on CPU"]["status"] == "ok"
    assert found["magi-core"]["status"] == "ok"
    import torch

    assert (found["CUDA"]["status"] == "ok") == torch.cuda.is_available()
    assert (found["ranks over gloo"]["status"] == "ok") == torch.distributed.is_gloo_available()


def test_env_text_has_every_finding_under_its_heading(capsys):
    code, out, _ = run(capsys, "env")
    assert code == 0
    for heading in ("machine", "packages", "devices", "what runs", "environment"):
        assert f"\n{heading}\n" in f"\n{out}"
    for finding in environment.collect():
        assert finding.name in out


@pytest.mark.parametrize(
    ("missing", "name", "status", "fix"),
    [
        ("torch", "attention", "missing", "pip install torch"),
        ("magi_core", "host library", "missing", "pip install magi-attention"),
        ("tvm_ffi", "host library", "broken", "reinstall magi-core"),
        ("matplotlib", "matplotlib", "missing", "magi-attention[draw]"),
        ("triton", "triton", "missing", "magi-attention[triton]"),
        ("magi_triton", "Triton operators", "missing", "magi-attention[triton]"),
        ("magi_comm", "magi-comm", "missing", "pip install magi-attention"),
        ("magi_attn_extensions", "magi-extensions", "missing", "magi-attention[extensions]"),
    ],
)
def test_env_works_without(missing, name, status, fix):
    done = process(f"import sys; sys.modules[{missing!r}] = None\n{ENV_JSON}")
    assert done.returncode == 0, done.stderr
    row = findings(done.stdout)[name]
    assert row["status"] == status, row
    assert fix in row["fix"]


def test_env_reports_a_broken_library_and_another_version(capsys, monkeypatch, tmp_path):
    from magi_core import _host

    broken = tmp_path / "libmagi_core_host.so"
    broken.write_text("not a library")
    monkeypatch.setattr(_host, "LIBRARY_PATH", broken)
    _host.lib.cache_clear()
    try:
        found = findings(run(capsys, "env", "--json")[1])
    finally:
        _host.lib.cache_clear()
    assert found["host library"]["status"] == "broken"
    assert str(broken) in found["host library"]["detail"]
    assert found["attention"]["status"] == "broken"
    monkeypatch.setattr(environment, "__version__", "9.9.9")
    row = findings(run(capsys, "env", "--json")[1])["magi-core"]
    assert (row["status"], row["fix"]) == ("broken", "pip install magi-core==9.9.9")


def test_env_names_the_variables_that_are_set(capsys, monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_DETERMINISTIC_MODE", "1")
    monkeypatch.setenv("MAGI_ATTENTION_QO_COMM", "1")
    monkeypatch.setenv("MAGI_ATTENTION_NO_SUCH", "1")
    found = findings(run(capsys, "env", "--json")[1])
    assert found["MAGI_ATTENTION_DETERMINISTIC_MODE"]["status"] == "ok"
    assert "has no effect here" in found["MAGI_ATTENTION_QO_COMM"]["detail"]
    assert found["MAGI_ATTENTION_NO_SUCH"]["status"] == "broken"
    monkeypatch.setenv("MAGI_ATTENTION_PRECISION", "fp8")
    row = findings(run(capsys, "env", "--json")[1])["variables"]
    assert row["status"] == "broken"
    assert "MAGI_ATTENTION_PRECISION must be one of" in row["detail"]


def test_env_lists_all_variables(capsys):
    _, text, _ = run(capsys, "env", "--variables")
    _, rows, _ = run(capsys, "env", "--variables", "--json")
    assert [row["name"] for row in json.loads(rows)] == [variable.name for variable in env.VARIABLES]
    assert all(variable.name in text and variable.meaning in text for variable in env.VARIABLES)


def plan_json(capsys, *argv: str) -> dict:
    code, out, err = run(capsys, "plan", *argv, "--json")
    assert code == 0, err
    return json.loads(out)


def test_plan_is_the_plan_a_key_makes(capsys):
    from magi_attention.api import dist_attn_runtime_dict_mgr, magi_attn_flex_key
    from magi_attention.config import DispatchConfig, DistAttnConfig, OverlapConfig
    from magi_comm.testing import ThreadWorld

    mask = Mask.documents([70, 3, 127], causal=True)
    config = DistAttnConfig(DispatchConfig(chunk_size=16), OverlapConfig(degree=2, min_chunk_size=8))

    def digest(comm) -> int:
        key = magi_attn_flex_key(mask, None, None, 200, 200, 4, 2, 16, 0, comm, config)
        return dist_attn_runtime_dict_mgr.get(key).dist_plan.digest

    expected = ThreadWorld(4).run(digest)
    report = plan_json(
        capsys, "documents", "-p", "lengths=[70,3,127]", "-p", "causal=True", "--world-size", "4",
        "--chunk-size", "16", "--degree", "2", "--min-chunk-size", "8",
    )  # fmt: skip
    assert expected == [report["digest"]] * 4
    assert report["area"] == mask.area() == sum(report["areas"])
    assert report["chunk_size"] == 7  # ceil(200 / (8 * 4)), below the configured 16


def test_one_mask_in_every_spelling_gives_one_plan(capsys, tmp_path, monkeypatch):
    world = ("--world-size", "3")
    digests = {plan_json(capsys, "documents", "-p", "lengths=[10,20]", "-p", "causal=True", *world)["digest"]}
    digests.add(plan_json(capsys, "--cu-seqlens", "0,10,30", "--causal", *world)["digest"])
    digests.add(plan_json(capsys, "--cu-seqlens", "0,10,30", "--cu-seqlens-k", "0,10,30", "--causal", *world)["digest"])
    digests.add(plan_json(capsys, "--cu-seqlens", "0,10,30", "--window=-1,0", *world)["digest"])
    path = tmp_path / "slices.json"
    for spec in (
        [[0, 10, 0, 10, "causal"], [10, 30, 10, 30, 1]],
        {"slices": [[0, 10, 0, 10, "causal"], [10, 30, 10, 30, "causal"]], "total_q": 30, "total_k": 30},
        {"q_ranges": [[0, 10], [10, 30]], "k_ranges": [[0, 10], [10, 30]], "mask_types": "causal"},
        {"q_ranges": [[0, 10], [10, 30]], "k_ranges": [[0, 10], [10, 30]], "mask_types": [1, "causal"]},
    ):
        path.write_text(json.dumps(spec))
        digests.add(plan_json(capsys, "--slices", str(path), *world)["digest"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(path.read_text()))
    digests.add(plan_json(capsys, "--slices", "-", *world)["digest"])
    assert len(digests) == 1


def test_plan_counts_bytes_and_takes_every_option(capsys):
    base = ("causal", "-p", "total_q=512", "--world-size", "4")
    report = plan_json(capsys, *base, "--num-heads-kv", "3", "--head-dim", "5", "--head-dim-v", "7", "--dtype", "fp32")
    assert report["bytes_per_token"] == 3 * (5 + 7) * 4
    assert sum(report["areas"]) == 512 * 513 // 2
    assert report["balance"] == pytest.approx(4 * max(report["areas"]) / sum(report["areas"]))
    assert plan_json(capsys, *base, "--degree", "0")["blocking"]
    assert plan_json(capsys, *base, "--degree", "3", "--min-chunk-size", "16")["num_stages"] == 3
    assert plan_json(capsys, *base, "--degree", "auto")["num_stages"] >= 1
    sequential = plan_json(capsys, *base, "--alg", "sequential_select", "--uneven-shard")
    assert sequential["balance"] > 1.5  # contiguous blocks of a causal mask
    assert plan_json(capsys, *base, "--world-size", "1")["received"] == [0]
    cross = plan_json(capsys, "full", "-p", "total_q=7", "-p", "total_k=5", "--world-size", "3")
    assert sum(cross["areas"]) == 35


def test_plan_prints_a_table_and_a_picture(capsys, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "mask.png"
    code, out, err = run(
        capsys, "plan", "causal", "-p", "total_q=64", "--world-size", "2", "--height", "8", "--width", "8",
        "--verify", "--png", str(path),
    )  # fmt: skip
    assert code == 0
    assert "64 x 64, 2080 visible pairs, 50.78 % of all" in out
    assert "balance (largest area / mean)" in out
    assert "verified" in out
    picture = out.splitlines()[-8:]
    for row, line in enumerate(picture):
        assert line[row + 1 :] == "." * (7 - row)  # above the diagonal nothing is visible
        assert set(line[: row + 1]) < {"0", "1"}
    assert str(path) in err
    pixels = image.imread(path)
    assert pixels.shape[0] == pixels.shape[1] >= 512
    assert np.array_equal(pixels[0, -1, :3], [1, 1, 1])
    assert not np.array_equal(pixels[-1, 0, :3], [1, 1, 1])
    assert "." * 8 not in run(capsys, "plan", "causal", "-p", "total_q=64", "--world-size", "2", "--no-text")[1]


def test_plan_of_nothing(capsys):
    report = plan_json(capsys, "--cu-seqlens", "0", "--world-size", "3")
    assert report["areas"] == [0, 0, 0]
    code, _, err = run(capsys, "plan", "--cu-seqlens", "0", "--world-size", "3", "--png", "x.png")
    assert (code, "has no picture" in err) == (2, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required"),
        (["plans"], "invalid choice: 'plans'"),
        (["plan", "causal", "-p", "total_q=8"], "--world-size"),
        (["plan", "--world-size", "2"], "exactly one mask must be given"),
        (["plan", "causal", "--cu-seqlens", "0,8", "--world-size", "2"], "got mask and cu_seqlens"),
        (["plan", "casual", "--world-size", "2"], "invalid choice: 'casual'"),
        (["plan", "causal", "--world-size", "2"], "causal(total_q, total_k=None): missing a required"),
        (["plan", "causal", "-p", "total=8", "--world-size", "2"], "missing a required argument"),
        (["plan", "causal", "-p", "total_q=8", "-p", "x=1", "--world-size", "2"], "unexpected keyword argument 'x'"),
        (["plan", "causal", "-p", "total_q", "--world-size", "2"], "a parameter must be NAME=VALUE"),
        (["plan", "causal", "-p", "total_q=1", "-p", "total_q=2", "--world-size", "2"], "total_q must be given once"),
        (["plan", "causal", "-p", "total_q=-8", "--world-size", "2"], "-8"),
        (["plan", "causal", "-p", "total_q=8", "--world-size", "0"], "--world-size must be at least 1, got 0"),
        (["plan", "causal", "-p", "total_q=8", "--world-size", "two"], "invalid int value: 'two'"),
        (["plan", "causal", "-p", "total_q=8", "--world-size", "2", "--degree", "many"], "--degree must be an integer"),
        (["plan", "causal", "-p", "total_q=8", "--world-size", "2", "--degree=-1"], "degree must be at least 0"),
        (["plan", "causal", "-p", "total_q=8", "--world-size", "2", "--alg", "best"], "--alg must be one of"),
        (["plan", "causal", "-p", "total_q=8", "--world-size", "2", "--chunk-size", "0"], "chunk_size must be at"),
        (["plan", "causal", "-p", "total_q=8", "--world-size", "2", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["plan", "causal", "-p", "total_q=8", "--world-size", "2", "--causal"], "belong to --cu-seqlens"),
        (["plan", "--cu-seqlens", "0,8", "-p", "x=1", "--world-size", "2"], "-p/--param belongs to a builder's name"),
        (["plan", "--cu-seqlens", "0,a", "--world-size", "2"], "--cu-seqlens must be integers"),
        (["plan", "--cu-seqlens", "1,8", "--world-size", "2"], "cu_seqlens_q must start at 0"),
        (["plan", "--cu-seqlens", "0,8", "--window", "1", "--world-size", "2"], "--window must be LEFT,RIGHT"),
        (["plan", "--cu-seqlens", "0,8", "--window=-3,0", "--world-size", "2"], "window_size"),
        (["plan", "--slices", "missing.json", "--world-size", "2"], "--slices missing.json: No such file"),
    ],
)  # fmt: skip
def test_a_wrong_argument_ends_with_2_and_says_why(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("3", "must hold an object or a list, got int"),
        ("[[0, 8, 0]]", "every slice must be [q_start, q_end, k_start, k_end]"),
        ('{"total_q": 3}', "must have slices, or q_ranges and k_ranges"),
        ('{"slice": []}', "unknown field 'slice'"),
        ('[[0, 8, 0, 8, "casual"]]', "'casual'"),
        ('{"slices": [[0, 8, 0, 8]], "total_q": 4}', "total_q"),
        ('[[8, 0, 0, 8]]', "8"),
        ('[["a", 8, 0, 8]]', "--slices"),
        ('[[0, 8, 0, 8], [4, 6, 2, 3]]', "slices"),
    ],
)  # fmt: skip
def test_wrong_slices_end_with_2_and_say_why(text, message, capsys, tmp_path):
    path = tmp_path / "slices.json"
    path.write_text(text)
    code, out, err = run(capsys, "plan", "--slices", str(path), "--world-size", "2")
    assert code == 2
    assert message in err
    assert out == ""


def test_overlap_is_planned_when_asked_for(capsys, tmp_path):
    path = tmp_path / "slices.json"
    path.write_text("[[0, 8, 0, 8], [4, 6, 2, 3]]")
    report = plan_json(capsys, "--slices", str(path), "--world-size", "2", "--allow-overlap")
    assert sum(report["areas"]) == 66


def test_python_m_runs_and_closed_pipes_are_quiet():
    done = subprocess.run(
        [sys.executable, "-m", "magi_attention", "--version"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stdout.startswith("magi-attention ")
    piped = process(
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'magi_attention', 'env', '--variables'],"
        " stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "p.stdout.close(); print(p.stderr.read().decode())"
    )
    assert "Traceback" not in piped.stdout
