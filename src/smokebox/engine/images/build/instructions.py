"""The instructions of a Dockerfile as typed values, before variables are expanded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from e2b_dockerfile_utils import parse_heredoc

MountKind: TypeAlias = Literal["bind", "cache", "tmpfs", "secret"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """An instruction with its place: the first line, and the text as it was written."""

    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heredoc:
    """A document inside a Dockerfile. With `expand`, variables in it are replaced."""

    name: str
    content: str
    chomp: bool = False
    expand: bool = True

    @property
    def script(self) -> str:
        """The content, without leading tabs if it was written with `<<-`."""
        if not self.chomp:
            return self.content
        return "".join(line.lstrip("\t") for line in self.content.splitlines(keepends=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandForm:
    """A command in shell form (one text) or in exec form (literal words)."""

    words: tuple[str, ...]
    shell: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MountOption:
    """A mount of one RUN. `id` names a cache or a secret, `source` a path in `stage`.

    An empty `stage` is the build context. `env` names the variable that holds a secret.
    """

    kind: MountKind
    target: str = ""
    source: str = ""
    stage: str = ""
    id: str = ""
    env: str = ""
    mode: int | None = None
    uid: int = 0
    gid: int = 0
    size: int | None = None
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Arg(Instruction):
    """Declares build arguments, with defaults or None."""

    names: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Env(Instruction):
    """Sets environment variables."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Label(Instruction):
    """Sets labels of the image."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInstruction(Instruction):
    """Runs a command. `mounts` are the texts of `--mount`, in which variables are expanded."""

    command: CommandForm
    heredocs: tuple[Heredoc, ...] = ()
    mounts: tuple[str, ...] = ()
    offline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Instruction):
    """Copies files from the context, a stage or an image. `stage` is empty for the context.

    An `add` also unpacks archives and fetches URLs. `heredocs` are by their word in `sources`.
    """

    sources: tuple[str, ...]
    destination: str
    stage: str = ""
    owner: str = ""
    mode: str = ""
    link: bool = False
    parents: bool = False
    excludes: tuple[str, ...] = ()
    heredocs: dict[str, Heredoc] = field(default_factory=dict)
    add: bool = False
    checksum: str = ""
    unpack: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workdir(Instruction):
    """Sets the working directory, and creates it."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UserInstruction(Instruction):
    """Sets the user of later instructions and of the image."""

    user: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shell(Instruction):
    """Sets the shell of later commands in shell form."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cmd(Instruction):
    """Sets the default command."""

    command: CommandForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrypoint(Instruction):
    """Sets the entry point."""

    command: CommandForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Expose(Instruction):
    """Names ports that the image listens on."""

    ports: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthcheckInstruction(Instruction):
    """Sets the health check; `command` is None for `HEALTHCHECK NONE`. Times are nanoseconds."""

    command: CommandForm | None
    times: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSignal(Instruction):
    """Sets the signal that stops the image's command."""

    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeInstruction(Instruction):
    """Names directories with data."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintainer(Instruction):
    """Sets the author of the image."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Onbuild(Instruction):
    """Keeps an instruction for builds on top of this image."""

    trigger: str


def is_only_heredoc(text: str) -> bool:
    """Return True for the command of a RUN that is a heredoc and nothing else."""
    return parse_heredoc(text) is not None
