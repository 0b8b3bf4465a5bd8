"""Requests to an app of agents, and its responses."""

from __future__ import annotations

from typing import Any

import msgspec

from smokebox.wire.failure import Failure


class MessageAttachment(msgspec.Struct, forbid_unknown_fields=True):
    """A file that comes with a message; `data` is base64."""

    name: str
    data: str


class SubmitMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A message to an agent."""

    message: str
    attachments: list[MessageAttachment] = []


class AbortSubmission(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The submission to abort, by default all of a conversation."""

    submission_id: str | None = None


class DecideApproval(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The decision about a tool call that waits for approval."""

    allow: bool
    reason: str = ""


class Accepted(msgspec.Struct):
    """A submission that was accepted. Its events come after `offset`."""

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


class AbortedSubmissions(msgspec.Struct):
    """Ids of the submissions that were aborted."""

    aborted: list[str]


class Events(msgspec.Struct):
    """Events after an offset; `offset` is the position to continue from."""

    events: list[msgspec.Raw]
    offset: int


class ConversationInfo(msgspec.Struct, kw_only=True):
    """A conversation with an agent. `working` counts its unfinished submissions."""

    id: str
    created_at: float
    updated_at: float
    offset: int
    working: int


class Conversations(msgspec.Struct):
    """Conversations, most recently changed first."""

    conversations: list[ConversationInfo]


class ServedInfo(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An agent or workflow of an app, or the error of a file that could not be loaded."""

    name: str
    url: str
    description: str = ""
    schedule: str | None = None
    error: str | None = None


class Index(msgspec.Struct):
    """The agents and workflows of an app."""

    agents: list[ServedInfo]
    workflows: list[ServedInfo]


class WorkList(msgspec.Struct):
    """Submissions, latest first."""

    runs: list[Work]
