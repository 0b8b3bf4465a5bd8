"""The protocol with the bash of a session: script lines in, reports out, and their directory.

Bash reads its script from a pipe. All lines are built here from fixed text, checked names and the
path of a directory. Commands, values and working directories are in a file of that directory,
which bash reads into an array. No line is in a loop or a function, so that `break`, `return` and
`declare` in a command mean what they mean in a script. Builtins are called as `\\builtin name`,
which no alias or function can override.

Bash reports fields that end in NUL, whose first byte is the kind.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import shutil
import termios
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.jail.namespace_setup import IO
from smokebox.engine.jail.shell_supervisor import INTERRUPT_SIGNAL
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from smokebox.types import Stream

# Names of files in the directory.
SCRIPT, REPORTS, FIELDS, DUMP, _STDIN = "bash", "r", "c", "d", "i"

# Kinds of reports: the exit status of a command, a shell that is ready, a restored state, a
# command that could not be read, and working directories that could not be entered.
STATUS, READY, RESTORED, UNREAD = b"s", b"y", b"k", b"u"
MISSING, NOT_DIRECTORY, DENIED = b"m", b"f", b"a"
# Reports after a command: the working directory, and the rest of the state.
CWD, STATE = b"p", b"d"

_DUMPED = (
    "shopt -p",
    "declare -f",
    "declare -F",
    "declare -p",
    "alias -p",
    "umask -p",
    "trap -p",
    "set +o",
)
# Variables that every bash sets, and those of this protocol.
_SPECIAL = (
    "BASH BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND "
    "BASH_EXECUTION_STRING BASH_LINENO BASH_MONOSECONDS BASH_SOURCE BASH_SUBSHELL BASH_TRAPSIG "
    "BASH_VERSINFO BASH_VERSION COMP_WORDBREAKS DIRSTACK EPOCHREALTIME EPOCHSECONDS EUID "
    "FUNCNAME GROUPS HISTCMD LINENO PIPESTATUS PPID PWD RANDOM SECONDS SHELLOPTS SRANDOM UID _ "
    "__smokebox __smokebox_back"
)
_KILL_SELF = "\\builtin kill -9 $$"
_NOT_RESTORED = re.compile(
    rb"^(?:declare -[-a-zA-Z]+ (?:%s)(?:=.*)?|trap -- .*%s.*|shopt -[su] (?:%s))\n"
    % (
        _SPECIAL.replace(" ", "|").encode(),
        re.escape(_KILL_SELF.encode()),
        b"login_shell|restricted_shell",
    ),
    re.MULTILINE,
)
# A variable as `declare -p` prints it. Arrays look different, and are never exported.
_VARIABLE = re.compile(
    rb"""^declare -([-a-zA-Z]+) ([A-Za-z_][A-Za-z0-9_]*)"""
    rb"""=("(?:[^"\\]|\\.)*"|\$'(?:[^'\\]|\\.)*')$""",
    re.MULTILINE | re.DOTALL,
)
_DOUBLE_QUOTED = re.compile(rb"\\([\\\"$`])")
_ANSI_QUOTED = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_ANSI_ESCAPES = {
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
# Variables that each shell and each terminal sets itself.
_NOT_INHERITED = frozenset({"PWD", "OLDPWD", "SHLVL", "TERM", "COLUMNS", "LINES", "_"})
_PREFIX = "s-"
_TRAVERSE_ONLY = 0o711


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """The state that a shell starts with: its working directory, and a script for the rest."""

    cwd: str
    script: bytes

    def pack(self) -> bytes:
        """Encode the state for the record."""
        return self.cwd.encode("utf-8", "surrogateescape") + b"\0" + self.script

    @classmethod
    def unpack(cls, data: bytes) -> SessionState:
        """Decode the result of `pack`."""
        cwd, _, script = data.partition(b"\0")
        return cls(cwd=cwd.decode("utf-8", "surrogateescape"), script=script)

    @classmethod
    def from_reports(cls, cwd: bytes, dump: bytes) -> SessionState:
        """Build the state from reports, without what every shell has anyway."""
        path = cwd.removesuffix(b"\n").decode("utf-8", "surrogateescape")
        return cls(cwd=path or "/", script=_NOT_RESTORED.sub(b"", dump))

    def exported(self) -> dict[str, str]:
        """Return the exported variables that another shell inherits."""
        return {
            name.decode(): _unquote(value).decode("utf-8", "surrogateescape")
            for flags, name, value in _VARIABLE.findall(self.script)
            if b"x" in flags and name.decode() not in _NOT_INHERITED
        }


def _unquote(value: bytes) -> bytes:
    if value.startswith(b'"'):
        return _DOUBLE_QUOTED.sub(rb"\1", value[1:-1])
    return _ANSI_QUOTED.sub(_unescape, value[2:-1])


def _unescape(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, other = match.groups()
    if octal is not None:
        return bytes([int(octal, 8) & 0xFF])
    if hexadecimal is not None:
        return bytes([int(hexadecimal, 16)])
    return _ANSI_ESCAPES.get(other, other)


class BashScript:
    """Builds script lines for a shell whose pipes are in the directory `path` inside."""

    def __init__(self, path: str) -> None:
        self._path = path

    def dump(self) -> str:
        """Return the content of the file `DUMP`, which reports the state."""
        # Each with its own redirection: the output of a DEBUG trap comes before it.
        to = f">{self._path}/{REPORTS} 2>/dev/null || \\builtin :"
        words = ["unset -v __smokebox", "printf p", "pwd", "printf '\\0d'", *_DUMPED]
        return "".join(f"\\builtin {word} {to}\n" for word in (*words, "printf '\\0'"))

    def start(self) -> str:
        """Start a shell in the directory of field 0, or report why that fails."""
        enter = self._enter("${__smokebox[0]}", self._report(READY))
        return f"{self._prepare()}{self._load()}\n{enter}\n"

    def restore(self) -> str:
        """Start a shell in the directory of field 0, else 1, and run field 2."""
        cd = '\\builtin cd -- "${__smokebox[0]}" || \\builtin cd -- "${__smokebox[1]}"'
        return (
            f"{self._prepare()}{self._load()}\n{cd} || \\builtin cd /\n"
            f'\\builtin eval -- "${{__smokebox[2]}}"\n{self._trap()}\n{self._report(READY)}\n'
        )

    def restored(self) -> bytes:
        """Return the end of the script of a state, which reports that it ran completely."""
        return f"\n{self._report(RESTORED)}\n".encode()

    def run(
        self,
        *,
        first: int,
        last_status: int,
        stdin: str | None,
        stdout: str,
        stderr: str,
        cwd: bool = False,
        env: Sequence[str] = (),
    ) -> str:
        """Run field 0 of the file, in the directory of field 1, with `env` from field 2 on.

        Args:
            first: Index of field 0 in the array. It differs each time, so that an old field is
                never run as the command.
            last_status: Value of `$?`.
            stdin: Name of a file in the directory, as are `stdout` and `stderr`.
            stdout: See `stdin`.
            stderr: See `stdin`.
            cwd: Whether there is a directory in field 1.
            env: Names of variables.
        """
        source = "/dev/null" if stdin is None else f"{self._path}/{stdin}"
        values = _assign(env, first)
        # With `builtin eval` alone the values would last only for the first command in it.
        evaluate = f"{values}\\builtin command eval" if values else "\\builtin eval"
        call = (
            f'{evaluate} -- "${{__smokebox[{first}]-}}" <{source} '
            f">{self._path}/{stdout} 2>{self._path}/{stderr}"
        )
        # The left side of `&&` fails without triggering `set -e` or the ERR trap.
        status = f"(\\builtin exit {last_status}) && \\builtin :" if last_status else "\\builtin :"
        back = ""
        if cwd:
            call = self._enter(f"${{__smokebox[{first + 1}]-}}", f"{status}; {call}")
            status = '__smokebox_back=("$PWD" "${OLDPWD-}")'
            back = (
                '\\builtin cd -- "${__smokebox_back[0]}" && OLDPWD=${__smokebox_back[1]}\n'
                "\\builtin unset -v __smokebox_back || \\builtin :\n"
            )
        return (
            f"{self._load(first)} || {self._report(UNREAD)}\n"
            # The only place where an assignment to LINENO lasts: the command is on line 1.
            f"{{ {status}; }} <&$((LINENO=0))\n{call}\n"
            f"\\builtin printf 's%s\\0' \"$?\" >{self._path}/{REPORTS}\n"
            # A command can have taken the descriptors that bash had saved.
            "\\builtin exec </dev/null >/dev/null 2>&1\n"
            f"{back}{self._run_dump()}\n"
        )

    def _prepare(self) -> str:
        return f"\\builtin shopt -s expand_aliases\n{self._trap()}\n"

    def _trap(self) -> str:
        # In a function, its local variables would be taken for those of the session.
        dump = f"[[ $FUNCNAME ]] || {{ {self._run_dump()}; }}".replace("'", "'\\''")
        return f"\\builtin trap -- '{dump}; {_KILL_SELF}' {INTERRUPT_SIGNAL}"

    def _run_dump(self) -> str:
        # Not with `source`, which triggers the RETURN trap and not the DEBUG trap.
        load = f"\\builtin mapfile -d '' -t __smokebox <{self._path}/{DUMP}"
        return f'{load} && \\builtin eval -- "$__smokebox"'

    def _load(self, first: int = 0) -> str:
        return f"\\builtin mapfile -O {first} -d '' -t __smokebox <{self._path}/{FIELDS}"

    def _report(self, kind: bytes) -> str:
        return f"\\builtin printf '{kind.decode()}\\0' >{self._path}/{REPORTS}"

    def _enter(self, directory: str, then: str) -> str:
        return (
            f'if [[ ! -e "{directory}" ]]; then {self._report(MISSING)}; '
            f'elif [[ ! -d "{directory}" ]]; then {self._report(NOT_DIRECTORY)}; '
            f'elif ! \\builtin cd -- "{directory}"; then {self._report(DENIED)}; '
            f"else {then}; fi"
        )


def pack_fields(fields: Iterable[bytes]) -> bytes:
    """Encode the content of the file `FIELDS`. No field contains a NUL."""
    return b"".join(field + b"\0" for field in fields)


def export_script(names: Sequence[str], removed: Sequence[str], first: int) -> bytes:
    """Build a command that exports `names` with the values from field 2 on, and unsets others.

    `first` is the index of field 0, as for `BashScript.run`.
    """
    lines = [f"\\builtin export {_assign(names, first)}"] if names else []
    lines += [f"\\builtin unset -v {name}" for name in removed]
    return " && ".join(lines).encode()


def _assign(names: Sequence[str], first: int) -> str:
    return "".join(f'{name}="${{__smokebox[{n}]-}}" ' for n, name in enumerate(names, first + 2))


class SessionDirectory:
    """The files and pipes of one shell, on the host. No open here blocks."""

    def __init__(self, io: str) -> None:
        name = _PREFIX + new_id()
        self.inside = f"{IO}/{name}"
        self.script = BashScript(self.inside)
        self._path = f"{io}/{name}"
        self._output_number = 0
        self._fds: list[int] = []
        # Not listable: a program that knows the name of a pipe can write as another user.
        os.chmod(io, _TRAVERSE_ONLY)
        os.mkdir(self._path)
        try:
            self._create_files()
        except OSError:
            self.close()
            raise

    @property
    def reports_fd(self) -> int:
        """The descriptor to read reports from. It never reaches the end of file."""
        return self._reports

    @property
    def all_read(self) -> bool:
        """True if the shell has read all lines, and run them."""
        count = array.array("i", [0])
        fcntl.ioctl(self._script, termios.FIONREAD, count)
        return count[0] == 0

    def send(self, lines: str) -> bool:
        """Write lines for the shell; return False if it does not read them."""
        # An empty line is read once the others have run, however slow the shell is.
        data = f"{lines}\n".encode()
        try:
            return os.write(self._script, data) == len(data)
        except BlockingIOError:
            return False

    def write_fields(self, fields: bytes) -> None:
        """Write the fields that the next lines read."""
        os.ftruncate(self._fields, 0)
        _write_all(self._fields, fields)

    def write_stdin(self, data: bytes | None) -> str | None:
        """Write a file for the stdin of a command, and return its name."""
        if data is None:
            return None
        fd = self._create(_STDIN, 0o644)
        try:
            _write_all(fd, data)
        finally:
            os.close(fd)
        return _STDIN

    def remove_stdin(self) -> None:
        """Unlink the file of `write_stdin`; programs that have it open keep it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._path}/{_STDIN}")

    @property
    def output_names(self) -> tuple[str, str]:
        """The names of the pipes for stdout and stderr."""
        return f"o{self._output_number}", f"e{self._output_number}"

    def open_outputs(self) -> dict[int, Stream]:
        """Open the reading ends of those pipes."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        stdout, stderr = self.output_names
        out = os.open(f"{self._path}/{stdout}", flags)
        try:
            return {out: "stdout", os.open(f"{self._path}/{stderr}", flags): "stderr"}
        except OSError:
            os.close(out)
            raise

    def replace_outputs(self) -> None:
        """Create other pipes for the next command: background processes write to these."""
        for name in self.output_names:
            os.unlink(f"{self._path}/{name}")
        self._output_number += 1
        self._create_outputs()

    def close(self) -> None:
        """Remove the directory. Safe to repeat."""
        while self._fds:
            os.close(self._fds.pop())
        shutil.rmtree(self._path, ignore_errors=True)

    def _create_files(self) -> None:
        os.chmod(self._path, _TRAVERSE_ONLY)
        # Owned by root, and read-only for other users inside.
        self._script = self._create_pipe(SCRIPT, 0o644)
        self._reports = self._create_pipe(REPORTS, 0o622)
        self._fields = self._keep(self._create(FIELDS, 0o644))
        dump = self._create(DUMP, 0o644)
        try:
            _write_all(dump, self.script.dump().encode())
        finally:
            os.close(dump)
        self._create_outputs()

    def _create_outputs(self) -> None:
        for name in self.output_names:
            os.mkfifo(f"{self._path}/{name}")
            os.chmod(f"{self._path}/{name}", 0o666)

    def _create_pipe(self, name: str, mode: int) -> int:
        path = f"{self._path}/{name}"
        os.mkfifo(path)
        os.chmod(path, mode)
        # For reading and writing: it neither waits for the shell nor ends with it.
        return self._keep(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))

    def _create(self, name: str, mode: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(f"{self._path}/{name}", flags)
        os.fchmod(fd, mode)
        return fd

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd


def remove_leftovers(io: str) -> None:
    """Remove the directories of shells that ended with another engine."""
    for name in os.listdir(io):
        if name.startswith(_PREFIX):
            shutil.rmtree(f"{io}/{name}", ignore_errors=True)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
