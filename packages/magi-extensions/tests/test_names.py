"""Import, names that always exist, providers, and errors that name what is missing."""

import subprocess
import sys

import magi_attn_extensions
import pytest
import torch
from magi_attn_extensions import provider, use_provider
from magi_attn_extensions.flash import NAMES
from magi_attn_extensions.providers import PROVIDERS, Provider


def test_import_brings_no_torch_and_no_provider():
    program = "import sys, magi_attn_extensions; print(sorted({'torch', 'flash_attn', 'triton'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        magi_attn_extensions.nothing  # noqa: B018


def test_every_public_name_resolves():
    for name in magi_attn_extensions.__all__:
        assert getattr(magi_attn_extensions, name) is not None
    assert set(magi_attn_extensions.__all__) <= set(dir(magi_attn_extensions))
    assert set(NAMES) <= set(magi_attn_extensions.__all__)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("fa2")])
def test_missing_provider_is_named_at_the_first_call(name, monkeypatch):
    monkeypatch.setattr(Provider, "installed", lambda self: False)
    is_packed = "varlen" in name
    q = torch.zeros((4, 2, 8) if is_packed else (1, 4, 2, 8))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    arguments = [torch.stack((q, q, q), 2)] if "qkvpacked" in name else [q, q, q]
    with pytest.raises(magi_attn_extensions.ProviderNotInstalledError) as caught:
        getattr(magi_attn_extensions, name)(*arguments, *((cu, cu, 4, 4) if is_packed else ()))
    assert name.removesuffix("_func_with_sink")[:3] in str(caught.value)
    assert PROVIDERS[name[:3]].install in str(caught.value)


def test_a_provider_is_found_where_it_is():
    assert Provider("x", "json.decoder", "").installed()
    assert not Provider("x", "no_such_package.part", "").installed()
    assert set(magi_attn_extensions.installed_providers()) == {"fa2", "fa3", "fa4"}


def test_the_choice_is_visible_and_can_be_forced():
    assert provider("fa2", "cpu") == "reference"
    assert provider("fa2", "cuda") in ("flash_attn", "torch")
    with use_provider("fa2", "torch"):
        assert provider("fa2", "cpu") == "torch"
        with use_provider("fa2", None):
            assert provider("fa2", "cpu") == "reference"
        assert provider("fa2", "cpu") == "torch"
    assert provider("fa2", "cpu") == "reference"
    with pytest.raises(ValueError, match="family must be one of fa2, fa3, fa4, got 'fa5'"):
        provider("fa5")
    message = "choice must be None or one of flash_attn, torch, reference for fa2"
    with pytest.raises(ValueError, match=message), use_provider("fa2", "cudnn"):
        pass


def test_forcing_what_is_missing_names_it(monkeypatch):
    monkeypatch.setattr(Provider, "installed", lambda self: False)
    q = torch.zeros(1, 4, 2, 8)
    missing = pytest.raises(
        magi_attn_extensions.ProviderNotInstalledError, match="fa2_func_with_sink needs the package"
    )
    with use_provider("fa2", "flash_attn"), missing:
        magi_attn_extensions.fa2_func_with_sink(q, q, q)
