"""What the bash of a session is told, line by line, and what it tells of its state.

Bash reads its script from a pipe. All lines are made here from fixed text, checked names
and the path of a folder; commands, values and directories lie in a file of that folder,
which bash reads into an array. No line is in a loop or a function, so that `break`,
`return` and `declare` in a command mean what they mean in a script. Words begin with
`\\builtin`, which no alias and no function of another builtin's name can take over.

Bash answers with fields that end in NUL, of which the first byte is the kind.
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
from smokebox.engine.jail.shell_supervisor import INTERRUPTION
from smokebox.foundation.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from smokebox.types import Stream

SCRIPT, REPORTS, COMMAND, DUMP = "bash", "r", "c", "d"

# The kinds of fields: a command's exit status, a shell that is ready, a state that was
# taken over, a command that could not be read, and directories that could not be entered.
STATUS, READY, RESTORED, UNREAD = b"s", b"y", b"k", b"u"
MISSING, NOT_DIRECTORY, DENIED = b"m", b"f", b"a"
# After a command: the directory, and all the rest.
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
# Variables that bash makes by itself, or of which it has its own, and ours.
_SPECIAL = (
    "BASH BASHOPTS BASHPID BASH_ALIASES BASH_ARGC BASH_ARGV BASH_ARGV0 BASH_CMDS BASH_COMMAND "
    "BASH_EXECUTION_STRING BASH_LINENO BASH_MONOSECONDS BASH_SOURCE BASH_SUBSHELL BASH_TRAPSIG "
    "BASH_VERSINFO BASH_VERSION COMP_WORDBREAKS DIRSTACK EPOCHREALTIME EPOCHSECONDS EUID "
    "FUNCNAME GROUPS HISTCMD LINENO PIPESTATUS PPID PWD RANDOM SECONDS SHELLOPTS SRANDOM UID _ "
    "__smokebox __smokebox_back"
)
_LAST_WORDS = "\\builtin kill -9 $$"
_LEFT_OUT = re.compile(
    rb"^(?:declare -[-a-zA-Z]+ (?:%s)(?:=.*)?|trap -- .*%s.*|shopt -[su] (?:%s))\n"
    % (
        _SPECIAL.replace(" ", "|").encode(),
        re.escape(_LAST_WORDS.encode()),
        b"login_shell|restricted_shell",
    ),
    re.MULTILINE,
)
PREFIX = "s-"
_PASSABLE = 0o711
_STDIN = "i"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """What a shell begins with: its directory, and a script that makes the rest."""

    cwd: str
    script: bytes

    def pack(self) -> bytes:
        """As it is kept in the record."""
        return self.cwd.encode("utf-8", "surrogateescape") + b"\0" + self.script

    @classmethod
    def unpack(cls, data: bytes) -> SessionState:
        """What `pack` made."""
        cwd, _, script = data.partition(b"\0")
        return cls(cwd=cwd.decode("utf-8", "surrogateescape"), script=script)

    @classmethod
    def heard(cls, cwd: bytes, dump: bytes) -> SessionState:
        """What a shell told, without what a shell has anyway."""
        path = cwd.removesuffix(b"\n").decode("utf-8", "surrogateescape")
        return cls(cwd=path or "/", script=_LEFT_OUT.sub(b"", dump))


class Driver:
    """Makes the lines for a shell whose pipes are in the directory `folder` inside."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def dump_script(self) -> str:
        """What the file `DUMP` holds: how the shell tells its state."""
        # Each with a redirection of its own: a DEBUG trap talks before that is made.
        to = f">{self._folder}/{REPORTS} 2>/dev/null || \\builtin :"
        words = ["unset -v __smokebox", "printf p", "pwd", "printf '\\0d'", *_DUMPED]
        return "".join(f"\\builtin {word} {to}\n" for word in (*words, "printf '\\0'"))

    def begin(self) -> str:
        """For a fresh shell: take the directory from field 0, or say what is wrong with it."""
        enter = self._enter("${__smokebox[0]}", self._tell(READY))
        return f"{self._prepare()}{self._load()}\n{enter}\n"

    def restore(self) -> str:
        """For a fresh shell: go to the directory of field 0, else 1, and run field 2."""
        go = '\\builtin cd -- "${__smokebox[0]}" || \\builtin cd -- "${__smokebox[1]}"'
        return (
            f"{self._prepare()}{self._load()}\n{go} || \\builtin cd /\n"
            f'\\builtin eval -- "${{__smokebox[2]}}"\n{self._trap()}\n{self._tell(READY)}\n'
        )

    def finished(self) -> bytes:
        """The end of a state's script: it was run to here."""
        return f"\n{self._tell(RESTORED)}\n".encode()

    def run(
        self,
        *,
        first: int,
        last: int,
        stdin: str | None,
        stdout: str,
        stderr: str,
        cwd: bool = False,
        env: Sequence[str] = (),
    ) -> str:
        """Run the first field: in the directory of the second, with `env` from the third on.

        `first` is their number in the array, another one each time, so that what was there
        is never taken for the command. `last` is what `$?` shall be; the others are names
        of files in the folder.
        """
        source = "/dev/null" if stdin is None else f"{self._folder}/{stdin}"
        values = _values(env, first)
        # For `builtin eval` alone the values would be gone with its first command.
        evaluate = f"{values}\\builtin command eval" if values else "\\builtin eval"
        call = (
            f'{evaluate} -- "${{__smokebox[{first}]-}}" <{source} '
            f">{self._folder}/{stdout} 2>{self._folder}/{stderr}"
        )
        # The left side of `&&` fails without touching `set -e` or the ERR trap.
        status = f"(\\builtin exit {last}) && \\builtin :" if last else "\\builtin :"
        back = ""
        if cwd:
            call = self._enter(f"${{__smokebox[{first + 1}]-}}", f"{status}; {call}")
            status = '__smokebox_back=("$PWD" "${OLDPWD-}")'
            back = (
                '\\builtin cd -- "${__smokebox_back[0]}" && OLDPWD=${__smokebox_back[1]}\n'
                "\\builtin unset -v __smokebox_back || \\builtin :\n"
            )
        return (
            f"{self._load(first)} || {self._tell(UNREAD)}\n"
            # The only place where an assignment to LINENO lasts: the command is on line 1.
            f"{{ {status}; }} <&$((LINENO=0))\n{call}\n"
            f"\\builtin printf 's%s\\0' \"$?\" >{self._folder}/{REPORTS}\n"
            # A command can have taken the descriptors that bash had saved.
            "\\builtin exec </dev/null >/dev/null 2>&1\n"
            f"{back}{self._dump()}\n"
        )

    def _prepare(self) -> str:
        return f"\\builtin shopt -s expand_aliases\n{self._trap()}\n"

    def _trap(self) -> str:
        # In a function its local variables would be taken for the session's.
        told = f"[[ $FUNCNAME ]] || {{ {self._dump()}; }}".replace("'", "'\\''")
        return f"\\builtin trap -- '{told}; {_LAST_WORDS}' {INTERRUPTION}"

    def _dump(self) -> str:
        # Not by `source`, which has a RETURN trap of its own and no DEBUG trap.
        load = f"\\builtin mapfile -d '' -t __smokebox <{self._folder}/{DUMP}"
        return f'{load} && \\builtin eval -- "$__smokebox"'

    def _load(self, first: int = 0) -> str:
        return f"\\builtin mapfile -O {first} -d '' -t __smokebox <{self._folder}/{COMMAND}"

    def _tell(self, kind: bytes) -> str:
        return f"\\builtin printf '{kind.decode()}\\0' >{self._folder}/{REPORTS}"

    def _enter(self, directory: str, then: str) -> str:
        return (
            f'if [[ ! -e "{directory}" ]]; then {self._tell(MISSING)}; '
            f'elif [[ ! -d "{directory}" ]]; then {self._tell(NOT_DIRECTORY)}; '
            f'elif ! \\builtin cd -- "{directory}"; then {self._tell(DENIED)}; '
            f"else {then}; fi"
        )


def pack_fields(fields: Iterable[bytes]) -> bytes:
    """The content of the file `COMMAND`; no field of it can hold a NUL."""
    return b"".join(field + b"\0" for field in fields)


def assignments(names: Sequence[str], removed: Sequence[str], first: int) -> bytes:
    """A command that exports `names` with the third field and those after, and unsets others.

    `first` is the number of the first field, as for `Driver.run`.
    """
    lines = [f"\\builtin export {_values(names, first)}"] if names else []
    lines += [f"\\builtin unset -v {name}" for name in removed]
    return " && ".join(lines).encode()


def _values(names: Sequence[str], first: int) -> str:
    return "".join(f'{name}="${{__smokebox[{n}]-}}" ' for n, name in enumerate(names, first + 2))


class SessionFolder:
    """The host's side. No open here can block, whoever has the other end, or nobody."""

    def __init__(self, io: str) -> None:
        name = PREFIX + new_id()
        self.inside = f"{IO}/{name}"
        self.driver = Driver(self.inside)
        self._path = f"{io}/{name}"
        self._pair = 0
        self._fds: list[int] = []
        # What is in it are names of pipes: whoever has one can speak for another user.
        os.chmod(io, _PASSABLE)
        os.mkdir(self._path)
        try:
            self._fill()
        except OSError:
            self.close()
            raise

    @property
    def reports(self) -> int:
        """The descriptor to read what the shell tells. Never at its end."""
        return self._reports

    @property
    def read(self) -> bool:
        """Whether the shell has read all that was said."""
        count = array.array("i", [0])
        fcntl.ioctl(self._script, termios.FIONREAD, count)
        return count[0] == 0

    def say(self, lines: str) -> bool:
        """Write lines for the shell; False when it does not read any."""
        data = lines.encode()
        try:
            return os.write(self._script, data) == len(data)
        except BlockingIOError:
            return False

    def put(self, fields: bytes) -> None:
        """What the next line reads."""
        os.ftruncate(self._command, 0)
        _write_all(self._command, fields)

    def put_stdin(self, data: bytes | None) -> str | None:
        """The name of a file for the command's stdin, if it has any."""
        if data is None:
            return None
        fd = self._create(_STDIN, 0o644)
        try:
            _write_all(fd, data)
        finally:
            os.close(fd)
        return _STDIN

    def take_stdin_away(self) -> None:
        """Remove that file; whoever has it open keeps it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._path}/{_STDIN}")

    @property
    def outputs(self) -> tuple[str, str]:
        """The names of the pipes for stdout and stderr."""
        return f"o{self._pair}", f"e{self._pair}"

    def open_outputs(self) -> dict[int, Stream]:
        """The reading ends of those pipes."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        stdout, stderr = self.outputs
        out = os.open(f"{self._path}/{stdout}", flags)
        try:
            return {out: "stdout", os.open(f"{self._path}/{stderr}", flags): "stderr"}
        except OSError:
            os.close(out)
            raise

    def renew_outputs(self) -> None:
        """Other pipes for the next command: somebody still writes to these."""
        for name in self.outputs:
            os.unlink(f"{self._path}/{name}")
        self._pair += 1
        self._make_outputs()

    def close(self) -> None:
        """Remove everything. Safe to repeat."""
        while self._fds:
            os.close(self._fds.pop())
        shutil.rmtree(self._path, ignore_errors=True)

    def _fill(self) -> None:
        os.chmod(self._path, _PASSABLE)
        # As root nobody inside can write what the shell reads.
        self._script = self._pipe(SCRIPT, 0o644)
        self._reports = self._pipe(REPORTS, 0o622)
        self._command = self._keep(self._create(COMMAND, 0o644))
        dump = self._create(DUMP, 0o644)
        try:
            _write_all(dump, self.driver.dump_script().encode())
        finally:
            os.close(dump)
        self._make_outputs()

    def _make_outputs(self) -> None:
        for name in self.outputs:
            os.mkfifo(f"{self._path}/{name}")
            os.chmod(f"{self._path}/{name}", 0o666)

    def _pipe(self, name: str, mode: int) -> int:
        path = f"{self._path}/{name}"
        os.mkfifo(path)
        os.chmod(path, mode)
        # For reading and writing: that neither waits for the shell nor ends with it.
        return self._keep(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))

    def _create(self, name: str, mode: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(f"{self._path}/{name}", flags)
        os.fchmod(fd, mode)
        return fd

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd


def sweep(io: str) -> None:
    """Remove the folders of shells that ended with another engine."""
    for name in os.listdir(io):
        if name.startswith(PREFIX):
            shutil.rmtree(f"{io}/{name}", ignore_errors=True)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
