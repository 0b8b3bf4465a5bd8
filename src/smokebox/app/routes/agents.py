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
from smokebox.app.request import json_response
from smokebox.app.routes.submissions import abort_open, accept_request, accepted_response
from smokebox.app.streams import ConversationEvents
from smokebox.errors import InvalidOption, NotFound
from smokebox.wire import submissions

if TYPE_CHECKING:
    from starlette.responses import Response

    from smokebox.app.request import AppRequest

_MAX_EVENTS = 1000


async def post(request: AppRequest) -> Response:
    """Accept a message. `?wait=result` waits for its outcome."""
    return await accepted_response(request, await accept_request(request, "agent"))


async def get(request: AppRequest) -> Response:
    """Return the records of a conversation after an offset; `?wait=20` waits for more."""
    name, id = _name(request), request.id
    after = last_offset(request.http)
    source = ConversationEvents(request.app.store, SessionKey(name, id, DEFAULT))
    if wants_events(request.http):
        return events_response(request.app.streams.chunks(source, after))
    wait = request.seconds("wait")
    events = await source.read(after, _limit(request))
    if not events and wait:
        try:
            async with asyncio.timeout(wait), request.app.streams.watch(source) as stream:
                events = list(await stream.read(after) or ())[: _limit(request)]
        except TimeoutError:
            events = []
    raw = [msgspec.Raw(event.data) for event in events]
    return json_response(submissions.Events(raw, events[-1].offset if events else after))


async def abort(request: AppRequest) -> Response:
    """Abort one submission of a conversation, or all that have no outcome."""
    body = await request.decode(submissions.AbortSubmission, optional=True)
    target = WorkTarget(kind="agent", name=_name(request), id=request.id)
    return await abort_open(request, target, body.submission_id)


async def decide(request: AppRequest) -> Response:
    """Approve or deny a tool call that waits for approval."""
    body = await request.decode(submissions.DecideApproval)
    name, id, call_id = _name(request), request.id, request.path_param("call_id")
    conversation = await Conversation.load(request.app.store, SessionKey(name, id, DEFAULT))
    waiting = {one.call.id for one in conversation.pending_calls if one.approval == "requested"}
    if call_id not in waiting:
        raise NotFound(
            f"no tool call {call_id!r:.100} waits for approval.",
            hint="The approval_requested events have the ids of those that do.",
            kind="approval",
            name=call_id,
        )
    # Sent through the inbox: the call may wait in another process, or in one that starts later.
    await request.app.inbox.add_decision(
        ApprovalDecision(name=name, id=id, call_id=call_id, allowed=body.allow, reason=body.reason)
    )
    return json_response({})


async def conversations(request: AppRequest) -> Response:
    """List the conversations with an agent."""
    found = await request.app.store.sessions(
        agent=_name(request), prefix=request.principal.prefix, limit=_limit(request)
    )
    return json_response(
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


async def delete(request: AppRequest) -> Response:
    """Delete a conversation and its records."""
    app, name, id = request.app, _name(request), request.id
    target = WorkTarget(kind="agent", name=name, id=id)
    known = await app.inbox.delete(target)
    await app.conversations.close(name, id)
    sessions = await app.store.sessions(agent=name, id=id)
    if not any([known, *[await app.store.delete(one.key) for one in sessions]]):
        raise NotFound(
            f"there is no conversation {id!r} with {name}.",
            hint=f"GET /agents/{name} lists them.",
            kind="conversation",
            name=id,
        )
    return json_response({})


def _name(request: AppRequest) -> str:
    return request.app.project.find("agent", request.path_param("name")).name


def _limit(request: AppRequest) -> int:
    text = request.http.query_params.get("limit", str(_MAX_EVENTS))
    if text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= _MAX_EVENTS:
        return int(text)
    raise InvalidOption(
        f"limit must be an integer from 1 to {_MAX_EVENTS}, not {text!r:.80}.",
        hint="Request more with the offset of the last event.",
        option="limit",
        value=text,
    )
