"""One request of a visitor and its answer, both streamed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from smokebox.errors import SandboxGone, ServiceUnavailable, SmokeboxError
from smokebox.server.previews.heads import answer_head
from smokebox.server.previews.pages import Refusal, render
from smokebox.server.previews.upstream import Upstream

if TYPE_CHECKING:
    from smokebox.engine import Sandbox
    from smokebox.server.previews.gate import Admitted
    from smokebox.server.previews.heads import Asked, Headers, Way
    from smokebox.server.previews.visitor import Before, Visitor
    from smokebox.wire.preview import Target

# May be sent again, and so over a connection that the other end may be closing.
_SAFE = frozenset((b"GET", b"HEAD", b"OPTIONS"))
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Exchange:
    """From the head of a request to the end of its answer."""

    def __init__(self, visitor: Visitor, asked: Asked) -> None:
        self.asked = asked
        self.upgrade = asked.upgrade
        self.bodiless = asked.method == b"HEAD"
        self.keep_alive = asked.keep_alive and not asked.upgrade
        self.blocked = asked.has_body or asked.upgrade
        self.spliced = False
        self.received = False
        self._visitor = visitor
        self._previews = visitor.previews
        self._admitted: Admitted | None = None
        self._upstream: Upstream | None = None
        self._waiting: list[bytes] = []
        self._head = b""
        self._way: Way
        self.begun = False
        self._chunked = self._answered = self._over = False

    def start(self, before: Before | None = None) -> None:
        """Ask the sandbox, or refuse; with what was found out when it was asked so before."""
        previews, visitor = self._previews, self._visitor
        try:
            if previews.draining:
                raise Refusal(503, previews.drain.refusal())
            target = visitor.target_of(self.asked) if before is None else before.target
            sandbox = visitor.sandbox_of(target)
            admitted = previews.gate.admit(sandbox, target, self._authorization)
        except Refusal as refusal:
            self._refuse(refusal)
            return
        if admitted is None:
            previews.run(self._load(sandbox, target))
        else:
            self._pass(admitted, target, before)

    def body(self, data: bytes) -> None:
        """A piece of the request's body, or after an upgrade of whatever it is."""
        if self.asked.chunked and not self.upgrade:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._forward(data)

    def complete(self) -> None:
        """The request is whole."""
        self.received = True
        if self.asked.chunked and not self.upgrade:
            self._forward(b"0\r\n\r\n")
        if self._answered:
            self._finish()

    def end(self) -> None:
        """The visitor has left."""
        if not self._over:
            self._leave()

    def cut(self) -> None:
        """Of `Ports`: end at once."""
        self._leave()
        self._visitor.abort()

    def head(
        self, status: int, reason: bytes, headers: Headers, known: dict[bytes, bytes]
    ) -> bytes:
        """The head of the answer, as the visitor gets it."""
        self.begun = True
        self._previews.count(status)
        return answer_head(
            status,
            reason,
            headers,
            known,
            framing=self._framing(status, known),
            prefix=self._way.prefix,
            origin=self._way.host,
        )

    def piece(self, data: bytes) -> bytes:
        """A piece of its body."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def tail(self) -> bytes:
        """What follows its body."""
        return b"0\r\n\r\n" if self._chunked else b""

    def send(self, data: bytes) -> None:
        """Of `Upstream`: give that to the visitor."""
        self._visitor.write(data)

    def answered(self) -> None:
        """Of `Upstream`: the answer is whole."""
        self._upstream = None
        self._answered = True
        self._waiting.clear()
        if self.received:
            self._finish()
        else:
            # The rest of the request is read, for the visitor to see the answer, by nobody.
            self._unblock()

    def switched(self) -> None:
        """Of `Upstream`: from here on both sides say what they like."""
        self.spliced = True
        self._visitor.keep_alive()
        self._flush()

    def failed(self, *, begun: bool, retry: bool) -> None:
        """Of `Upstream`: there will be no answer, or no more of it."""
        self._upstream = None
        if begun or self._over:
            self._leave()
            self._visitor.abort() if not self.spliced else self._visitor.close()
        elif retry:
            self._previews.run(self._dial())
        else:
            self._refuse(_silent(self._port))

    def pause(self) -> None:
        """Of `Upstream`: the sandbox does not keep up."""
        self.blocked = True
        self._visitor.update_reading()

    def resume(self) -> None:
        """Of `Upstream`: it does again."""
        self._unblock()

    def hold(self) -> None:
        """Of `Visitor`: who asks does not keep up."""
        if self._upstream is not None:
            self._upstream.pause()

    def go_on(self) -> None:
        """Of `Visitor`: it does again."""
        if self._upstream is not None:
            self._upstream.resume()

    @property
    def _authorization(self) -> bytes | None:
        return self.asked.known.get(b"authorization")

    @property
    def _port(self) -> int:
        return self._admitted.port if self._admitted is not None else 0

    async def _load(self, sandbox: Sandbox, target: Target) -> None:
        try:
            await sandbox.ports.load()
            admitted = self._previews.gate.admit(sandbox, target, self._authorization)
        except Refusal as refusal:
            self._refuse(refusal)
        except SmokeboxError as error:
            self._refuse(Refusal(503, error))
        else:
            if admitted is not None and not self._visitor.gone:
                self._pass(admitted, target)

    def _pass(self, admitted: Admitted, target: Target, before: Before | None = None) -> None:
        self._admitted = admitted
        admitted.ports.enter(admitted.port, self)
        asked = self.asked
        before = before or self._visitor.look(asked, target)
        way = self._way = before.way
        path = asked.target[len(way.prefix) - 1 :] if way.prefix else asked.target
        self._head = b"%b %b HTTP/1.1\r\n%b" % (asked.method, path, before.fields)
        if asked.method in _SAFE and not self.blocked:
            run = admitted.run
            upstream = self._previews.pool.take((run.id, run.generation, admitted.port))
            if upstream is not None:
                self._ask(upstream)
                return
        self._previews.run(self._dial())

    async def _dial(self) -> None:
        admitted = self._admitted
        assert admitted is not None
        run, port = admitted.run, admitted.port
        try:
            sock = await admitted.ports.dial(run, port)
            key, pool = (run.id, run.generation, port), self._previews.pool
            _, upstream = await asyncio.get_running_loop().create_connection(
                lambda: Upstream(pool, key), sock=sock
            )
        except ServiceUnavailable as error:
            self._refuse(Refusal(502, error))
            return
        except SandboxGone as error:
            self._refuse(Refusal(410, error))
            return
        except OSError:
            self._refuse(_silent(port))
            return
        if self._over:
            upstream.close()
            return
        if self.asked.known.get(b"expect", b"").lower() == b"100-continue" and not self.received:
            self.send(_CONTINUE)
        self._ask(upstream)
        if not self.upgrade:
            self._flush()

    def _ask(self, upstream: Upstream) -> None:
        self._upstream = upstream
        upstream.ask(self, self._head)
        if self._visitor.full:
            upstream.pause()

    def _forward(self, data: bytes) -> None:
        if self._answered or self._over:
            return
        if self._upstream is not None and (self.spliced or not self.upgrade):
            self._upstream.write(data)
        else:
            self._waiting.append(data)
            self._visitor.update_reading()

    def _flush(self) -> None:
        if self._waiting and self._upstream is not None:
            self._upstream.write(b"".join(self._waiting))
            self._waiting.clear()
        self._unblock()

    def _unblock(self) -> None:
        self.blocked = False
        self._visitor.update_reading()

    def _framing(self, status: int, known: dict[bytes, bytes]) -> bytes:
        """The lines that say where the answer ends, for this visitor."""
        if status == 101:
            return b"connection: upgrade\r\nupgrade: websocket\r\n"
        lines = b""
        bare = self.bodiless or status in (204, 304)
        if b"transfer-encoding" not in known and b"content-length" in known and status != 204:
            lines = b"content-length: %b\r\n" % known[b"content-length"]
        elif not bare and self.asked.old:
            self.keep_alive = False
        elif not bare:
            self._chunked = True
            lines = b"transfer-encoding: chunked\r\n"
        if not self.keep_alive:
            return lines + b"connection: close\r\n"
        return lines + b"connection: keep-alive\r\n" if self.asked.old else lines

    def _refuse(self, refusal: Refusal) -> None:
        if self._over or self._visitor.gone:
            return
        self._previews.count(refusal.status)
        self.keep_alive = self.keep_alive and self.received
        self._visitor.write(
            render(
                refusal,
                for_browser=self.asked.for_browser,
                head_only=self.bodiless,
                keep_alive=self.keep_alive,
            )
        )
        self._answered = True
        self._waiting.clear()
        if self.received or self.upgrade:
            self._finish()
        else:
            self._unblock()

    def _finish(self) -> None:
        self._leave()
        self._visitor.done(self)

    def _leave(self) -> None:
        self._over = True
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.close()
        if self._admitted is not None:
            self._admitted.ports.leave(self._admitted.port, self)


def _silent(port: int) -> Refusal:
    return Refusal(
        502,
        ServiceUnavailable(
            f"what listens on port {port} closed the connection without an answer.",
            hint="Does it speak HTTP? See its log.",
            service="port",
            port=port,
        ),
    )
