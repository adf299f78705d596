"""The README: its two commands are what CI runs, its links lead somewhere, its names exist."""

import re
from pathlib import Path

import magi_attention.api
import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NOXFILE = (ROOT / "noxfile.py").read_text(encoding="utf-8")


def commands() -> list[str]:
    return [line for block in re.findall(r"```console\n(.*?)```", README, re.S) for line in block.splitlines()]


def test_the_first_command_is_the_demo_and_the_second_the_tests():
    demo, test = commands()
    assert demo.endswith("nox -s demo")
    assert test.endswith("nox -s test")


def test_ci_runs_the_test_command_as_written():
    assert commands()[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_sessions_that_are_named_exist():
    texts = [README, (ROOT / "CONTRIBUTING.md").read_text(), (ROOT / ".ci" / "run").read_text()]
    texts += [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    sessions = set(re.findall(r"^def (\w+)\(session: nox.Session\) -> None:", NOXFILE, re.M))
    for text in texts:
        for names in re.findall(r"nox -s ((?:[a-z]+ ?)+)", text):
            assert set(names.split()) <= sessions, names


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_to_files(name):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (ROOT / target).exists(), target


def test_imports_shown_work():
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(block, {})  # only imports stand there
    for name in re.findall(r"`(?:\w+, )*\w+ = (\w+)\(", README):
        assert name in magi_attention.api.__all__, name


def test_picture_is_small():
    for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / target).stat().st_size <= 100 * 1024
