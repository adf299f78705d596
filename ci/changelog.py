"""The changelog from fragments. A change leaves `changes/<slug>.<added|changed|fixed>.md`: one sentence for a user.

python ci/changelog.py                                  print what the next release will say
python ci/changelog.py 0.2.0 "Two sentences about it."  write it into CHANGELOG.md and remove the fragments
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"added": "Added", "changed": "Changed", "fixed": "Fixed"}
MARKER = "<!-- releases, newest first -->"
_NAME = re.compile(r"(?P<slug>[a-z0-9][a-z0-9-]*)\.(?P<kind>[a-z]+)\.md")
_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


def read_fragments(folder: Path) -> dict[str, list[str]]:
    """Sentences by kind, in the order of their slugs.

    Raises:
        ValueError: a file is not named `<slug>.<kind>.md`, is empty, or holds more than one paragraph.
    """
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match is None or match["kind"] not in KINDS:
            raise ValueError(
                f"{path}: name it <slug>.<{'|'.join(KINDS)}>.md, with lower-case letters, digits and dashes"
            )
        text = path.read_text(encoding="utf-8").strip()
        if not text or "\n\n" in text or text.startswith(("#", "-", "*")):
            raise ValueError(f"{path}: write one sentence for a user, without a heading or a bullet")
        found[match["kind"]].append(" ".join(text.split()))
    return found


def render(fragments: dict[str, list[str]]) -> str:
    """Sections of Markdown, empty kinds left out."""
    sections = []
    for kind, heading in KINDS.items():
        if fragments[kind]:
            sections.append("\n".join([f"### {heading}", "", *(f"- {sentence}" for sentence in fragments[kind])]))
    return "\n\n".join(sections)


def release(root: Path, version: str, summary: str, date: datetime.date) -> None:
    """Move the fragments into `CHANGELOG.md` under a new heading.

    Raises:
        ValueError: the version is not a version or is there already, nothing changed, or the marker is missing.
    """
    if not _VERSION.fullmatch(version):
        raise ValueError(f"version must look like 1.2.3 or 1.2.3rc1, got {version!r}")
    changelog, folder = root / "CHANGELOG.md", root / "changes"
    text = changelog.read_text(encoding="utf-8")
    if MARKER not in text:
        raise ValueError(f"{changelog} must hold the line {MARKER}")
    if f"\n## {version} " in text:
        raise ValueError(f"{changelog} has {version} already")
    body = render(read_fragments(folder))
    if not body:
        raise ValueError(f"{folder} holds no fragments: nothing to release")
    opening = f"{summary.strip()}\n\n" if summary.strip() else ""
    section = f"{MARKER}\n\n## {version} ({date.isoformat()})\n\n{opening}{body}"
    changelog.write_text(text.replace(MARKER, section, 1), encoding="utf-8")
    for path in folder.glob("*.md"):
        path.unlink()


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Command line; the exit status is 2 for a mistake."""
    parser = argparse.ArgumentParser(description="The changelog from the fragments in changes/.")
    parser.add_argument("version", nargs="?", help="write this release into CHANGELOG.md")
    parser.add_argument("summary", nargs="?", default="", help="what the release opens with")
    parsed = parser.parse_args(arguments)
    try:
        if parsed.version is None:
            print(render(read_fragments(root / "changes")))
        else:
            release(root, parsed.version, parsed.summary, datetime.date.today())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
