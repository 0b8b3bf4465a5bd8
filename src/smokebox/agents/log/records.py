"""What the record of a session consists of. Records are only ever added.

A field is never renamed or given another meaning: what changes gets a new name with a
default, or a new record, and `VERSION` goes up with a migration in `migrations.py`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from smokebox.agents.events import Outcome, ToolStatus
from smokebox.agents.messages import AssistantMessage, ToolReturn, Usage, UserMessage
from smokebox.errors import SmokeboxError, StoreTooNew
from smokebox.wire.failure import Failure, error_of, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


VERSION = 1

WorkKind: TypeAlias = Literal["prompt", "skill", "task", "shell", "compact"]


class SessionCreated(msgspec.Struct, frozen=True, tag="session_created", omit_defaults=True):
    """The first record. System prompt and tools are those of the whole session, until
    `ResourcesChanged` has others.

    `parent` is the session whose task this one does, `forked_from` one whose records up to
    `forked_at` precede these; both are names of sessions of the same agent and id.
    """

    system: str
    tools: tuple[dict[str, Any], ...] = ()
    model: str = ""
    parent: str | None = None
    forked_from: str | None = None
    forked_at: int = 0
    depth: int = 0
    instructions: str = ""


class ResourcesChanged(msgspec.Struct, frozen=True, tag="resources_changed", omit_defaults=True):
    """The agent has other tools or instructions than when the session began, as `message`
    tells the model. `instructions` is a digest of them, as it is in `SessionCreated`."""

    tools: tuple[dict[str, Any], ...]
    instructions: str
    message: UserMessage


class WorkAccepted(msgspec.Struct, frozen=True, tag="work_accepted", omit_defaults=True):
    """Work that will have exactly one `WorkEnded`, whatever happens.

    `options` are those that fit in JSON; `key` makes the same work asked for twice one.
    """

    work_id: str
    kind: WorkKind
    message: UserMessage | None = None
    options: dict[str, Any] = {}
    key: str | None = None


class WorkStarted(msgspec.Struct, frozen=True, tag="work_started", omit_defaults=True):
    """Work begins, or begins again after the process that did it was killed."""

    work_id: str
    attempt: int = 1


class MessageAdded(msgspec.Struct, frozen=True, tag="message_added"):
    """The model will be shown this from its next turn on."""

    work_id: str
    message: UserMessage


class ReplyStarted(msgspec.Struct, frozen=True, tag="reply_started"):
    """A model begins to answer."""

    work_id: str
    reply_id: str
    model: str


class ReplyDelta(msgspec.Struct, frozen=True, tag="reply_delta", omit_defaults=True):
    """A good deal more of an answer that is being given; many small pieces in one record."""

    reply_id: str
    text: str
    thinking: bool = False


class ReplyEnded(msgspec.Struct, frozen=True, tag="reply_ended"):
    """The whole answer."""

    reply_id: str
    message: AssistantMessage


class ReplyFailed(msgspec.Struct, frozen=True, tag="reply_failed", omit_defaults=True):
    """An answer that did not come to its end: what there is of it plays no part."""

    reply_id: str
    error: str
    code: str = ""


class ToolStarted(msgspec.Struct, frozen=True, tag="tool_started", omit_defaults=True):
    """From here on the tool may have had its effect."""

    work_id: str
    call_id: str
    name: str
    durable: bool = False


class ToolEnded(msgspec.Struct, frozen=True, tag="tool_ended", omit_defaults=True):
    """What a tool call came to."""

    call_id: str
    result: ToolReturn
    status: ToolStatus = "ok"
    seconds: float = 0.0


class ApprovalRequested(msgspec.Struct, frozen=True, tag="approval_requested"):
    """A tool call waits for somebody to allow it."""

    work_id: str
    call_id: str
    name: str
    arguments: str


class ApprovalDecided(msgspec.Struct, frozen=True, tag="approval_decided", omit_defaults=True):
    """Somebody did, or did not."""

    call_id: str
    allowed: bool
    reason: str = ""


class Compacted(msgspec.Struct, frozen=True, tag="compacted", omit_defaults=True):
    """From here on the model sees `summary` in place of what came before `keep_from`.

    That is a position as `Conversation` counts them: an offset, and in a fork one that goes on
    from those of what it was forked from.
    """

    summary: str
    keep_from: int
    tokens_before: int = 0
    usage: Usage = Usage()
    work_id: str = ""


class TaskStarted(msgspec.Struct, frozen=True, tag="task_started", omit_defaults=True):
    """A child session works for this one; `call_id` is the tool call that asked for it."""

    work_id: str
    session: str
    call_id: str | None = None
    agent: str | None = None


class TaskEnded(msgspec.Struct, frozen=True, tag="task_ended", omit_defaults=True):
    """It has done so."""

    session: str
    outcome: Outcome
    usage: Usage = Usage()


class AbortRequested(msgspec.Struct, frozen=True, tag="abort_requested"):
    """Work is to end as soon as it can."""

    work_id: str


class WorkEnded(msgspec.Struct, frozen=True, tag="work_ended", omit_defaults=True):
    """The one outcome of accepted work."""

    work_id: str
    outcome: Outcome
    text: str = ""
    result: Any = None
    error: dict[str, Any] | None = None
    usage: Usage = Usage()


Record: TypeAlias = (
    SessionCreated
    | ResourcesChanged
    | WorkAccepted
    | WorkStarted
    | MessageAdded
    | ReplyStarted
    | ReplyDelta
    | ReplyEnded
    | ReplyFailed
    | ToolStarted
    | ToolEnded
    | ApprovalRequested
    | ApprovalDecided
    | Compacted
    | TaskStarted
    | TaskEnded
    | AbortRequested
    | WorkEnded
)


class StoredRecord(msgspec.Struct, frozen=True):
    """A record where it lies: offsets of a session begin at 1, and have no gaps."""

    offset: int
    at: float
    record: Record


# Version -> what makes a record of the next version from the JSON of one of this. Those that
# were released never change.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """A record as JSON, of the version that this code writes.

    What no encoding has, such as half of a surrogate pair that a model wrote, becomes `?`.
    """
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(record), ensure_ascii=False)
        return text.encode(errors="replace")


def decode(
    data: bytes,
    version: int,
    *,
    where: str,
    latest: int = VERSION,
    upgrades: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = UPGRADES,
) -> Record:
    """The record that was written so by some version up to this. Raises `StoreTooNew`."""
    if version > latest:
        raise too_new(f"a record of {where}", version, latest)
    if version == latest:
        return _decoder.decode(data)
    value = msgspec.json.decode(data)
    for older in range(version, latest):
        value = upgrades[older](value)
    return _decoder.decode(_encoder.encode(value))


def too_new(what: str, version: int, latest: int) -> StoreTooNew:
    """What to say of something that a later version wrote."""
    return StoreTooNew(
        f"{what} is of version {version}, from a later Smokebox: this one knows versions up to "
        f"{latest}.",
        hint="Upgrade Smokebox, or give persist= another place.",
        version=version,
        latest=latest,
    )


def dump_error(error: BaseException) -> dict[str, Any]:
    """What the record has of an error."""
    if not isinstance(error, SmokeboxError):
        error = SmokeboxError(f"{type(error).__name__}: {error}")
    made: dict[str, Any] = msgspec.to_builtins(failure_of(error))
    return {name: value for name, value in made.items() if value not in ("", None, {}, False)}


def load_error(kept: dict[str, Any] | None) -> SmokeboxError:
    """The error that the record has, as the class that it was."""
    return error_of(msgspec.convert(kept or {"code": "error", "message": ""}, Failure))
