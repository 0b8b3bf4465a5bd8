"""Parser of Dockerfiles into typed instructions.

The syntax (continuations, quotes, heredocs) is parsed by `e2b-dockerfile-utils`, a port of
BuildKit's parser. Everything that builds do not support is refused here by name, before anything
runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypedDict

from e2b_dockerfile_utils import (
    DockerfileSyntaxError,
    parse_dockerfile_ast,
    parse_heredoc,
)

from smokebox.engine.images.build.flags import Flags, parse_duration, parse_mount
from smokebox.engine.images.build.instructions import (
    Arg,
    Cmd,
    CommandForm,
    Copy,
    Entrypoint,
    Env,
    Expose,
    HealthcheckInstruction,
    Heredoc,
    Instruction,
    Label,
    Maintainer,
    Onbuild,
    RunInstruction,
    Shell,
    StopSignal,
    UserInstruction,
    VolumeInstruction,
    Workdir,
)
from smokebox.engine.images.build.problems import invalid, refused, suggestion

if TYPE_CHECKING:
    from collections.abc import Callable

    from e2b_dockerfile_utils import DockerfileAst, DockerfileInstruction

MAX_SIZE = 1 << 20
MAX_INSTRUCTIONS = 2000

_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
# Frontends whose language this parser has.
_SYNTAX = re.compile(
    r"(?:docker\.io/)?docker/dockerfile(?:-upstream)?(?::[A-Za-z0-9._-]+)?(?:@sha256:[0-9a-f]{64})?"
)
_UNKNOWN = re.compile(r"unknown instruction: (\S*)")
_NO_TRIGGER = {"ONBUILD", "FROM", "MAINTAINER"}


@dataclass(frozen=True, slots=True, kw_only=True)
class From(Instruction):
    """The start of a stage: its base image or stage, its name, and its platform."""

    base: str
    name: str = ""
    platform: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    """The instructions of a file. `escape` is its escape character."""

    file: str
    instructions: tuple[Instruction, ...]
    escape: str
    warnings: tuple[str, ...] = ()


def parse_dockerfile(content: str, *, file: str = "Dockerfile") -> Dockerfile:
    """Parse the text of a Dockerfile.

    Args:
        content: The text.
        file: Name of the file in errors.

    Raises:
        InvalidDockerfile: The text is not valid; the error has the line.
        Unsupported: It uses a feature that builds do not have; the error has the line.
    """
    if len(content) > MAX_SIZE:
        raise invalid(file, None, f"it is longer than {MAX_SIZE} characters", "Shorten it.")
    _check_directives(content, file)
    ast = _parse(content, file)
    if not ast.instructions:
        raise invalid(file, None, "it has no instructions", "Begin it with FROM.")
    if len(ast.instructions) > MAX_INSTRUCTIONS:
        raise invalid(file, None, f"it has more than {MAX_INSTRUCTIONS} instructions", "")
    instructions = tuple(_convert(one, file) for one in ast.instructions)
    warnings = tuple(f"{file}:{one.line}: {one.message}" for one in ast.warnings)
    return Dockerfile(
        file=file, instructions=instructions, escape=ast.escape_token, warnings=warnings
    )


def parse_trigger(text: str, *, file: str, line: int) -> Instruction:
    """Parse the instruction of an ONBUILD, with its line in errors."""
    [instruction] = _parse("\n" * (line - 1) + text, file).instructions
    return _convert(instruction, file)


def _parse(content: str, file: str) -> DockerfileAst:
    try:
        return parse_dockerfile_ast(content)
    except DockerfileSyntaxError as error:
        problem = re.sub(r"^Dockerfile parse error(?: on line \d+)?: ", "", str(error))
        unknown = _UNKNOWN.fullmatch(problem)
        hint = suggestion(unknown[1].upper(), _CONVERTERS) if unknown else ""
        raise invalid(file, error.line, problem.rstrip("."), hint) from None


def _check_directives(content: str, file: str) -> None:
    for number, text in enumerate(content.removeprefix("\ufeff").splitlines(), 1):
        found = _DIRECTIVE.fullmatch(text.strip())
        if found is None:
            return
        if found[1].lower() == "syntax" and not _SYNTAX.fullmatch(found[2]):
            raise refused(
                file,
                number,
                f"# syntax={found[2]}",
                "builds parse Dockerfiles themselves and run no other frontend",
                "Remove the line if the file is a plain Dockerfile.",
            )


def _convert(source: DockerfileInstruction, file: str) -> Instruction:
    flags = Flags(file, source.start_line, source.name, source.flags)
    converted = _Converter(source, file, flags)
    return _CONVERTERS[source.name](converted)


class _Place(TypedDict):
    """The fields that all instructions have."""

    line: int
    text: str


class _Converter:
    """Converts one instruction of the syntax tree."""

    def __init__(self, source: DockerfileInstruction, file: str, flags: Flags) -> None:
        self.args = source.args
        self.json = source.json
        self.file = file
        self.line = source.start_line
        self.text = source.original.strip()
        self.place = _Place(line=self.line, text=self.text)
        self.flags = flags
        self.heredocs = tuple(
            Heredoc(name=one.name, content=one.content, chomp=one.chomp, expand=one.expand)
            for one in source.heredocs
        )

    def fail(self, problem: str, hint: str = "") -> NoReturn:
        raise invalid(self.file, self.line, problem, hint)

    def refuse(self, feature: str, reason: str, hint: str) -> NoReturn:
        raise refused(self.file, self.line, feature, reason, hint)

    def argument(self) -> str:
        """Return the only argument."""
        name = self.text.split(None, 1)[0].upper()
        if len(self.args) != 1 or not self.args[0]:
            self.fail(f"{name} takes exactly one argument")
        return self.args[0]

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return names and values."""
        pairs = tuple(zip(self.args[::3], self.args[1::3], strict=True))
        name = self.text.split(None, 1)[0].upper()
        if not pairs or any(not key for key, _ in pairs):
            self.fail(f"{name} needs a name", f"Write {name} NAME=value.")
        return pairs

    def command(self) -> CommandForm:
        return CommandForm(words=tuple(self.args), shell=not self.json)

    def from_(self) -> From:
        args = self.args
        if len(args) not in (1, 3) or (len(args) == 3 and args[1].upper() != "AS"):
            self.fail("FROM takes an image, and optionally AS and a name", "Write FROM image AS x.")
        name = args[2].lower() if len(args) == 3 else ""
        if name and not re.fullmatch(r"[a-z][a-z0-9._-]*", name):
            self.fail(f"{args[2]!r} is not a valid name of a stage", "Use letters, digits and -_.")
        return From(
            **self.place,
            base=args[0],
            name=name,
            platform=self.flags.get("platform"),
        )

    def arg(self) -> Arg:
        if not self.args:
            self.fail("ARG needs a name")
        names = []
        for word in self.args:
            name, equals, value = word.partition("=")
            if not name:
                self.fail("ARG needs a name before '='")
            names.append((name, value if equals else None))
        return Arg(**self.place, names=tuple(names))

    def run(self) -> RunInstruction:
        if not self.args or not self.args[0]:
            self.fail("RUN needs a command")
        if self.flags.get("security", "sandbox") != "sandbox":
            self.refuse(
                "RUN --security=insecure",
                "a command never gets privileges on the host",
                "Remove the flag.",
            )
        if self.flags.all("device"):
            self.refuse("RUN --device", "sandboxes have no devices of the host", "Remove the flag.")
        network = self.flags.get("network", "default")
        if network == "host":
            self.refuse(
                "RUN --network=host",
                "sandboxes never share the network of the host",
                "Allow the hosts that it needs in the build's egress policy.",
            )
        if network not in ("default", "none"):
            self.fail(f"--network is default or none, not {network!r}")
        for text in self.flags.all("mount"):
            # One with variables is checked when they are known.
            if "$" not in text:
                parse_mount(self.file, self.line, text)
        return RunInstruction(
            **self.place,
            command=self.command(),
            heredocs=self.heredocs,
            mounts=self.flags.all("mount"),
            offline=network == "none",
        )

    def copy(self) -> Copy:
        return self._copy(add=False)

    def add(self) -> Copy:
        return self._copy(add=True)

    def _copy(self, *, add: bool) -> Copy:
        name = "ADD" if add else "COPY"
        if len(self.args) < 2:
            self.fail(f"{name} needs a source and a destination", f"Write {name} source /path/.")
        flags = self.flags
        if flags.get("keep-git-dir"):
            self.refuse("ADD --keep-git-dir", _GIT_REASON, _GIT_HINT)
        heredocs = iter(self.heredocs)
        documents = {
            word: next(heredocs)
            for word in self.args[:-1]
            if not self.json and self.heredocs and parse_heredoc(word) is not None
        }
        for source in self.args[:-1]:
            if add and _is_git(source):
                self.refuse("ADD of a git repository", _GIT_REASON, _GIT_HINT)
        return Copy(
            **self.place,
            sources=tuple(self.args[:-1]),
            destination=self.args[-1],
            stage=flags.get("from"),
            owner=flags.get("chown"),
            mode=flags.get("chmod"),
            link=flags.is_set("link"),
            parents=flags.is_set("parents"),
            excludes=flags.all("exclude"),
            heredocs=documents,
            add=add,
            checksum=flags.get("checksum"),
            unpack=flags.truth("unpack"),
        )

    def workdir(self) -> Workdir:
        return Workdir(**self.place, path=self.argument())

    def user(self) -> UserInstruction:
        return UserInstruction(**self.place, user=self.argument())

    def shell(self) -> Shell:
        if not self.json or not self.args:
            self.fail("SHELL takes a list of words", 'Write SHELL ["/bin/bash", "-c"].')
        return Shell(**self.place, words=tuple(self.args))

    def cmd(self) -> Cmd:
        return Cmd(**self.place, command=self.command())

    def entrypoint(self) -> Entrypoint:
        return Entrypoint(**self.place, command=self.command())

    def env(self) -> Env:
        return Env(**self.place, pairs=self.pairs())

    def label(self) -> Label:
        return Label(**self.place, pairs=self.pairs())

    def expose(self) -> Expose:
        if not self.args:
            self.fail("EXPOSE needs a port")
        return Expose(**self.place, ports=tuple(self.args))

    def healthcheck(self) -> HealthcheckInstruction:
        kind = self.args[0].upper() if self.args else ""
        if kind == "NONE" and len(self.args) == 1:
            return HealthcheckInstruction(**self.place, command=None)
        if kind != "CMD" or len(self.args) < 2:
            self.fail("HEALTHCHECK takes CMD with a command, or NONE")
        times = {
            name: parse_duration(self.file, self.line, name, self.flags.get(name))
            for name in ("interval", "timeout", "start-period", "start-interval")
            if self.flags.get(name)
        }
        if retries := self.flags.get("retries"):
            if not retries.isdigit():
                self.fail(f"--retries={retries} is not a number")
            times["retries"] = int(retries)
        command = CommandForm(words=tuple(self.args[1:]), shell=not self.json)
        return HealthcheckInstruction(**self.place, command=command, times=times)

    def stop_signal(self) -> StopSignal:
        return StopSignal(**self.place, signal=self.argument())

    def volume(self) -> VolumeInstruction:
        if not self.args or not all(self.args):
            self.fail("VOLUME needs a path")
        return VolumeInstruction(**self.place, paths=tuple(self.args))

    def maintainer(self) -> Maintainer:
        return Maintainer(**self.place, name=self.argument())

    def onbuild(self) -> Onbuild:
        # The parser drops the arguments of this one.
        trigger = self.text.partition(" ")[2].strip()
        name = trigger.split(None, 1)[0].upper() if trigger else ""
        if not trigger or name in _NO_TRIGGER:
            self.fail(f"ONBUILD cannot have {name or 'no instruction'}")
        parse_trigger(trigger, file=self.file, line=self.line)
        return Onbuild(**self.place, trigger=trigger)


_GIT_REASON = "builds do not clone repositories"
_GIT_HINT = "Use RUN git clone, or clone it into the build context."


def _is_git(source: str) -> bool:
    return source.startswith(("git@", "git://", "ssh://")) or bool(
        re.match(r"https?://[^#?]+\.git(?:[#?]|$)", source)
    )


_CONVERTERS: dict[str, Callable[[_Converter], Instruction]] = {
    "ADD": _Converter.add,
    "ARG": _Converter.arg,
    "CMD": _Converter.cmd,
    "COPY": _Converter.copy,
    "ENTRYPOINT": _Converter.entrypoint,
    "ENV": _Converter.env,
    "EXPOSE": _Converter.expose,
    "FROM": _Converter.from_,
    "HEALTHCHECK": _Converter.healthcheck,
    "LABEL": _Converter.label,
    "MAINTAINER": _Converter.maintainer,
    "ONBUILD": _Converter.onbuild,
    "RUN": _Converter.run,
    "SHELL": _Converter.shell,
    "STOPSIGNAL": _Converter.stop_signal,
    "USER": _Converter.user,
    "VOLUME": _Converter.volume,
    "WORKDIR": _Converter.workdir,
}
