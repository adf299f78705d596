"""One version for all: links to VERSION, pins of siblings, METADATA of wheels, and the pins of the tools."""

import email
import os
import re
import zipfile
from pathlib import Path

import pytest

try:
    import tomllib
except ImportError:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
VERSION = (ROOT / "VERSION").read_text().strip()
PROJECTS = sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("packages/magi-core/arch/*/pyproject.toml")])
WHEELS = tomllib.loads((ROOT / "ci" / "wheels.toml").read_text())


def project(path: Path) -> dict:
    return tomllib.loads(path.read_text())


@pytest.fixture(scope="module")
def dist() -> Path:
    named = os.environ.get("MAGI_TEST_DIST")
    folder = Path(named) if named else ROOT / "dist"
    if not named and not any(folder.glob("*.whl")):
        pytest.skip("no wheels in dist/: `nox -s wheels` builds and tests them")
    return folder


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_version_is_a_plain_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+|\.dev\d+)?", VERSION)


def test_the_table_of_wheels_lists_every_project():
    assert {project(path)["project"]["name"]: path.parent for path in PROJECTS} == {
        name: ROOT / facts["source"] for name, facts in WHEELS.items()
    }


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_package_links_to_the_one_version(path):
    link = path.parent / "VERSION"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "VERSION"
    assert "version" in project(path)["project"]["dynamic"]


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_siblings_are_pinned_to_the_same_version(path):
    text = path.read_text()
    for name in re.findall(r'"(magi-[a-z0-9-]+)(?:\[[a-z0-9,]+\])?(?:==\{project\[version\]\})?"', text):
        pinned = re.search(rf'"{name}(\[[a-z0-9,]+\])?=={{project\[version\]}}"', text)
        assert pinned or f'name = "{name}"' in text, f"{path}: {name} is not pinned to the version of the project"


def test_every_wheel_has_the_version_and_pins_its_siblings(dist):
    wheels = sorted(dist.glob("*.whl"))
    assert wheels, f"no wheels in {dist}"
    names = set()
    for wheel in wheels:
        data = metadata(wheel)
        names.add(data["Name"])
        assert data["Version"] == VERSION, wheel.name
        for requirement in data.get_all("Requires-Dist") or []:
            if requirement.startswith("magi-"):
                assert re.match(rf"magi-[a-z0-9-]+(\[[a-z0-9,]+\])?=={re.escape(VERSION)}(;|$| ;)", requirement), (
                    requirement
                )
    assert names <= set(WHEELS)


def test_minimums_are_the_lower_bounds_of_the_packages():
    lines = (ROOT / "ci" / "minimums.txt").read_text().splitlines()
    minimums = dict(re.match(r"([a-z-]+)==([0-9.]+)", line).groups() for line in lines if not line.startswith("#"))
    bounds: dict[str, set[tuple[int, ...]]] = {}
    for path in PROJECTS:
        for name, bound in re.findall(r'"(torch|numpy|apache-tvm-ffi)>=([0-9.]+)', path.read_text()):
            bounds.setdefault(name, set()).add(tuple(map(int, bound.split("."))))
    assert set(bounds) == set(minimums)
    for name, found in bounds.items():
        (bound,) = found  # all packages ask the same
        assert tuple(map(int, minimums[name].split(".")))[: len(bound)] == bound, name


def test_hooks_run_the_versions_that_ci_runs():
    pins = dict(re.findall(r"^([a-z-]+)==([0-9.]+)$", (ROOT / "ci" / "constraints.txt").read_text(), re.M))
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.search(r"ruff-pre-commit\n\s+rev: v(\S+)", hooks)[1] == pins["ruff"]
    assert re.search(r"mirrors-clang-format\n\s+rev: v(\S+)", hooks)[1] == pins["clang-format"]


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflow_reads_only_pins_its_actions_and_calls_nox_only(path):
    text = path.read_text()
    assert "permissions:\n  contents: read\n" in text
    assert "secrets." not in text
    assert "pull_request_target" not in text
    actions = re.findall(r"uses: (\S+)", text)
    assert actions
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in actions), actions
    commands = re.findall(r"- run: (.*)", text)
    assert commands
    assert all(command.startswith(("python -m pip install -q nox", "nox -s ")) for command in commands), commands
