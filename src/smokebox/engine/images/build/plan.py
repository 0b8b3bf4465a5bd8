"""The plan of a build: its stages, and which of them a target needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.engine.images.build.flags import parse_mount
from smokebox.engine.images.build.instructions import Arg, Copy, Instruction, RunInstruction
from smokebox.engine.images.build.parser import Dockerfile, From
from smokebox.engine.images.build.problems import invalid, suggestion
from smokebox.engine.images.build.variables import (
    Expander,
    GlobalArguments,
    platform_arguments,
)
from smokebox.engine.images.platforms import Platform, host_platform
from smokebox.errors import InvalidOption, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SCRATCH = "scratch"
_ALIASES = {
    "x86_64": "amd64",
    "x86-64": "amd64",
    "aarch64": "arm64",
    "arm64/v8": "arm64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a build: instructions on top of a base.

    `base` is the index of a stage, or the name of an image. `needs` are the indexes of all stages
    that it reads.
    """

    index: int
    name: str
    base: int | str
    start: From
    instructions: tuple[Instruction, ...]
    needs: tuple[int, ...]

    @property
    def label(self) -> str:
        """Name of the stage in progress and errors."""
        return self.name or f"stage-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The stages that a build executes, in the order of the file; the last is the target."""

    file: str
    stages: tuple[Stage, ...]
    arguments: GlobalArguments
    platform: Platform
    warnings: tuple[str, ...] = ()

    @property
    def target(self) -> Stage:
        """The stage whose image is the result."""
        return self.stages[-1]

    def stage(self, index: int) -> Stage:
        """Return the stage with an index in the file."""
        return next(one for one in self.stages if one.index == index)

    def find(self, name: str, before: int) -> int | None:
        """Return the index of the stage that `--from` of a later one names, or None."""
        return _find({one.index: one.name for one in self.stages}, name, before)


def make_plan(
    dockerfile: Dockerfile,
    *,
    build_args: Mapping[str, str] | None = None,
    target: str | None = None,
    platform: str | None = None,
) -> Plan:
    """Return the plan for a target of a Dockerfile.

    Args:
        dockerfile: The parsed file.
        build_args: Values of arguments.
        target: Name or number of a stage; by default the last one.
        platform: Platform of the result; only that of this host is possible.

    Raises:
        InvalidDockerfile: A stage is not valid.
        InvalidOption: There is no such target.
        Unsupported: The platform is not that of this host.
    """
    here = check_platform(platform)
    expander = Expander(dockerfile.file, dockerfile.escape)
    arguments = GlobalArguments(expander, build_args or {}, platform_arguments(here, target or ""))
    stages = _split(dockerfile, arguments, here)
    chosen = _choose(stages, target)
    needed = _closure(stages, chosen)
    return Plan(
        file=dockerfile.file,
        stages=tuple(one for one in stages if one.index in needed and one.index <= chosen),
        arguments=arguments,
        platform=here,
        warnings=dockerfile.warnings,
    )


def build_platform() -> Platform:
    """Return the platform of this host as builds write it: arm64 has no variant."""
    here = host_platform()
    return Platform(here.os, here.architecture) if here.architecture == "arm64" else here


def check_platform(platform: str | None) -> Platform:
    """Return the platform of this host, and refuse every other."""
    here = build_platform()
    if not platform:
        return here
    wanted = platform.lower().removeprefix("linux/")
    if _ALIASES.get(wanted, wanted) not in (here.architecture, "linux"):
        raise Unsupported(
            f"this host builds images for {here}, not for {platform!r}.",
            hint=f"Leave the platform out, or build on a host with {platform}.",
            operation="platform",
            platform=platform,
        )
    return here


def _split(dockerfile: Dockerfile, arguments: GlobalArguments, here: Platform) -> list[Stage]:
    """Split a file into stages, and expand the FROM of each."""
    starts: list[tuple[From, list[Instruction]]] = []
    for instruction in dockerfile.instructions:
        if isinstance(instruction, From):
            starts.append((instruction, []))
        elif starts:
            starts[-1][1].append(instruction)
        elif isinstance(instruction, Arg):
            arguments.declare(instruction)
        else:
            problem = "no build stage: the first instruction is FROM"
            raise invalid(dockerfile.file, instruction.line, problem, "Begin it with FROM image.")
    if not starts:
        raise invalid(dockerfile.file, None, "it has no FROM", "Begin it with FROM image.")
    stages: list[Stage] = []
    names: dict[int, str] = {}
    for index, (start, instructions) in enumerate(starts):
        stages.append(_stage(dockerfile.file, index, start, instructions, arguments, names, here))
        names[index] = start.name
    return stages


def _stage(
    file: str,
    index: int,
    start: From,
    instructions: list[Instruction],
    arguments: GlobalArguments,
    names: dict[int, str],
    here: Platform,
) -> Stage:
    if start.name and start.name in names.values():
        raise invalid(file, start.line, f"two stages are named {start.name!r}", "Rename one.")
    expander = arguments.expander
    name = expander.word(start.base, arguments.values, start.line)
    if not name:
        raise invalid(
            file,
            start.line,
            f"the base name {start.base!r} is empty",
            "Give the argument a default before the first FROM, or pass it.",
        )
    _check_stage_platform(expander.word(start.platform, arguments.values, start.line), start)
    found = _find(names, name, index) if not name.isdigit() else None
    base: int | str = name if found is None else found
    needs = {base} if isinstance(base, int) else set()
    for reference, line in _references(file, instructions):
        earlier = _find(names, reference, index)
        if earlier is not None:
            needs.add(earlier)
        elif reference.isdigit():
            raise invalid(file, line, f"there is no stage {reference} before this one", "")
        elif reference.lower() == start.name:
            raise invalid(file, line, f"the stage {reference!r} cannot copy from itself", "")
    return Stage(
        index=index,
        name=start.name,
        base=base,
        start=start,
        instructions=tuple(instructions),
        needs=tuple(sorted(needs)),
    )


def _check_stage_platform(platform: str, start: From) -> None:
    try:
        check_platform(platform)
    except Unsupported as error:
        error.message = f"line {start.line}: {error.message}"
        error.fields["line"] = start.line
        raise


def _references(file: str, instructions: list[Instruction]) -> Iterator[tuple[str, int]]:
    """Yield the names that COPY --from and RUN --mount read, with their lines."""
    for one in instructions:
        if isinstance(one, Copy) and one.stage:
            yield one.stage, one.line
        elif isinstance(one, RunInstruction):
            for text in one.mounts:
                # Variables in it are expanded later; the name of a stage has none.
                if "from=" in text and (stage := parse_mount(file, one.line, text).stage):
                    yield stage, one.line


def _find(names: Mapping[int, str], name: str, before: int) -> int | None:
    for index, known in names.items():
        if known and known == name.lower() and index < before:
            return index
    if name.isdigit() and int(name) in names and int(name) < before:
        return int(name)
    return None


def _choose(stages: list[Stage], target: str | None) -> int:
    if not target:
        return len(stages) - 1
    names = {one.index: one.name for one in stages}
    found = _find(names, target, len(stages))
    if found is None:
        known = [one.name for one in stages if one.name] or ["0"]
        raise InvalidOption(
            f"the Dockerfile has no stage {target!r}.",
            hint=suggestion(target, known),
            option="target",
            value=target,
        )
    return found


def _closure(stages: list[Stage], target: int) -> set[int]:
    """Return the stages that a target needs, itself included."""
    needed, waiting = set[int](), [target]
    while waiting:
        index = waiting.pop()
        if index not in needed:
            needed.add(index)
            waiting += stages[index].needs
    return needed
