"""Agents: messages to them, and what comes of these."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from smokebox.agents.harness import DEFAULT
from smokebox.agents.log.conversation import Conversation
from smokebox.agents.log.store import SessionKey
from smokebox.app.admission import admit
from smokebox.app.call import answer
from smokebox.app.routes.submissions import aborting, accepted
from smokebox.app.sse import events_response, last_offset, wants_events
from smokebox.app.streams import Records
from smokebox.app.submission import Decision, Target
from smokebox.errors import InvalidOption, NotFound
from smokebox.wire import work

if TYPE_CHECKING:
    from starlette.responses import Response

    from smokebox.app.call import Call

_MOST_EVENTS = 1000


async def post(call: Call) -> Response:
    """Take a message on. `?wait=result` waits for what comes of it."""
    return await accepted(call, await admit(call, "agent"))


async def get(call: Call) -> Response:
    """What was said and done in a conversation, behind an offset; `?wait=20` waits for more."""
    name, id = _name(call), call.id
    after = last_offset(call.request)
    source = Records(call.app.store, SessionKey(name, id, DEFAULT))
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
    return answer(work.Events(events, lines[-1].offset if lines else after))


async def abort(call: Call) -> Response:
    """Call off one submission of a conversation, or all that have no outcome."""
    body = await call.decoded(work.AbortBody, optional=True)
    target = Target(kind="agent", name=_name(call), id=call.id)
    return await aborting(call, target, body.submission_id)


async def decide(call: Call) -> Response:
    """Let a tool call run that waits for it, or not."""
    body = await call.decoded(work.ApprovalBody)
    name, id, call_id = _name(call), call.id, call.part("call_id")
    conversation = await Conversation.load(call.app.store, SessionKey(name, id, DEFAULT))
    asked = {one.call.id for one in conversation.pending_calls if one.consent == "asked"}
    if call_id not in asked:
        raise NotFound(
            f"no tool call {call_id!r:.100} waits to be allowed.",
            hint="The event approval_asked has the ids of those that do.",
            kind="approval",
            name=call_id,
        )
    # By way of the inbox: it may wait in another process, or in one that is yet to come.
    await call.app.inbox.decide(
        Decision(name=name, id=id, call_id=call_id, allowed=body.allow, reason=body.reason)
    )
    return answer({})


async def conversations(call: Call) -> Response:
    """The conversations with an agent."""
    found = await call.app.store.sessions(agent=_name(call), limit=_most(call))
    return answer(
        work.Conversations(
            [
                work.ConversationInfo(
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


async def delete(call: Call) -> Response:
    """Remove a conversation with everything that was recorded of it."""
    app, name, id = call.app, _name(call), call.id
    target = Target(kind="agent", name=name, id=id)
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


def _name(call: Call) -> str:
    return call.app.project.find("agent", call.part("name")).name


def _most(call: Call) -> int:
    text = call.request.query_params.get("limit", str(_MOST_EVENTS))
    if text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= _MOST_EVENTS:
        return int(text)
    raise InvalidOption(
        f"limit is a whole number from 1 to {_MOST_EVENTS}, not {text!r:.80}.",
        hint="Ask for more behind the offset of the last.",
        option="limit",
        value=text,
    )
