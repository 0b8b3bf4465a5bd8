"""Input of commands from a terminal, with history and, where it is installed, prompt_toolkit."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import bashkit

from smokebox.foundation.endpoint import default_home

Read = Callable[[str], str]


def open_reader() -> Read:
    """Return a function that shows a prompt and reads one complete command.

    It raises `EOFError` on Ctrl-D and `KeyboardInterrupt` on Ctrl-C, as `input` does.
    """
    if not sys.stdout.isatty():
        return _plain_reader
    history = history_file()
    if find_spec("prompt_toolkit") is not None:
        return _prompt_toolkit_reader(history)
    return _readline_reader(history)


def history_file() -> Path | None:
    """Return the history file in the state directory, or None if it cannot be written."""
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
    # readline counts escape sequences as columns unless they stand between \x01 and \x02.
    return re.sub(r"(\x1b\[[0-9;]*m)", "\x01\\1\x02", prompt)


# Messages of bashkit's parser when the text ends too early; any other is a real syntax error.
_TOO_EARLY = re.compile(r"unexpected EOF|unexpected end of|unterminated")


def unfinished(text: str) -> bool:
    """Return whether more lines could complete `text`: an open quote, a heredoc, a loop."""
    stripped = text.rstrip()
    if stripped.endswith(("&&", "||")) or _ends_with_open_backslash(text):
        return True
    error = _syntax_error(text)
    if error:
        return bool(_TOO_EARLY.search(error))
    # A lone ")" is an error everywhere except in the body of a heredoc or an array.
    return bool(stripped) and not _syntax_error(f"{text}\n)")


def _ends_with_open_backslash(text: str) -> bool:
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1


def _syntax_error(text: str) -> str:
    try:
        _parser().analyze(text)
    except bashkit.BashError as error:
        return str(error) or "parse error"
    return ""


@functools.cache
def _parser() -> bashkit.Bash:
    return bashkit.Bash()
