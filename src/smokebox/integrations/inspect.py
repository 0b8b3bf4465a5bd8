"""Inspect sandbox environment over our sandboxes: `sandbox="smokebox"` in a task or a sample.

Inspect finds it through an entry point, so no import is needed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import tomllib
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from smokebox.errors import InvalidOption, NotFound, SandboxGone, Unsupported
from smokebox.integrations import missing_framework
from smokebox.integrations.command import Command, CommandOutcome, has_users, run_command
from smokebox.options import check_env, refuse_unknown

try:
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxEnvironment,
        SandboxEnvironmentConfigType,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
    from inspect_ai.util import concurrency as limit_concurrency

    # Private, but the only way to share the limit that --max-subprocesses sets.
    from inspect_ai.util._subprocess import max_subprocesses_context_var
    from pydantic import BaseModel, ConfigDict, Field, ValidationError
except ImportError as error:
    raise missing_framework("inspect-ai", extra="inspect") from error

if TYPE_CHECKING:
    from smokebox.sandbox.api import SandboxApi

logger = logging.getLogger(__name__)

SandboxKind = Literal["local", "virtual"]


class SmokeboxConfig(BaseModel):
    """Kind of sandbox for each sample, and its environment variables.

    `local` is this machine, without isolation, in a temporary directory that is removed after the
    sample; `virtual` is a bash in memory. In a task: `SandboxEnvironmentSpec("smokebox",
    SmokeboxConfig(sandbox="virtual"))`, or `("smokebox", "box.toml")` with the same keys in a TOML
    file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sandbox: SandboxKind = "local"
    env: dict[str, str] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @classmethod
    def parse(cls, config: SandboxEnvironmentConfigType | dict[str, Any] | None) -> SmokeboxConfig:
        """Return the configuration from any form in which Inspect passes it."""
        if isinstance(config, SmokeboxConfig):
            return config
        if isinstance(config, BaseModel):
            raise InvalidOption(
                f"the smokebox sandbox takes a SmokeboxConfig, not {config!r}.",
                hint="Pass SandboxEnvironmentSpec('smokebox', SmokeboxConfig(...)).",
                option="config",
            )
        values = _read_file(config) if isinstance(config, str) else config or {}
        refuse_unknown("the smokebox sandbox", values, cls.model_fields)
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidOption(
                f"the smokebox sandbox cannot take {first['input']!r} for "
                f"{'.'.join(map(str, first['loc']))}.",
                hint=f"{first['msg']}.",
                option=str(first["loc"][0]),
            ) from error


@sandboxenv(name="smokebox")
class SmokeboxEnvironment(SandboxEnvironment):
    """A sandbox as the environment of one sample. `directory`, if any, is removed with it."""

    def __init__(self, sandbox: SandboxApi, *, directory: str | None = None) -> None:
        super().__init__()
        self.sandbox = sandbox
        self._directory = directory
        self._users: frozenset[str] | None = None

    @classmethod
    async def sample_init(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        metadata: dict[str, str],
    ) -> dict[str, SandboxEnvironment]:
        """Create the sandbox of a sample."""
        chosen = SmokeboxConfig.parse(config)
        env = check_env(chosen.env)
        if chosen.sandbox == "virtual":
            from smokebox.sandbox.virtual import virtual

            return {"default": cls(virtual(env=env))}
        from smokebox.sandbox.local import local

        directory = tempfile.mkdtemp(prefix="smokebox-sample-")
        return {"default": cls(local(cwd=directory, env=env), directory=directory)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Close the sandbox of a sample and remove its files."""
        for environment in environments.values():
            await environment.as_type(SmokeboxEnvironment).aclose()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration from a dict of a log or a command line."""
        return SmokeboxConfig.parse(config)

    def default_polling_interval(self) -> float:
        """Return the seconds between polls of a process, which stay on this machine."""
        return 0.2

    async def aclose(self) -> None:
        """Stop everything in the sandbox and remove its directory. Safe to repeat."""
        try:
            await self.sandbox.aclose()
        finally:
            if self._directory is not None:
                await asyncio.to_thread(_remove, self._directory)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a program.

        A command that timed out is never retried, even with `timeout_retry`: it may have done half
        of its work.
        """
        command = Command.of_arguments(cmd, env)
        slots = max_subprocesses_context_var.get()
        limiter = (
            limit_concurrency("subprocesses", slots, resizable=True)
            if concurrency
            else nullcontext()
        )
        try:
            async with limiter:
                await self._check_user(user)
                done = await run_command(
                    self.sandbox,
                    command,
                    # Passed explicitly, because the shell of some sandboxes remembers the last
                    # `cd`.
                    cwd=cwd or self.sandbox.cwd,
                    timeout=timeout,
                    stdin=input,
                    user=user,
                    limit=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
                )
        except SandboxGone as error:
            raise SandboxUnavailableError(str(error)) from error
        except NotFound as error:
            # The response of a container engine for an unknown user.
            return ExecResult(success=False, returncode=126, stdout="", stderr=f"{error}\n")
        except Unsupported as error:
            if error.fields.get("operation") != "user":
                raise
            raise SandboxUserUnsupportedError(str(error)) from error
        return _result(cmd, done, timeout)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Create or replace a file and its parent directories."""
        await self.sandbox.write_file(file, contents)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a whole file, with its line endings unchanged."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        info = await self.sandbox.stat(file)
        if info.is_file and info.size is not None and info.size > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        data = await self.sandbox.read_bytes(file)
        # Checked again: the file may have grown, or the sandbox may not have known its size.
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    async def _check_user(self, user: str | None) -> None:
        if user is None or has_users(self.sandbox):
            return
        if self._users is None:
            result = await self.sandbox.exec("id -u; id -un", timeout=30)
            self._users = frozenset(result.stdout.split())
        if user not in self._users:
            raise SandboxUserUnsupportedError(
                f"the smokebox sandbox runs commands as {' or '.join(sorted(self._users))}, "
                f"not as {user!r}. Leave user out."
            )


def _result(cmd: list[str], done: CommandOutcome, timeout: int | None) -> ExecResult[str]:
    if done.exceeded:
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        text = done.stdout if done.exceeded == "stdout" else done.stderr
        start = text.encode()[:limit].decode(errors="ignore")
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, start)
    if done.timed_out:
        raise TimeoutError(f"{cmd[0]} took longer than {timeout} seconds and was killed.")
    if done.exit_code == 126 and "permission denied" in done.stderr.lower():
        raise PermissionError(f"{cmd[0]} may not be executed: {done.stderr.strip()}")
    return ExecResult(
        success=done.exit_code == 0,
        returncode=done.exit_code,
        stdout=done.stdout,
        stderr=done.stderr,
    )


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InvalidOption(
            f"cannot read the sandbox configuration {path}: {error}.",
            hint="Write a TOML file, for example with the line: sandbox = 'virtual'.",
            option="config",
        ) from error


def _remove(directory: str) -> None:
    # A sample may leave directories without write permission, and symlinks that lead outside.
    for folder, names, _ in os.walk(directory):
        for name in names:
            child = os.path.join(folder, name)
            if not os.path.islink(child):
                with suppress(OSError):
                    os.chmod(child, 0o700)
    shutil.rmtree(directory, ignore_errors=True)
    if os.path.exists(directory):
        logger.warning("some files of a sample could not be removed: %s", directory)
