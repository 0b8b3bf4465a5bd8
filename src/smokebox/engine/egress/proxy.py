"""The egress proxy of one sandbox: checks every connection and DNS query that leaves it.

Everything that arrives was sent by the sandbox, and is hostile.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from smokebox.egress.handler import find_handler
from smokebox.egress.layers import EgressLayers
from smokebox.egress.meter import Meter
from smokebox.egress.policy import WEB_PORTS
from smokebox.engine.egress import dns
from smokebox.engine.egress.audit_log import FILE, AuditLog
from smokebox.engine.egress.client_hello import LONGEST, ClientHello, read_hello
from smokebox.engine.egress.dns import HostAddresses
from smokebox.engine.egress.listener import BACKLOG, DnsListener, IncomingConnection, Listener
from smokebox.engine.egress.trust import install
from smokebox.engine.egress.tunnel import Tunnel, abort
from smokebox.engine.files.executor import RootExecutor
from smokebox.engine.jail.network import EgressSockets, destination
from smokebox.errors import SmokeboxError
from smokebox.project import Secrets
from smokebox.runtime.pipes import readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.egress.clients import Clients
    from smokebox.egress.handler import Handler, HandlerOption
    from smokebox.egress.policy import EgressInForce, Verdict
    from smokebox.engine.egress.audit_log import TrafficTotals
    from smokebox.engine.egress.authority import Authority
    from smokebox.engine.egress.http.upstream import UpstreamPool
    from smokebox.engine.jail.api import Jail, Owner
    from smokebox.engine.run import Run
    from smokebox.engine.workers import Workers


# How long a program may take to say what it wants, and a server to be reached.
HELLO_SECONDS = 30.0
CONNECT_SECONDS = 10.0

_DNS, _HTTPS = 53, 443
_CLOSED = EgressLayers()
_NAMES, _AUTHORITY = "egress.names", "egress.pem"

_log = logging.getLogger("smokebox.egress")


class EgressProxy:
    """Serves what leaves one sandbox while it is awake. `policy` is asked for each connection
    and each request anew.

    `problem` says why there is no way out, where the host cannot have one.
    """

    def __init__(
        self,
        sandbox_id: str,
        *,
        layers: Callable[[], EgressLayers | None],
        clients: Clients,
        workers: Workers,
        traffic: TrafficTotals,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.clients = clients
        self.env: Any = Secrets()
        self.handlers = HandlerResolver()
        self.audit_log = AuditLog(traffic.count)
        self.names = HostAddresses()
        self.meter = Meter(lambda: self.policy)
        self.problem = ""
        self._layers = layers
        self._workers = workers
        self._known = _CLOSED
        self._policy = _CLOSED.egress()
        self._authority: Authority | None = None
        self._pool: UpstreamPool | None = None
        self._jail: Jail | None = None
        self._directory = ""
        self._sockets = EgressSockets()
        self._questions: list[DnsListener] = []
        self._listener: Listener | None = None

    @property
    def policy(self) -> EgressInForce:
        """The policy in force."""
        layers = self._layers() or _CLOSED
        if layers is not self._known:
            self._policy = layers.egress(self.clients.bind)
            self._known = layers
        return self._policy

    @property
    def open(self) -> bool:
        """Whether anything can leave at all."""
        return self._listener is not None and not self.policy.closed

    @property
    def connections(self) -> int:
        """How many are open."""
        return self._listener.connections if self._listener is not None else 0

    @property
    def authority(self) -> Authority:
        """What the sandbox trusts; of a sandbox that was woken once."""
        if self._authority is None:
            # It takes its time, and a sandbox without a network does not need it.
            from smokebox.engine.egress.authority import Authority

            self._authority = Authority.open(f"{self._directory}/{_AUTHORITY}", self.sandbox_id)
        return self._authority

    @property
    def pool(self) -> UpstreamPool:
        """Connections to servers."""
        if self._pool is None:
            from smokebox.engine.egress.http.upstream import UpstreamPool

            self._pool = UpstreamPool()
        return self._pool

    async def begin(self, run: Run) -> None:
        """Serve a run, or one that goes on under another policy."""
        if run.jail is not self._jail:
            await self._take(run)
            self.names.begin(f"{run.directory}/{_NAMES}")
        await self._see_to(run)

    async def adopt(self, run: Run) -> None:
        """Serve a run that began in another engine's time: it knows the names of then."""
        await self._take(run)
        self.names.resume(f"{run.directory}/{_NAMES}")
        await self._see_to(run)

    async def ended(self, reason: str) -> None:
        """Let go of a run that is over."""
        await self.leave()
        self.meter = Meter(lambda: self.policy)

    async def leave(self) -> None:
        """Cut what is open, and serve no more."""
        for questions in self._questions:
            questions.close()
        listener, self._listener = self._listener, None
        self._questions, self._jail = [], None
        if listener is not None:
            await listener.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._sockets.close()
        self._sockets = EgressSockets()
        self.audit_log.close()

    async def _take(self, run: Run) -> None:
        await self.leave()
        self._jail = run.jail
        if run.directory != self._directory:
            self._directory, self._authority = run.directory, None
        self.audit_log.place(f"{run.directory}/{FILE}")
        self._sockets = run.jail.egress_sockets.release()
        self.problem = self._sockets.reason
        self._questions = [DnsListener(sock, self._answer) for sock in self._sockets.dns]

    async def _see_to(self, run: Run) -> None:
        """Listen if the policy is open; once listening, stay so under a closed policy."""
        sock = self._sockets.tcp
        if sock is None:
            if self.problem and not self.policy.closed:
                _log.warning("sandbox %s has no way out: %s", self.sandbox_id, self.problem)
            return
        if not self.policy.closed:
            await self._furnish(run)
        if self._listener is None and (not self.policy.closed or _listens(sock)):
            sock.listen(BACKLOG)
            self._listener = Listener(sock, self._arrive)

    async def _furnish(self, run: Run) -> None:
        """Have the sandbox trust what it is shown here."""
        try:
            authority = await asyncio.to_thread(self._prepare)
            await self._desk(run.jail).run(install, authority.pem)
        except (SmokeboxError, OSError) as error:
            # Such as a full disk: programs will say that they do not trust, and the rest goes on.
            _log.warning("sandbox %s cannot be given certificates: %s", self.sandbox_id, error)

    def _prepare(self) -> Authority:
        # What takes long to import does so here, and not while others wait for the loop.
        from smokebox.engine.egress import web

        assert web
        return self.authority

    def _desk(self, jail: Jail) -> RootExecutor:
        async def root() -> tuple[int, Owner]:
            return jail.root, jail.owner

        return RootExecutor(root, self._workers)

    def _answer(self, question: bytes) -> bytes | None:
        return dns.answer(question, self._find)

    def _find(self, question: dns.Question) -> str | None:
        """The address that stands for a name, if the sandbox may know of it."""
        if self.policy.resolves(question.name):
            return self.names.address_of(question.name)
        # Programs ask for both kinds of addresses at once: that is one thing.
        if question.kind != dns.ADDRESS_V6:
            verdict = self.policy.decide(question.name)
            self.audit_log.note(
                verdict="refused",
                host=question.name,
                port=_DNS,
                rule=verdict.rule,
                protocol="dns",
                reason=verdict.reason or f"{question.name} is not known here",
            )
        return None

    async def _arrive(self, sock: socket.socket) -> None:
        """See one connection to its end."""
        try:
            wanted = destination(sock)
            # What came to us by our own name asks for nothing.
            if wanted is None or ipaddress.ip_address(wanted[0]).is_loopback:
                abort(sock)
            else:
                await self._serve(sock, *wanted)
        except OSError as error:
            _log.debug("sandbox %s: a connection broke: %s", self.sandbox_id, error)
            abort(sock)
        except BaseException:
            abort(sock)
            raise

    async def _serve(self, sock: socket.socket, address: str, port: int) -> None:
        """Have a connection served by whom it concerns, who closes it."""
        host = self.names.name_of(address)
        name = host or address
        verdict = self.policy.decide(name, port)
        if verdict.action == "tunnel":
            await self._tunnel(sock, name, port, verdict)
        elif port in WEB_PORTS or verdict.action == "handle":
            await self._serve_web(sock, host, address, port)
        elif port == _DNS and host is None:
            await self._answer_stream(sock)
        else:
            self._refuse(sock, name, port, verdict.rule, verdict.reason)

    async def _serve_web(
        self, sock: socket.socket, host: str | None, address: str, port: int
    ) -> None:
        hello = await self._peek(sock)
        if hello is None:
            abort(sock)
            return
        # One that names another server than it asked for is refused further on.
        if port == _HTTPS and hello.sni and host in (None, hello.sni):
            verdict = self.policy.decide(hello.sni, port, sni=True)
            if verdict.action == "tunnel":
                await self._tunnel(sock, hello.sni, port, verdict)
                return
        from smokebox.engine.egress import web

        await web.serve(
            self,
            IncomingConnection(
                sock=sock, address=address, port=port, host=host, hello=hello.tls, sni=hello.sni
            ),
        )

    async def _peek(self, sock: socket.socket) -> ClientHello | None:
        """What the first bytes are, which stay where they are; None where none came."""
        size = 1
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                while True:
                    # Or bytes that are there, and are too few, would wake us without end.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
                    await readable(sock.fileno())
                    data = sock.recv(max(size, 4096), socket.MSG_PEEK)
                    hello = read_hello(data)
                    if not data:
                        return None
                    if not hello.missing or len(data) < size:
                        break
                    size = min(len(data) + hello.missing, LONGEST)
        except TimeoutError:
            return None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return hello

    async def _tunnel(self, sock: socket.socket, name: str, port: int, verdict: Verdict) -> None:
        from smokebox.engine.egress.http.upstream import UpstreamFailure
        from smokebox.foundation.http1.dial import Endpoint

        if reason := self.meter.admit():
            self._refuse(sock, name, port, "limits", reason)
            return
        endpoint = Endpoint(
            host=name,
            port=port,
            tls=False,
            address=verdict.address,
            private=verdict.address is not None,
        )
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                outside = await self.pool.dial(endpoint)
        except UpstreamFailure as error:
            self._refuse(sock, name, port, error.rule or verdict.rule, error.reason)
            return
        except (OSError, TimeoutError) as error:
            why = os.strerror(error.errno) if error.errno else "no answer in time"
            why = f"{name} port {port}: {why}"
            self._refuse(sock, name, port, verdict.rule, why, failed=True)
            return
        await self._join(sock, outside, name, port, verdict.rule)

    async def _join(
        self, sock: socket.socket, outside: socket.socket, name: str, port: int, rule: str
    ) -> None:
        loop = asyncio.get_running_loop()
        begun, reason = loop.time(), "the sandbox stopped"
        outside.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        tunnel = Tunnel(sock, outside, self.meter.count)
        try:
            reason = await tunnel.run()
            sock.close()
        finally:
            outside.close()
            self.audit_log.note(
                verdict="tunnelled",
                host=name,
                port=port,
                rule=rule,
                protocol="tcp",
                sent=tunnel.sent,
                received=tunnel.received,
                seconds=loop.time() - begun,
                reason=reason,
            )

    async def _answer_stream(self, sock: socket.socket) -> None:
        """Answer questions by TCP, as programs ask them whose answers were cut."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELLO_SECONDS):
                while len(size := await _exactly(sock, 2)) == 2:
                    question = await _exactly(sock, int.from_bytes(size, "big"))
                    if (answer := self._answer(question)) is None:
                        break
                    await loop.sock_sendall(sock, len(answer).to_bytes(2, "big") + answer)
        sock.close()

    def _refuse(
        self,
        sock: socket.socket,
        host: str,
        port: int,
        rule: str,
        reason: str,
        *,
        failed: bool = False,
    ) -> None:
        abort(sock)
        self.audit_log.note(
            verdict="failed" if failed else "refused",
            host=host,
            port=port,
            rule=rule,
            protocol="tcp",
            reason=reason,
        )


async def _exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where it ended."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size and (more := await loop.sock_recv(sock, size - len(data))):
        data += more
    return data


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


class HandlerResolver:
    """Functions as they are; what is named by its place is imported, once."""

    async def resolve(self, option: HandlerOption) -> Handler:
        """The handler itself. Raises `InvalidOption` where there is none."""
        if isinstance(option, str):
            # A module of a user's may take its time.
            return await asyncio.to_thread(find_handler, option)
        return option
