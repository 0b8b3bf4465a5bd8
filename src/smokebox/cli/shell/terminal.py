"""Reads commands from a terminal, with history and, where it is installed, prompt_toolkit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from smokebox.cli.shell.unfinished import unfinished
from smokebox.wire.place import default_home

Read = Callable[[str], str]


def open_terminal() -> Read:
    """A function that shows a prompt and gives one whole command.

    It raises `EOFError` for Ctrl-D and `KeyboardInterrupt` for Ctrl-C, as `input` does.
    """
    if not sys.stdout.isatty():
        return _plain_reader
    history = history_file()
    if find_spec("prompt_toolkit") is not None:
        return _prompt_toolkit_reader(history)
    return _readline_reader(history)


def history_file() -> Path | None:
    """Where the history is kept between shells, or None where nothing can be written."""
    path = Path(default_home())
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / "history").touch(mode=0o600)
    except OSError:
        return None
    return path / "history"


def _plain_reader(prompt: str) -> str:
    text = ""
    while not text or unfinished(text):
        sys.stderr.write("> " if text else prompt)
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        text += line
    return text


def _prompt_toolkit_reader(history: Path | None) -> Read:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.formatted_text import ANSI
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    session: PromptSession[str] = PromptSession(
        history=FileHistory(history) if history else InMemoryHistory(),
        prompt_continuation=lambda width, line, wrapped: "" if wrapped else "> ",
        multiline=Condition(lambda: unfinished(session.default_buffer.text)),
        enable_open_in_editor=True,
    )
    return lambda prompt: session.prompt(ANSI(prompt))


def _readline_reader(history: Path | None) -> Read:
    import readline

    file = history.with_suffix(".readline") if history else None
    if file:
        with suppress(OSError):
            file.touch(mode=0o600)
            readline.read_history_file(file)

    def read(prompt: str) -> str:
        try:
            text = input(_visible_width_only(prompt))
            while unfinished(text):
                text += "\n" + input("> ")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            raise
        if file:
            with suppress(OSError):
                readline.append_history_file(1, file)
        return text

    return read


def _visible_width_only(prompt: str) -> str:
    # readline counts the columns of the prompt unless its escapes stand between \x01 and \x02.
    return re.sub(r"(\x1b\[[0-9;]*m)", "\x01\\1\x02", prompt)
