"""The environment: the set of names is frozen, every value is read once, and nothing is silently ignored."""

import ast
import os
import warnings
from pathlib import Path

import pytest
from magi_attention import env
from magi_attention.common.enum import MagiAttentionKernelBackend, MagiAttentionPrecision
from magi_attention.env import reader
from magi_attention.env.table import PREFIX, Status

REPOSITORY = Path(__file__).resolve().parents[3]
PACKAGE = Path(env.__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """No variable of ours, no snapshot and no memory of warnings; as it was afterwards."""
    for name in env.variables_set():
        monkeypatch.delenv(name)
    monkeypatch.setattr(reader, "_current", None)
    monkeypatch.setattr(reader, "_warned", set())


def reference_names() -> set[str]:
    lines = (REPOSITORY / "tests/data/env_names.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_the_table_has_every_public_name_and_no_other():
    names = reference_names()
    assert len(names) == 60
    for name in names:
        assert env.find(name) is not None, f"{name} of the reference is not in the table"
    for variable in env.VARIABLES:
        stem = variable.name.rstrip("*")
        assert any(name.startswith(stem) if "*" in variable.name else name == stem for name in names), variable.name
    assert len({variable.name for variable in env.VARIABLES}) == len(env.VARIABLES)


def test_the_table_is_the_one_in_ci():
    tomllib = pytest.importorskip("tomllib")
    rows = tomllib.loads((REPOSITORY / "ci/env_table.toml").read_text())["variable"]
    in_file = {row["name"]: (row["status"], row.get("default", ""), row["meaning"]) for row in rows}
    in_code = {v.name: (v.status.value, v.default, v.meaning) for v in env.VARIABLES}
    assert len(rows) == len(in_file)
    assert in_file == in_code


def test_at_most_twelve_are_honoured_and_each_is_a_field():
    honoured = [v.name for v in env.VARIABLES if v.status is Status.HONOURED]
    assert len(honoured) <= 12
    fields = {PREFIX + name.upper() for name in reader._PARSERS}
    assert fields == {name for name in honoured if not name.endswith("*")}
    assert set(reader._PARSERS) == set(env.EnvSnapshot.__dataclass_fields__)


def test_defaults_of_the_table_are_those_of_an_empty_environment():
    defaults = {v.name: v.default for v in env.VARIABLES if v.status is Status.HONOURED and v.default}
    assert env.parse(defaults) == (env.EnvSnapshot(), {})
    assert env.parse({}) == (env.EnvSnapshot(), {})


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("KERNEL_BACKEND", "sdpa_ol", "kernel_backend", MagiAttentionKernelBackend.SDPA_OL),
        ("KERNEL_BACKEND", "SDPA", "kernel_backend", MagiAttentionKernelBackend.SDPA),
        ("PRECISION", "fp64", "precision", MagiAttentionPrecision.FP64),
        ("DETERMINISTIC_MODE", "1", "deterministic_mode", True),
        ("SANITY_CHECK", "true", "sanity_check", True),
        ("PROFILE_MODE", "on", "profile_mode", True),
        ("MIN_CHUNKS_PER_RANK", "3", "min_chunks_per_rank", 3),
        ("DIST_ATTN_RUNTIME_DICT_SIZE", "-1", "dist_attn_runtime_dict_size", -1),
        ("FFA_FORWARD_SM_MARGIN", "0", "ffa_forward_sm_margin", 0),
        ("FFA_BACKWARD_SM_MARGIN", "16", "ffa_backward_sm_margin", 16),
        ("DSINK_ALL_REDUCE_OP", "avg", "dsink_all_reduce_op", "avg"),
        ("LOG_LEVEL", "warn", "log_level", "WARNING"),
        ("LOG_LEVEL", "DEBUG", "log_level", "DEBUG"),
    ],
)
def test_a_honoured_variable_sets_its_field(name, text, field, value):
    snapshot, remarks = env.parse({PREFIX + name: text})
    assert getattr(snapshot, field) == value
    assert remarks == {}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("KERNEL_BACKEND", "cudnn", "must be one of ffa, sdpa, sdpa_ol, fa4, got 'cudnn'"),
        ("PRECISION", "fp8", "must be one of bf16, fp16, fp32, fp64, got 'fp8'"),
        ("DETERMINISTIC_MODE", "2", "must be 0 or 1, got '2'"),
        ("SDPA_BACKEND", "maybe", "must be 0 or 1, got 'maybe'"),
        ("MIN_CHUNKS_PER_RANK", "0", "must be at least 1, got 0"),
        ("MIN_CHUNKS_PER_RANK", "8.5", "must be an integer, got '8.5'"),
        ("FFA_FORWARD_SM_MARGIN", "-1", "must be at least 0, got -1"),
        ("DSINK_ALL_REDUCE_OP", "max", "must be one of none, sum, avg, got 'max'"),
        ("LOG_LEVEL", "LOUD", "must be a level of logging"),
    ],
)
def test_a_value_that_cannot_be_read_is_a_value_error_naming_the_variable(name, text, message):
    with pytest.raises(ValueError, match=message) as error:
        env.parse({PREFIX + name: text})
    assert PREFIX + name in str(error.value)


def test_old_names_of_the_backend_are_mapped_with_a_remark():
    for name, backend in (("SDPA_BACKEND", "sdpa"), ("FA4_BACKEND", "fa4")):
        snapshot, remarks = env.parse({PREFIX + name: "1"})
        assert snapshot.kernel_backend.value == backend
        assert f"MAGI_ATTENTION_KERNEL_BACKEND={backend}" in remarks[PREFIX + name]
    agreeing, _ = env.parse({PREFIX + "SDPA_BACKEND": "1", PREFIX + "KERNEL_BACKEND": "sdpa"})
    assert agreeing.kernel_backend is MagiAttentionKernelBackend.SDPA
    for other in ({"KERNEL_BACKEND": "ffa"}, {"FA4_BACKEND": "1"}):
        with pytest.raises(ValueError, match="must be chosen once"):
            env.parse({PREFIX + "SDPA_BACKEND": "1"} | {PREFIX + name: text for name, text in other.items()})


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda v: v.name)
def test_setting_any_variable_warns_exactly_as_its_status_says(variable, monkeypatch):
    name = variable.name.replace("*", "WORLD_SIZE")
    monkeypatch.setenv(name, variable.default or ("bf16" if name.endswith("PRECISION") else "1"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env.snapshot()
        env.reload()  # once per process, not per reading
    expected = 1 if variable.status in (Status.MAPPED, Status.NO_EFFECT) else 0
    assert [w.category for w in caught] == [env.EnvWarning] * expected
    assert all(name in str(w.message) for w in caught)


def test_an_unknown_name_with_our_prefix_warns_once(monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKND", "sdpa")
    with pytest.warns(env.EnvWarning, match="MAGI_ATTENTION_KERNEL_BACKND is not a variable of magi_attention"):
        env.snapshot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.reload()


def test_an_empty_value_is_unset(monkeypatch):
    monkeypatch.setenv("MAGI_ATTENTION_KERNEL_BACKEND", "")
    monkeypatch.setenv("MAGI_ATTENTION_QO_COMM", " ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert env.snapshot() == env.EnvSnapshot()


def test_read_once_until_reload(monkeypatch):
    before = env.snapshot()
    monkeypatch.setenv("MAGI_ATTENTION_MIN_CHUNKS_PER_RANK", "5")
    assert env.snapshot() is before
    assert env.min_chunks_per_rank() == 8
    assert env.reload().min_chunks_per_rank == 5
    assert env.min_chunks_per_rank() == 5


def test_snapshots_compare_by_behaviour_and_hash():
    base = env.EnvSnapshot()
    changes = dict(
        kernel_backend=MagiAttentionKernelBackend.SDPA, precision=MagiAttentionPrecision.FP32, deterministic_mode=True,
        sanity_check=True, min_chunks_per_rank=2, ffa_forward_sm_margin=0, ffa_backward_sm_margin=0,
        dsink_all_reduce_op="sum",
    )  # fmt: skip
    for name, value in changes.items():
        changed = env.EnvSnapshot(**{name: value})
        assert changed != base, name
        assert {changed: 1}[env.EnvSnapshot(**{name: value})] == 1
    for name, value in dict(log_level="DEBUG", dist_attn_runtime_dict_size=3, profile_mode=True).items():
        assert env.EnvSnapshot(**{name: value}) == base
        assert hash(env.EnvSnapshot(**{name: value})) == hash(base)


def test_override_is_undone_and_refuses_unknown_fields():
    with env.override(deterministic_mode=True, kernel_backend=MagiAttentionKernelBackend.SDPA) as inside:
        assert env.snapshot() is inside
        assert env.is_deterministic_mode_enable()
        assert env.is_sdpa_backend_enable()
        assert inside.core_backend == "reference"
    assert not env.is_deterministic_mode_enable()
    assert env.snapshot().core_backend is None
    with pytest.raises(TypeError), env.override(determinstic_mode=True):
        pass
    with pytest.raises(RuntimeError, match="inside"), env.override(sanity_check=True):
        raise RuntimeError("inside")
    assert not env.is_sanity_check_enable()


def test_public_functions_say_what_is_in_force():
    assert env.kernel_backend() is MagiAttentionKernelBackend.FFA
    assert env.precision() is None
    assert env.log_level() == "WARNING"
    assert env.dist_attn_runtime_dict_size() == 1000
    assert env.comm.dsink_all_reduce_op() == "none"
    assert (env.comm.ffa_fwd_sm_margin_save_for_comm(), env.comm.ffa_bwd_sm_margin_save_for_comm()) == (4, 4)
    assert env.general.is_cpp_backend_enable()
    assert not env.comm.is_qo_comm_enable()


def test_the_log_level_configures_our_logger_only_when_set(monkeypatch):
    import logging

    logger = logging.getLogger("magi_attention")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    monkeypatch.setattr(reader, "_handler", None)
    env.snapshot()
    assert (logger.level, logger.handlers) == (logging.NOTSET, [])
    monkeypatch.setenv("MAGI_ATTENTION_LOG_LEVEL", "debug")
    env.reload()
    env.reload()
    assert logger.level == logging.DEBUG
    assert len(logger.handlers) == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1, 0, 1, 1, False)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"},
         (3, 4, 1, 2, 2, True)),
        ({"RANK": "5", "WORLD_SIZE": "8", "NNODES": "2", "NPROC_PER_NODE": "4"}, (5, 8, 1, 4, 2, False)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1, 2, 1, False)),
    ],
)  # fmt: skip
def test_launch_reads_torchrun(variables, expected, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "NNODES", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    got = env.launch()
    assert (
        got.rank, got.world_size, got.local_rank, got.num_local_ranks, got.num_nodes, got.has_address
    ) == expected  # fmt: skip


def test_launch_refuses_a_rank_outside_its_world(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match="RANK must be below WORLD_SIZE=2, got 2"):
        env.launch()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ValueError, match="RANK must be an integer, got 'one'"):
        env.launch()


def _reads_environment(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in ("environ", "getenv", "environb") for alias in node.names):
                return True
    return False


def test_only_one_module_reads_the_environment():
    readers = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if _reads_environment(ast.parse(path.read_text()))
    ]
    assert readers == [os.path.join("env", "reader.py")]
