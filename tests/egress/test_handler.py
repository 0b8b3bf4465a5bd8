"""Handlers that are named by where they are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from smokebox.egress.handler import CLIENT, HandlerContext, find_handler
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from pathlib import Path

    from smokebox.egress.message import Request

SOURCE = """
async def fine(request, env, context):
    return request
class Table:
    fine = fine
def wrong(request):
    return request
number = 7
"""


async def handler(request: Request, env: Any, context: HandlerContext) -> Request:
    return request


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that can be imported."""
    name = f"handlers_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_broken.py").write_text("raise ValueError('s3cret')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_function_is_its_own_handler() -> None:
    assert find_handler(handler) is handler


def test_a_handler_is_imported_by_its_path(module: str) -> None:
    found = find_handler(f"{module}:fine")
    assert found is sys.modules[module].fine
    assert find_handler(f"{module}:Table.fine") is found


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{module}:missing", "there is no handler"),
        ("{module}.missing:fine", "there is no handler"),
        ("{module}:number", "is int, and no handler"),
        ("{module}:wrong", "does not take"),
        ("{module}_broken:fine", "cannot be imported: ValueError"),
        ("nothing", "is a function, or"),
        (CLIENT, "there is no handler"),
    ],
)
def test_what_is_no_handler_is_refused(module: str, path: str, words: str) -> None:
    with pytest.raises(InvalidOption, match=words) as caught:
        find_handler(path.format(module=module))
    assert "s3cret" not in str(caught.value)
