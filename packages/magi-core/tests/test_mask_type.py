import numpy as np
import pytest
from magi_core.mask_type import AttnMaskType, mask_type_codes


def test_codes_and_names():
    assert [t.to_int_type() for t in AttnMaskType] == [0, 1, 2, 3]
    assert [t.value for t in AttnMaskType] == ["full", "causal", "inv_causal", "bi_causal"]
    for t in AttnMaskType:
        assert AttnMaskType.from_int_type(t.to_int_type()) is t
        assert AttnMaskType(t.value) is AttnMaskType.from_any(t.value) is AttnMaskType.from_any(t.to_int_type()) is t


@pytest.mark.parametrize("types", ["causal", 1, AttnMaskType.CAUSAL, ["causal", 1], np.array([1, 1])])
def test_one_for_all_or_one_each(types):
    assert mask_type_codes(types, 2).tolist() == [1, 1]
    assert mask_type_codes(None, 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("types", "error", "message"),
    [
        ("square", ValueError, "'full', 'causal'"),
        (4, ValueError, "0, 1, 2 or 3"),
        ([0], ValueError, r"one type per slice \(2\)"),
        ([0, 1.5], TypeError, "AttnMaskType, a str or an int"),
        (np.array([0, 7]), ValueError, r"mask_types\[1\]"),
        (np.array([0.0, 1.0]), TypeError, "integers"),
        (1.5, TypeError, "mask_types must be"),
        (True, TypeError, "mask_types must be"),
    ],
)
def test_errors(types, error, message):
    with pytest.raises(error, match=message):
        mask_type_codes(types, 2)
    with pytest.raises(ValueError, match="int_type"):
        AttnMaskType.from_int_type(-1)
