"""Importing needs nothing: no GPU, no compiler, no optional package, no home to write to; and costs little.

Each case is a process of its own, with a clean environment. Contract item 15, handed case 20.
"""

import json
import os
import subprocess
import sys

import pytest

PACKAGES = {
    # package: modules whose import must also succeed bare
    "magi_core": (
        "magi_core.ranges",
        "magi_core.mask",
        "magi_core.planner",
        "magi_core.flex_attn",
        "magi_core.testing",
    ),
    "magi_comm": ("magi_comm.groups", "magi_comm.range_ops", "magi_comm.testing"),
    "magi_attention": (
        "magi_attention.api",
        "magi_attention.common",
        "magi_attention.common.enum",
        "magi_attention.config",
        "magi_attention.env",
        "magi_attention.functional",
        "magi_attention.functional.utils",
        "magi_attention.utils",
        "magi_attention.cli",
        "magi_attention.drawing",
    ),
    "magi_triton": (),
    "magi_attn_extensions": (),
}
NO_TORCH = ("magi_core", "magi_attention", "magi_attention.config", "magi_attention.common.enum", "magi_attention.env",
            "magi_attention.cli", "magi_core.ranges", "magi_core.planner", "magi_attention.drawing")  # fmt: skip
OPTIONAL = ("triton", "matplotlib", "flash_attn", "flash_attn_interface", "magi_triton", "magi_attn_extensions")


def _is_installed(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


@pytest.fixture
def bare(tmp_path):
    """Run Python code without GPU, compilers, caches, a home, or any variable of ours; gives what it prints."""
    home = tmp_path / "home"
    home.mkdir()
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    environment = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "LANG") if name in os.environ}
    environment |= {
        "HOME": str(home / "missing"),  # root writes into read-only folders, nobody into one that cannot exist
        "XDG_CACHE_HOME": str(home / "file" / "cache"),
        "PATH": "",
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(scratch),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    (home / "file").write_text("in the way of every folder below it")
    home.chmod(0o555)

    def run(code: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "error::UserWarning", "-c", code],
            env=environment | more,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in home.iterdir()) == ["file"], "something was written into the home"
        return done.stdout

    yield run
    home.chmod(0o755)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_and_its_modules_import_bare(package, bare):
    if not _is_installed(package):
        pytest.skip(f"{package} is not installed")
    modules = [package, *PACKAGES[package]]
    out = bare(
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(json.dumps([name for name in {OPTIONAL!r} if name in sys.modules]))"
    )
    assert set(json.loads(out)) <= {package}, "an optional package was imported"


def test_names_are_listed_and_unknown_ones_refused(bare):
    out = bare(
        "import magi_attention, magi_attention.functional as f, magi_attention.common as c, magi_attention.utils as u\n"
        "assert 'explain' in dir(magi_attention) and 'dist_attn_func' in dir(f) and 'AttnRanges' in dir(c)\n"
        "for module in (magi_attention, f, c, u):\n"
        "    try: module.no_such_name\n"
        "    except AttributeError as error: assert module.__name__ in str(error) and 'no_such_name' in str(error)\n"
        "    else: raise SystemExit(module.__name__)\n"
        "print(magi_attention.__version__)"
    )
    import magi_attention

    assert out.strip() == magi_attention.__version__


def test_light_modules_import_without_torch(bare):
    bare("import importlib, sys\nsys.modules['torch'] = None\n" + "".join(f"import {module}\n" for module in NO_TORCH))


@pytest.mark.parametrize("missing", ["triton", "matplotlib"])
def test_an_optional_package_may_be_missing(missing, bare):
    extra = {"triton": "triton", "matplotlib": "draw"}[missing]
    use = {
        "triton": "magi_attention.utils.to_triton_dtype(torch.float32)",
        "matplotlib": "magi_attention.utils.vis_matrix(torch.zeros(2, 2))",
    }[missing]
    bare(
        f"import sys\nsys.modules[{missing!r}] = None\nimport torch, magi_attention.api, magi_attention.utils\n"
        f"try: {use}\n"
        f"except ImportError as error: assert 'magi-attention[{extra}]' in str(error), error\n"
        "else: raise SystemExit('used what is missing')"
    )


def test_triton_without_a_driver_does_not_matter(bare):
    if not _is_installed("triton"):
        pytest.skip("triton is not installed")
    bare(
        "import triton, torch, magi_attention.api as api\n"
        "q = torch.randn(8, 2, 16)\n"
        "ranges = torch.tensor([[0, 8]], dtype=torch.int32)\n"
        "out, meta = api.flex_flash_attn_func(q, q, q, ranges, ranges, torch.ones(1, dtype=torch.int32))\n"
        "assert out.isfinite().all() and meta.lse.shape == (8, 2)"
    )


def test_the_environment_is_not_read_at_import(bare):
    bare("import magi_attention.api", MAGI_ATTENTION_KERNEL_BACKEND="no such backend", MAGI_ATTENTION_UNKNOWN="1")


def test_import_loads_no_array_library(bare):
    """What makes an import slow is what it brings along: nothing heavy before first use."""
    loaded = bare(
        "import sys, magi_attention, magi_attention.config\nprint('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert loaded.split() == ["False", "False"]
