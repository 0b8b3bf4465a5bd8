"""Routes of agents: messages, conversations and approvals."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from smokebox.agents.log.conversation import Conversation
from smokebox.agents.log.store import SessionKey
from smokebox.agents.session_context import DEFAULT
from smokebox.app.events import events_response, last_offset, wants_events
from smokebox.app.inbox import ApprovalDecision, WorkTarget
from smokebox.app.request import answer
from smokebox.app.routes.submissions import aborting, accept_request, accepted
from smokebox.app.streams import ConversationEvents
from smokebox.errors import InvalidOption, NotFound
from smokebox.wire import submissions

if TYPE_CHECKING:
    from starlette.responses import Response

    from smokebox.app.request import AppCall

_MOST_EVENTS = 1000


async def post(call: AppCall) -> Response:
    """Accept a message. `?wait=result` waits for its outcome."""
    return await accepted(call, await accept_request(call, "agent"))


async def get(call: AppCall) -> Response:
    """Return the records of a conversation after an offset; `?wait=20` waits for more."""
    name, id = _name(call), call.id
    after = last_offset(call.request)
    source = ConversationEvents(call.app.store, SessionKey(name, id, DEFAULT))
    if wants_events(call.request):
        return events_response(call.app.streams.events(source, after))
    wait = call.seconds("wait")
    lines = await source.read(after, _most(call))
    if not lines and wait:
        try:
            async with asyncio.timeout(wait), call.app.streams.watch(source) as stream:
                lines = list(await stream.read(after) or ())[: _most(call)]
        except TimeoutError:
            lines = []
    events = [msgspec.Raw(line.data) for line in lines]
    return answer(submissions.Events(events, lines[-1].offset if lines else after))


async def abort(call: AppCall) -> Response:
    """Abort one submission of a conversation, or all that have no outcome."""
    body = await call.decoded(submissions.AbortBody, optional=True)
    target = WorkTarget(kind="agent", name=_name(call), id=call.id)
    return await aborting(call, target, body.submission_id)


async def decide(call: AppCall) -> Response:
    """Approve or deny a tool call that waits for approval."""
    body = await call.decoded(submissions.ApprovalBody)
    name, id, call_id = _name(call), call.id, call.part("call_id")
    conversation = await Conversation.load(call.app.store, SessionKey(name, id, DEFAULT))
    asked = {one.call.id for one in conversation.pending_calls if one.consent == "asked"}
    if call_id not in asked:
        raise NotFound(
            f"no tool call {call_id!r:.100} waits for approval.",
            hint="The approval_requested events have the ids of those that do.",
            kind="approval",
            name=call_id,
        )
    # Sent through the inbox: the call may wait in another process, or in one that starts later.
    await call.app.inbox.decide(
        ApprovalDecision(name=name, id=id, call_id=call_id, allowed=body.allow, reason=body.reason)
    )
    return answer({})


async def conversations(call: AppCall) -> Response:
    """List the conversations with an agent."""
    found = await call.app.store.sessions(agent=_name(call), limit=_most(call))
    return answer(
        submissions.Conversations(
            [
                submissions.ConversationInfo(
                    id=one.key.id,
                    created_at=one.created_at,
                    updated_at=one.updated_at,
                    offset=one.head,
                    working=one.unfinished,
                )
                for one in found
                if one.key.session == DEFAULT
            ]
        )
    )


async def delete(call: AppCall) -> Response:
    """Delete a conversation and its records."""
    app, name, id = call.app, _name(call), call.id
    target = WorkTarget(kind="agent", name=name, id=id)
    known = await app.inbox.forget(target)
    await app.conversations.let_go(name, id)
    gone = [await app.store.delete(one.key) for one in await app.store.sessions(agent=name, id=id)]
    if not known and not any(gone):
        raise NotFound(
            f"there is no conversation {id!r} with {name}.",
            hint=f"GET /agents/{name} lists them.",
            kind="conversation",
            name=id,
        )
    return answer({})


def _name(call: AppCall) -> str:
    return call.app.project.find("agent", call.part("name")).name


def _most(call: AppCall) -> int:
    text = call.request.query_params.get("limit", str(_MOST_EVENTS))
    if text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= _MOST_EVENTS:
        return int(text)
    raise InvalidOption(
        f"limit must be an integer from 1 to {_MOST_EVENTS}, not {text!r:.80}.",
        hint="Request more with the offset of the last event.",
        option="limit",
        value=text,
    )
