"""What goes back to the program in the sandbox: an answer, or the reason why there is none."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeAlias

from smokebox.engine.egress.http.body import Outgoing
from smokebox.engine.egress.http.exchange import Answer
from smokebox.engine.egress.http.head import Fields, bodiless, write_response

if TYPE_CHECKING:
    from smokebox.egress.scrub import Scrubber
    from smokebox.engine.egress.http.wire import Wire

Count: TypeAlias = Callable[[int], None]

_MOST_REASON = 500


@dataclass(slots=True, kw_only=True)
class Reply:
    """An answer on its way. `length` is that of a body that is not here yet, where it is known."""

    status: int
    reason: str
    fields: Fields
    body: bytes | Answer | AsyncIterable[bytes] = b""
    length: int | None = None
    scrubber: Scrubber | None = field(default=None, repr=False)

    async def write(
        self, wire: Wire, method: str, *, keep: bool, modern: bool, count: Count
    ) -> bool:
        """Send it; whether the connection can have another request."""
        fields = self.shown()
        chunked = False
        if bodiless(method, self.status):
            self.body = b""
        elif isinstance(self.body, bytes):
            fields.append(("content-length", str(len(self.body))))
        elif self.length is not None:
            fields.append(("content-length", str(self.length)))
        elif modern:
            chunked = True
            fields.append(("transfer-encoding", "chunked"))
        else:
            keep = False
        if not keep:
            fields.append(("connection", "close"))
        elif not modern:
            fields.append(("connection", "keep-alive"))
        reason = self.scrubber.text(self.reason) if self.scrubber else self.reason
        outgoing = Outgoing(wire, write_response(self.status, reason, fields), chunked=chunked)
        await self._pour(outgoing, count)
        return keep

    async def _pour(self, outgoing: Outgoing, count: Count) -> None:
        if isinstance(self.body, bytes):
            count(len(self.body))
            await outgoing.finish(self._clean(self.body, last=True))
        elif isinstance(self.body, Answer):
            await self._pass(self.body, outgoing, count)
        else:
            outgoing.flush()
            async for piece in self.body:
                count(len(piece))
                await outgoing.write(self._clean(piece))
            await outgoing.finish(self._clean(b"", last=True))

    async def _pass(self, answer: Answer, outgoing: Outgoing, count: Count) -> None:
        if not answer.ready:
            outgoing.flush()
        while True:
            piece = await answer.read()
            count(len(piece))
            if answer.done:
                await outgoing.finish(self._clean(piece, last=True))
                return
            await outgoing.write(self._clean(piece))

    def _clean(self, piece: bytes, *, last: bool = False) -> bytes:
        scrubber = self.scrubber
        if scrubber is None:
            return piece
        shown = scrubber.feed(piece)
        return shown + scrubber.finish() if last else shown

    def shown(self) -> Fields:
        """The headers, without secrets."""
        scrubber = self.scrubber
        if scrubber is None or not scrubber.finds_in(itertools.chain.from_iterable(self.fields)):
            return list(self.fields)
        # What stands in for a secret cannot stand in a name.
        kept = [field for field in self.fields if scrubber.text(field[0]) == field[0]]
        return [(name, scrubber.text(value)) for name, value in kept]


def explain(
    status: int, why: str, *, rule: str = "", accept: str = "", fields: Fields | None = None
) -> Reply:
    """The door's own answer: why something was not done, and the rule that says so."""
    why = why[:_MOST_REASON]
    if "application/json" in accept.lower():
        kind, text = "application/json", json.dumps({"error": {"message": why, "rule": rule}})
    else:
        kind, text = "text/plain; charset=utf-8", f"smokebox: {why}\n"
    sent: Fields = [("content-type", kind), *(fields or [])]
    if rule:
        sent.append(("x-smokebox-refused", rule.encode("ascii", "backslashreplace").decode()))
    return Reply(status=status, reason=phrase(status), fields=sent, body=text.encode())


def phrase(status: int) -> str:
    """The usual words for a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
