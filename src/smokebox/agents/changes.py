"""What an agent's tools and instructions are now, against what its session was told."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from smokebox.agents.log.records import ResourcesChanged
from smokebox.agents.messages import Text, UserMessage

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from smokebox.agents.log.conversation import Conversation


def digest(instructions: str) -> str:
    """What instructions are recognized by."""
    return hashlib.sha256(instructions.encode()).hexdigest()[:16]


def changed(
    conversation: Conversation, tools: Sequence[dict[str, Any]], instructions: str
) -> ResourcesChanged | None:
    """What the model has to be told before its next turn.

    The system prompt stays as it is, and tools that are still there keep their places, so
    that a provider's cache holds as far as it can.
    """
    known = conversation.resources
    if known is None:
        return None
    now = digest(instructions)
    before, names = _names(known.tools), _names(tools)
    gained = [name for name in names if name not in before]
    lost = [name for name in before if name not in names]
    said = []
    if gained:
        said.append(f"These tools have been added: {', '.join(gained)}.")
    if lost:
        said.append(f"These tools are gone: {', '.join(lost)}.")
    if now != known.instructions and known.instructions:
        told = instructions.strip() or "(none)"
        said.append(f"Your instructions have changed. They are now:\n\n{told}")
    if not said:
        return None
    return ResourcesChanged(
        tuple(tools), now, UserMessage((Text("\n\n".join(said)),), signal="resources")
    )


def _names(tools: Sequence[dict[str, Any]]) -> list[str]:
    return [str(tool["name"]) for tool in tools]
