"""The code contexts of one sandbox: create, get, list, delete, and run code in them.

Each is a background process, so it outlives this engine. It ends with the run of the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, Unpack

from smokebox.engine.interpreter import kernels
from smokebox.engine.interpreter.context import CodeContext
from smokebox.engine.names import check_context_id
from smokebox.engine.processes.logs import last_lines
from smokebox.engine.processes.registry import ProcessRegistry
from smokebox.engine.record.rows import ContextRow
from smokebox.errors import (
    Conflict,
    InvalidOption,
    LimitReached,
    NotFound,
    PathNotFound,
    ProcessEnded,
)
from smokebox.foundation.ids import new_id
from smokebox.options import check_env, check_timeout
from smokebox.runtime.output import MAX_OUTPUT, Collector
from smokebox.sandbox.code import CodeStream, check_language
from smokebox.types import CodeExecution, CodeResult, OutputChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from smokebox.engine.interpreter.kernels import KernelSpec
    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Program, Run, RunOwner
    from smokebox.sandbox.code import CodeEvent
    from smokebox.types import CodeLanguage

MAX_RUNNING = 32
# Ended contexts are kept so that later calls with their ids get the reason.
MAX_ENDED = 32
LONGEST_CODE = 16 << 20
# No process id contains "~": the files of processes are in the same directory.
_SUFFIX = "~code"


class CodeOptions(TypedDict, total=False):
    """The options of `Contexts.stream`."""

    context: CodeContext | str | None
    language: str | None
    env: Mapping[str, str] | None
    timeout: float | None


class Contexts(ProcessRegistry[CodeContext, ContextRow]):
    """The contexts of a sandbox that run or ended recently."""

    def __init__(self, owner: RunOwner, record: Record) -> None:
        super().__init__(ContextRow, owner, record)
        self._starting: set[str] = set()
        self._default_lock = asyncio.Lock()

    async def create(
        self,
        id: str | None = None,
        *,
        language: str = "python",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        shared: bool = False,
    ) -> CodeContext:
        """Create a context: a process that starts in `cwd`, with `env` added.

        Args:
            id: Id of the context; by default a random one.
            language: Language of its code.
            cwd: Working directory; by default that of the sandbox.
            env: Environment variables to add.
            timeout: Default timeout of its code, in seconds.
            shared: Use it for code that names no context.

        Raises:
            Unsupported: The image has no program that runs the language.
            LimitReached: The sandbox has too many contexts.
            Conflict: The id is taken.
        """
        name = check_context_id(id) if id is not None else new_id("c")
        kernel = kernels.kernel_for(check_language(language))
        env, timeout = check_env(env), check_timeout(timeout)
        async with self._use() as run:
            await self._load()
            self._reserve(name)
            creating = self._create(run, name, kernel, cwd, env, timeout, shared)
            return await self._complete(run, creating)

    async def get(self, id: str) -> CodeContext:
        """Return a context by id, including one that ended recently. Raises `NotFound`."""
        await self._load()
        found = self._handles.get(check_context_id(id))
        if found is None:
            raise NotFound(
                f"sandbox {self._id} has no code context {id!r}.",
                hint="List its contexts, or create one. They end when the sandbox sleeps.",
                kind="context",
                name=id,
            )
        return found

    async def list(self) -> list[CodeContext]:
        """Return the contexts that accept code, in order of creation."""
        await self._load()
        return [context for context in self._handles.values() if context.running]

    async def delete(self, id: str) -> None:
        """Kill a context with all processes that its code started, and forget it."""
        context = await self.get(id)
        if context.running:
            await context.kill()
        await self._forget([context])

    async def run(self, code: str, **options: Unpack[CodeOptions]) -> CodeExecution:
        """Run code and wait for it. Takes the options of `stream`."""
        results: list[CodeResult] = []
        async with self._use() as run:
            collector = Collector(run.spills, MAX_OUTPUT)
            events = self.stream(code, **options)
            try:
                async with events:
                    async for event in events:
                        if isinstance(event, OutputChunk):
                            await collector.feed(event.stream, event.data.encode())
                        elif isinstance(event, CodeResult):
                            results.append(event)
                output = await collector.finish()
            except BaseException:
                collector.abandon()
                raise
        ended = events.execution
        return replace(
            ended,
            results=tuple(results),
            stdout=output.stdout.text,
            stderr=output.stderr.text,
            stdout_file=output.stdout.file,
            stderr_file=output.stderr.file,
            truncated=ended.truncated or output.stdout.truncated or output.stderr.truncated,
        )

    def stream(
        self,
        code: str,
        *,
        context: CodeContext | str | None = None,
        language: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CodeStream:
        """Run code and stream its output and results.

        After `timeout` seconds, or when the stream is closed, the code is interrupted. Its context
        is killed only if the code does not end then.

        Args:
            code: The code.
            context: Context to run it in; by default a shared one of `language`.
            language: Language of the code; by default that of the context, or Python.
            env: Environment variables for this code only.
            timeout: Seconds; by default the timeout of the context.
        """
        known = None if language is None else check_language(language)
        options = check_env(env), check_timeout(timeout)
        return CodeStream(self._stream(_check_code(code), context, known, *options))

    @property
    def busy(self) -> bool:
        """True if code runs in any of them."""
        return any(context.busy for context in self._handles.values())

    async def adopt(self, run: Run) -> None:
        """Take over the contexts that another engine left in this run of the sandbox."""
        await super().adopt(run)
        for context in self._handles.values():
            if context.process.running:
                context.recover()

    async def _stream(
        self,
        code: str,
        context: CodeContext | str | None,
        language: CodeLanguage | None,
        env: dict[str, str],
        timeout: float | None,
    ) -> AsyncGenerator[CodeEvent | CodeExecution, None]:
        async with self._use():
            found = await self._find(context, language)
            timeout = timeout if timeout is not None else found.row.timeout
            events = found.stream(code, env=env, timeout=timeout)
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event

    async def _find(
        self, context: CodeContext | str | None, language: CodeLanguage | None
    ) -> CodeContext:
        if context is None:
            return await self._get_shared(language or "python")
        found = await self.get(context) if isinstance(context, str) else context
        if language is not None and language != found.language:
            raise InvalidOption(
                f"code context {found.id} is for {found.language}, not for {language}.",
                hint="Leave language out, or create a context for it.",
                option="language",
                value=language,
            )
        return found

    async def _get_shared(self, language: CodeLanguage) -> CodeContext:
        """Return the running context for code that names none, or create one."""
        async with self._default_lock:
            for context in await self.list():
                if context.row.shared and context.language == language:
                    return context
            return await self.create(language=language, shared=True)

    def _open(self, row: ContextRow) -> CodeContext:
        return CodeContext(
            row,
            stem=self._stem(row.context_id + _SUFFIX),
            use=self._use,
            on_exit=self._on_exit,
            on_tree_end=self._on_tree_end,
        )

    def _reserve(self, name: str) -> None:
        if name in self._handles or name in self._starting:
            raise Conflict(
                f"sandbox {self._id} already has a code context {name!r}.",
                hint="Use another id, or delete that context, even if it has ended.",
                kind="context",
                name=name,
            )
        running = sum(context.running for context in self._handles.values())
        if running + len(self._starting) >= MAX_RUNNING:
            raise LimitReached(
                f"sandbox {self._id} has {MAX_RUNNING} code contexts, which is the limit.",
                hint="Delete some of them.",
                limit="contexts",
            )
        self._starting.add(name)

    async def _create(
        self,
        run: Run,
        name: str,
        kernel: KernelSpec,
        cwd: str | None,
        env: dict[str, str],
        timeout: float | None,
        shared: bool,
    ) -> CodeContext:
        try:
            directory = kernels.install(run)
            for words in kernel.commands(run, directory):
                program = await run.program(words, cwd=cwd, env=env)
                row = ContextRow(
                    sandbox_id=self._id,
                    context_id=name,
                    generation=run.generation,
                    language=kernel.language,
                    cwd=program.cwd,
                    created_at=time.time(),
                    timeout=timeout,
                    shared=shared,
                )
                try:
                    return await self._begin(run, program, self._open(row), kernel)
                except PathNotFound as error:
                    if error.path != words[0]:
                        raise
            raise kernel.missing(self._id)
        finally:
            self._starting.discard(name)

    async def _begin(
        self, run: Run, program: Program, context: CodeContext, kernel: KernelSpec
    ) -> CodeContext:
        await self._start(run, program, context, stdin=True)
        try:
            await context.wait_ready()
        except BaseException as error:
            output = last_lines(context.process.log.path("stderr"))
            await self._discard(run, context)
            if isinstance(error, ProcessEnded):
                missing = error.fields["exit_code"] == kernels.NOT_FOUND
                raise kernel.missing(self._id) if missing else kernel.failed(output) from error
            raise
        self._handles[context.id] = context
        return context

    def _on_tree_end(self, context: CodeContext) -> None:
        if context.row.shared:
            # No caller knows its id, and another takes its place.
            self._spawn(self._forget([context]))
            return
        context.remove_pipes()
        ended = [one for one in self._handles.values() if one.process.tree_ended]
        ended.sort(key=lambda one: one.row.ended_at or 0.0)
        if len(ended) > MAX_ENDED:
            self._spawn(self._forget(ended[:-MAX_ENDED]))


def _check_code(code: object) -> str:
    if not isinstance(code, str):
        raise InvalidOption(
            f"code is a str, not {type(code).__name__}.",
            hint="Pass the source text; for a file, its content.",
            option="code",
        )
    if len(code) > LONGEST_CODE:
        raise InvalidOption(
            f"the code has {len(code)} characters, and the limit is {LONGEST_CODE}.",
            hint="Write its data to a file of the sandbox, and read the file in the code.",
            option="code",
        )
    return code
