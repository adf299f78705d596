"""Every public name can be imported, is documented, and takes the public arguments."""

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


def lines(name: str) -> list[str]:
    text = (DATA / name).read_text().splitlines()
    return [line for line in text if line and not line.startswith("#")]


def resolve(dotted: str) -> Any:
    """What a program gets that imports the longest module of the name and takes the rest as attributes."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if error.name != ".".join(parts[:cut]) and not ".".join(parts[:cut]).startswith(f"{error.name}."):
                raise  # a module of ours that exists but misses something
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(dotted)


@pytest.mark.parametrize("name", lines("public_names.txt"))
def test_a_public_name_can_be_imported_and_is_documented(name):
    found = resolve(name)
    is_method = inspect.isfunction(found) and "." in found.__qualname__
    if not is_method and (inspect.isfunction(found) or inspect.isclass(found) or inspect.ismodule(found)):
        assert inspect.getdoc(found), f"{name} has no docstring"


_NAMES_OF_MODULES = """
import importlib, inspect, json, pkgutil, sys
root = importlib.import_module(sys.argv[1])
packages = [root, *(importlib.import_module(m.name) for m in pkgutil.walk_packages(root.__path__, root.__name__ + ".")
                    if m.ispkg)]
kinds = {}
for package in packages:
    for name in {m.name for m in pkgutil.iter_modules(package.__path__)} & set(getattr(package, "__all__", ())):
        if sys.argv[2] == "module first":
            importlib.import_module(f"{package.__name__}.{name}")
        kinds[f"{package.__name__}.{name}"] = type(getattr(package, name)).__name__
print(json.dumps(kinds))
"""


@pytest.mark.parametrize("package", ["magi_attention", "magi_core", "magi_comm"])
def test_importing_a_module_hides_no_name_that_its_package_exports(package):
    """Importing the submodule ``p.x`` sets ``p.x``: a function of that name, not imported yet, would be gone."""
    kinds = []
    for order in ("name first", "module first"):
        command = [sys.executable, "-c", _NAMES_OF_MODULES, package, order]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        kinds.append(json.loads(done.stdout))
    assert kinds[0] == kinds[1]


def test_the_list_has_no_name_twice():
    names = lines("public_names.txt")
    assert len(names) == len(set(names))
    assert len(names) > 250


def parameters(text: str) -> list[tuple[str, str | None]]:
    """``[(name, repr of its default or None)]`` of what stands between the parentheses; ``*`` is a name of its own."""
    found, depth, start = [], 0, 0
    for place, character in enumerate([*text, ","]):
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            name, equals, default = text[start:place].strip().partition("=")
            if name:
                found.append((name, default if equals else None))
            start = place + 1
    return found


@pytest.mark.parametrize("line", lines("public_signatures.txt"), ids=lambda line: line.partition("(")[0])
def test_a_public_callable_takes_the_public_arguments(line):
    matched = re.fullmatch(r"([\w.]+)\((.*)\)", line)
    assert matched, line
    name, expected = matched[1], parameters(matched[2])
    ours = list(inspect.signature(resolve(name)).parameters.values())
    is_keyword_only = False
    for place, (argument, default) in enumerate(expected):
        if argument == "*":
            is_keyword_only = True
            continue
        if is_keyword_only:
            got = {parameter.name: parameter for parameter in ours}[argument]
        else:
            got = ours[place]
            assert got.name == argument, f"argument {place} of {name}"
            assert got.kind in (got.POSITIONAL_OR_KEYWORD, got.POSITIONAL_ONLY)
        if default is None:
            assert got.default is got.empty, f"{argument} of {name} has a default"
        elif default != "...":
            if hasattr(got.default, "default_factory"):
                continue
            assert repr(got.default) == default, f"default of {argument} of {name}"
        else:
            assert got.default is not got.empty, f"{argument} of {name} has no default"
    num_public = len([argument for argument, _ in expected if argument != "*"])
    for extra in ours[num_public:] if not is_keyword_only else []:
        assert extra.kind in (extra.KEYWORD_ONLY, extra.VAR_KEYWORD) or extra.default is not extra.empty


def test_signature_lines_are_parsed():
    assert parameters("a, b=(1, 2), *, c='x'") == [("a", None), ("b", "(1, 2)"), ("*", None), ("c", "'x'")]
    assert parameters("") == []
