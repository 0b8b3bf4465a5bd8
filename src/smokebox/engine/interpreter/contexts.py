"""The code contexts of one sandbox: made, found again, listed, ended, and code run in them.

Each is a lasting process, so it outlives this engine, with a row in the record and files in
the sandbox's `run` directory. It ends with the run of the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from smokebox.engine.interpreter import kernels
from smokebox.engine.interpreter.context import CodeContext
from smokebox.engine.names import check_context_id
from smokebox.engine.processes.launch import EXIT, abandon, launch, remove_files
from smokebox.engine.processes.lifetime import is_held
from smokebox.engine.processes.logs import last_lines
from smokebox.engine.record.rows import ContextRow, delete, put, update
from smokebox.errors import (
    Conflict,
    InvalidOption,
    LimitReached,
    NotFound,
    PathNotFound,
    ProcessEnded,
    SandboxGone,
    StorageFull,
)
from smokebox.foundation.ids import new_id
from smokebox.options import check_env, check_timeout
from smokebox.runtime.output import MAX_OUTPUT, Collector
from smokebox.sandbox.code import CodeStream, check_language
from smokebox.types import CodeExecution, CodeResult, OutputChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from smokebox.engine.interpreter.kernels import KernelSpec
    from smokebox.engine.record.record import Record
    from smokebox.engine.run import Program, Run
    from smokebox.sandbox.code import CodeEvent
    from smokebox.types import CodeLanguage

T = TypeVar("T")

MOST_RUNNING = 32
# Ended ones are kept so that who still has their ids hears what became of them.
MOST_ENDED = 32
LONGEST_CODE = 16 << 20
# No id of a process ends so: their files lie in the same directory.
_SUFFIX = "~code"


class Contexts:
    """What contexts a sandbox has, and had lately.

    `locate` and `use` are as for `Processes`: telling of contexts never wakes a sandbox.
    """

    def __init__(
        self,
        *,
        id: str,
        locate: Callable[[], Awaitable[str]],
        record: Record,
        use: Callable[[], AbstractAsyncContextManager[Run]],
    ) -> None:
        self._id = id
        self._locate = locate
        self._record = record
        self._use = use
        self._directory = ""
        self._known: dict[str, CodeContext] = {}
        self._starting: set[str] = set()
        self._loaded = False
        self._loading = asyncio.Lock()
        self._defaults = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._writes: set[asyncio.Task[None]] = set()

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
        """A context of its own: a process that begins in `cwd`, with `env` besides its own.

        `timeout` is for its code, where a call names no other. Raises `Unsupported` where the
        image has nothing that runs the language, `LimitReached` for one context too many, and
        `Conflict` for an id that is taken.
        """
        name = check_context_id(id) if id is not None else new_id("c")
        kernel = kernels.kernel_for(check_language(language))
        env, timeout = check_env(env), check_timeout(timeout)
        async with self._use() as run:
            await self._load()
            self._reserve(name)
            # In a task of its own: who stops waiting must not leave half of it behind.
            making = self._spawn(self._make(run, name, kernel, cwd, env, timeout, shared))
            try:
                return await asyncio.shield(making)
            except asyncio.CancelledError:
                self._spawn(self._undo(making))
                raise

    async def get(self, id: str) -> CodeContext:
        """The context of that id, also one that has ended lately; raises `NotFound`."""
        await self._load()
        found = self._known.get(check_context_id(id))
        if found is None:
            raise NotFound(
                f"sandbox {self._id} has no code context {id!r}.",
                hint="List its contexts, or create one. They end with the sandbox's sleep.",
                kind="context",
                name=id,
            )
        return found

    async def list(self) -> list[CodeContext]:
        """All that take code, in the order in which they were made."""
        await self._load()
        return [context for context in self._known.values() if context.running]

    async def delete(self, id: str) -> None:
        """End a context with all that its code started, and forget it."""
        context = await self.get(id)
        if context.running:
            await context.kill()
        await self._forget([context])

    async def run(
        self,
        code: str,
        *,
        context: CodeContext | str | None = None,
        language: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CodeExecution:
        """Run code and wait for it. See `stream` for its options."""
        results: list[CodeResult] = []
        async with self._use() as run:
            collector = Collector(run.spills, MAX_OUTPUT)
            events = self.stream(code, context=context, language=language, env=env, timeout=timeout)
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
        """Run code and give what it writes and shows as it comes.

        Without `context` in the default one of `language`, which is nobody else's and is made
        when it is not there. `env` holds for this code only. After `timeout` seconds, or when
        nobody listens any more, the code is interrupted, and its context lives on; one that
        does not heed that is ended.
        """
        known = None if language is None else check_language(language)
        options = check_env(env), check_timeout(timeout)
        return CodeStream(self._stream(_checked(code), context, known, *options))

    @property
    def busy(self) -> bool:
        """Whether code runs in any of them."""
        return any(context.busy for context in self._known.values())

    async def adopt(self, run: Run) -> None:
        """Take over what another engine left in this run of the sandbox."""
        await self._load()
        for context in list(self._known.values()):
            process = context.process
            if process.generation != run.generation:
                if process.running:
                    process.lifetime.cut_off(self._id, "the engine stopped")
            elif process.running or is_held(process.stem + EXIT):
                process.lifetime.attach(run)
                if process.running:
                    self._spawn(context.recover())
        await self._written()

    async def ended(self, reason: str, *, destroyed: bool = False) -> None:
        """The run of the sandbox is over: what ran was killed, and who asks hears why."""
        await self._load()
        for context in list(self._known.values()):
            context.process.lifetime.cut_off(self._id, reason, destroyed=destroyed)
            context.close()
        await self._written()

    async def aclose(self) -> None:
        """Let go of everything, and leave what runs for another engine. Safe to repeat."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for context in self._known.values():
            context.close()

    async def _stream(
        self,
        code: str,
        context: CodeContext | str | None,
        language: CodeLanguage | None,
        env: dict[str, str],
        timeout: float | None,
    ) -> AsyncGenerator[CodeEvent | CodeExecution, None]:
        async with self._use():
            where = await self._find(context, language)
            timeout = timeout if timeout is not None else where.row.timeout
            events = where.stream(code, env=env, timeout=timeout)
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event

    async def _find(
        self, context: CodeContext | str | None, language: CodeLanguage | None
    ) -> CodeContext:
        if context is None:
            return await self._default(language or "python")
        found = await self.get(context) if isinstance(context, str) else context
        if language is not None and language != found.language:
            raise InvalidOption(
                f"code context {found.id} is for {found.language}, not for {language}.",
                hint="Leave language out, or create a context for it.",
                option="language",
                value=language,
            )
        return found

    async def _default(self, language: CodeLanguage) -> CodeContext:
        """The context for code that names none: another one, when the last has ended."""
        async with self._defaults:
            for context in await self.list():
                if context.row.shared and context.language == language:
                    return context
            return await self.create(language=language, shared=True)

    async def _load(self) -> None:
        async with self._loading:
            if self._loaded:
                return
            self._directory = await self._locate()
            if not self._directory:
                return
            for row in await self._record.rows(ContextRow, self._id):
                self._known[row.context_id] = self._context(row)
            self._loaded = True

    def _context(self, row: ContextRow) -> CodeContext:
        return CodeContext(
            row,
            stem=os.path.join(self._directory, "run", row.context_id + _SUFFIX),
            use=self._use,
            on_end=self._on_end,
            on_gone=self._on_gone,
        )

    def _reserve(self, name: str) -> None:
        if name in self._known or name in self._starting:
            raise Conflict(
                f"sandbox {self._id} has a code context {name!r} already.",
                hint="Use another id, or delete that one, also when it has ended.",
                kind="context",
                name=name,
            )
        running = sum(context.running for context in self._known.values())
        if running + len(self._starting) >= MOST_RUNNING:
            raise LimitReached(
                f"sandbox {self._id} has {MOST_RUNNING} code contexts, and may not have more.",
                hint="Delete some of them.",
                limit="contexts",
            )
        self._starting.add(name)

    async def _make(
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
            place = kernels.install(run)
            for words in kernel.commands(run, place):
                started = await run.program(words, cwd=cwd, env=env)
                row = ContextRow(
                    sandbox_id=self._id,
                    context_id=name,
                    generation=run.generation,
                    language=kernel.language,
                    cwd=started.cwd,
                    created_at=time.time(),
                    timeout=timeout,
                    shared=shared,
                )
                try:
                    return await self._begin(run, started, self._context(row), kernel)
                except PathNotFound as error:
                    if error.path != words[0]:
                        raise
            raise kernel.missing(self._id)
        finally:
            self._starting.discard(name)

    async def _begin(
        self, run: Run, program: Program, context: CodeContext, kernel: KernelSpec
    ) -> CodeContext:
        process = context.process
        try:
            await self._record.write(put(context.row))
            told = await launch(run, program, process.stem, stdin=True, timeout=None)
            process.lifetime.begin(told)
            process.lifetime.attach(run)
            await context.ready()
        except BaseException as error:
            said = last_lines(process.log.path("stderr"))
            context.close()
            await abandon(run, process.stem)
            with contextlib.suppress(SandboxGone):
                await self._record.write(delete(ContextRow, self._id, context.id))
            if isinstance(error, ProcessEnded):
                missing = error.fields["exit_code"] == kernels.NOT_FOUND
                raise kernel.missing(self._id) if missing else kernel.unfit(said) from error
            raise
        self._known[context.id] = context
        return context

    async def _undo(self, making: asyncio.Task[CodeContext]) -> None:
        """End and forget a context whose making nobody waited for."""
        with contextlib.suppress(Exception):
            context = await making
            await context.kill()
            await self._forget([context])

    def _on_end(self, context: CodeContext) -> None:
        if self._known.get(context.id) is context:
            task = self._spawn(self._write_end(context))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    def _on_gone(self, context: CodeContext) -> None:
        if context.row.shared:
            # Nobody has its id to ask by, and another takes its place.
            self._spawn(self._forget([context]))
            return
        context.clear()
        ended = [one for one in self._known.values() if one.process.gone]
        ended.sort(key=lambda one: one.row.ended_at or 0.0)
        if len(ended) > MOST_ENDED:
            self._spawn(self._forget(ended[:-MOST_ENDED]))

    async def _write_end(self, context: CodeContext) -> None:
        # On a full disk too: the next engine finds out by itself that it has ended.
        with contextlib.suppress(SandboxGone, NotFound, StorageFull):
            await self._record.write(update(context.row))

    async def _forget(self, contexts: Sequence[CodeContext]) -> None:
        for context in contexts:
            context.close()
            remove_files(context.process.stem)
            self._known.pop(context.id, None)
        with contextlib.suppress(SandboxGone):
            rows = (delete(ContextRow, self._id, context.id) for context in contexts)
            await self._record.write(*rows)

    def _spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _written(self) -> None:
        if self._writes:
            await asyncio.wait(self._writes)


def _checked(code: object) -> str:
    if not isinstance(code, str):
        raise InvalidOption(
            f"code is a str, not {type(code).__name__}.",
            hint="Pass the code itself; for a file, its text.",
            option="code",
        )
    if len(code) > LONGEST_CODE:
        raise InvalidOption(
            f"the code has {len(code)} characters, and may have {LONGEST_CODE}.",
            hint="Write its data to a file of the sandbox, and have the code read that.",
            option="code",
        )
    return code
