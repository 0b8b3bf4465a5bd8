"""From a request to accepted work: whether it is let in, and what it asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, uuid4, uuid5

import msgspec

from smokebox.agents.harness import DEFAULT
from smokebox.app.attachments import check_attachments
from smokebox.app.call import decoded
from smokebox.app.served import ServedAgent
from smokebox.app.submission import Target
from smokebox.errors import Forbidden, InvalidOption
from smokebox.wire.work import MessageBody

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smokebox.app.app import App
    from smokebox.app.call import Call
    from smokebox.app.project import Served
    from smokebox.app.submission import Kind, Submission

# What lets somebody in is not kept.
_HIDDEN = frozenset(("authorization", "cookie", "proxy-authorization"))


async def admit(call: Call, kind: Kind) -> Submission:
    """Take the work of a request on."""
    served = _let_in(call, kind)
    data = await call.body()
    delivery = call.verify(served.trigger, data)
    if not served.trigger.open:
        raise Forbidden(
            f"{served.name} is not open to requests.",
            hint='Write triggers = {"webhook": True} into its file.',
        )
    # What is signed cannot be sent again under another key.
    key = delivery or call.idempotency_key
    id = call.id if kind == "agent" else run_id(served.name, key)
    return await call.app.inbox.accept(
        Target(kind=kind, name=served.name, id=id),
        _message(data) if isinstance(served, ServedAgent) else _payload(data),
        key=key,
        request=_request(call),
        head=await _head(call.app, served.name, id) if isinstance(served, ServedAgent) else 0,
    )


def run_id(workflow: str, key: str | None) -> str:
    """The id of a run: the same key is the same run."""
    return uuid5(NAMESPACE_URL, f"smokebox:key:{workflow}:{key}").hex if key else uuid4().hex


def _let_in(call: Call, kind: Kind) -> Served:
    """What is asked for. Who has no key learns of nothing but what is signed."""
    project, name = call.app.project, call.part("name")
    known: Mapping[str, Served] = project.agents if kind == "agent" else project.workflows
    if name not in known or known[name].trigger.signature is None:
        call.let_in()
    return project.find(kind, name)


async def _head(app: App, name: str, id: str) -> int:
    """The offset of what a conversation has up to now."""
    found = await app.store.sessions(agent=name, id=id)
    return next((one.head for one in found if one.key.session == DEFAULT), 0)


def _message(data: bytes) -> dict[str, Any]:
    body = decoded(MessageBody, data)
    if not body.message.strip():
        raise InvalidOption("message is empty.", hint='Send {"message": "..."}.', option="message")
    plain: dict[str, Any] = msgspec.to_builtins(body)
    check_attachments(plain.get("attachments", ()))
    return plain


def _payload(data: bytes) -> object:
    return decoded(object, data) if data else None


def _request(call: Call) -> dict[str, Any]:
    request = call.request
    headers = {name: value for name, value in request.headers.items() if name not in _HIDDEN}
    return {
        "method": request.method,
        "path": request.url.path,
        "query": dict(request.query_params),
        "headers": headers,
    }
