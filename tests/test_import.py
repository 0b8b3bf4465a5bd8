"""Imports: `import smokebox` loads no third-party modules, and exported names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import smokebox
import smokebox.sync

MAX_MODULES = 12


def modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in done.stdout.split()}


def test_import_loads_no_third_party_module() -> None:
    loaded = modules_after("import smokebox") - modules_after("")
    assert loaded - set(sys.stdlib_module_names) == {"smokebox"}


def test_importing_sandboxes_loads_no_slow_module() -> None:
    slow = {"aiohttp", "websockets", "yarl", "multidict", "cryptography", "starlette", "bashkit"}
    loaded = modules_after("from smokebox import Sandbox, get_sandbox")
    assert "msgspec" in loaded
    assert not slow & loaded


def test_model_servers_do_not_need_aiohttp() -> None:
    names = "FakeModelServer, RecordedModels, ScriptedModel, serve_project"
    assert "aiohttp" not in modules_after(f"from smokebox.testing import {names}")


def test_import_loads_few_modules() -> None:
    script = (
        "import sys; before = len(sys.modules); import smokebox; print(len(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert int(done.stdout) <= MAX_MODULES


def test_dir_lists_exported_names() -> None:
    assert set(smokebox.__all__) | {"__version__"} == set(dir(smokebox))


@pytest.mark.parametrize("name", smokebox.__all__)
def test_every_exported_name_can_be_imported(name: str) -> None:
    assert getattr(smokebox, name).__name__ == name


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'smokebox' has no attribute 'nonsense'"):
        smokebox.nonsense  # noqa: B018


@pytest.mark.parametrize("name", ["Network", "Allow", "Decision"])
def test_replaced_name_is_an_error_that_names_its_replacement(name: str) -> None:
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
