"""The project's sessions; CI calls these and nothing else. `nox --list` names them.

Sessions share one environment, `.nox/shared`: torch alone takes most of a minute to install. Tests run against the
built wheels (`dist/`), never against the source tree. `nox -s dev` makes `.nox/dev`, where the packages are editable.

MAGI_TORCH says where torch comes from:
    cpu (default)  the pinned version; a wheel in PIP_FIND_LINKS if one lies there, else PyTorch's CPU index
    index          the pinned version as the package index gives it (a CUDA build on Linux)
    system         the torch of the interpreter that runs nox (GPU machines that already have one)
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"  # uv does not see a local torch build
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typecheck", "test"]

ROOT = Path(__file__).resolve().parent
DIST = ROOT / "dist"
SHARED = ROOT / ".nox" / "shared"
CONSTRAINTS = ROOT / "ci" / "constraints.txt"
TORCH = os.environ.get("MAGI_TORCH", "cpu")
PURE_OR_HOST = ("magi-core", "magi-comm", "magi-triton", "magi-extensions", "magi-attention")
# Groups of tests in the order of the packages' arrows: name -> (folder, extra environment, workers of pytest-xdist).
TEST_GROUPS: dict[str, tuple[str, dict[str, str], int]] = {
    "core": ("packages/magi-core/tests", {}, 2),
    "comm": ("packages/magi-comm/tests", {}, 0),
    "triton": ("packages/magi-triton/tests", {"TRITON_INTERPRET": "1"}, 2),
    "extensions": ("packages/magi-extensions/tests", {}, 2),
    "attention": ("packages/magi-attention/tests", {}, 2),
    "across": ("tests", {}, 2),
}
WITH_PROCESSES = ("across",)  # groups with tests marked `distributed`, which run one at a time
DEFAULT_MARKS = "not gpu and not nightly"


def wheel_table() -> dict[str, dict[str, object]]:
    """`ci/wheels.toml`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # nox itself brings it there
        import tomli as tomllib
    table: dict[str, dict[str, object]] = tomllib.loads((ROOT / "ci" / "wheels.toml").read_text())
    return table


@contextmanager
def timed(session: nox.Session, what: str) -> Iterator[None]:
    """Log how long a part took: the budgets of CI are kept by looking at these lines."""
    begun = time.monotonic()
    try:
        yield
    finally:
        session.log(f"{what}: {time.monotonic() - begun:.0f} s")


def digest(*parts: Path | str) -> str:
    """A digest of files, of the files under folders (builds, caches and tests left out), and of strings."""
    sha = hashlib.sha256()
    skip = {"build", "__pycache__", "tests", "arch", "dist"}
    for part in parts:
        if isinstance(part, str):
            sha.update(part.encode())
            continue
        files = [part] if part.is_file() else []
        for folder, names, leaves in os.walk(part, followlinks=True):
            names[:] = sorted(name for name in names if name not in skip and not name.startswith("."))
            files += [Path(folder, leaf) for leaf in sorted(leaves) if not leaf.endswith((".so", ".pyc"))]
        for file in files:
            sha.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return sha.hexdigest()


def torch_options() -> list[str]:
    """Options of pip for the one command that installs torch."""
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    local = any(Path(folder).is_dir() and any(Path(folder).glob("torch-*.whl")) for folder in folders)
    if TORCH == "index" or local or sys.platform == "darwin":
        return []
    return ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]  # "2.13.0+cpu" sorts above "2.13.0"


def environment(session: nox.Session, *groups: str, at: Path = SHARED) -> str:
    """Install requirement groups (`ci/requirements/<group>.txt`) into the shared environment; its python."""
    python = at / "bin" / "python"
    if not python.exists():
        with timed(session, f"environment {at.name}"):
            options = ["--system-site-packages"] if TORCH == "system" else []
            session.run(sys.executable, "-m", "virtualenv", "-q", *options, str(at))
    for group in groups:
        if group == "torch" and TORCH == "system":
            continue
        file = ROOT / "ci" / "requirements" / f"{group}.txt"
        stamp, key = at / f".{group}.stamp", digest(file, CONSTRAINTS, TORCH)
        if stamp.exists() and stamp.read_text() == key:
            continue
        # A GPU machine keeps its own torch, numpy and triton: the pins are those of the CPU machines.
        pins = [] if TORCH == "system" else ["-c", str(CONSTRAINTS)]
        with timed(session, f"install {group}"):
            options = torch_options() if group == "torch" else []
            session.run(str(python), "-m", "pip", "install", "-q", "--no-compile", *pins, *options, "-r", str(file))
        stamp.write_text(key)
    return str(python)


def build_wheels(session: nox.Session, *names: str) -> None:
    """Build what changed since `dist/` was last filled; repair native wheels to manylinux."""
    table = wheel_table()
    DIST.mkdir(exist_ok=True)
    for name in names:
        facts = table[name]
        source = ROOT / str(facts["source"])
        settings = [str(item) for item in facts.get("ci_settings", ())]  # type: ignore[attr-defined]
        if os.environ.get("MAGI_RELEASE"):
            settings = []
        stamp, key = DIST / f".{name}.stamp", digest(source, ROOT / "VERSION", *settings)
        stem = name.replace("-", "_")
        old = [path for path in DIST.glob("*.whl") if path.name.split("-")[0] == stem]
        if len(old) == 1 and stamp.exists() and stamp.read_text() == key:
            continue
        for path in old:
            path.unlink()
        native = bool(facts["libraries"])
        python = environment(session, *(["wheels"] if native else []))
        raw = DIST / "raw"
        shutil.rmtree(raw, ignore_errors=True)
        with timed(session, f"wheel {name}"):
            options = [f"--config-settings={item}" for item in settings]
            session.run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(raw), *options, str(source))
            wheel = next(raw.glob("*.whl"))
            if native and sys.platform == "linux":
                tools = f"{SHARED / 'bin'}{os.pathsep}{os.environ['PATH']}"  # auditwheel calls patchelf
                # tvm-ffi's library is a dependency of its own, loaded before ours.
                command = ["repair", "--exclude", "libtvm_ffi.so", "-w", str(DIST), str(wheel)]
                session.run(str(SHARED / "bin" / "auditwheel"), *command, env={"PATH": tools}, silent=True)
            else:
                shutil.move(wheel, DIST / wheel.name)
        shutil.rmtree(raw)
        stamp.write_text(key)


def install_wheels(session: nox.Session, python: str, *names: str) -> None:
    """Install wheels from `dist/` into the shared environment, only what changed."""
    changed = []
    for name in names:
        key = (DIST / f".{name}.stamp").read_text()
        stamp = SHARED / f".wheel-{name}.stamp"
        if not stamp.exists() or stamp.read_text() != key:
            changed.append((name, stamp, key))
    if not changed:
        return
    wheels = [next(DIST.glob(f"{name.replace('-', '_')}-[0-9]*.whl")) for name, _, _ in changed]
    session.run(python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", *map(str, wheels))
    for _, stamp, key in changed:
        stamp.write_text(key)


def ready(session: nox.Session, *groups: str) -> str:
    """The shared environment with torch, the requirement groups, and the project's wheels; its python."""
    python = environment(session, "torch", "run", *groups)
    build_wheels(session, *PURE_OR_HOST)
    install_wheels(session, python, *PURE_OR_HOST)
    return python


def run_tests(
    session: nox.Session, marks: str, names: list[str], args: list[str], env: dict[str, str], alone: bool = False
) -> None:
    """Run groups of tests one after another, all of them even when one fails.

    Tests that start processes of their own run one at a time, and so do all when `alone`; the others run on as many
    workers as the group allows.
    """
    python = ready(session, "test")
    failed = []
    for name in names:
        folder, own, workers = TEST_GROUPS[name]
        passes = [(marks, 0 if alone else workers)]
        if name in WITH_PROCESSES and not alone:
            passes = [(f"{marks} and not distributed", workers), (f"{marks} and distributed", 0)]
        with timed(session, f"tests of {name}"):
            for chosen, workers in passes:
                spread = ["-n", str(workers), "--dist", "worksteal"] if workers else []
                command = ["-m", "pytest", "-q", "-m", chosen, "--timeout=300", "--durations=5", *spread, folder, *args]
                allowed = [0, 5] if args or alone else [0]  # 5: nothing selected
                try:
                    session.run(python, *command, env={"OMP_NUM_THREADS": "1", **own, **env}, success_codes=allowed)
                except CommandFailed:
                    failed.append(f"{name} ({chosen})")
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def split_posargs(session: nox.Session) -> tuple[list[str], list[str]]:
    """Names of test groups (all when none is named) and what is left for pytest."""
    names = [word for word in session.posargs if word in TEST_GROUPS]
    return names or list(TEST_GROUPS), [word for word in session.posargs if word not in TEST_GROUPS]


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Run the demo: 4 ranks on the CPU against one rank, and a picture of who computes what."""
    python = ready(session, "demo")
    with timed(session, "demo"):
        session.run(python, "examples/demo.py", *session.posargs)


@nox.session(venv_backend="none")
def test(session: nox.Session) -> None:
    """Test every package from its built wheel; needs no GPU. `-- core -k mask` picks a group and passes options on."""
    names, args = split_posargs(session)
    run_tests(session, DEFAULT_MARKS, names, args, {})


@nox.session(venv_backend="none")
def distributed(session: nox.Session) -> None:
    """Run the tests that start several processes (gloo; NCCL where there are GPUs)."""
    names, args = split_posargs(session)
    names = [name for name in names if name in session.posargs] or list(WITH_PROCESSES)
    run_tests(session, f"distributed and {DEFAULT_MARKS}", names, args, {}, alone=True)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the tests that need a GPU, on a machine that has one, with its own torch: `MAGI_TORCH=system nox -s gpu`."""
    build_wheels(session, "magi-core-sm90")
    ready(session, "test")
    install_wheels(session, str(SHARED / "bin" / "python"), "magi-core-sm90")
    names, args = split_posargs(session)
    names = [name for name in names if name in session.posargs] or list(TEST_GROUPS)
    run_tests(session, "gpu", names, args, {}, alone=True)


@nox.session(venv_backend="none")
def properties(session: nox.Session) -> None:
    """Run everything that needs no GPU, with many more examples of each property (nightly: hours)."""
    names, args = split_posargs(session)
    profile = {"HYPOTHESIS_PROFILE": "nightly", "MAGI_ATTENTION_TEST_NIGHTLY": "1"}
    run_tests(session, "not gpu", names, [*args, "--timeout=3600"], profile)


@nox.session(venv_backend="virtualenv")
def minimums(session: nox.Session) -> None:
    """Test the lowest versions of our direct requirements (`ci/minimums.txt`), in an environment of its own."""
    build_wheels(session, *PURE_OR_HOST)
    session.install(*torch_options(), "-r", "ci/minimums.txt", "pytest", "pytest-timeout", "hypothesis")
    session.install("--no-deps", "--force-reinstall", *(str(path) for path in DIST.glob("*.whl")))
    for name in ("core", "comm", "attention"):
        session.run("python", "-m", "pytest", "-q", "-m", DEFAULT_MARKS, TEST_GROUPS[name][0], *session.posargs)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Check style: ruff for Python, clang-format for C++ and CUDA. `-- --fix` mends what can be mended."""
    environment(session, "lint")
    tools, fix = SHARED / "bin", "--fix" in session.posargs
    session.run(str(tools / "ruff"), "check", *(["--fix"] if fix else []), ".")
    session.run(str(tools / "ruff"), "format", *([] if fix else ["--check"]), ".")
    sources = [
        str(path) for path in sorted(Path("packages").rglob("csrc/**/*")) if re.search(r"\.(cc|h|cu|cuh)$", path.name)
    ]
    if sources:
        session.run(str(tools / "clang-format"), *(["-i"] if fix else ["--dry-run", "-Werror"]), *sources)


@nox.session(venv_backend="none")
def typecheck(session: nox.Session) -> None:
    """Check types with mypy, strict on the packages."""
    python = environment(session, "torch", "run", "typecheck")
    sources = sorted(str(path) for path in Path("packages").glob("*/src/*") if (path / "__init__.py").exists())
    session.run(python, "-m", "mypy", *sources, "benchmarks", "noxfile.py", *session.posargs)


@nox.session(venv_backend="none")
def wheels(session: nox.Session) -> None:
    """Build every wheel, then audit them: tags, sizes, needed libraries, install into a bare environment, versions."""
    build_wheels(session, *wheel_table())
    python = environment(session, "test", "wheels")
    env = {"MAGI_TEST_DIST": str(DIST)}
    with timed(session, "audit of the wheels"):
        session.run(
            python,
            "-m",
            "pytest",
            "-q",
            "--noconftest",
            "tests/test_wheels.py",
            "tests/test_lockstep.py",
            *session.posargs,
            env=env,
        )
    for path in sorted(DIST.glob("*.whl")):
        session.log(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.name}")


@nox.session(venv_backend="none")
def lockstep(session: nox.Session) -> None:
    """Check that every wheel's version and sibling pins agree with VERSION."""
    build_wheels(session, *PURE_OR_HOST)
    python = environment(session, "test", "wheels")
    session.run(
        python, "-m", "pytest", "-q", "--noconftest", "tests/test_lockstep.py", env={"MAGI_TEST_DIST": str(DIST)}
    )


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the documentation in English and Chinese, warnings as errors. `-- update` renews the catalogues."""
    python = environment(session, "docs")
    out = ROOT / "docs" / "_build"
    if "update" in session.posargs:
        session.run(python, "-m", "sphinx", "-q", "-b", "gettext", "docs", str(out / "gettext"))
        command = ["update", "-p", str(out / "gettext"), "-d", "docs/locales", "-l", "zh_CN", "-w", "0"]
        session.run(str(SHARED / "bin" / "sphinx-intl"), *command)
        return
    with timed(session, "docs"):
        for language in ("en", "zh_CN"):
            options = ["-W", "--keep-going", "-q", "-b", "html", "-D", f"language={language}"]
            session.run(python, "-m", "sphinx", *options, "docs", str(out / "html" / language))
    session.log(f"open {out / 'html' / 'en' / 'index.html'}")


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Run benchmarks: `nox -s bench -- run 'cpu_attn/*'`; without arguments, list the cases."""
    python = ready(session, "demo")
    session.run(python, "-m", "benchmarks", *(session.posargs or ["list"]))


@nox.session(venv_backend="none")
def dev(session: nox.Session) -> None:
    """Make `.nox/dev`, with the packages editable and every tool, for work on the project."""
    at = ROOT / ".nox" / "dev"
    python = environment(session, "torch", "run", "test", "lint", "typecheck", "wheels", at=at)
    session.run(python, "-m", "pip", "install", "-q", "scikit-build-core==1.1.2", "cmake>=3.28", "ninja")
    folders = [f"packages/{name}" for name in PURE_OR_HOST]
    options = [word for folder in folders for word in ("-e", folder)]
    session.run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", *options)
    session.log(f"source {at / 'bin' / 'activate'}")
