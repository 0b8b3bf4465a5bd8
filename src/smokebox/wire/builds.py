"""Values of builds: entries of a context, and events of the progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextEntry:
    """A file, directory or symlink of a build context, at a path relative to its root.

    `digest` is the SHA-256 of a file's content in hexadecimal, `target` that of a symlink.
    `mtime_ns` is in nanoseconds since the epoch.
    """

    path: str
    type: Literal["file", "directory", "symlink"]
    mode: int = 0o644
    size: int = 0
    mtime_ns: int = 0
    digest: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEvent:
    """Progress of a build.

    `kind` is "step" when an instruction starts, "output" for what it writes, "done" when it has
    ended, "warning", and at the end "image". `step` counts from 1 to `steps` in the order of the
    file, and steps of independent stages overlap. `digest` is that of the finished image.

    `base` names a recipe that the build waits for, such as `recipe:base`: the event is one of its
    build, whose steps are counted apart.
    """

    kind: Literal["step", "output", "done", "warning", "image"]
    step: int = 0
    steps: int = 0
    base: str = ""
    stage: str = ""
    instruction: str = ""
    line: int = 0
    cached: bool = False
    seconds: float = 0.0
    stream: Literal["stdout", "stderr", ""] = ""
    data: str = ""
    digest: str = ""
    names: tuple[str, ...] = ()
