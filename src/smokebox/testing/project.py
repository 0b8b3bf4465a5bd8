"""`serve_project`: a project, served for the duration of a test."""

from __future__ import annotations

import contextlib
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.app.app import App
from smokebox.app.server import run_app
from smokebox.app.settings import STATE
from smokebox.sandbox.background_loop import BackgroundLoop

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def serve_project(folder: str | Path = ".", *, keys: tuple[str, ...] = ()) -> Iterator[str]:
    """Serve a project on a free port with temporary state, and yield its URL.

        with serve_project(".") as url:
            print(AgentClient(url).ask("assistant", "me", "Hello"))

    It runs on a background thread, in the working directory of the test.
    """
    loop = BackgroundLoop()
    with tempfile.TemporaryDirectory() as state, _variable(STATE, state):
        app = App(Path(folder), keys=keys)
        stack = AsyncExitStack()
        try:
            yield loop.run(stack.enter_async_context(run_app(app)))
        finally:
            loop.run(stack.aclose())
            loop.close()


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
