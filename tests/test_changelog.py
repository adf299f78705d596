"""The changelog: the fragments that are there, and what a release makes of them."""

import datetime
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = runpy.run_path(str(ROOT / "ci" / "changelog.py"))
DAY = datetime.date(2026, 12, 1)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "changes").mkdir()
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{CHANGELOG['MARKER']}\n")
    return tmp_path


def add(project, name, text):
    (project / "changes" / name).write_text(text)


def test_the_fragments_of_the_project_can_be_released(tmp_path):
    fragments = CHANGELOG["read_fragments"](ROOT / "changes")
    assert sum(map(len, fragments.values())) == len(list((ROOT / "changes").glob("*.md")))
    assert CHANGELOG["MARKER"] in (ROOT / "CHANGELOG.md").read_text()


def test_release_writes_newest_first_and_removes_the_fragments(project):
    add(project, "one.fixed.md", "Rows that see nothing\ngive zeros.\n")
    CHANGELOG["release"](project, "0.1.0", "", DAY)
    add(project, "b.added.md", "B.")
    add(project, "a.added.md", "A.")
    add(project, "c.changed.md", "C.")
    CHANGELOG["release"](project, "0.2.0", "Two sentences. About it.", DAY)
    assert (
        (project / "CHANGELOG.md").read_text()
        == f"""# Changelog

{CHANGELOG["MARKER"]}

## 0.2.0 (2026-12-01)

Two sentences. About it.

### Added

- A.
- B.

### Changed

- C.

## 0.1.0 (2026-12-01)

### Fixed

- Rows that see nothing give zeros.
"""
    )
    assert list((project / "changes").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("one.removed.md", "Gone.", "name it <slug>"),
        ("One.added.md", "Capital.", "name it <slug>"),
        ("notes.txt", "No.", "name it <slug>"),
        ("one.added.md", "\n", "write one sentence"),
        ("one.added.md", "- A bullet.", "write one sentence"),
        ("one.added.md", "One.\n\nTwo.", "write one sentence"),
    ],
)
def test_bad_fragments_are_refused(project, name, text, message):
    add(project, name, text)
    with pytest.raises(ValueError, match=message):
        CHANGELOG["read_fragments"](project / "changes")


def test_bad_releases_are_refused(project, capsys):
    with pytest.raises(ValueError, match="nothing to release"):
        CHANGELOG["release"](project, "0.1.0", "", DAY)
    add(project, "one.added.md", "One.")
    with pytest.raises(ValueError, match="version must look like"):
        CHANGELOG["release"](project, "v1", "", DAY)
    CHANGELOG["release"](project, "0.1.0", "", DAY)
    add(project, "two.added.md", "Two.")
    with pytest.raises(ValueError, match="has 0.1.0 already"):
        CHANGELOG["release"](project, "0.1.0", "", DAY)
    assert CHANGELOG["main"](["0.1.0"], root=project) == 2
    assert "has 0.1.0 already" in capsys.readouterr().err
    (project / "CHANGELOG.md").write_text("# Changelog\n")
    with pytest.raises(ValueError, match="must hold the line"):
        CHANGELOG["release"](project, "0.2.0", "", DAY)


def test_preview_prints_and_changes_nothing(project, capsys):
    add(project, "one.added.md", "One.")
    assert CHANGELOG["main"]([], root=project) == 0
    assert capsys.readouterr().out == "### Added\n\n- One.\n"
    assert len(list((project / "changes").iterdir())) == 1
