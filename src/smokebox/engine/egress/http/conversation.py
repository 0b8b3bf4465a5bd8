"""The requests of one connection, one after the other: judged, handled, sent and answered."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smokebox.egress.handler import handler_name
from smokebox.egress.message import Request
from smokebox.engine.egress.http.body import Incoming
from smokebox.engine.egress.http.exchange import Answer, Errand, send
from smokebox.engine.egress.http.handling import Handling
from smokebox.engine.egress.http.head import (
    Malformed,
    RequestHead,
    parse_request,
    write_response,
)
from smokebox.engine.egress.http.pool import Place, Unanswered
from smokebox.engine.egress.http.reply import Reply, explain
from smokebox.engine.egress.http.target import Origin, check_target
from smokebox.engine.egress.http.upgrade import pass_both
from smokebox.engine.egress.http.wire import Cut, Wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.egress.policy import Egress, Verdict
    from smokebox.egress.scrub import Scrubber
    from smokebox.engine.egress.http.doorway import Doorway
    from smokebox.types import NetworkVerdict

# A program that sends a large body hears why it was refused only when it has sent some.
_MOST_DROPPED = 1024 * 1024
_DROP_SECONDS = 2.0
_MOST_PATH = 2048


@dataclass(slots=True)
class _Note:
    """What the journal will say of a request."""

    verdict: NetworkVerdict = "forwarded"
    rule: str = ""
    method: str | None = None
    path: str | None = None
    status: int | None = None
    handler: str | None = None
    reason: str = ""
    sent: int = 0
    received: int = 0


class Conversation:
    """Serves one connection of a program with one server, as far as the door lets it.

    `left` is called when the program leaves in the middle of a request.
    """

    def __init__(
        self, door: Doorway, wire: Wire, origin: Origin, left: Callable[[], object]
    ) -> None:
        self._left = left
        self._door = door
        self._wire = wire
        self._origin = origin
        self._judged: tuple[Egress, Verdict] | None = None

    async def run(self) -> None:
        """Serve until the program leaves, or the connection cannot have another request."""
        while (raw := await self._next()) is not None:
            note = _Note()
            body = None
            started = time.perf_counter()
            self._wire.lost = self._left
            try:
                if isinstance(raw, Malformed):
                    raise raw
                head = parse_request(raw)
                note.method, note.path = head.method, head.target[:_MOST_PATH]
                target = check_target(head, self._origin)
                body = Incoming(self._wire, head.framing, expected=head.expects, count=self._count)
                keep = await self._serve(head, target, body, note)
            except Malformed as error:
                keep = await self._last_words(error, note)
            except BaseException as error:
                note.verdict = "failed"
                left = isinstance(error, (Cut, TimeoutError, asyncio.CancelledError))
                note.reason = "the program left" if left else f"{type(error).__name__} in the door"
                raise
            finally:
                self._wire.lost = None
                self._write_down(note, body, started)
            if not keep:
                if body is not None:
                    await self._drop(body)
                return

    async def _next(self) -> bytes | Malformed | None:
        try:
            head = await self._wire.head()
            return None if self._wire.ended else head
        except Malformed as error:
            return error
        except TimeoutError:
            return None

    async def _serve(self, head: RequestHead, target: str, body: Incoming, note: _Note) -> bool:
        """One request; whether there can be another."""
        verdict = self._verdict()
        note.rule, note.handler = verdict.rule, handler_name(verdict.handler)
        if verdict.action == "refuse":
            return await self._explain(head, body, note, Unanswered(verdict.reason, 403))
        if over := self._door.meter.admit():
            return await self._explain(head, body, note, Unanswered(over, 429, rule="limits"))
        origin, address = self._origin, verdict.address
        errand = Errand(
            method=head.method,
            place=Place(origin.host, origin.port, origin.tls, address, address is not None),
            target=target,
            host=head.host,
            fields=head.fields,
            body=body,
            framing=head.framing,
            upgrade=head.upgrade,
        )
        try:
            if verdict.handler is not None:
                return await self._handle(verdict, errand, head, body, note)
            answer = await send(self._door.pool, errand)
            try:
                return await self._pass(answer, head, body, note, None)
            finally:
                answer.release()
        except Unanswered as error:
            if note.status is not None:
                note.rule = error.rule or note.rule
                return self._break_off(note, error.reason)
            return await self._explain(head, body, note, error)

    async def _handle(
        self, verdict: Verdict, errand: Errand, head: RequestHead, body: Incoming, note: _Note
    ) -> bool:
        assert verdict.handler is not None
        handling = Handling(self._door, errand, self._origin, verdict, body)
        try:
            made = await handling.decide(verdict.handler)
            if isinstance(made, Request):
                answer = await handling.send(made)
                return await self._pass(answer, head, body, note, handling.scrubber)
            passed = handling.answer_in(made)
            if passed is not None and passed.status == 101:
                return await self._switch(passed, note, handling.scrubber)
            note.verdict = "forwarded" if handling.asked else "answered"
            return await self._reply(handling.reply(made), head, body, note)
        finally:
            handling.release()

    async def _pass(
        self,
        answer: Answer,
        head: RequestHead,
        body: Incoming,
        note: _Note,
        scrubber: Scrubber | None,
    ) -> bool:
        if answer.status == 101:
            return await self._switch(answer, note, scrubber)
        reply = Reply(
            status=answer.status,
            reason=answer.reason,
            fields=answer.fields,
            body=answer,
            length=answer.length,
            scrubber=scrubber,
        )
        return await self._reply(reply, head, body, note)

    async def _reply(self, reply: Reply, head: RequestHead, body: Incoming, note: _Note) -> bool:
        note.status = reply.status
        keep = await reply.write(
            self._wire,
            head.method,
            keep=head.keep and (body.done or body.whole),
            modern=head.modern,
            count=lambda size: self._received(size, note),
        )
        if keep and not body.done:
            await body.read()
        return keep

    async def _switch(self, answer: Answer, note: _Note, scrubber: Scrubber | None) -> bool:
        note.status = 101
        reply = Reply(status=101, reason="", fields=answer.fields, scrubber=scrubber)
        fields = [*reply.shown(), ("connection", "Upgrade"), ("upgrade", "websocket")]
        self._wire.write(write_response(101, "Switching Protocols", fields))

        def sent(size: int) -> None:
            note.sent += size
            self._count(size)

        await pass_both(
            self._wire,
            answer.wire,
            scrubber,
            sent=sent,
            received=lambda size: self._received(size, note),
        )
        return False

    async def _explain(
        self, head: RequestHead, body: Incoming, note: _Note, error: Unanswered
    ) -> bool:
        """The door's own answer to a request that nobody else answers."""
        refused = error.status in (403, 429)
        note.verdict = "refused" if refused else "failed"
        note.reason, note.rule = error.reason, error.rule or note.rule
        accept = next((value for name, value in head.fields if name.lower() == "accept"), "")
        reply = explain(
            error.status, error.reason, rule=note.rule if refused else "", accept=accept
        )
        note.status = reply.status
        await self._drop(body)
        # These are no bytes of the sandbox: they are not counted, and no limit stops them.
        return await reply.write(
            self._wire,
            head.method,
            keep=head.keep and body.done,
            modern=head.modern,
            count=_nothing,
        )

    async def _last_words(self, error: Malformed, note: _Note) -> bool:
        note.verdict, note.rule, note.reason = "refused", "http", error.reason
        if note.status is not None:
            self._wire.abort()
            return False
        note.status = error.status
        reply = explain(error.status, error.reason, rule="http")
        return await reply.write(self._wire, "", keep=False, modern=True, count=_nothing)

    def _break_off(self, note: _Note, reason: str) -> bool:
        """End the connection so that the program can tell that the answer is not whole."""
        note.verdict, note.reason = "failed", reason
        self._wire.abort()
        return False

    async def _drop(self, body: Incoming) -> None:
        """Read what is left of a small body, so that the answer to it is not lost."""
        with contextlib.suppress(TimeoutError, Malformed, Unanswered, Cut):
            async with asyncio.timeout(_DROP_SECONDS):
                while not (body.done or body.broken or body.expected or self._wire.ended):
                    await body.read()
                    if body.size > _MOST_DROPPED:
                        return

    def _verdict(self) -> Verdict:
        policy = self._door.policy
        if self._judged is None or self._judged[0] is not policy:
            self._judged = (policy, policy.decide(self._origin.host, self._origin.port))
        return self._judged[1]

    def _count(self, size: int) -> None:
        if size and (over := self._door.meter.count(size)):
            raise Unanswered(over, 429, rule="limits")

    def _received(self, size: int, note: _Note) -> None:
        note.received += size
        self._count(size)

    def _write_down(self, note: _Note, body: Incoming | None, started: float) -> None:
        self._door.journal.note(
            verdict=note.verdict,
            host=self._origin.host,
            port=self._origin.port,
            rule=note.rule,
            protocol="https" if self._origin.tls else "http",
            method=note.method,
            path=note.path,
            status=note.status,
            sent=note.sent + (body.size if body is not None else 0),
            received=note.received,
            seconds=time.perf_counter() - started,
            handler=note.handler,
            reason=note.reason,
        )


def _nothing(size: int) -> None:
    """Count nothing."""
