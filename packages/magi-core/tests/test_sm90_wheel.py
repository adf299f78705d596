"""The sm90 arch wheel: built from source, unpacked, loaded without a GPU, refused when its version differs."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = ROOT / "packages" / "magi-core" / "arch" / "sm90"
VERSION = (ROOT / "VERSION").read_text().strip()
EXPORTS = (
    *("magi_version", "magi_plan_format", "attn_fwd", "attn_bwd_prepare", "attn_bwd"),
    *("dq_convert", "dq_workspace_words"),
)


def _site_with_wheel(folder: Path) -> Path:
    """A folder with the wheel unpacked: a wheel from ``MAGI_TEST_WHEELS`` or ``dist/``, else one built here."""
    pytest.importorskip("tvm_ffi")
    places = (Path(os.environ.get("MAGI_TEST_WHEELS", ROOT / "dist")),)
    wheels = [wheel for place in places for wheel in sorted(place.glob(f"magi_core_sm90-{VERSION}-py3-none-*.whl"))]
    if not wheels:
        if shutil.which("nvcc") is None or importlib.util.find_spec("scikit_build_core") is None:
            pytest.skip("no built wheel in dist/, and nvcc or scikit-build-core to build one is missing")
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder)]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run(
            [*command, "-C", "cmake.define.MAGI_SM90_KERNELS=ci", "-C", f"build-dir={folder / 'build'}", str(PROJECT)],
            check=True,
            env=environment,
        )
        wheels = sorted(folder.glob("*.whl"))
    assert len(wheels) == 1, wheels
    site = folder / "site"
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(site)
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _site_with_wheel(tmp_path_factory.mktemp("sm90"))


def _run(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that sees the unpacked wheel first."""
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_wheel_is_python_and_torch_free(site: Path) -> None:
    metadata = next(site.glob("magi_core_sm90-*.dist-info"))
    assert f"\nVersion: {VERSION}\n" in (metadata / "METADATA").read_text()
    assert "sm90 = magi_core_sm90" in (metadata / "entry_points.txt").read_text()
    assert "Tag: py3-none-" in (metadata / "WHEEL").read_text()
    needed = subprocess.run(
        ["readelf", "-d", str(site / "magi_core_sm90" / "libmagi_core_sm90.so")],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    if not needed:
        pytest.skip("readelf is missing")
    libraries = [line.split("[")[1].rstrip("]") for line in needed.splitlines() if "(NEEDED)" in line]
    assert any(name.startswith("libtvm_ffi") for name in libraries)
    assert not [name for name in libraries if name.startswith(("libtorch", "libc10", "libpython", "libcuda"))], (
        libraries
    )


def test_loads_without_gpu_and_exports_its_functions(site: Path) -> None:
    done = _run(
        site,
        "import magi_core_sm90 as m\n"
        f"library = m.load()\nfor name in {EXPORTS!r}: library[name]\n"
        "print(m.__version__, library['magi_version'](), library['magi_plan_format']() == m.PLAN_FORMAT)",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [VERSION, VERSION, "True"]


def test_found_by_entry_point(site: Path) -> None:
    done = _run(
        site,
        "from importlib.metadata import entry_points\n"
        "points = [p for p in entry_points(group='magi_core.arch') if p.name == 'sm90']\n"
        "print(points[0].load().COMPUTE_CAPABILITIES)",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "((9, 0),)"


def test_library_of_another_version_is_refused(site: Path, tmp_path: Path) -> None:
    """A library left over from another release (here: the metadata moved on) must not serve."""
    other = tmp_path / "site"
    shutil.copytree(site, other)
    metadata = next(other.glob("magi_core_sm90-*.dist-info"))
    text = (metadata / "METADATA").read_text().replace(f"Version: {VERSION}", "Version: 99.0.0")
    (metadata / "METADATA").write_text(text)
    done = _run(other, "import magi_core_sm90 as m\nm.load()")
    assert done.returncode != 0
    assert "ImportError" in done.stderr and f"is version {VERSION}" in done.stderr and "99.0.0" in done.stderr


def test_core_refuses_wheel_of_another_version(site: Path, tmp_path: Path) -> None:
    pytest.importorskip("magi_core")
    other = tmp_path / "site"
    shutil.copytree(site, other)
    metadata = next(other.glob("magi_core_sm90-*.dist-info"))
    text = (metadata / "METADATA").read_text().replace(f"Version: {VERSION}", "Version: 99.0.0")
    (metadata / "METADATA").write_text(text)
    code = (
        "from magi_core.backends import arch\n"
        "try: arch.load_arch('sm90')\n"
        "except arch.ArchNotInstalledError as error: print(error)"
    )
    done = _run(other, code)
    assert done.returncode == 0, done.stderr
    assert "magi-core-sm90 99.0.0 does not fit" in done.stdout and "magi-core[sm90]" in done.stdout
    loaded = _run(site, "from magi_core.backends import arch\nprint(arch.load_arch('sm90').has('attn_bwd_prepare'))")
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.strip() == "True"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ("delta, half, half, lse, None", "ValueError", "out must be on a CUDA device"),
        ("delta, half.float(), half.float(), lse, None", "NotImplementedError", 'backend="reference"'),
        ("delta, half[:2], half, lse, None", "ValueError", "dout must have the shape of out"),
        ("delta, half, half, lse.double(), None", "TypeError", "lse must be float32, got float64"),
        ("delta, half, half, lse[:, :1], None", "ValueError", "lse must have shape (total_q, num_heads_q)"),
    ],
)
def test_bad_arguments_of_prepare(site: Path, arguments: str, error: str, words: str) -> None:
    pytest.importorskip("torch")
    done = _run(
        site,
        "import magi_core_sm90, torch\n"
        "half, lse, delta = torch.ones(3, 2, 64).half(), torch.ones(3, 2), torch.ones(3, 2)\n"
        f"try: magi_core_sm90.load()['attn_bwd_prepare']({arguments})\n"
        "except Exception as error: print(type(error).__name__, error)",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(error) and words in done.stdout, done.stdout
