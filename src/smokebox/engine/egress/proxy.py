"""The egress proxy of one sandbox: checks every connection and DNS query that leaves it.

All input comes from the sandbox, and is untrusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from smokebox.egress.layers import EgressLayers
from smokebox.egress.meter import Meter
from smokebox.egress.policy import WEB_PORTS
from smokebox.engine.egress.audit_log import FILE, AuditLog
from smokebox.engine.egress.client_hello import MAX_HELLO, ClientHello, read_hello
from smokebox.engine.egress.dns import TYPE_AAAA, HostAddresses, Question, answer_query
from smokebox.engine.egress.listener import BACKLOG, DnsListener, IncomingConnection, Listener
from smokebox.engine.egress.trust import install
from smokebox.engine.egress.tunnel import TcpTunnel, abort
from smokebox.engine.files.executor import RootExecutor
from smokebox.engine.jail.network import EgressSockets, destination
from smokebox.engine.run import RunPart
from smokebox.errors import SmokeboxError
from smokebox.foundation.loop_shares import run_in
from smokebox.project import Secrets
from smokebox.runtime.pipes import readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.egress.handler import HandlerRegistry
    from smokebox.egress.policy import EgressInForce, Verdict
    from smokebox.egress.upstream import UpstreamPool
    from smokebox.engine.egress.audit_log import TrafficTotals
    from smokebox.engine.egress.authority import Authority
    from smokebox.engine.jail.jail import Jail
    from smokebox.engine.jail.spec import Owner
    from smokebox.engine.run import Run
    from smokebox.engine.workers import Workers
    from smokebox.foundation.loop_shares import LoopShare


# Maximum time until a program sends its first bytes, and until a server accepts a tunnel.
HELLO_SECONDS = 30.0
CONNECT_SECONDS = 10.0

_DNS, _HTTPS = 53, 443
_CLOSED = EgressLayers()
_NAMES, _AUTHORITY = "egress.names", "egress.pem"

_log = logging.getLogger("smokebox.egress")


class EgressProxy(RunPart):
    """Serves the traffic of one sandbox while it is awake.

    `policy` is read for each connection and each request. `problem` is the reason why the host
    cannot give the sandbox a network, if it cannot.
    """

    def __init__(
        self,
        sandbox_id: str,
        *,
        layers: Callable[[], EgressLayers | None],
        share: Callable[[], LoopShare | None],
        handlers: HandlerRegistry,
        workers: Workers,
        traffic: TrafficTotals,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.handlers = handlers
        self.env: Any = Secrets()
        self.audit_log = AuditLog(traffic.count)
        self.names = HostAddresses()
        self.meter = Meter(lambda: self.policy)
        self.problem = ""
        self._layers = layers
        self._share = share
        self._workers = workers
        # The policy in force, and the layers that it was computed from.
        self._policy = _CLOSED.egress()
        self._policy_layers = _CLOSED
        self._authority: Authority | None = None
        self._pool: UpstreamPool | None = None
        self._jail: Jail | None = None
        self._directory = ""
        self._sockets = EgressSockets()
        self._dns: list[DnsListener] = []
        self._listener: Listener | None = None

    @property
    def policy(self) -> EgressInForce:
        """The policy in force."""
        layers = self._layers() or _CLOSED
        if layers is not self._policy_layers:
            policy = layers.egress(self.handlers.bind)
            if policy.guard != self._policy.guard and self._pool is not None:
                # An idle connection may lead to an address that is no longer allowed.
                self._pool.close()
                self._pool = None
            self._policy, self._policy_layers = policy, layers
        return self._policy

    @property
    def open(self) -> bool:
        """True if some traffic can leave the sandbox."""
        return self._listener is not None and not self.policy.closed

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return self._listener.connections if self._listener is not None else 0

    @property
    def authority(self) -> Authority:
        """The certificate authority that the sandbox trusts, once it was awake."""
        if self._authority is None:
            # Slow to import, and a sandbox without a network does not need it.
            from smokebox.engine.egress.authority import Authority

            self._authority = Authority.open(f"{self._directory}/{_AUTHORITY}", self.sandbox_id)
        return self._authority

    @property
    def pool(self) -> UpstreamPool:
        """The connections to servers."""
        if self._pool is None:
            from smokebox.egress.upstream import UpstreamPool

            self._pool = UpstreamPool(self.policy.guard)
        return self._pool

    async def begin(self, run: Run) -> None:
        if run.jail is not self._jail:
            await self._attach(run)
            self.names.create(f"{run.directory}/{_NAMES}")
        await self._listen(run)

    async def adopt(self, run: Run) -> None:
        await self._attach(run)
        self.names.load(f"{run.directory}/{_NAMES}")
        await self._listen(run)

    async def ended(self, reason: str) -> None:
        await self.aclose()
        self.meter = Meter(lambda: self.policy)

    async def aclose(self) -> None:
        """Stop serving, and cut open connections."""
        for dns in self._dns:
            dns.close()
        listener, self._listener = self._listener, None
        self._dns, self._jail = [], None
        if listener is not None:
            await listener.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._sockets.close()
        self._sockets = EgressSockets()
        self.audit_log.close()

    async def _attach(self, run: Run) -> None:
        """Take over the sockets of a run."""
        await self.aclose()
        self._jail = run.jail
        if run.directory != self._directory:
            self._directory, self._authority = run.directory, None
        self.audit_log.open(f"{run.directory}/{FILE}")
        self._sockets = run.jail.egress_sockets.release()
        self.problem = self._sockets.reason
        self._dns = [
            DnsListener(sock, self._answer_query, self._share) for sock in self._sockets.dns
        ]

    async def _listen(self, run: Run) -> None:
        """Listen if the policy is open. A socket that listens already stays so when it closes."""
        sock = self._sockets.tcp
        if sock is None:
            if self.problem and not self.policy.closed:
                _log.warning("sandbox %s has no network: %s", self.sandbox_id, self.problem)
            return
        if not self.policy.closed:
            await self._install_authority(run.jail)
        if self._listener is None and (not self.policy.closed or _is_listening(sock)):
            sock.listen(BACKLOG)
            self._listener = Listener(sock, self._serve_in_share)

    async def _install_authority(self, jail: Jail) -> None:
        """Make the programs of the sandbox trust our certificates."""

        async def root() -> tuple[int, Owner]:
            return jail.root, jail.owner

        try:
            authority = await asyncio.to_thread(self._load_authority)
            await RootExecutor(root, self._workers).run(install, authority.pem)
        except (SmokeboxError, OSError) as error:
            # Such as a full disk: TLS fails in the sandbox, and everything else works.
            _log.warning("sandbox %s cannot be given certificates: %s", self.sandbox_id, error)

    def _load_authority(self) -> Authority:
        # Import on this thread, because it takes long and would block the event loop.
        from smokebox.engine.egress import http_proxy

        assert http_proxy
        return self.authority

    def _answer_query(self, message: bytes) -> bytes | None:
        return answer_query(message, self._look_up)

    def _look_up(self, question: Question) -> str | None:
        """Return the synthetic address of a name that the policy allows."""
        if self.policy.resolves(question.name):
            return self.names.address_of(question.name)
        # Programs send an A and an AAAA query together: log one of them.
        if question.type != TYPE_AAAA:
            verdict = self.policy.decide(question.name)
            self.audit_log.add(
                verdict="refused",
                host=question.name,
                port=_DNS,
                rule=verdict.rule,
                protocol="dns",
                reason=verdict.reason or f"no port of {question.name} is allowed",
            )
        return None

    async def _serve_in_share(self, sock: socket.socket) -> None:
        await run_in(self._share(), self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        """Serve one connection until it ends, and close it."""
        try:
            wanted = destination(sock)
            # A connection to the proxy's own address has no destination.
            if wanted is None or ipaddress.ip_address(wanted[0]).is_loopback:
                abort(sock)
            else:
                await self._route(sock, *wanted)
        except OSError as error:
            _log.debug("sandbox %s: a connection broke: %s", self.sandbox_id, error)
            abort(sock)
        except BaseException:
            abort(sock)
            raise

    async def _route(self, sock: socket.socket, address: str, port: int) -> None:
        host = self.names.name_of(address)
        name = host or address
        verdict = self.policy.decide(name, port)
        if verdict.action == "tunnel":
            await self._tunnel(sock, name, port, verdict)
        elif port in WEB_PORTS or verdict.action == "handle":
            await self._serve_http(sock, host, address, port)
        elif port == _DNS and host is None:
            await self._serve_dns(sock)
        else:
            self._refuse(sock, name, port, verdict.rule, verdict.reason)

    async def _serve_http(
        self, sock: socket.socket, host: str | None, address: str, port: int
    ) -> None:
        hello = await self._peek(sock)
        if hello is None:
            abort(sock)
            return
        # `http_proxy` refuses a server name other than the host of the connection.
        if port == _HTTPS and hello.sni and host in (None, hello.sni):
            verdict = self.policy.decide(hello.sni, port, sni=True)
            if verdict.action == "tunnel":
                await self._tunnel(sock, hello.sni, port, verdict)
                return
        from smokebox.engine.egress import http_proxy

        await http_proxy.serve(
            self,
            IncomingConnection(
                sock=sock, address=address, port=port, host=host, hello=hello.tls, sni=hello.sni
            ),
        )

    async def _peek(self, sock: socket.socket) -> ClientHello | None:
        """Parse the first bytes without consuming them; None if the program sent none."""
        size = 1
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                while True:
                    # Otherwise bytes that are too few would wake us again and again.
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
                    await readable(sock.fileno())
                    data = sock.recv(max(size, 4096), socket.MSG_PEEK)
                    hello = read_hello(data)
                    if not data:
                        return None
                    if not hello.missing or len(data) < size:
                        break
                    size = min(len(data) + hello.missing, MAX_HELLO)
        except TimeoutError:
            return None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return hello

    async def _tunnel(self, sock: socket.socket, name: str, port: int, verdict: Verdict) -> None:
        from smokebox.egress.upstream import UpstreamFailure
        from smokebox.foundation.http1.dial import Endpoint

        if reason := self.meter.admit():
            self._refuse(sock, name, port, "limits", reason)
            return
        address = verdict.address
        endpoint = Endpoint(name, port, tls=False, address=address, named=address is not None)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                outside = await self.pool.dial(endpoint)
        except UpstreamFailure as error:
            self._refuse(sock, name, port, error.rule or verdict.rule, error.reason)
            return
        except (OSError, TimeoutError) as error:
            reason = os.strerror(error.errno) if error.errno else "no response in time"
            reason = f"{name} port {port}: {reason}"
            self._refuse(sock, name, port, verdict.rule, reason, failed=True)
            return
        await self._relay(sock, outside, name, port, verdict.rule)

    async def _relay(
        self, sock: socket.socket, outside: socket.socket, name: str, port: int, rule: str
    ) -> None:
        loop = asyncio.get_running_loop()
        started, reason = loop.time(), "the sandbox stopped"
        outside.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        tunnel = TcpTunnel(sock, outside, self.meter.count)
        try:
            reason = await tunnel.run()
            sock.close()
        finally:
            outside.close()
            self.audit_log.add(
                verdict="tunnelled",
                host=name,
                port=port,
                rule=rule,
                protocol="tcp",
                sent=tunnel.sent,
                received=tunnel.received,
                seconds=loop.time() - started,
                reason=reason,
            )

    async def _serve_dns(self, sock: socket.socket) -> None:
        """Answer DNS queries over TCP, which programs use after a truncated response."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELLO_SECONDS):
                while len(size := await _read_exactly(sock, 2)) == 2:
                    query = await _read_exactly(sock, int.from_bytes(size, "big"))
                    if (response := self._answer_query(query)) is None:
                        break
                    await loop.sock_sendall(sock, len(response).to_bytes(2, "big") + response)
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
        self.audit_log.add(
            verdict="failed" if failed else "refused",
            host=host,
            port=port,
            rule=rule,
            protocol="tcp",
            reason=reason,
        )


async def _read_exactly(sock: socket.socket, size: int) -> bytes:
    """Read that many bytes, or fewer if the connection ends."""
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < size and (more := await loop.sock_recv(sock, size - len(data))):
        data += more
    return data


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
