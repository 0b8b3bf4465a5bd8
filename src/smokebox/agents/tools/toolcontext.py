"""What a tool may know of the call that it answers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smokebox.agents.tools.abort import AbortSignal
from smokebox.errors import Unsupported
from smokebox.types import OutputChunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.agents.harness import Harness
    from smokebox.sandbox.api import SandboxApi

_log = logging.getLogger("smokebox.tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """One call of a tool. A function that has a parameter `ctx` gets it; the model does not.

    `key` is the same when a durable tool runs again after a crash, and belongs to no other
    call: what it names was perhaps already done. `attempt` counts those runs from 1.
    `harness` is what the agent runs in, and `env` what it was initialized with.
    """

    session: str = ""
    call_id: str = ""
    tool: str = ""
    key: str = ""
    attempt: int = 1
    sandbox: SandboxApi | None = None
    env: Any = None
    harness: Harness | None = None
    aborted: AbortSignal = field(default_factory=AbortSignal)
    on_output: Callable[[OutputChunk], object] | None = field(default=None, repr=False)

    @property
    def fs(self) -> SandboxApi:
        """The files of the agent's workspace. Raises `Unsupported` where it has none."""
        if self.sandbox is None:
            raise Unsupported(
                f"the tool {self.tool!r} wants a workspace, and this agent has none.",
                hint="Leave sandbox=None out of the agent, or leave this tool out.",
                operation="fs",
            )
        return self.sandbox

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records say which session and which call they are about."""
        about = {"session": self.session, "tool": self.tool, "call_id": self.call_id}
        return logging.LoggerAdapter(_log, about)

    def output(self, text: str) -> None:
        """Show whoever watches how far the tool is; the model does not see it."""
        if self.on_output is not None:
            self.on_output(OutputChunk("stdout", text))
