"""`import smokebox` costs nothing: no third-party module, and hardly any time."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import smokebox

RUNS = 7
LONGEST_IMPORT = 0.1


def best_start(code: str) -> float:
    """The shortest of several starts of an interpreter that runs `code`, in seconds."""
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - began)
    return min(times)


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


def test_import_takes_less_than_a_tenth_of_a_second() -> None:
    assert best_start("import smokebox") - best_start("pass") < LONGEST_IMPORT


def test_dir_lists_what_the_package_offers() -> None:
    assert set(smokebox.__all__) | {"__version__"} == set(dir(smokebox))


@pytest.mark.parametrize("name", smokebox.__all__)
def test_every_offered_name_can_be_imported(name: str) -> None:
    assert getattr(smokebox, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'smokebox' has no attribute 'nonsense'"):
        smokebox.nonsense  # noqa: B018
