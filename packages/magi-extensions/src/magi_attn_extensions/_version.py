"""The version: of the VERSION file in a source tree, else of the installed distribution."""

from importlib.metadata import version
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[2] / "VERSION"

__version__ = _SOURCE.read_text(encoding="utf-8").strip() if _SOURCE.is_file() else version("magi-extensions")
