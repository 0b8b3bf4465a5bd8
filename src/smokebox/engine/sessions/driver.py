"""What the bash of a session is told, line by line, and what it tells of its state.

Bash reads its script from a pipe. All lines are made here from fixed text, checked names
and the path of a folder; commands, values and directories lie in a file of that folder,
which bash reads into an array. No line is in a loop or a function, so that `break`,
`return` and `declare` in a command mean what they mean in a script. Words begin with
`\\builtin`, which no alias and no function of another builtin's name can take over.

Bash answers with fields that end in NUL, of which the first byte is the kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.jail.minded_shell import INTERRUPTION

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

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


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a shell begins with: its directory, and a script that makes the rest."""

    cwd: str
    script: bytes

    def pack(self) -> bytes:
        """As it is kept in the record."""
        return self.cwd.encode("utf-8", "surrogateescape") + b"\0" + self.script

    @classmethod
    def unpack(cls, data: bytes) -> State:
        """What `pack` made."""
        cwd, _, script = data.partition(b"\0")
        return cls(cwd=cwd.decode("utf-8", "surrogateescape"), script=script)

    @classmethod
    def heard(cls, cwd: bytes, dump: bytes) -> State:
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
