"""Code in a sandbox, in contexts that keep what it did."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from smokebox.client.answering import lost
from smokebox.client.handle import Handle, part, repeat_key
from smokebox.options import check_env, check_timeout
from smokebox.sandbox.code import CodeStream, check_language
from smokebox.types import CodeContextInfo, CodeError, CodeExecution, CodeResult, OutputChunk
from smokebox.wire import answers
from smokebox.wire.codec import decode
from smokebox.wire.requests import CreateCodeContext, RunCode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from smokebox.sandbox.code import CodeEvent

_EVENTS: dict[str, type[CodeEvent]] = {
    "output": OutputChunk,
    "result": CodeResult,
    "exception": CodeError,
}


class Code(Handle):
    """`run_code`, `run_code_stream`, and the contexts that code runs in."""

    async def create_code_context(
        self,
        *,
        language: str = "python",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CodeContextInfo:
        """A place of its own for code, which finds there what the code before it did.

        `timeout` is how long each piece of code may run that names no other. A context ends
        with the sleep of its sandbox, and outlives the server. Raises `Unsupported` where the
        sandbox has nothing that runs the language.
        """
        body = CreateCodeContext(
            language=check_language(language),
            cwd=cwd,
            env=check_env(env) or None,
            timeout=check_timeout(timeout),
        )
        path, key = "/code/contexts", repeat_key()
        return await self._ask(
            CodeContextInfo, "POST", path, body=body, timeout=None, repeat_key=key
        )

    async def run_code(
        self,
        code: str,
        *,
        context: CodeContextInfo | str | None = None,
        language: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CodeExecution:
        """Run code and wait for it. An error in it is a result, in `error`.

        Without `context` in the default one of `language` (Python), which is made when it is
        not there. `env` holds for this code only. After `timeout` seconds, and by cancelling,
        the code is interrupted, and its context lives on where the code heeds that.
        """
        body = _run(code, context, language, env, timeout)
        return await self._ask(CodeExecution, "POST", "/code", body=body, timeout=None)

    def run_code_stream(
        self,
        code: str,
        *,
        context: CodeContextInfo | str | None = None,
        language: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CodeStream:
        """Run code and give what it writes and shows as it comes; the options are `run_code`'s."""
        return CodeStream(self._code_events(_run(code, context, language, env, timeout)))

    async def list_code_contexts(self) -> list[CodeContextInfo]:
        """All contexts, in the order in which they were made."""
        return (await self._ask(answers.CodeContexts, "GET", "/code/contexts")).contexts

    async def delete_code_context(self, context: CodeContextInfo | str) -> None:
        """End a context with all that its code started, and forget it."""
        path = f"/code/contexts/{part('context', _id(context))}"
        await self._ask(type(None), "DELETE", path, timeout=None)

    async def _code_events(self, body: RunCode) -> AsyncGenerator[CodeEvent | CodeExecution, None]:
        events = self._events("POST", "/code/stream", body=body)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.name == "execution":
                    yield decode(CodeExecution, event.data)
                    return
                yield decode(_EVENTS[event.name], event.data)
        raise lost("code/stream")


def _run(
    code: str,
    context: CodeContextInfo | str | None,
    language: str | None,
    env: Mapping[str, str] | None,
    timeout: float | None,
) -> RunCode:
    return RunCode(
        code=code,
        context=None if context is None else _id(context),
        language=None if language is None else check_language(language),
        env=check_env(env) or None,
        timeout=check_timeout(timeout),
    )


def _id(context: CodeContextInfo | str) -> str:
    return context.id if isinstance(context, CodeContextInfo) else context
