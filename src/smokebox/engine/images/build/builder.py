"""Execution of a plan: independent stages in parallel, each step by step with a cache."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import posixpath
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.engine.images.build import instructions as dockerfile
from smokebox.engine.images.build.copy_step import CopyPlanner, PlannedCopies
from smokebox.engine.images.build.flags import parse_mount
from smokebox.engine.images.build.metadata import ConfigEditor
from smokebox.engine.images.build.parser import parse_trigger
from smokebox.engine.images.build.problems import place
from smokebox.engine.images.build.progress import Progress, StepProgress
from smokebox.engine.images.build.sources import RootSource, digest_tree
from smokebox.engine.images.build.state import step_key
from smokebox.engine.images.build.steps import SCRIPT, CommandStep
from smokebox.engine.images.build.variables import Scope
from smokebox.errors import BuildFailed, InvalidDockerfile, SmokeboxError, from_os_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from smokebox.engine.images.build.bases import BaseImages
    from smokebox.engine.images.build.cache import BuildCache
    from smokebox.engine.images.build.instructions import Instruction, MountOption
    from smokebox.engine.images.build.plan import Plan, Stage
    from smokebox.engine.images.build.sources import ContextSource, Source
    from smokebox.engine.images.build.state import BuildState
    from smokebox.engine.images.build.steps import StepRunner
    from smokebox.engine.images.catalog import LayerReference
    from smokebox.engine.images.usage import Charge

_STAGES_AT_ONCE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildServices:
    """Parts that all steps of a build use."""

    runner: StepRunner
    bases: BaseImages
    cache: BuildCache
    context: ContextSource
    fetch: Callable[[str], Awaitable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """Settings of the execution.

    `keep` turns the files at a failure into a sandbox's id. `charge` counts layers that are made.
    """

    scope: str = ""
    use_cache: bool = True
    timeout: float | None = None
    keep: Callable[[BuildState], Awaitable[str]] | None = None
    charge: Charge | None = None


class Builder:
    """Executes one plan."""

    def __init__(self, plan: Plan, services: BuildServices, settings: BuildSettings) -> None:
        self.plan = plan
        self.services = services
        self.settings = settings
        # Every stage counts its FROM.
        steps = sum(len(stage.instructions) + 1 for stage in plan.stages)
        self.progress = Progress(steps)
        self._first_step: dict[int, int] = {}
        number = 1
        for stage in plan.stages:
            self._first_step[stage.index] = number
            number += len(stage.instructions) + 1
        self._results: dict[int, asyncio.Task[BuildState]] = {}
        self._slots = asyncio.Semaphore(_STAGES_AT_ONCE)

    async def build(self) -> BuildState:
        """Build the target, and return its state."""
        for warning in self.plan.warnings:
            await self.progress.warn(warning)
        try:
            async with asyncio.TaskGroup() as group:
                for stage in self.plan.stages:
                    self._results[stage.index] = group.create_task(self._build_stage(stage))
        except BaseExceptionGroup as group_error:
            error = _first_error(group_error)
            raise error from error.__cause__
        if unused := self.plan.arguments.unused():
            names = ", ".join(unused)
            await self.progress.warn(f"no ARG declares these build arguments: {names}")
        return self._results[self.plan.target.index].result()

    async def result(self, index: int) -> BuildState:
        """Wait for a stage, and return its state."""
        return await asyncio.shield(self._results[index])

    async def state_of(self, name: str, before: int) -> BuildState:
        """Return the state that `--from` names: of an earlier stage, or of an image."""
        index = self.plan.find(name, before)
        if index is not None:
            return await self.result(index)
        return await self.base(name)

    async def base(self, name: str) -> BuildState:
        """Return the state of a base image. The progress has that of a recipe that is built."""
        scope = self.settings.scope or None
        return await self.services.bases.find(name, scope=scope, report=self.progress.send)

    async def _build_stage(self, stage: Stage) -> BuildState:
        for index in stage.needs:
            await self.result(index)
        async with self._slots:
            return await StageBuild(self, stage, self._first_step[stage.index]).run()


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error to report; stages that only waited for another are cancelled."""
    errors = [
        _first_error(error) if isinstance(error, BaseExceptionGroup) else error
        for error in group.exceptions
    ]
    real = [one for one in errors if not isinstance(one, asyncio.CancelledError)]
    return (real or errors)[0]


class StageBuild:
    """Executes the instructions of one stage."""

    def __init__(self, builder: Builder, stage: Stage, first_step: int) -> None:
        self.builder = builder
        self.stage = stage
        self._number = first_step
        self._services = builder.services
        self._settings = builder.settings
        self._state: BuildState
        self._editor: ConfigEditor
        self.scope: Scope

    async def run(self) -> BuildState:
        """Run all instructions, and return the final state."""
        stage, progress = self.stage, self._progress(self.stage.start)
        await progress.begin()
        with self._failures(stage.start, progress):
            await self._start()
        await progress.end(cached=True)
        triggers, self._editor.config = (
            self._editor.config.onbuild,
            replace(self._editor.config, onbuild=()),
        )
        for trigger in triggers:
            parsed = parse_trigger(trigger, file=self.builder.plan.file, line=stage.start.line)
            self.builder.progress.steps += 1
            await self._step(parsed)
        for instruction in stage.instructions:
            self._number += 1
            await self._step(instruction)
        config = self._editor.config
        if self._state.created_at:
            created = datetime.datetime.fromtimestamp(self._state.created_at, datetime.UTC)
            config = replace(config, created=created.isoformat(timespec="seconds"))
        return replace(self._state, config=config)

    @property
    def directory(self) -> str:
        """The working directory of instructions."""
        return self._editor.config.cwd or "/"

    @property
    def state(self) -> BuildState:
        """The state so far."""
        return replace(self._state, config=self._editor.config)

    async def _start(self) -> None:
        base = self.stage.base
        if isinstance(base, int):
            self._state = await self.builder.result(base)
        else:
            self._state = await self.builder.base(base)
        config = self._state.config
        if not config.architecture:
            config = replace(config, architecture=self.builder.plan.platform.architecture)
        self.scope = Scope(outer=self.builder.plan.arguments, env=dict(config.env))
        self._editor = ConfigEditor(config, self.scope, self.builder.plan.file)

    async def _step(self, instruction: Instruction) -> None:
        progress = self._progress(instruction)
        await progress.begin()
        with self._failures(instruction, progress):
            cached = await self._execute(instruction, progress)
        await progress.end(cached=cached)

    async def _execute(self, instruction: Instruction, progress: StepProgress) -> bool:
        """Execute an instruction, and return True if nothing had to run."""
        match instruction:
            case dockerfile.RunInstruction():
                return await self._run(instruction, progress)
            case dockerfile.Copy():
                return await self._copy(instruction)
            case dockerfile.Workdir():
                return await self._workdir(instruction)
            case _:
                self._editor.apply(instruction)
                self._editor.add_history(instruction.text, empty=True)
                return True

    async def _workdir(self, instruction: dockerfile.Workdir) -> bool:
        path = self.scope.expand(instruction.path, instruction.line)
        path = posixpath.normpath(posixpath.join("/", self.directory, path))
        self._editor.set_directory("/" + path.lstrip("/"))
        user = self._editor.config.user
        key = step_key(self._state.key, "WORKDIR", self.directory, user)

        async def make() -> tuple[LayerReference, ...]:
            return await self._services.runner.make_directory(self._state, self.directory, user)

        return await self._cached(key, make, f"WORKDIR {self.directory}")

    async def _copy(self, instruction: dockerfile.Copy) -> bool:
        planner = CopyPlanner(instruction, self.scope, self.directory, self.builder.plan.file)
        async with contextlib.AsyncExitStack() as stack:
            source, origin = await self._source(instruction)
            copies = await planner.plan(source, self._services.fetch, stack)
            opened: list[Source] = []

            async def resolved() -> PlannedCopies:
                """Return the copies with the stage of `--from` open."""
                if origin and not opened:
                    opened.append(await self._open_stage(instruction.stage, stack))
                return copies.reading(opened[0]) if opened else copies

            async def content() -> str:
                digest = await asyncio.to_thread(planner.digest, await resolved())
                return step_key(self._state.key, *planner.key_parts(), digest)

            async def make() -> tuple[LayerReference, ...]:
                layers: tuple[LayerReference, ...] = ()
                state = self._state
                for one in (await resolved()).copies:
                    made = await self._services.runner.copy(state, one.step, one.source)
                    layers = (*made, *layers)
                    state = replace(state, layers=(*made, *state.layers))
                return layers

            text = instruction.text
            if not origin:
                return await self._cached(await content(), make, text)
            # The same stage has the same content, which need not be read then.
            key = step_key(self._state.key, "from", *planner.key_parts(), origin)
            return await self._cached(key, make, text, content=content)

    async def _source(self, instruction: dockerfile.Copy) -> tuple[Source | None, str]:
        """Return what a COPY reads; for a stage only its key, as it is opened when needed."""
        if not instruction.stage:
            return self._services.context, ""
        state = await self.builder.state_of(instruction.stage, self.stage.index)
        return None, state.key

    async def _open_stage(self, name: str, stack: contextlib.AsyncExitStack) -> Source:
        state = await self.builder.state_of(name, self.stage.index)
        return await self._open_state(state, stack)

    async def _open_state(self, state: BuildState, stack: contextlib.AsyncExitStack) -> Source:
        reader = await stack.enter_async_context(self._services.runner.reading(state))
        return RootSource(reader.rooted_files())

    async def _run(self, instruction: dockerfile.RunInstruction, progress: StepProgress) -> bool:
        step = self._command(instruction)
        async with contextlib.AsyncExitStack() as stack:
            sources, inputs = await self._mount_sources(step.mounts, stack)
            proxies = self.builder.plan.arguments.proxies()
            key = step_key(
                self._state.key,
                "RUN",
                step.argv,
                step.env,
                step.cwd,
                step.user,
                [repr(mount) for mount in step.mounts],
                step.offline,
                (step.script or b"").decode(errors="surrogateescape"),
                inputs,
            )
            command = replace(step, env={**proxies, **step.env})

            async def make() -> tuple[LayerReference, ...]:
                opened = {
                    name: source if source is not None else await self._open_stage(name, stack)
                    for name, source in sources.items()
                }
                return await self._run_command(instruction, command, opened, progress)

            return await self._cached(key, make, instruction.text)

    async def _run_command(
        self,
        instruction: dockerfile.RunInstruction,
        step: CommandStep,
        sources: dict[str, Source],
        progress: StepProgress,
    ) -> tuple[LayerReference, ...]:
        keep = self._settings.keep
        charge = self._settings.charge if any(one.kind == "cache" for one in step.mounts) else None
        before = 0 if charge is None else await self._services.runner.cache_usage()
        outcome = await self._services.runner.run(
            self._state,
            step,
            sources,
            progress,
            timeout=self._settings.timeout,
            keep_failed=keep is not None,
        )
        if charge is not None:
            charge.add(max(0, await self._services.runner.cache_usage() - before))
        if outcome.exit_code == 0:
            return outcome.layers
        sandbox, hint = "", ""
        if keep is not None:
            try:
                await self._charge(outcome.layers)
                state = replace(self.state, layers=(*outcome.layers, *self._state.layers))
                sandbox = await keep(state)
            except SmokeboxError as error:
                # What failed first is the command.
                hint = f"No sandbox was kept: {error.message} {error.hint}".rstrip()
        raise self._failed(
            instruction,
            f"ended with exit code {outcome.exit_code}",
            progress,
            hint=hint or _hint(outcome.exit_code, sandbox),
            exit_code=outcome.exit_code,
            sandbox=sandbox or None,
        )

    def _command(self, instruction: dockerfile.RunInstruction) -> CommandStep:
        argv, script = self._editor.words(instruction.command), None
        if instruction.heredocs:
            argv, script = _heredoc_command(instruction, self._editor.shell)
        mounts = [
            parse_mount(
                self.builder.plan.file,
                instruction.line,
                self.scope.expand(text, instruction.line),
            )
            for text in instruction.mounts
        ]
        return CommandStep(
            argv=argv,
            env=self.scope.values,
            cwd=self.directory,
            user=self._editor.config.user,
            mounts=tuple(mounts),
            offline=instruction.offline,
            script=script,
        )

    async def _mount_sources(
        self, mounts: tuple[MountOption, ...], stack: contextlib.AsyncExitStack
    ) -> tuple[dict[str, Source | None], list[str]]:
        """Return what bind mounts read, by stage, and keys of their content."""
        sources: dict[str, Source | None] = {}
        inputs: list[str] = []
        for mount in mounts:
            if mount.kind != "bind":
                continue
            if not mount.stage:
                context = self._services.context
                sources[""] = context
                path = posixpath.normpath(f"/{mount.source}").lstrip("/")
                digest = await asyncio.to_thread(digest_tree, context, path, keep_owner=False)
                inputs.append(digest)
            else:
                state = await self.builder.state_of(mount.stage, self.stage.index)
                sources.setdefault(mount.stage, None)
                inputs.append(state.key)
        return sources, inputs

    async def _cached(
        self,
        key: str,
        make: Callable[[], Awaitable[tuple[LayerReference, ...]]],
        history: str,
        *,
        content: Callable[[], Awaitable[str]] | None = None,
    ) -> bool:
        """Take a step from the cache, or make it and record it. Returns True for a hit.

        `content` returns a key that depends on the content alone. It is computed only if there is
        no step of `key`, and later steps depend on it.
        """
        cache, scope = self._services.cache, self._settings.scope
        found = await cache.find(scope, key) if self._settings.use_cache else None
        result = key
        if found is None and content is not None:
            result = await content()
            found = await cache.find(scope, result) if self._settings.use_cache else None
        hit = found is not None
        if found is None:
            turn = (
                cache.turn(scope, result) if self._settings.use_cache else contextlib.nullcontext()
            )
            async with turn:
                # Another build may have made the same step meanwhile.
                found = await cache.find(scope, result) if self._settings.use_cache else None
                hit = found is not None
                if found is None:
                    made = await make()
                    await self._charge(made)
                    found = await cache.add(scope, result, made)
        if found.key == result != key:
            created_at = found.created_at
            await cache.add(scope, key, found.layers, result=result, created_at=created_at)
        self._state = self._state.with_step(found.key, found.layers, found.created_at)
        self._editor.add_history(history, empty=not found.layers)
        for _ in found.layers[1:]:
            # Tools expect as many entries as there are layers.
            self._editor.add_history(history, empty=False)
        return hit

    async def _charge(self, layers: tuple[LayerReference, ...]) -> None:
        """Count layers that were made, before they are recorded. Raises `LimitReached`."""
        if self._settings.charge is not None:
            for layer in layers:
                self._settings.charge.add_layer(await self._services.runner.measure(layer))

    def _progress(self, instruction: Instruction) -> StepProgress:
        return StepProgress(
            self.builder.progress,
            number=self._number,
            stage=self.stage.label,
            instruction=instruction,
        )

    @contextlib.contextmanager
    def _failures(self, instruction: Instruction, progress: StepProgress) -> Iterator[None]:
        """Add the instruction and its place to errors in the block."""
        try:
            yield
        except (SmokeboxError, OSError) as error:
            # Of the host, such as a full disk: its paths are not those of the image.
            found = error if isinstance(error, SmokeboxError) else from_os_error(error, "/")
            if isinstance(found, (BuildFailed, InvalidDockerfile)) or "line" in found.fields:
                raise
            message = found.message.rstrip(".")
            raise self._failed(instruction, message, progress, hint=found.hint) from found

    def _failed(
        self,
        instruction: Instruction,
        problem: str,
        progress: StepProgress,
        *,
        hint: str,
        exit_code: int | None = None,
        sandbox: str | None = None,
    ) -> BuildFailed:
        file = self.builder.plan.file
        text = instruction.text if len(instruction.text) < 200 else instruction.text[:200] + "..."
        return BuildFailed(
            f"{place(file, instruction.line)}: `{text}`: {problem}.",
            hint=hint,
            instruction=instruction.text,
            file=file,
            line=instruction.line,
            exit_code=exit_code,
            output=progress.tail,
            sandbox=sandbox,
        )


def _heredoc_command(
    instruction: dockerfile.RunInstruction, shell: tuple[str, ...]
) -> tuple[tuple[str, ...], bytes | None]:
    """Return the command of a RUN with heredocs, and a script that it runs."""
    [text] = instruction.command.words
    first = instruction.heredocs[0]
    if not dockerfile.is_only_heredoc(text):
        full = text + "".join(f"\n{one.content}{one.name}" for one in instruction.heredocs)
        return (*shell, full), None
    script = first.script
    if not script.startswith("#!"):
        return (*shell, script), None
    # The directory of the script allows no execution: its interpreter is started.
    interpreter = script.split("\n", 1)[0][2:].strip().split(None, 1)
    return (*interpreter, SCRIPT), script.encode(errors="surrogateescape")


def _hint(exit_code: int, sandbox: str) -> str:
    if sandbox:
        return f"Look into its files: smokebox sh {sandbox}"
    hints = {
        124: "It took longer than the build's timeout: raise it.",
        127: "A program is missing in the image: install it in an earlier step.",
    }
    return hints.get(
        exit_code, "Build with keep=True (--keep) for a sandbox with the files at this point."
    )
