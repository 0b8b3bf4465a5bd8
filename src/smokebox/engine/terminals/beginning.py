"""What a terminal begins with: its program, and what it takes over from a session."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smokebox.engine.sessions.driver import State
from smokebox.errors import InvalidOption
from smokebox.options import check_env
from smokebox.sandbox.paths import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.engine.record.rows import SessionRow
    from smokebox.engine.run import Command, Program, Run

TERM = "xterm-256color"

# As `declare -p` writes them; what is not one word in quotes is an array, and not exported.
_VARIABLE = re.compile(
    rb"""^declare -([-a-zA-Z]+) ([A-Za-z_][A-Za-z0-9_]*)"""
    rb"""=("(?:[^"\\]|\\.)*"|\$'(?:[^'\\]|\\.)*')$""",
    re.MULTILINE | re.DOTALL,
)
_IN_DOUBLE = re.compile(rb"\\([\\\"$`])")
_IN_ANSI = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_NAMED = {
    b"a": b"\a",
    b"b": b"\b",
    b"e": b"\x1b",
    b"E": b"\x1b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
}
# What each shell and each terminal has of its own.
_OWN = frozenset({"PWD", "OLDPWD", "SHLVL", "TERM", "COLUMNS", "LINES", "_"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where to begin, as whom, and with which variables; None for the sandbox's own."""

    cwd: str | None = None
    user: str | None = None
    env: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_session(cls, row: SessionRow) -> Beginning:
        """As a session is after its last command."""
        if row.state is None:
            return cls(cwd=row.cwd or None, user=row.user or None, env=dict(row.env))
        state = State.unpack(row.state)
        return cls(cwd=state.cwd, user=row.user or None, env=exported(state.script))

    async def program(
        self,
        run: Run,
        command: Command | None,
        *,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
    ) -> Program:
        """What to start, with what was asked for put over this."""
        return await run.program(
            words_of(command, run.shell),
            cwd=resolve(cwd, self.cwd or run.cwd) if cwd is not None else self.cwd,
            env={"TERM": run.env.get("TERM", TERM), **self.env, **check_env(env)},
            user=user if user is not None else self.user,
        )


def words_of(command: Command | None, shell: str) -> Command:
    """The words to start: the shell, one program by its name, or words as they are."""
    if command is None:
        return [shell]
    if isinstance(command, str):
        if not command or command.split() != [command]:
            raise InvalidOption(
                f"the command of a terminal is one word, or a list of words, not {command!r:.80}.",
                hint="Pass 'python3', or ['python3', '-q'], or ['bash', '-c', 'make; exec bash'].",
                option="command",
                value=command,
            )
        return [command]
    return command


def exported(script: bytes) -> dict[str, str]:
    """The exported variables in the state of a session."""
    found: dict[str, str] = {}
    for flags, name, value in _VARIABLE.findall(script):
        if b"x" in flags and name.decode() not in _OWN:
            found[name.decode()] = _unquote(value).decode("utf-8", "surrogateescape")
    return found


def _unquote(value: bytes) -> bytes:
    if value.startswith(b'"'):
        return _IN_DOUBLE.sub(rb"\1", value[1:-1])
    return _IN_ANSI.sub(_character, value[2:-1])


def _character(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, other = match.groups()
    if octal is not None:
        return bytes([int(octal, 8) & 0xFF])
    if hexadecimal is not None:
        return bytes([int(hexadecimal, 16)])
    return _NAMED.get(other, other)
