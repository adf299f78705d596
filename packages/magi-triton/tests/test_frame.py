"""Import, the facts of the machine, and the registry."""

import subprocess
import sys
from pathlib import Path

import magi_triton
import pytest


def test_import_brings_neither_torch_nor_triton():
    program = "import sys, magi_triton; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        magi_triton.nothing  # noqa: B018


def test_facts_of_the_machine():
    info = magi_triton.backend_info
    assert magi_triton.vendor_name == magi_triton.vendor == info.vendor_name
    assert magi_triton.device == info.device
    assert (info.capability is None) == (info.device == "cpu")
    assert set(magi_triton.__all__) <= set(dir(magi_triton))


def test_every_operator_loads_and_answers():
    from magi_triton.registry import _OPERATORS

    assert magi_triton.operators() == tuple(sorted(_OPERATORS))
    for name, operator in _OPERATORS.items():
        assert callable(operator.load())
        assert isinstance(magi_triton.supports(name), magi_triton.Support)
        assert (Path(__file__).parent / operator.tests).is_file()


def test_supports_says_why_not():
    answer = magi_triton.supports("recompute_mask", dropout_p=1.5)
    assert not answer
    assert answer.reason == "dropout_p must be in [0, 1), got 1.5" or "TRITON_INTERPRET" in answer.reason


def test_supports_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="operator must be one of .*recompute_mask.*, got 'nothing'"):
        magi_triton.supports("nothing")
    with pytest.raises(ValueError, match="recompute_mask has .*, got heads"):
        magi_triton.supports("recompute_mask", heads=4)


@pytest.mark.parametrize(
    ("triton_version", "device", "interpreted", "reason"),
    [
        (None, "cuda", False, "pip install 'magi-triton\\[triton\\]'"),
        ("3.7.1", "cpu", False, "TRITON_INTERPRET=1"),
        ("3.7.1", "cpu", True, None),
        ("3.7.1", "cuda", False, None),
    ],
)
def test_the_missing_thing_is_named(triton_version, device, interpreted, reason):
    info = magi_triton.BackendInfo("cpu", device, "", None, 0, triton_version, interpreted)
    if reason is None:
        assert info.why_not() is None
    else:
        with pytest.raises(RuntimeError, match=reason):
            raise RuntimeError(info.why_not())
