"""The documentation: translations are whole and keep their code, pages show programs that CI runs."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
CATALOGUES = sorted(DOCS.glob("locales/*/LC_MESSAGES/*.po"))


def messages(path: Path) -> list[tuple[str, str, bool]]:
    """(msgid, msgstr, fuzzy) of a catalogue, its header left out."""
    found = []
    for block in path.read_text(encoding="utf-8").split("\n\n"):
        parts = {"msgid": "", "msgstr": ""}
        current = None
        for line in block.splitlines():
            match = re.match(r'(msgid|msgstr) (".*")$', line)
            if match:
                current = match[1]
            text = match[2] if match else line
            if current and text.startswith('"'):
                parts[current] += text[1:-1].replace('\\"', '"')
        if parts["msgid"]:
            found.append((parts["msgid"], parts["msgstr"], "#, fuzzy" in block))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_page_has_a_catalogue_in_every_language(page):
    for folder in DOCS.glob("locales/*/LC_MESSAGES"):
        assert (folder / f"{page.stem}.po").exists(), "run `nox -s docs -- update`, then translate"


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_catalogue_is_whole_and_keeps_code(path):
    found = messages(path)
    assert len(found) >= 5
    for source, translation, fuzzy in found:
        assert translation, f"not translated: {source!r}"
        assert not fuzzy, f"to be looked at again: {source!r}"
        code = r"`[^`]+`"
        assert sorted(re.findall(code, source)) == sorted(re.findall(code, translation)), source


@pytest.mark.parametrize("path", CATALOGUES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_catalogue_is_of_the_page_as_it_is(path):
    def plain(text: str) -> str:
        return re.sub(r"[\s|]+", " ", text)

    page = plain((DOCS / f"{path.stem}.md").read_text(encoding="utf-8"))
    stale = [source for source, _, _ in messages(path) if plain(source).strip() not in page]
    assert stale == [], "run `nox -s docs -- update`, then translate"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_programs_are_included_never_pasted(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^```(python|py|\{code-block\})", text, re.M)
    for included in re.findall(r"\{literalinclude\} (\S+)", text):
        assert (DOCS / included).resolve().parent == DOCS.parent / "examples"
