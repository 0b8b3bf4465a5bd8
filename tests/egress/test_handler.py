"""Handlers imported by path."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from smokebox.egress.handler import CLIENT, load_handler
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from pathlib import Path


SOURCE = """
async def fine(request, env, context):
    return request
class Table:
    fine = fine
def wrong(request):
    return request
number = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that can be imported."""
    name = f"handlers_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_broken.py").write_text("raise ValueError('s3cret')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_handler_is_imported_by_its_path(module: str) -> None:
    found = load_handler(f"{module}:fine")
    assert found is sys.modules[module].fine
    assert load_handler(f"{module}:Table.fine") is found


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{module}:missing", "there is no handler"),
        ("{module}.missing:fine", "there is no handler"),
        ("{module}:number", "is int, not a handler"),
        ("{module}:wrong", "does not take"),
        ("{module}_broken:fine", "cannot be imported: ValueError"),
        ("nothing", "is a function, or"),
        (CLIENT, "there is no handler"),
    ],
)
def test_invalid_handler_is_refused(module: str, path: str, message: str) -> None:
    with pytest.raises(InvalidOption, match=message) as caught:
        load_handler(path.format(module=module))
    assert "s3cret" not in str(caught.value)
