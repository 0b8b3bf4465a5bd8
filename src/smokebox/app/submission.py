"""One piece of work that an app was given: a message for an agent, or a run of a workflow."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import msgspec

from smokebox.agents.events import Outcome
from smokebox.errors import InvalidOption
from smokebox.wire.failure import Failure

Kind: TypeAlias = Literal["agent", "workflow"]
State: TypeAlias = Literal["waiting", "running", "ended"]
# What a conversation can be called in a URL.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Whose turn it is: work of one target is done one piece after the other.

    `name` is that of the agent or workflow, `id` the conversation's or the run's.
    """

    kind: Kind
    name: str
    id: str

    def __str__(self) -> str:
        return f"{self.kind}s/{self.name}/{self.id}"


class Ending(msgspec.Struct, frozen=True, omit_defaults=True):
    """What work came to. `result` is what a workflow returned, or an agent's answer."""

    outcome: Outcome
    result: Any = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Accepted work, as the inbox has it. `attempts` counts how often it was begun, and `head`
    is the offset of its conversation behind which all of it is."""

    id: str
    target: Target
    body: Any
    accepted_at: float
    state: State = "waiting"
    attempts: int = 0
    abort_asked: bool = False
    ended_at: float | None = None
    ending: Ending | None = None
    request: dict[str, Any] | None = None
    head: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether a tool call of a conversation with an agent may run."""

    name: str
    id: str
    call_id: str
    allowed: bool
    reason: str = ""


def check_conversation_id(id: object) -> str:
    """`id`, once it is one that a conversation can have."""
    if isinstance(id, str) and _ID.fullmatch(id):
        return id
    raise InvalidOption(
        f"an id is letters, digits, '.', '_' and '-', at most 100 of them, not {id!r:.120}.",
        hint="Use for example the id of a user or a ticket.",
        option="id",
        value=id,
    )
