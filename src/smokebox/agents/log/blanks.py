"""Messages without what providers reject: blank text, and messages of nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.agents.messages import AssistantMessage, Text, Thinking, UserMessage

if TYPE_CHECKING:
    from smokebox.agents.messages import AssistantPart, Message, UserPart


def without_blanks(message: Message) -> Message | None:
    """The message as it may be shown, the same object where it may; None if nothing is left.

    An answer of thoughts alone is nothing: most providers cannot be sent one.
    """
    match message:
        case UserMessage():
            parts = tuple(part for part in message.parts if not _blank(part))
            if len(parts) == len(message.parts) and parts:
                return message
            return UserMessage(parts, signal=message.signal) if parts else None
        case AssistantMessage():
            said = tuple(part for part in message.parts if not _blank(part))
            if all(isinstance(part, Thinking) for part in said):
                return None
            if len(said) == len(message.parts):
                return message
            return AssistantMessage(
                parts=said, model=message.model, stop=message.stop, usage=message.usage
            )
        case _:
            return message


def _blank(part: UserPart | AssistantPart) -> bool:
    return isinstance(part, Text) and not part.text.strip()
