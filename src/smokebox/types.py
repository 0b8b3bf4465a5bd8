"""The frozen values that cross rooms: results, files, and what a sandbox can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stream = Literal["stdout", "stderr"]
FileType = Literal["file", "directory", "symlink", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a finished command left behind. A non-zero exit is a result, not an error.

    Exit codes are bash's: 127 for a missing program, 126 for one stopped by a limit,
    124 for a timeout, 128+n for death by signal n. `timed_out` tells our timeout from a
    command that answers 124 by itself. When `truncated`, `stdout` and `stderr` are not
    whole: where the middle is left out a marker says so, and `stdout_file` and
    `stderr_file` name the whole streams where the sandbox kept them. `session_ended` says
    that the shell of a session ended with this command, and the next one gets a fresh one.
    """

    exit_code: int
    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    timed_out: bool = False
    duration: float = 0.0
    stdout_file: str | None = None
    stderr_file: str | None = None
    session_ended: bool = False

    @property
    def success(self) -> bool:
        """True when the command exited with 0."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """A piece of output as it was written. Text, never cut inside a character."""

    stream: Stream
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """What `stat` knows of a path. What a sandbox cannot tell is None, never made up.

    `type`, `size`, `mtime` and `mode` describe what the path leads to; `is_symlink`
    describes the path itself.
    """

    path: str
    type: FileType
    is_symlink: bool = False
    size: int | None = None
    mtime: float | None = None
    mode: int | None = None

    @property
    def is_file(self) -> bool:
        """True for a regular file, also behind a symlink."""
        return self.type == "file"

    @property
    def is_directory(self) -> bool:
        """True for a directory, also behind a symlink."""
        return self.type == "directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a sandbox can and cannot do, for programs and, through `describe`, for models.

    `commands` lists the programs a script can call, or is None where nobody knows
    without looking. `max_output` is the most of one stream that even `exec_stream`
    gives; a limit is None where there is none. `refused_in_names` holds characters that
    no file name can have. What is from `processes` on the conformance suite goes by.
    """

    sandbox: str
    isolation: Literal["none", "interpreter", "process", "namespaces", "gvisor", "remote"]
    network: Literal["off", "allowlist", "open"]
    persistence: Literal["memory", "host", "bucket", "remote"]
    shell_state: Literal["fresh", "persistent"] = "fresh"
    commands: frozenset[str] | None = None
    read_only: bool = False
    processes: bool = True
    symlinks: bool = True
    refused_in_names: str = ""
    file_modes: bool = True
    max_file_size: int | None = None
    max_output: int | None = None

    def describe(self) -> str:
        """Two lines that tell a model where it is and what it has."""
        place = f"{self.sandbox} sandbox (isolation: {self.isolation}, files: {self.persistence}"
        place += ", read-only)" if self.read_only else ")"
        place += f"; network: {self.network}; shell state: {self.shell_state} between commands."
        if self.commands is None:
            return f"{place}\nCommands: whatever `command -v` finds."
        return f"{place}\nCommands: {' '.join(sorted(self.commands))}."
