"""What an app of agents is asked, and what it answers."""

from __future__ import annotations

from typing import Any

import msgspec

from smokebox.wire.failure import Failure


class Attachment(msgspec.Struct, forbid_unknown_fields=True):
    """A file that comes with a message; `data` is base64."""

    name: str
    data: str


class MessageBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What somebody says to an agent."""

    message: str
    attachments: list[Attachment] = []


class AbortBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be called off: one submission, or all of a conversation."""

    submission_id: str | None = None


class ApprovalBody(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Whether a tool call that waits may run."""

    allow: bool
    reason: str = ""


class Accepted(msgspec.Struct):
    """Work that was taken on. Events of it come behind `offset`."""

    submission_id: str
    id: str
    url: str
    stream_url: str
    offset: int


class Work(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A submission. `outcome` is completed, failed or aborted once `state` is ended."""

    submission_id: str
    kind: str
    name: str
    id: str
    state: str
    accepted_at: float
    attempts: int = 0
    ended_at: float | None = None
    outcome: str | None = None
    result: Any = None
    failure: Failure | None = None


class Aborted(msgspec.Struct):
    """Which submissions were called off."""

    aborted: list[str]


class Events(msgspec.Struct):
    """Events behind an offset; `offset` is where to go on."""

    events: list[msgspec.Raw]
    offset: int


class ConversationInfo(msgspec.Struct, kw_only=True):
    """A conversation with an agent. `working` is how much accepted work has no end."""

    id: str
    created_at: float
    updated_at: float
    offset: int
    working: int


class Conversations(msgspec.Struct):
    """Conversations, those that changed last first."""

    conversations: list[ConversationInfo]


class ServedInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Something that an app serves, or the fault of a file that it could not take in."""

    name: str
    url: str
    description: str = ""
    schedule: str | None = None
    error: str | None = None


class Index(msgspec.Struct):
    """All that an app serves."""

    agents: list[ServedInfo]
    workflows: list[ServedInfo]


class WorkList(msgspec.Struct):
    """Submissions, the latest first."""

    runs: list[Work]
