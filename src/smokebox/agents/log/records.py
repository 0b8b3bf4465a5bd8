"""Records of a session's event log, which only grows.

A field is never renamed or reused: a change gets a new field with a default, or a new record,
and `VERSION` goes up with an entry in `UPGRADES`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from smokebox.agents.events import Outcome, ToolStatus
from smokebox.agents.messages import AssistantMessage, ImagePart, ToolReturn, Usage, UserMessage
from smokebox.errors import SmokeboxError, StoreTooNew
from smokebox.wire.failure import Failure, error_of, failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


VERSION = 1

WorkKind: TypeAlias = Literal["prompt", "skill", "task", "shell", "compact", "restore"]


class SessionCreated(msgspec.Struct, frozen=True, tag="session_created", omit_defaults=True):
    """The first record. Its system prompt and tools apply until a `ResourcesChanged`.

    `parent` is the session whose task this one does. `forked_from` is a session whose records
    up to `forked_at` precede these. Both are names of sessions of the same agent and id.
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
    """The agent's tools or instructions have changed, which `message` announces to the model.

    `instructions` is a digest, as in `SessionCreated`.
    """

    tools: tuple[dict[str, Any], ...]
    instructions: str
    message: UserMessage


class WorkAccepted(msgspec.Struct, frozen=True, tag="work_accepted", omit_defaults=True):
    """A work item was accepted: exactly one `WorkEnded` follows, even after a crash.

    `options` has the options that can be stored as JSON. `key` is the idempotency key.
    """

    work_id: str
    kind: WorkKind
    message: UserMessage | None = None
    options: dict[str, Any] = {}
    key: str | None = None


class WorkStarted(msgspec.Struct, frozen=True, tag="work_started", omit_defaults=True):
    """A work item starts, or restarts after its process was killed."""

    work_id: str
    attempt: int = 1


class MessageAdded(msgspec.Struct, frozen=True, tag="message_added"):
    """A message for the model, which sees it from its next turn on."""

    work_id: str
    message: UserMessage


class ReplyStarted(msgspec.Struct, frozen=True, tag="reply_started"):
    """A model starts to reply."""

    work_id: str
    reply_id: str
    model: str


class ReplyDelta(msgspec.Struct, frozen=True, tag="reply_delta", omit_defaults=True):
    """More text of a reply; combines many deltas of the provider."""

    reply_id: str
    text: str
    thinking: bool = False


class ReplyEnded(msgspec.Struct, frozen=True, tag="reply_ended"):
    """The complete reply."""

    reply_id: str
    message: AssistantMessage


class ReplyFailed(msgspec.Struct, frozen=True, tag="reply_failed", omit_defaults=True):
    """A reply was cut off; its deltas are discarded."""

    reply_id: str
    error: str
    code: str = ""


class ToolStarted(msgspec.Struct, frozen=True, tag="tool_started", omit_defaults=True):
    """A tool starts: from here on it may have had an effect."""

    work_id: str
    call_id: str
    name: str
    durable: bool = False


class ToolEnded(msgspec.Struct, frozen=True, tag="tool_ended", omit_defaults=True):
    """Result of a tool call."""

    call_id: str
    result: ToolReturn
    status: ToolStatus = "ok"
    seconds: float = 0.0


class ApprovalRequested(msgspec.Struct, frozen=True, tag="approval_requested"):
    """A tool call waits for approval."""

    work_id: str
    call_id: str
    name: str
    arguments: str


class ApprovalDecided(msgspec.Struct, frozen=True, tag="approval_decided", omit_defaults=True):
    """A tool call was approved or denied."""

    call_id: str
    allowed: bool
    reason: str = ""


class Compacted(msgspec.Struct, frozen=True, tag="compacted", omit_defaults=True):
    """From here on `summary` replaces the messages before `keep_from`.

    `keep_from` is a position of `Conversation`: an offset, which in a fork continues from the
    offsets of the original session.
    """

    summary: str
    keep_from: int
    tokens_before: int = 0
    usage: Usage = Usage()
    work_id: str = ""


class TaskStarted(msgspec.Struct, frozen=True, tag="task_started", omit_defaults=True):
    """A child session starts a task; `call_id` is the tool call that requested it, if any."""

    work_id: str
    session: str
    call_id: str | None = None
    agent: str | None = None


class TaskEnded(msgspec.Struct, frozen=True, tag="task_ended", omit_defaults=True):
    """A child session has ended its task."""

    session: str
    outcome: Outcome
    usage: Usage = Usage()


class CheckpointTaken(msgspec.Struct, frozen=True, tag="checkpoint_taken", omit_defaults=True):
    """The files of the workspace were kept after a turn; 0 is before the first.

    `snapshot` is the id of a snapshot, or the name of a blob with one. The last `keep` of the
    session can be restored; `dropped` are blobs that are no longer needed.
    """

    work_id: str
    snapshot: str
    turn: int
    keep: int
    description: str = ""
    in_blob: bool = False
    dropped: tuple[str, ...] = ()


class AbortRequested(msgspec.Struct, frozen=True, tag="abort_requested"):
    """A work item is to stop as soon as it can."""

    work_id: str


class WorkEnded(msgspec.Struct, frozen=True, tag="work_ended", omit_defaults=True):
    """The outcome of a work item."""

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
    | CheckpointTaken
    | AbortRequested
    | WorkEnded
)


class StoredRecord(msgspec.Struct, frozen=True):
    """A record with its offset. Offsets of a session start at 1 and have no gaps."""

    offset: int
    at: float
    record: Record


# Version -> function that turns the JSON of a record into that of the next version. Released
# ones never change.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """Encode a record as JSON, in the latest version.

    Characters that have no encoding, such as half a surrogate pair from a model, become `?`.
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
    """Decode a record of any version up to this one. Raises `StoreTooNew` for a later one."""
    if version > latest:
        raise too_new(f"a record of {where}", version, latest)
    if version == latest:
        return _decoder.decode(data)
    value = msgspec.json.decode(data)
    for older in range(version, latest):
        value = upgrades[older](value)
    return _decoder.decode(_encoder.encode(value))


def too_new(what: str, version: int, latest: int) -> StoreTooNew:
    """Return the error for data that a later version wrote."""
    return StoreTooNew(
        f"{what} is of version {version}, from a later Smokebox: this one knows versions up to "
        f"{latest}.",
        hint="Upgrade Smokebox, or set persist= to another place.",
        version=version,
        latest=latest,
    )


def dump_error(error: BaseException) -> dict[str, Any]:
    """Convert an error to JSON values for `WorkEnded`."""
    if not isinstance(error, SmokeboxError):
        error = SmokeboxError(f"{type(error).__name__}: {error}")
    fields: dict[str, Any] = msgspec.to_builtins(failure_of(error))
    return {name: value for name, value in fields.items() if value not in ("", None, {}, False)}


def load_error(stored: dict[str, Any] | None) -> SmokeboxError:
    """Return the error that `dump_error` stored, as an instance of its class."""
    return error_of(msgspec.convert(stored or {"code": "error", "message": ""}, Failure))


@dataclass(frozen=True, slots=True)
class LogChange:
    """Change that records make to the store's entry of a session."""

    unfinished: int
    parent: str | None
    forked_from: str | None
    blobs: frozenset[str]
    dropped: frozenset[str] = frozenset()


def change_of(records: Sequence[Record]) -> LogChange:
    """Return the change in unfinished work, and the parent, origin and blobs that records add."""
    unfinished = 0
    kept: set[str] = set()
    dropped: set[str] = set()
    parent = forked_from = None
    images: list[object] = []
    for record in records:
        match record:
            case WorkAccepted():
                unfinished += 1
                images += record.message.parts if record.message is not None else ()
            case WorkEnded():
                unfinished -= 1
            case SessionCreated():
                parent, forked_from = record.parent, record.forked_from
            case ToolEnded():
                images += record.result.images
            case MessageAdded():
                images += record.message.parts
            case CheckpointTaken():
                dropped |= {*record.dropped}
                kept |= {record.snapshot} if record.in_blob else set()
    blobs = kept.union(part.blob for part in images if isinstance(part, ImagePart))
    return LogChange(unfinished, parent, forked_from, frozenset(blobs), frozenset(dropped - blobs))
