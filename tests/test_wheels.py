"""The wheels of `dist/`: tags, sizes, needed libraries; they install into a bare environment, load and match."""

import json
import os
import re
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

try:
    import tomllib
except ImportError:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
VERSION = (ROOT / "VERSION").read_text().strip()
WHEELS = tomllib.loads((ROOT / "ci" / "wheels.toml").read_text())
NATIVE = {name: facts for name, facts in WHEELS.items() if facts["libraries"]}
# What a native wheel may need besides itself: the C and C++ runtimes, and tvm-ffi, which is a requirement of its own.
ALLOWED = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|tvm_ffi)\.so(\.\d+)?|ld-linux-x86-64\.so\.2)")


@pytest.fixture(scope="session")
def dist() -> Path:
    named = os.environ.get("MAGI_TEST_DIST")
    folder = Path(named) if named else ROOT / "dist"
    if not named and not all(list(folder.glob(f"{name.replace('-', '_')}-[0-9]*.whl")) for name in WHEELS):
        pytest.skip("dist/ lacks wheels: `nox -s wheels` builds and tests them")
    return folder


def wheel_of(dist: Path, name: str) -> Path:
    (wheel,) = dist.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    return wheel


@pytest.mark.parametrize("name", WHEELS)
def test_tag_and_size(dist, name):
    wheel = wheel_of(dist, name)
    project, version, python, abi, platform = wheel.stem.split("-")
    assert (project, version) == (name.replace("-", "_"), VERSION)
    assert f"{python}-{abi}-{platform}".startswith(WHEELS[name]["tag"])
    assert wheel.stat().st_size <= WHEELS[name]["max_mib"] * 2**20, f"{wheel.name} is over its budget in ci/wheels.toml"


@pytest.mark.parametrize("name", WHEELS)
def test_holds_only_its_own_package_and_types(dist, name):
    with zipfile.ZipFile(wheel_of(dist, name)) as archive:
        names = archive.namelist()
    tops = {entry.split("/")[0] for entry in names}
    packages = {top for top in tops if not top.endswith((".dist-info", ".libs"))}
    assert len(packages) == 1
    assert f"{packages.pop()}/py.typed" in names or name.startswith("magi-core-")
    assert not [entry for entry in names if "/tests/" in entry or entry.endswith((".pyc", ".cu", ".cc"))]
    assert {entry for entry in names if entry.endswith(".so")} == set(WHEELS[name]["libraries"])


@pytest.mark.parametrize("name", NATIVE)
def test_library_needs_neither_torch_nor_python_nor_cuda(dist, name):
    from elftools.elf.elffile import ELFFile

    with zipfile.ZipFile(wheel_of(dist, name)) as archive:
        for entry in NATIVE[name]["libraries"]:
            elf = ELFFile(BytesIO(archive.read(entry)))
            needed = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
            assert [library for library in needed if not ALLOWED.fullmatch(library)] == []
            symbols = [
                symbol
                for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
                if symbol.entry.st_shndx != "SHN_UNDEF"
            ]
            exported = {symbol.name for symbol in symbols}
            assert any(symbol.startswith("__tvm_ffi_") for symbol in exported)
            ours = {symbol for symbol in exported if re.match(r"_ZN[KVR]*4magi", symbol)}
            assert not ours, f"{entry} exports C++ symbols of ours: {sorted(ours)[:5]}"


@pytest.fixture(scope="session")
def bare(dist, tmp_path_factory) -> Path:
    """A fresh environment with every wheel and what they need at import: numpy and tvm-ffi, and no torch."""
    at = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(at)], check=True)
    python = at / "bin" / "python"
    constraints = str(ROOT / "ci" / "constraints.txt")
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "-c", constraints, "numpy", "apache-tvm-ffi"], check=True)
    subprocess.run([*pip, "--no-deps", *(str(wheel_of(dist, name)) for name in WHEELS)], check=True)
    return python


def run(python: Path, program: str) -> str:
    """Run a program away from the source tree, where only installed packages can be found."""
    result = subprocess.run([str(python), "-I", "-c", program], cwd="/", capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_host_library_loads_and_plans_without_torch(bare):
    program = """
import sys, json
import magi_core
from magi_core import _host
from magi_core.bands import Bands
area = Bands.from_slices([[0, 8]], [[0, 8]], [1]).area()
assert "torch" not in sys.modules
print(json.dumps([magi_core.__version__, str(_host.LIBRARY_PATH), int(area)]))
"""
    version, path, area = json.loads(run(bare, program))
    assert version == VERSION
    assert str(bare.parent.parent) in path
    assert area == 36  # the lower triangle of 8 x 8, diagonal included


def test_arch_library_loads_exports_its_kernels_and_has_our_version(bare):
    program = """
import json
from magi_core.backends import arch
library = arch.load_arch("sm90")
functions = [name for name in ("attn_bwd_prepare", "magi_version", "magi_plan_format") if library.has(name)]
print(json.dumps([arch.installed_archs(), library.version, str(library.native["magi_version"]()), functions]))
"""
    archs, version, built, functions = json.loads(run(bare, program))
    assert archs == ["sm90"]
    assert version == built == VERSION
    assert functions == ["attn_bwd_prepare", "magi_version", "magi_plan_format"]


def test_arch_wheel_of_another_version_is_refused(bare):
    program = """
import magi_core
magi_core.__version__ = "99.0.0"
from magi_core.backends import arch
try:
    arch.load_arch("sm90")
except arch.ArchNotInstalledError as error:
    print(error)
"""
    assert f"magi-core-sm90 {VERSION} does not fit magi-core 99.0.0" in run(bare, program)


@pytest.mark.parametrize("package", ["magi_core", "magi_triton", "magi_attn_extensions", "magi_attention"])
def test_imports_without_torch_and_with_a_read_only_home(bare, package, tmp_path):
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    program = f"import {package}; print({package}.__version__)"
    environ = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home)}
    command = [str(bare), "-I", "-c", program]
    result = subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == VERSION
