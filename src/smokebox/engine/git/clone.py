"""Git as it runs in the sandbox: its words, its environment, and what its failures mean."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smokebox.engine import commands
from smokebox.errors import GitError, PathExists, SmokeboxError, StorageFull, Unsupported

if TYPE_CHECKING:
    from smokebox.engine.git.repository import Repository
    from smokebox.engine.run import Run
    from smokebox.types import ExecResult

# What the sandbox's own files and variables say of git does not hold for a clone: a proxy,
# a credential helper, a hook or another place for the same URL would lead it elsewhere.
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
_OURS = re.compile(r"GIT_.*|LC_.*|(https?|all|no)_proxy", re.IGNORECASE)
_MAX_OUTPUT = 1 << 16
_LONGEST_REASON = 400
_FULL = ("No space left on device", "Disk quota exceeded")
_NO_PROGRAM = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Clone:
    """One clone of a repository by the git of a run, through the door at `door`."""

    run: Run
    repository: Repository
    target: str
    branch: str | None
    depth: int | None
    door: str

    async def make(self) -> None:
        """Clone; the sandbox keeps the repository's own URL, and never the door's."""
        url = str(self.repository.url)
        words = ["-c", f"url.{self.door}.insteadOf={url}", "clone", "--quiet", "--origin=origin"]
        if self.branch is not None:
            words.append(f"--branch={self.branch}")
        if self.depth is not None:
            words.append(f"--depth={self.depth}")
        result = await self._git(*words, "--", url, self.target)
        if not result.success:
            raise self._explain(result)

    async def commit(self) -> str | None:
        """The commit that is checked out; None in an empty repository."""
        return await self._asked("rev-parse", "--quiet", "--verify", "HEAD^{commit}")

    async def head(self) -> str | None:
        """The branch that is checked out; None where it is none."""
        name = await self._asked("symbolic-ref", "--quiet", "HEAD")
        return name.removeprefix("refs/heads/") if name is not None else None

    async def _asked(self, *words: str) -> str | None:
        result = await self._git("-C", self.target, *words)
        return result.stdout.strip() or None if result.success else None

    async def _git(self, *words: str) -> ExecResult:
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        program = await self.run.program(["git", *settings, *words], cwd="/")
        kept = {name: text for name, text in program.env.items() if not _OURS.fullmatch(name)}
        program = replace(program, env=kept | _ENVIRONMENT)
        return await commands.execute(
            self.run, program, spills=self.run.spills, max_output=_MAX_OUTPUT
        )

    def _explain(self, result: ExecResult) -> SmokeboxError:
        url = str(self.repository.url)
        text = self.repository.redact(result.stderr.replace(self.door, url)).strip()
        if result.exit_code == _NO_PROGRAM or "'remote-http' is not a git command" in text:
            return Unsupported(
                f"the image of sandbox {self.run.id} has no git that can clone over HTTP.",
                hint="Use an image with git in it, of version 2.32 or later.",
                operation="git_checkout",
                sandbox=self.run.id,
            )
        if self.branch is not None and f"Remote branch {self.branch} not found" in text:
            return GitError(
                f"{url} has no branch or tag {self.branch!r}.",
                hint="Leave branch out for the one that the repository starts with.",
                reason="branch_not_found",
                url=url,
                branch=self.branch,
            )
        if any(words in text for words in _FULL):
            return StorageFull(
                self.target,
                f"there is no room for {url} in {self.target}.",
                hint="Raise the disk limit, or pass depth=1.",
            )
        if "already exists and is not an empty directory" in text:
            return PathExists(self.target, hint="Pass another target=.")
        why = text[-_LONGEST_REASON:] or f"exit code {result.exit_code}"
        return GitError(
            f"git could not clone {url}: {why}",
            hint="Look at what git says, and try again.",
            reason="failed",
            url=url,
            exit_code=result.exit_code,
        )
