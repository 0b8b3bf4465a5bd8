"""Client of an app: send messages to its agents and run its workflows, from any process.

client = AgentClient("http://localhost:8000")
reply = await client.ask("support", "user-42", "Where is my order?")
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from base64 import b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import msgspec

from smokebox.client.address import Address
from smokebox.client.http_client import is_connection_lost
from smokebox.client.transport import Transport
from smokebox.errors import DeadlineExceeded, InvalidOption, SandboxGone, ServiceUnavailable
from smokebox.foundation.ids import new_global_id
from smokebox.wire import submissions
from smokebox.wire.failure import error_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from smokebox.foundation import sse


KEY = "SMOKEBOX_APP_KEY"
# Less than the silence after which a server counts as dead.
_WAIT = 10.0
# Longest outage of an app that a waiting call tolerates.
OUTAGE_SECONDS = 60.0
_PAUSE = 0.5
_OUTCOME, _SUBMISSION = "outcome", "submission"


class AgentClient:
    """An app at a URL.

    Accepted work continues whether or not a client waits for it: cancelling a call does not
    stop it, and `submission(id)` finds it from another process. `abort` stops it.

    Args:
        url: Base URL of the app.
        key: Key of the app, by default $SMOKEBOX_APP_KEY.
    """

    def __init__(self, url: str, *, key: str | None = None) -> None:
        key = key or os.environ.get(KEY)
        self._transport = Transport(Address.parse(url), key, prefix="")

    async def send(
        self,
        agent: str,
        id: str,
        message: str,
        *,
        attachments: Mapping[str, bytes] | None = None,
        key: str | None = None,
    ) -> Submission:
        """Send a message to an agent, and return when it is stored durably.

        Args:
            agent: Name of the agent.
            id: Id of the conversation; an unknown one starts it.
            message: Text of the message.
            attachments: Files by name. Images are shown to the model, others are written into
                its workspace.
            key: Idempotency key: messages with the same key are accepted once.

        Raises:
            NotFound: There is no such agent.
            ServiceUnavailable: The app cannot be reached.
        """
        files = [
            submissions.MessageAttachment(name, b64encode(data).decode())
            for name, data in (attachments or {}).items()
        ]
        path = f"{_path('agents', agent)}/{_quoted('id', id)}"
        return await self._submit(path, submissions.SubmitMessage(message, files), key)

    async def ask(
        self,
        agent: str,
        id: str,
        message: str,
        *,
        attachments: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> SubmissionResult:
        """Send a message to an agent and wait for its reply; `str(reply)` is the text.

        Args:
            agent: Name of the agent.
            id: Id of the conversation.
            message: Text of the message.
            attachments: Files by name; see `send`.
            timeout: Seconds to wait; the work continues after them.

        Raises:
            DeadlineExceeded: There was no reply within `timeout` seconds.
            SmokeboxError: The error that the work failed with, as its own class.
        """
        sent = await self.send(agent, id, message, attachments=attachments)
        return await sent.wait(timeout)

    async def stream(
        self, agent: str, id: str, message: str, *, attachments: Mapping[str, bytes] | None = None
    ) -> AsyncGenerator[AgentEvent, None]:
        """Send a message to an agent and yield events until it has replied; see `send`."""
        sent = await self.send(agent, id, message, attachments=attachments)
        async for event in sent.events():
            yield event

    async def run(
        self, workflow: str, payload: object = None, *, key: str | None = None
    ) -> Submission:
        """Start a run of a workflow, and return when it is stored durably.

        Args:
            workflow: Name of the workflow.
            payload: Input of the run, as JSON.
            key: Idempotency key: runs with the same key are accepted once.

        Raises:
            NotFound: There is no such workflow.
        """
        return await self._submit(_path("workflows", workflow), payload, key)

    def submission(self, submission_id: str) -> Submission:
        """Return accepted work by its id, to wait for it or abort it."""
        return Submission(self._transport, _quoted("submission_id", submission_id))

    async def history(
        self, agent: str, id: str, *, offset: int = 0, limit: int = 1000
    ) -> list[AgentEvent]:
        """Return events of a conversation.

        Args:
            agent: Name of the agent.
            id: Id of the conversation.
            offset: Start after this offset, by default at the beginning.
            limit: Maximum number of events.
        """
        response = await self._transport.request(
            submissions.Events,
            "GET",
            self._conversation(agent, id),
            query=dict(offset=offset, limit=limit),
        )
        return [decode_event(bytes(one)) for one in response.events]

    async def follow(
        self, agent: str, id: str, *, offset: int = 0
    ) -> AsyncGenerator[AgentEvent, None]:
        """Yield the events of a conversation after an offset, then live events, without end.

        Reconnects after a restart of the app without missing events.
        """
        path = self._conversation(agent, id)
        async for event in resume_events(self._transport, path, offset):
            yield decode_event(event.data)

    async def abort(self, agent: str, id: str, *, submission_id: str | None = None) -> list[str]:
        """Abort running and queued work of a conversation, or one submission of it.

        Returns:
            The ids of the submissions that were aborted.
        """
        path = f"{self._conversation(agent, id)}/abort"
        body = submissions.AbortSubmission(submission_id)
        return (
            await self._transport.request(submissions.AbortedSubmissions, "POST", path, body=body)
        ).aborted

    async def approve(self, agent: str, id: str, call_id: str) -> None:
        """Approve a pending tool call.

        Args:
            agent: Name of the agent.
            id: Id of the conversation.
            call_id: Id of the call, from its event.

        Raises:
            NotFound: There is no such pending call.
        """
        await self._decide(agent, id, call_id, submissions.DecideApproval(True))

    async def deny(self, agent: str, id: str, call_id: str, reason: str = "") -> None:
        """Deny a pending tool call.

        Args:
            agent: Name of the agent.
            id: Id of the conversation.
            call_id: Id of the call.
            reason: Reason, which the model gets.

        Raises:
            NotFound: There is no such pending call.
        """
        await self._decide(agent, id, call_id, submissions.DecideApproval(False, reason))

    async def conversations(self, agent: str) -> list[submissions.ConversationInfo]:
        """Return the conversations with an agent, most recently changed first."""
        path = _path("agents", agent)
        return (await self._transport.request(submissions.Conversations, "GET", path)).conversations

    async def delete(self, agent: str, id: str) -> None:
        """Delete a conversation and its records."""
        await self._transport.request(type(None), "DELETE", self._conversation(agent, id))

    async def index(self) -> submissions.Index:
        """Return the agents and workflows of the app."""
        return await self._transport.request(submissions.Index, "GET", "/agents")

    async def aclose(self) -> None:
        """Close the connections; the next call opens new ones."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _submit(self, path: str, body: object, key: str | None) -> Submission:
        # With an idempotency key the request can be retried when no response came.
        accepted = await self._transport.request(
            submissions.Accepted, "POST", path, body=body, idempotency_key=key or new_global_id()
        )
        return Submission(self._transport, accepted.submission_id, target_id=accepted.id)

    async def _decide(
        self, agent: str, id: str, call_id: str, body: submissions.DecideApproval
    ) -> None:
        path = f"{self._conversation(agent, id)}/approvals/{_quoted('call_id', call_id)}"
        await self._transport.request(type(None), "POST", path, body=body)

    def _conversation(self, agent: str, id: str) -> str:
        return f"{_path('agents', agent)}/{_quoted('id', id)}"


def _path(kind: str, name: str) -> str:
    return f"/{kind}/{_quoted('name', name)}"


def _quoted(option: str, value: str) -> str:
    if isinstance(value, str) and value and value not in (".", ".."):
        return quote(value, safe="")
    raise InvalidOption(
        f"{option} is a non-empty str, not {value!r:.80}.",
        hint="Pass for example 'user-42'.",
        option=option,
        value=value,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEvent:
    """One event. `offset` continues a stream after it; `data` depends on `type`."""

    type: str
    offset: int
    at: float
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmissionResult:
    """Result of finished work.

    `text`, `data` and `usage` are those of an agent's reply; `result` is what a workflow
    returned.
    """

    submission_id: str
    result: Any

    @property
    def text(self) -> str:
        """Text of an agent's reply; "" for a workflow."""
        return str(self._reply_field("text") or "")

    @property
    def data(self) -> Any:
        """Structured result of an agent's reply."""
        return self._reply_field("data")

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens and cost of an agent's reply."""
        return dict(self._reply_field("usage") or {})

    def __str__(self) -> str:
        return self.text

    def _reply_field(self, name: str) -> Any:
        return self.result.get(name) if isinstance(self.result, dict) else None


class Submission:
    """Accepted work. `client.submission(id)` finds it again by its `id`.

    `target_id` is the id of the conversation or the run, None if unknown.
    """

    def __init__(self, transport: Transport, id: str, *, target_id: str | None = None) -> None:
        self.id = id
        self.target_id = target_id
        self._transport = transport

    async def info(self) -> submissions.Work:
        """Return the state of the work."""
        return await self._transport.request(submissions.Work, "GET", self._path)

    async def wait(self, timeout: float | None = None) -> SubmissionResult:
        """Wait for the result. Waits through a restart of the app.

        Args:
            timeout: Seconds to wait; the work continues after them.

        Raises:
            DeadlineExceeded: It did not end within `timeout` seconds.
            Aborted: It was aborted.
            SmokeboxError: The error that it failed with, as its own class.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        outage = _Outage()
        while True:
            remaining = _WAIT if deadline is None else min(_WAIT, deadline - time.monotonic())
            try:
                query = {"wait": max(0.0, round(remaining, 3))}
                work = await self._transport.request(
                    submissions.Work, "GET", self._path, query=query
                )
                outage.end()
            except (SandboxGone, ServiceUnavailable) as error:
                await outage.wait(error)
                continue
            if work.state == "ended":
                return _outcome(work)
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"the work {self.id} did not end in {timeout:g} s; it is still running.",
                    hint="Wait longer, or abort it with abort().",
                    operation="wait",
                    timeout=timeout,
                )

    async def events(self, *, offset: int = 0) -> AsyncGenerator[AgentEvent, None]:
        """Yield its events after an offset, then live ones, until it ends."""
        async for event in resume_events(self._transport, self._path, offset):
            if event.name == _OUTCOME:
                return
            if event.name != _SUBMISSION:
                yield decode_event(event.data)

    async def abort(self) -> bool:
        """Abort the work; return False if it had already ended."""
        work = await self.info()
        if work.kind == "agent":
            path, body = (
                f"/agents/{work.name}/{work.id}/abort",
                submissions.AbortSubmission(self.id),
            )
        else:
            path, body = f"/runs/{work.id}/abort", None
        response = await self._transport.request(
            submissions.AbortedSubmissions, "POST", path, body=body
        )
        return self.id in response.aborted

    @property
    def _path(self) -> str:
        return f"/submissions/{self.id}"


class _Outage:
    """Time since an app stopped responding."""

    def __init__(self) -> None:
        self._since: float | None = None

    def end(self) -> None:
        """Record that it responded."""
        self._since = None

    async def wait(self, error: Exception) -> None:
        """Pause before a retry, or raise the error if the outage lasts too long."""
        self._since = self._since or time.monotonic()
        lost = isinstance(error, ServiceUnavailable) or is_connection_lost(error)
        if not lost or time.monotonic() - self._since > OUTAGE_SECONDS:
            raise error
        await asyncio.sleep(_PAUSE)


async def resume_events(
    transport: Transport, path: str, offset: int
) -> AsyncGenerator[sse.Event, None]:
    """Yield the events at a path after an offset without end, reconnecting when they stop.

    Raises `ServiceUnavailable` or `SandboxGone` for an app that does not come back.
    """
    outage = _Outage()
    while True:
        try:
            headers = {"accept": "text/event-stream", "last-event-id": str(offset)}
            async with contextlib.aclosing(
                transport.events("GET", path, headers=headers)
            ) as events:
                async for event in events:
                    outage.end()
                    if event.id is not None:
                        offset = int(event.id)
                    yield event
            # The app was stopped cleanly, for example to be restarted.
            await asyncio.sleep(_PAUSE)
        except (SandboxGone, ServiceUnavailable) as error:
            await outage.wait(error)


def decode_event(data: bytes) -> AgentEvent:
    """Decode an event of the wire."""
    plain: dict[str, Any] = msgspec.json.decode(data)
    return AgentEvent(
        type=plain.pop("type"), offset=plain.pop("offset"), at=plain.pop("at"), data=plain
    )


def _outcome(work: submissions.Work) -> SubmissionResult:
    if work.failure is not None:
        raise error_of(work.failure)
    return SubmissionResult(submission_id=work.submission_id, result=work.result)
