"""Errors for a framework that is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = {
    "deepagents": ("deepagents", "deepagents"),
    "inspect": ("inspect_ai", "inspect"),
    "pydantic_ai": ("pydantic_ai", "pydantic-ai"),
}

IMPORT_WITHOUT = """
import sys
from importlib import import_module
from smokebox.errors import MissingDependency
module, package = sys.argv[1:]
sys.modules[package] = None
try:
    import_module(f"smokebox.integrations.{module}")
except MissingDependency as error:
    print(error.hint)
"""


@pytest.mark.parametrize("module", FRAMEWORKS)
def test_missing_framework_names_the_extra_to_install(module: str) -> None:
    package, extra = FRAMEWORKS[module]
    command = [sys.executable, "-c", IMPORT_WITHOUT, module, package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True)
    assert done.stdout == f"Install it: pip install 'smokebox[{extra}]'.\n"
