"""`import smokebox` costs nothing: no third-party module, and hardly any other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import smokebox
import smokebox.sync

MOST_MODULES = 12


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_import_brings_in_nothing_third_party() -> None:
    brought = modules_after("import smokebox") - modules_after("")
    assert brought - set(sys.stdlib_module_names) == {"smokebox"}


def test_sandboxes_come_without_what_is_slow_to_import() -> None:
    """A library of HTTP took longer than the rest of a command line, and its server together."""
    slow = {"aiohttp", "websockets", "yarl", "multidict", "cryptography", "starlette", "bashkit"}
    brought = modules_after("from smokebox import Sandbox, get_sandbox")
    assert "msgspec" in brought
    assert not slow & brought


def test_import_brings_in_hardly_anything() -> None:
    script = (
        "import sys; before = len(sys.modules); import smokebox; print(len(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert int(done.stdout) <= MOST_MODULES


def test_dir_lists_what_the_package_offers() -> None:
    assert set(smokebox.__all__) | {"__version__"} == set(dir(smokebox))


@pytest.mark.parametrize("name", smokebox.__all__)
def test_every_offered_name_can_be_imported(name: str) -> None:
    assert getattr(smokebox, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'smokebox' has no attribute 'nonsense'"):
        smokebox.nonsense  # noqa: B018


@pytest.mark.parametrize("name", ["Network", "Allow", "Decision"])
def test_replaced_name_is_an_error_that_says_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=r"Use .*Egress"):
        getattr(smokebox, name)


def test_every_public_name_has_a_line_in_the_docs() -> None:
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    names = re.findall(r"^\| `(\w+)` \| \S", page, re.MULTILINE)
    assert sorted(names) == smokebox.__all__


def test_names_marked_in_the_docs_are_those_of_sync() -> None:
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    marked = re.findall(r"^\| `(\w+)` \|.*[Ss]ync too", page, re.MULTILINE)
    assert set(marked) == set(smokebox.__all__) & set(dir(smokebox.sync))
