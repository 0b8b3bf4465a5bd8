"""Tool calls that somebody has to allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from smokebox.agents.messages import ToolCall
    from smokebox.agents.tools.tool import Tool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a call may run, and what the model is told where it may not."""

    allowed: bool
    reason: str = ""


class Gate(Protocol):
    """Lets calls pass, or not."""

    async def pass_through(
        self, call: ToolCall, tool: Tool | None, arguments: dict[str, Any]
    ) -> Verdict:
        """Wait until it is known whether a call may run."""
        ...
