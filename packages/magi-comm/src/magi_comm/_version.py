"""The one version of all Magi wheels.

An installed wheel knows it from its metadata; a source tree reads the VERSION file it was checked out with.
"""

from importlib import metadata
from pathlib import Path


def _find_version() -> str:
    source = Path(__file__).resolve().parents[2] / "VERSION"
    if source.is_file():
        return source.read_text(encoding="utf-8").strip()
    return metadata.version("magi-comm")


__version__ = _find_version()
