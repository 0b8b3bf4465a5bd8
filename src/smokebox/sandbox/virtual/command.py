"""Commands written in Python, for `virtual(commands={...})` and for Smokebox itself.

A plain function is the fast path: text in, text out, a few microseconds a call. An
`async` function streams bytes, may wait, and stops when the script is cancelled.
"""

from __future__ import annotations

import errno
import inspect
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from bashkit import BuiltinResult

from smokebox.errors import InvalidOption, PathError, PathNotFound, SmokeboxError
from smokebox.foundation.paths import resolve
from smokebox.sandbox.virtual.command_runtime import CommandTurn, threaded_tree

if TYPE_CHECKING:
    from bashkit import BuiltinContext, CommandContext, FileSystem
    from bashkit._bashkit import CommandOutput as EngineOutput

    from smokebox.sandbox.filesystems.tree import Tree

_log = logging.getLogger("smokebox.commands")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")
_KEYWORDS = frozenset((
    "if", "then", "elif", "else", "fi", "case", "esac", "for", "select", "while", "until", "do",
    "done", "in", "function", "time", "coproc",
))  # fmt: skip
# Builtins that change the shell itself, which a Python function cannot do.
_SHELL_STATE = frozenset((
    "alias", "break", "builtin", "cd", "command", "continue", "declare", "eval", "exec", "exit",
    "export", "local", "popd", "pushd", "read", "readonly", "return", "set", "shift", "source",
    "times", "trap", "typeset", "unalias", "unset",
))  # fmt: skip

# Exit code of a writer whose reader has exited: 128 + SIGPIPE.
_BROKEN_PIPE = 141


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOutput:
    """Output of a command that also sets stderr or an exit code."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandCall:
    """One call of a plain command: arguments, input, environment and directory.

    `env` holds exported variables only. `stdin` is empty if nothing was piped in; bytes in it that
    are not UTF-8 are replaced, so a command that reads bytes must be `async`.
    """

    name: str
    args: list[str]
    stdin: str
    env: Mapping[str, str]
    cwd: str
    files: Tree
    _engine: FileSystem = field(repr=False)

    def path(self, name: str) -> str:
        """Return the absolute form of a path argument."""
        return resolve(name, self.cwd)

    def read_file(self, name: str) -> bytes:
        """Return the bytes of a file argument, which may be `<(...)` or in `/dev`."""
        return _read_file(self.files, self._engine, self.path(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandStream:
    """One call of an `async` command, with input and output as streams of bytes."""

    name: str
    args: list[str]
    env: Mapping[str, str]
    cwd: str
    files: Tree
    _context: CommandContext = field(repr=False)
    _turn: CommandTurn = field(repr=False)

    def path(self, name: str) -> str:
        """Return the absolute form of a path argument."""
        return resolve(name, self.cwd)

    def read_file(self, name: str) -> bytes:
        """Return the bytes of a file argument, which may be `<(...)` or in `/dev`."""
        return _read_file(self.files, self._context.fs, self.path(name))

    @property
    async def stdin(self) -> AsyncIterator[bytes]:
        """Yield the piped input as it arrives."""
        while (data := await self._turn.wait_for_io(self._context.stdin.read_chunk())) is not None:
            yield data

    async def read(self) -> bytes:
        """Return the rest of the input."""
        return b"".join([data async for data in self.stdin])

    async def write(self, data: str | bytes) -> None:
        """Write to stdout; wait for a slow reader, and end the command if the reader has exited."""
        await self._send(self._context.stdout, data)

    async def write_error(self, data: str | bytes) -> None:
        """Write to stderr."""
        await self._send(self._context.stderr, data)

    async def _send(self, output: EngineOutput, data: str | bytes) -> None:
        raw = data.encode("utf-8", "replace") if isinstance(data, str) else bytes(data)
        try:
            await self._turn.wait_for_io(output.write(raw))
        except RuntimeError as error:
            # bashkit's message for a full or oversized file: "io error: file too large: ...".
            reason = str(error).removeprefix("io error: ")
            raise OSError(errno.EIO, f"write error: {reason}") from error


PlainCommand: TypeAlias = Callable[[CommandCall], "str | CommandOutput"]
StreamingCommand: TypeAlias = Callable[[CommandStream], "Awaitable[int | None]"]
Command: TypeAlias = PlainCommand | StreamingCommand

Builtin: TypeAlias = "Callable[[BuiltinContext], BuiltinResult]"
Streaming: TypeAlias = "Callable[[CommandContext], Awaitable[int]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCommands:
    """Commands in the two forms that the shell takes.

    `builtins` go to the constructor of `bashkit.Bash`, `streaming` to its `add_command`.
    """

    builtins: dict[str, Builtin]
    streaming: dict[str, Streaming]


def check_commands(commands: Mapping[str, Command] | None) -> dict[str, Command]:
    """Return a copy of `commands` after checking names and values."""
    if commands is None:
        return {}
    if not isinstance(commands, Mapping):
        raise InvalidOption(
            f"commands must be a mapping of names to functions, not {type(commands).__name__}.",
            hint="Pass commands={'greet': greet}.",
            option="commands",
        )
    for name, command in commands.items():
        _check_name(name)
        if not callable(command):
            raise InvalidOption(
                f"the command {name} is {type(command).__name__}, which cannot be called.",
                hint="Pass a function that takes one CommandCall, or an async one.",
                option="commands",
                value=name,
            )
    return dict(commands)


def split_commands(commands: Mapping[str, Command], tree: Tree) -> EngineCommands:
    """Return the commands in the forms that the shell takes, each using the files of `tree`."""
    engine_commands = EngineCommands(builtins={}, streaming={})
    for name, command in check_commands(commands).items():
        if _is_streaming(command):
            engine_commands.streaming[name] = _Streaming(name, command, tree)  # type: ignore[arg-type]
        else:
            engine_commands.builtins[name] = _builtin(name, command, tree)  # type: ignore[arg-type]
    return engine_commands


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidOption(
            f"{name!r} is not a valid command name.",
            hint="Use letters, digits, and any of _ . + @ - after the first.",
            option="commands",
            value=name,
        )
    if name in _KEYWORDS or name in _SHELL_STATE:
        kind = "a word of the shell's grammar" if name in _KEYWORDS else "part of the shell itself"
        raise InvalidOption(
            f"{name!r} is {kind} and cannot be replaced.",
            hint="Choose another name.",
            option="commands",
            value=name,
        )


def _is_streaming(command: Command) -> bool:
    inner = inspect.unwrap(command)
    while hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    call = getattr(inner, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(call)


def _builtin(name: str, command: PlainCommand, tree: Tree) -> Builtin:
    files = threaded_tree(tree)

    def run(context: BuiltinContext) -> BuiltinResult:
        call = CommandCall(
            name=name,
            args=context.argv,
            stdin=context.stdin or "",
            env=context.env,
            cwd=context.cwd,
            files=files,
            _engine=context.fs,
        )
        try:
            output = command(call)
        except SystemExit as error:
            return BuiltinResult("", "", _status(error.code))
        except Exception as error:
            _log.debug("the command %s failed", name, exc_info=True)
            return BuiltinResult("", f"{name}: {describe(error)}\n", 1)
        if isinstance(output, str):
            return BuiltinResult(_utf8(output), "", 0)
        if isinstance(output, CommandOutput):
            code = output.exit_code & 0xFF
            return BuiltinResult(_utf8(output.stdout), _utf8(output.stderr), code)
        return BuiltinResult("", _wrong_result(name, output, "str or CommandOutput"), 1)

    return run


class _Streaming:
    """Adapter of an `async` command for bashkit."""

    def __init__(self, name: str, command: StreamingCommand, tree: Tree) -> None:
        self._name = name
        self._command = command
        self._tree = tree
        # bashkit checks whether the object's call is async, and then calls the class, so that a
        # pending command is known before it can run.
        vars(self)["__call__"] = self._run

    def __call__(self, context: CommandContext) -> CommandTurn:
        return CommandTurn(lambda turn: self._run(context, turn))

    async def _run(self, context: CommandContext, turn: CommandTurn) -> int:
        name = self._name
        stream = CommandStream(
            name=name,
            args=context.argv,
            env=context.env,
            cwd=context.cwd,
            files=self._tree,
            _context=context,
            _turn=turn,
        )
        try:
            code = await self._command(stream)
        except SystemExit as error:
            return _status(error.code)
        except BrokenPipeError:
            return _BROKEN_PIPE
        except Exception as error:
            _log.debug("the command %s failed", name, exc_info=True)
            return await _report_error(stream, f"{name}: {describe(error)}\n")
        if code is None or isinstance(code, int):
            return (code or 0) & 0xFF
        return await _report_error(stream, _wrong_result(name, code, "int or None"))


async def _report_error(stream: CommandStream, text: str) -> int:
    try:
        await stream.write_error(text)
    except OSError:
        return _BROKEN_PIPE
    return 1


def _read_file(files: Tree, engine: FileSystem, path: str) -> bytes:
    # Process substitutions and devices belong to bashkit: the tree does not hold them.
    if not path.startswith("/dev/"):
        return files.read(path)
    try:
        return engine.read_file(path)
    except RuntimeError:
        raise PathNotFound(path) from None


def describe(error: BaseException) -> str:
    """Return an exception as one line for stderr, as a command would print it."""
    if isinstance(error, PathError):
        return f"{error.path}: {os.strerror(error.number)}"
    if isinstance(error, SmokeboxError):
        text = error.message
    elif isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        text = f"{place}{error.strerror}"
    else:
        text = str(error)
    return _utf8(" ".join(text.split())) or type(error).__name__


def _utf8(text: str) -> str:
    # Lone surrogates, from names that are not UTF-8, cannot be passed to bashkit.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _wrong_result(name: str, result: object, wanted: str) -> str:
    if inspect.iscoroutine(result):
        result.close()
    return f"{name}: the command returned {type(result).__name__}, expected {wanted}\n"


def _status(code: object) -> int:
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1
