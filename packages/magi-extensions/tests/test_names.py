"""Import, names that always exist, and errors that name what is missing."""

import subprocess
import sys

import magi_attn_extensions
import pytest
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
    assert callable(magi_attn_extensions.dsa_attn_func)


@pytest.mark.parametrize("name", NAMES)
def test_missing_provider_is_named_at_the_first_call(name, monkeypatch):
    provider = PROVIDERS[name[:3]]
    monkeypatch.setattr(Provider, "installed", lambda self: False)
    with pytest.raises(magi_attn_extensions.ProviderNotInstalledError) as caught:
        getattr(magi_attn_extensions, name)(1, 2, 3)
    assert name in str(caught.value)
    assert provider.install in str(caught.value)


def test_with_its_provider_a_name_says_that_it_is_not_in_this_release(monkeypatch):
    monkeypatch.setattr(Provider, "installed", lambda self: True)
    with pytest.raises(NotImplementedError, match="fa2_func_with_sink is not in this release"):
        magi_attn_extensions.fa2_func_with_sink()


def test_a_provider_is_found_where_it_is():
    assert Provider("x", "json.decoder", "").installed()
    assert not Provider("x", "no_such_package.part", "").installed()
    assert set(magi_attn_extensions.installed_providers()) == {"fa2", "fa3", "fa4"}
