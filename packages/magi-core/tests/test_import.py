"""What importing the package may need."""

import subprocess
import sys
from pathlib import Path

import magi_core
import pytest

CODE = """
import sys
for blocked in ("torch", "tvm_ffi", "matplotlib", "triton"):
    sys.modules[blocked] = None
import magi_core
from magi_core import AttnMaskType, AttnRange, AttnRanges, Mask, Bands, FlexPlan, AttnRectangle, RangeError
assert AttnRanges.from_ranges([(0, 3), (2, 5)]).merge() == AttnRanges.from_ranges([(0, 5)])
print(magi_core.__version__)
"""


def test_import_needs_numpy_only(tmp_path):
    # A home that cannot be written to, and none of the optional packages.
    source = str(Path(magi_core.__file__).resolve().parents[1])
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        env={"PYTHONPATH": source, "HOME": str(tmp_path / "missing"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == magi_core.__version__


def test_missing_library_is_named(monkeypatch, tmp_path):
    from magi_core import _host

    monkeypatch.setattr(_host, "LIBRARY_PATH", tmp_path / "libmagi_core_host.so")
    _host.lib.cache_clear()
    with pytest.raises(ImportError, match="install the magi-core wheel"):
        _host.lib()
    (tmp_path / "libmagi_core_host.so").write_bytes(b"not a library")
    with pytest.raises(ImportError, match="could not be loaded"):
        _host.lib()
    monkeypatch.undo()
    _host.lib.cache_clear()
    assert _host.lib() is not None


def test_unknown_name():
    with pytest.raises(AttributeError, match="no_such_name"):
        magi_core.no_such_name  # noqa: B018
    assert "FlexPlan" in dir(magi_core)
