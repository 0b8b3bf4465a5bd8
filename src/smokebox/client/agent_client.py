"""The client of an app: messages to its agents, runs of its workflows, from any process.

client = AgentClient("http://localhost:8000")
answer = await client.ask("support", "user-42", "Where is my order?")
"""

from __future__ import annotations

import os
from base64 import b64encode
from typing import TYPE_CHECKING, Self
from urllib.parse import quote
from uuid import uuid4

from smokebox.client.connection import Address
from smokebox.client.submitted import AgentEvent, Outcome, Submitted, event_of, resumed
from smokebox.client.transport import Transport
from smokebox.errors import InvalidOption
from smokebox.wire import work

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

KEY = "SMOKEBOX_APP_KEY"


class AgentClient:
    """An app at a URL, with the key that opens it (by default $SMOKEBOX_APP_KEY).

    Work goes on whether or not somebody waits for it: cancelling a call leaves it alone, and
    `submission(id)` finds it again from another process. `abort` calls it off.
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
    ) -> Submitted:
        """Give an agent a message in the conversation `id`, and return when that is durable.

        `attachments` are files by name: images are shown to the model, others are put into its
        workspace. Messages of one `key` are one.
        """
        files = [
            work.Attachment(name, b64encode(data).decode())
            for name, data in (attachments or {}).items()
        ]
        path = f"{_path('agents', agent)}/{_quoted('id', id)}"
        return await self._submit(path, work.MessageBody(message, files), key)

    async def ask(
        self,
        agent: str,
        id: str,
        message: str,
        *,
        attachments: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> Outcome:
        """Give an agent a message, and wait for its answer: `str(answer)` is its text.

        Raises what the work failed with, as the class that it was.
        """
        sent = await self.send(agent, id, message, attachments=attachments)
        return await sent.wait(timeout)

    async def stream(
        self, agent: str, id: str, message: str, *, attachments: Mapping[str, bytes] | None = None
    ) -> AsyncGenerator[AgentEvent, None]:
        """Give an agent a message, and hear what happens until its end."""
        sent = await self.send(agent, id, message, attachments=attachments)
        async for event in sent.events():
            yield event

    async def run(
        self, workflow: str, payload: object = None, *, key: str | None = None
    ) -> Submitted:
        """Begin a run of a workflow. Runs of one `key` are one."""
        return await self._submit(_path("workflows", workflow), payload, key)

    def submission(self, submission_id: str) -> Submitted:
        """Work that was accepted, by its id, to wait for or to call off."""
        return Submitted(self._transport, _quoted("submission_id", submission_id))

    async def history(
        self, agent: str, id: str, *, offset: int = 0, limit: int = 1000
    ) -> list[AgentEvent]:
        """What was said and done in a conversation, behind an offset."""
        found = await self._transport.ask(
            work.Events,
            "GET",
            self._conversation(agent, id),
            query=dict(offset=offset, limit=limit),
        )
        return [event_of(bytes(one)) for one in found.events]

    async def follow(
        self, agent: str, id: str, *, offset: int = 0
    ) -> AsyncGenerator[AgentEvent, None]:
        """What was said and done behind an offset, then what is, without end.

        Goes on where it was when the app was started again.
        """
        path = self._conversation(agent, id)
        async for event in resumed(self._transport, path, offset):
            yield event_of(event.data)

    async def abort(self, agent: str, id: str, *, submission_id: str | None = None) -> list[str]:
        """Call off what goes on and what waits in a conversation, or one submission of it; gives
        the ids of what was."""
        path = f"{self._conversation(agent, id)}/abort"
        body = work.AbortBody(submission_id)
        return (await self._transport.ask(work.Aborted, "POST", path, body=body)).aborted

    async def approve(self, agent: str, id: str, call_id: str) -> None:
        """Let a tool call run that waits for it."""
        await self._decide(agent, id, call_id, work.ApprovalBody(True))

    async def deny(self, agent: str, id: str, call_id: str, reason: str = "") -> None:
        """Do not let it run; the model is told the reason."""
        await self._decide(agent, id, call_id, work.ApprovalBody(False, reason))

    async def conversations(self, agent: str) -> list[work.ConversationInfo]:
        """The conversations with an agent, those that changed last first."""
        path = _path("agents", agent)
        return (await self._transport.ask(work.Conversations, "GET", path)).conversations

    async def delete(self, agent: str, id: str) -> None:
        """Remove a conversation with all that was recorded of it."""
        await self._transport.ask(type(None), "DELETE", self._conversation(agent, id))

    async def index(self) -> work.Index:
        """What the app serves."""
        return await self._transport.ask(work.Index, "GET", "/agents")

    async def aclose(self) -> None:
        """Close the connections; the next call opens others."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _submit(self, path: str, body: object, key: str | None) -> Submitted:
        # With a key of its own it can be sent again when no answer came.
        told = await self._transport.ask(
            work.Accepted, "POST", path, body=body, repeat_key=key or uuid4().hex
        )
        return Submitted(self._transport, told.submission_id, target_id=told.id)

    async def _decide(self, agent: str, id: str, call_id: str, body: work.ApprovalBody) -> None:
        path = f"{self._conversation(agent, id)}/approvals/{_quoted('call_id', call_id)}"
        await self._transport.ask(type(None), "POST", path, body=body)

    def _conversation(self, agent: str, id: str) -> str:
        return f"{_path('agents', agent)}/{_quoted('id', id)}"


def _path(kind: str, name: str) -> str:
    return f"/{kind}/{_quoted('name', name)}"


def _quoted(option: str, value: str) -> str:
    if isinstance(value, str) and value and value not in (".", ".."):
        return quote(value, safe="")
    raise InvalidOption(
        f"{option} is a str that is not empty, not {value!r:.80}.",
        hint="Pass for example 'user-42'.",
        option=option,
        value=value,
    )
