"""The door of one sandbox: what leaves it comes here, is judged, and passed on or refused.

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

from smokebox.egress.environment import Secrets
from smokebox.egress.layers import Layers
from smokebox.egress.meter import Meter
from smokebox.egress.policy import WEB_PORTS
from smokebox.engine.egress import dns
from smokebox.engine.egress.arrival import Arrival
from smokebox.engine.egress.handlers import Handlers
from smokebox.engine.egress.hello import LONGEST, Hello, read_hello
from smokebox.engine.egress.journal import FILE, Journal
from smokebox.engine.egress.listening import BACKLOG, Listener, Questions
from smokebox.engine.egress.names import Names
from smokebox.engine.egress.trust import install
from smokebox.engine.egress.tunnel import Tunnel, abort
from smokebox.engine.files.steps import Desk
from smokebox.engine.jail.network import Doors, destination
from smokebox.errors import SmokeboxError
from smokebox.sandbox.pipes import readable

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.egress.clients import Clients
    from smokebox.egress.policy import Egress, Verdict
    from smokebox.engine.egress.authority import Authority
    from smokebox.engine.egress.http.pool import Pool
    from smokebox.engine.egress.traffic import Traffic
    from smokebox.engine.jail.api import Jail, Owner
    from smokebox.engine.run import Run
    from smokebox.engine.workers import Workers

# How long a program may take to say what it wants, and a server to be reached.
HELLO_SECONDS = 30.0
CONNECT_SECONDS = 10.0

_DNS, _HTTPS = 53, 443
_CLOSED = Layers()
_NAMES, _AUTHORITY = "egress.names", "egress.pem"

_log = logging.getLogger("smokebox.egress")


class Door:
    """Serves what leaves one sandbox while it is awake. `policy` is asked for each connection
    and each request anew.

    `problem` says why there is no way out, where the host cannot have one.
    """

    def __init__(
        self,
        sandbox_id: str,
        *,
        layers: Callable[[], Layers | None],
        clients: Clients,
        workers: Workers,
        traffic: Traffic,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.clients = clients
        self.env: Any = Secrets()
        self.handlers = Handlers()
        self.journal = Journal(traffic.count)
        self.names = Names()
        self.meter = Meter(lambda: self.policy)
        self.problem = ""
        self._layers = layers
        self._workers = workers
        self._known = _CLOSED
        self._policy = _CLOSED.egress()
        self._authority: Authority | None = None
        self._pool: Pool | None = None
        self._jail: Jail | None = None
        self._directory = ""
        self._doors = Doors()
        self._questions: list[Questions] = []
        self._listener: Listener | None = None

    @property
    def policy(self) -> Egress:
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
    def pool(self) -> Pool:
        """Connections to servers."""
        if self._pool is None:
            from smokebox.engine.egress.http.pool import Pool

            self._pool = Pool()
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
        self._doors.close()
        self._doors = Doors()
        self.journal.close()

    async def _take(self, run: Run) -> None:
        await self.leave()
        self._jail = run.jail
        if run.directory != self._directory:
            self._directory, self._authority = run.directory, None
        self.journal.place(f"{run.directory}/{FILE}")
        self._doors = run.jail.doors.release()
        self.problem = self._doors.reason
        self._questions = [Questions(sock, self._answer) for sock in self._doors.dns]

    async def _see_to(self, run: Run) -> None:
        """Open the door where the policy has it open; once open, who comes gets an answer."""
        door = self._doors.tcp
        if door is None:
            if self.problem and not self.policy.closed:
                _log.warning("sandbox %s has no way out: %s", self.sandbox_id, self.problem)
            return
        if not self.policy.closed:
            await self._furnish(run)
        if self._listener is None and (not self.policy.closed or _listens(door)):
            door.listen(BACKLOG)
            self._listener = Listener(door, self._arrive)

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

    def _desk(self, jail: Jail) -> Desk:
        async def root() -> tuple[int, Owner]:
            return jail.root, jail.owner

        return Desk(root, self._workers)

    def _answer(self, question: bytes) -> bytes | None:
        return dns.answer(question, self._find)

    def _find(self, question: dns.Question) -> str | None:
        """The address that stands for a name, if the sandbox may know of it."""
        if self.policy.resolves(question.name):
            return self.names.address_of(question.name)
        # Programs ask for both kinds of addresses at once: that is one thing.
        if question.kind != dns.ADDRESS_V6:
            verdict = self.policy.decide(question.name)
            self.journal.note(
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
            Arrival(
                sock=sock, address=address, port=port, host=host, hello=hello.tls, sni=hello.sni
            ),
        )

    async def _peek(self, sock: socket.socket) -> Hello | None:
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
        from smokebox.engine.egress.http.pool import Place, Unanswered

        if reason := self.meter.admit():
            self._refuse(sock, name, port, "limits", reason)
            return
        place = Place(
            host=name,
            port=port,
            tls=False,
            address=verdict.address,
            private=verdict.address is not None,
        )
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                outside = await self.pool.dial(place)
        except Unanswered as error:
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
            self.journal.note(
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
        self.journal.note(
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
