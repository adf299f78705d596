"""The version: of the installed distribution, or, in a source tree, of the VERSION file every wheel reads."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_SOURCE_VERSION = Path(__file__).resolve().parents[2] / "VERSION"


def _read_version() -> str:
    # A source tree first: an older wheel of the same name may be installed beside it.
    if _SOURCE_VERSION.is_file():
        return _SOURCE_VERSION.read_text().strip()
    try:
        return version("magi-attention")
    except PackageNotFoundError:
        return "0+unknown"


__version__ = _read_version()
