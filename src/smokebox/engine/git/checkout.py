"""Clones by the git of a sandbox: the target gets the whole repository, or stays as it was."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.engine.git.proxy import GitProxy
from smokebox.engine.git.remote import GitRemote
from smokebox.errors import (
    Conflict,
    DeadlineExceeded,
    GitError,
    PathExists,
    PathNotFound,
    SmokeboxError,
    StorageFull,
    Unsupported,
)
from smokebox.foundation.tasks import run_to_completion
from smokebox.types import GitCheckout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smokebox.egress.address_guard import PrivateAccess
    from smokebox.engine.files.files import Files
    from smokebox.engine.git.repository import Repository
    from smokebox.engine.lifecycle import Lifecycle
    from smokebox.engine.run import Run
    from smokebox.types import ExecResult

# Time to remove an incomplete clone.
CLEAR_SECONDS = 60.0

# The git configuration of the sandbox does not apply: a proxy, a credential helper, a hook or
# another insteadOf for the URL would redirect the clone.
_SETTINGS = (
    "protocol.allow=never",
    "protocol.http.allow=always",
    "http.followRedirects=false",
    "http.proxy=",
    "credential.helper=",
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "submodule.recurse=false",
    "gc.auto=0",
    "safe.directory=*",
    "advice.detachedHead=false",
)
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "",
    "LC_ALL": "C",
    "LANGUAGE": "",
}
_REPLACED_VARIABLES = re.compile(r"GIT_.*|LC_.*|(https?|all|no)_proxy", re.IGNORECASE)
_MAX_OUTPUT = 1 << 16
_MAX_REASON = 400
_DISK_FULL = ("No space left on device", "Disk quota exceeded")
_NOT_FOUND = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckoutJob:
    """One call of `git_checkout`, its options checked."""

    lifecycle: Lifecycle
    files: Files
    repository: Repository
    target: str
    branch: str | None
    depth: int | None
    allow_private: PrivateAccess
    targets: set[str]

    async def run(self, timeout: float | None) -> GitCheckout:
        """Clone within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout) as limit:
                async with self.lifecycle.use() as run:
                    target = self.files.resolve_path(self.target)
                    with self._claim(target):
                        return await self._clone_or_clear(
                            run, target, await self._is_empty_directory(target)
                        )
        except TimeoutError as error:
            if not limit.expired():
                raise
            url = str(self.repository.url)
            raise DeadlineExceeded(
                f"cloning {url} took longer than {timeout:g} s.",
                hint="Pass a longer timeout=, or depth=1 for the last commit only.",
                operation="git_checkout",
                timeout=timeout,
                url=url,
            ) from error

    @contextlib.contextmanager
    def _claim(self, target: str) -> Iterator[None]:
        """Refuse other clones to the same target: the one that fails would remove it."""
        if target in self.targets:
            raise Conflict(
                f"another checkout to {target} is under way.",
                hint="Wait for it, or pass another target=.",
                kind="target",
                name=target,
            )
        self.targets.add(target)
        try:
            yield
        finally:
            self.targets.discard(target)

    async def _is_empty_directory(self, target: str) -> bool:
        """Return whether an empty directory exists. Raises `PathExists` for anything else."""
        try:
            entry = await self.files.stat(target, follow_symlinks=False)
        except PathNotFound:
            return False
        dangling = entry.is_symlink and not await self.files.exists(target)
        if not dangling and (await self.files.stat(target)).is_directory:
            if not await self.files.readdir(target):
                return True
            raise PathExists(
                target,
                f"{target} is a directory that is not empty.",
                hint="Pass another target=, or remove what is there.",
            )
        raise PathExists(target, hint="Pass another target=, or remove what is there.")

    async def _clone_or_clear(self, run: Run, target: str, existed: bool) -> GitCheckout:
        try:
            return await self._clone(run, target)
        except PathExists:
            # Another call created it first.
            raise
        except BaseException:
            await run_to_completion(self._clear(target, existed))
            raise

    async def _clone(self, run: Run, target: str) -> GitCheckout:
        url = str(self.repository.url)
        remote = GitRemote(self.repository, allow_private=self.allow_private)
        proxy = GitProxy(remote)
        with contextlib.closing(remote):
            async with proxy.open(run.jail):
                # The sandbox stores the URL of the repository, not that of the proxy.
                args = ["-c", f"url.{proxy.url}.insteadOf={url}", "clone", "--quiet"]
                args += [f"--branch={self.branch}"] if self.branch is not None else []
                args += [f"--depth={self.depth}"] if self.depth is not None else []
                result = await _git(run, *args, "--origin=origin", "--", url, target)
                if not result.success:
                    # Git knows only that it got no response.
                    raise proxy.failure or self._explain(result, run, target, proxy.url)
        head = await _read(run, target, "symbolic-ref", "--quiet", "HEAD")
        return GitCheckout(
            url=url,
            target=target,
            branch=head.removeprefix("refs/heads/") if head is not None else None,
            commit=await _read(run, target, "rev-parse", "--quiet", "--verify", "HEAD^{commit}"),
        )

    async def _clear(self, target: str, existed: bool) -> None:
        """Remove what a clone left behind, unless the sandbox was destroyed meanwhile."""
        with contextlib.suppress(SmokeboxError, TimeoutError):
            async with asyncio.timeout(CLEAR_SECONDS):
                if await self.lifecycle.row() is None:
                    return
                paths = [target]
                if existed:
                    paths = [f"{target}/{name}" for name in await self.files.readdir(target)]
                for path in paths:
                    await self.files.rm(path, recursive=True, force=True)

    def _explain(self, result: ExecResult, run: Run, target: str, proxy_url: str) -> SmokeboxError:
        url = str(self.repository.url)
        text = self.repository.redact(result.stderr.replace(proxy_url, url)).strip()
        if result.exit_code == _NOT_FOUND or "'remote-http' is not a git command" in text:
            return Unsupported(
                f"the image of sandbox {run.id} has no git that can clone over HTTP.",
                hint="Use an image that has git 2.32 or later.",
                operation="git_checkout",
                sandbox=run.id,
            )
        if self.branch is not None and f"Remote branch {self.branch} not found" in text:
            return GitError(
                f"{url} has no branch or tag {self.branch!r}.",
                hint="Omit branch= for the default branch.",
                reason="branch_not_found",
                url=url,
                branch=self.branch,
            )
        if any(message in text for message in _DISK_FULL):
            return StorageFull(
                target,
                f"there is no room for {url} in {target}.",
                hint="Raise the disk limit, or pass depth=1.",
            )
        if "already exists and is not an empty directory" in text:
            return PathExists(target, hint="Pass another target=.")
        reason = text[-_MAX_REASON:] or f"exit code {result.exit_code}"
        return GitError(
            f"git could not clone {url}: {reason}",
            hint="Read the output of git, and try again.",
            reason="failed",
            url=url,
            exit_code=result.exit_code,
        )


async def _read(run: Run, target: str, *args: str) -> str | None:
    """Return the output of git in a repository, or None."""
    result = await _git(run, "-C", target, *args)
    return result.stdout.strip() or None if result.success else None


async def _git(run: Run, *args: str) -> ExecResult:
    settings = [arg for setting in _SETTINGS for arg in ("-c", setting)]
    program = await run.program(["git", *settings, *args], cwd="/")
    variables = {
        name: text for name, text in program.env.items() if not _REPLACED_VARIABLES.fullmatch(name)
    }
    program = replace(program, env=variables | _ENVIRONMENT)
    return await run.execute(program, max_output=_MAX_OUTPUT)
