"""The one version of all Magi wheels.

An installed wheel knows it from its metadata; a source tree reads the VERSION file it was checked out with.
"""

from importlib import metadata
from pathlib import Path


def _find_version() -> str:
    source = Path(__file__).resolve().parents[1]
    if source.name == "src" and (source.parent / "VERSION").is_file():
        return (source.parent / "VERSION").read_text(encoding="utf-8").strip()
    return metadata.version("magi-core")


__version__ = _find_version()
