"""`import smokebox` costs nothing: no third-party module, and hardly any other."""

from __future__ import annotations

import subprocess
import sys

import pytest

import smokebox

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
