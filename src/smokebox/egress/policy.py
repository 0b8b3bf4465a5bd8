"""What may leave a sandbox, judged in one strict order.

1. `denied_hosts`: refused.
2. `allowed_hosts`, where set, is a gate: what it does not match is refused, handler or not.
3. `tcp` names host and port: passed as bytes. Other ports than 80 and 443 end here, refused,
   unless an entry of `outbound_by_host` names the port.
4. `pass_through`: TLS that is passed unopened, by the name in its first message.
5. `outbound_by_host`: the exact name, then the most precise glob.
6. `outbound`: the handler for all others.
7. What `allowed_hosts` matched, or `opened_hosts` does, goes to the internet.
8. `internet=True`: so does everything else.
9. Refused.

`opened_hosts` is what `allow_host` adds at run time: it passes the gate, and is none itself,
so that opening one host closes no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from smokebox.egress.handler import HandlerOption, check_handler
from smokebox.egress.pattern import HostPattern, HostPort, normal_host
from smokebox.errors import InvalidOption
from smokebox.options import strict_fields

Action: TypeAlias = Literal["refuse", "handle", "forward", "tunnel"]

WEB_PORTS = (80, 443)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the policy says of one host and port.

    `rule` is the entry that spoke. `address` is where the policy says that the host is,
    with a port or without; such a place may be private.
    """

    action: Action
    rule: str
    handler: HandlerOption | None = field(default=None, repr=False)
    address: str | None = None
    reason: str = ""


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Egress:
    """What a sandbox may reach, and by which handlers. By default nothing.

    Hosts are names, addresses or globs: `*.example.com` is every name below it and not
    itself. `hosts` says where a name is (`{"pypi.test": "127.0.0.1:8081"}`), which may be a
    private address: no other way leads to one. With `scrub`, header values that a handler
    added are taken out of what the server answers. `max_requests`, `max_bytes` (both ways
    together) and `requests_per_second` bound what one sandbox may send.
    """

    internet: bool = False
    allowed_hosts: Sequence[str] | None = None
    denied_hosts: Sequence[str] = ()
    outbound_by_host: Mapping[str, HandlerOption] = field(default_factory=dict)
    outbound: HandlerOption | None = None
    tcp: Sequence[str] = ()
    pass_through: Sequence[str] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)
    scrub: bool = True
    max_requests: int | None = None
    max_bytes: int | None = None
    requests_per_second: float | None = None
    opened_hosts: Sequence[str] = ()
    _table: _Table = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("internet", "scrub"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        for name in ("max_requests", "max_bytes", "requests_per_second"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not _positive(value)):
                raise _wrong(name, value, "a positive number, or None for no bound")
        object.__setattr__(self, "_table", _Table(self))

    @property
    def closed(self) -> bool:
        """Whether nothing can leave, whatever the host."""
        handlers = self.outbound_by_host or self.outbound is not None
        hosts = self.allowed_hosts or self.opened_hosts or self.tcp or self.pass_through
        return not (self.internet or hosts or handlers)

    def decide(self, host: str, port: int = 443, *, sni: bool = False) -> Verdict:
        """What becomes of a connection to that host and port; `sni` says that TLS named it."""
        return self._table.decide(normal_host(host), port, sni=sni)

    def resolves(self, host: str) -> bool:
        """Whether a program may know of that name: whether any port of it may be reached."""
        return self._table.resolves(normal_host(host))


class _Table:
    """The entries of a policy, parsed and checked once."""

    def __init__(self, policy: Egress) -> None:
        self.internet = policy.internet
        allowed = policy.allowed_hosts
        self.allowed = None if allowed is None else _hosts("allowed_hosts", allowed)
        self.denied = _hosts("denied_hosts", policy.denied_hosts)
        self.opened = _hosts("opened_hosts", policy.opened_hosts)
        self.tcp = [HostPort.parse("tcp", one) for one in _listed("tcp", policy.tcp)]
        self.pass_through = _hosts("pass_through", policy.pass_through)
        self.outbound = policy.outbound
        if policy.outbound is not None:
            check_handler("outbound", policy.outbound)
        self.by_host = _handlers(policy.outbound_by_host)
        self.places = _places(policy.hosts)
        self._check_reach()

    def decide(self, host: str, port: int, *, sni: bool) -> Verdict:
        """The order of this module, in code."""
        if denied := _first(self.denied, host):
            return _refuse(f"denied_hosts[{denied.text!r}]", f"{host} is denied")
        gate = None if self.allowed is None else _first(self.allowed, host)
        opened = _first(self.opened, host)
        if self.allowed is not None and gate is None and opened is None:
            return _refuse("allowed_hosts", f"{host} is not in allowed_hosts")
        address = self.places.get(host)
        for entry in self.tcp:
            if entry.matches(host, port):
                rule = f"tcp[{entry.text!r}]"
                return Verdict(action="tunnel", rule=rule, address=address)
        if sni and (passed := _first(self.pass_through, host)):
            rule = f"pass_through[{passed.text!r}]"
            return Verdict(action="tunnel", rule=rule, address=address)
        if found := self._handler(host, port):
            name, handler = found
            rule = f"outbound_by_host[{name!r}]"
            return Verdict(action="handle", rule=rule, handler=handler, address=address)
        if port not in WEB_PORTS:
            reason = f"port {port} of {host} is not named; tcp=['{host}:{port}'] would open it"
            return _refuse("tcp", reason)
        if self.outbound is not None:
            return Verdict(action="handle", rule="outbound", handler=self.outbound, address=address)
        if gate is not None:
            rule = f"allowed_hosts[{gate.text!r}]"
            return Verdict(action="forward", rule=rule, address=address)
        if opened is not None:
            rule = f"allow_host({opened.text!r})"
            return Verdict(action="forward", rule=rule, address=address)
        if self.internet:
            return Verdict(action="forward", rule="internet", address=address)
        return _refuse("internet", f"{host} is not allowed; allowed_hosts=[{host!r}] would open it")

    def resolves(self, host: str) -> bool:
        """Whether some port of a host may be reached."""
        ports = {80, 443, *(entry.port for entry in self.tcp)}
        ports.update(port for _, port, _ in self.by_host.values() if port is not None)
        return any(self.decide(host, port, sni=port == 443).action != "refuse" for port in ports)

    def _handler(self, host: str, port: int) -> tuple[str, HandlerOption] | None:
        best: tuple[bool, int, str, HandlerOption] | None = None
        for name, (pattern, wanted, handler) in self.by_host.items():
            if port != wanted if wanted is not None else port not in WEB_PORTS:
                continue
            if pattern.matches(host):
                rank = (pattern.exact, pattern.precision, name, handler)
                if best is None or rank[:2] > best[:2]:
                    best = rank
        return best[2:] if best else None

    def _check_reach(self) -> None:
        """Refuse entries that the gate or a denial keeps from ever being used."""
        named = [("outbound_by_host", name, one[0]) for name, one in self.by_host.items()]
        named += [("tcp", one.text, one.host) for one in self.tcp]
        named += [("pass_through", one.text, one) for one in self.pass_through]
        for option, name, pattern in named:
            if not pattern.exact:
                continue
            if denied := _first(self.denied, pattern.text):
                raise _unreached(option, name, f"denied_hosts has {denied.text!r}")
            if self.allowed is not None and not _first(self.allowed + self.opened, pattern.text):
                raise _unreached(option, name, "allowed_hosts does not let it through")


def _hosts(option: str, given: object) -> list[HostPattern]:
    return [HostPattern.parse(option, one) for one in _listed(option, given)]


def _listed(option: str, given: object) -> list[object]:
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise _wrong(option, given, "a list of hosts")
    return list(given)


def _handlers(given: object) -> dict[str, tuple[HostPattern, int | None, HandlerOption]]:
    if not isinstance(given, Mapping):
        raise _wrong("outbound_by_host", given, "a table of handlers by host")
    found: dict[str, tuple[HostPattern, int | None, HandlerOption]] = {}
    option = "outbound_by_host"
    for name, handler in given.items():
        check_handler(f"{option}[{name!r}]", handler)
        entry = parse_entry(name)
        key = entry.text
        if key in found:
            raise InvalidOption(
                f"{option} has two handlers for {key!r}.",
                hint="Keep one: names are compared in lower case, without a final dot.",
                option=option,
                value=name,
            )
        if isinstance(entry, HostPort):
            found[key] = (entry.host, entry.port, handler)
        else:
            found[key] = (entry, None, handler)
    return found


def handler_key(name: object) -> str:
    """An entry of `outbound_by_host` as names are compared. Raises `InvalidOption`."""
    return parse_entry(name).text


def parse_entry(name: object) -> HostPattern | HostPort:
    """What an entry of `outbound_by_host` names: a host, or one port of it."""
    if isinstance(name, str) and "/" not in name and (name.count(":") == 1 or "]:" in name):
        return HostPort.parse("outbound_by_host", name)
    return HostPattern.parse("outbound_by_host", name)


def _places(given: object) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise _wrong("hosts", given, "a table of addresses by host")
    found = {}
    for name, place in given.items():
        pattern = HostPattern.parse("hosts", name)
        if not pattern.exact:
            raise _wrong("hosts", name, "a table by whole names, without globs")
        text = place if isinstance(place, str) else ""
        if text.count(":") == 1 or "]:" in text:
            bare = HostPort.parse("hosts", text).host
        else:
            bare = HostPattern.parse("hosts", text.removeprefix("[").removesuffix("]") or place)
        if not bare.exact:
            raise _wrong("hosts", place, "a table of single addresses")
        found[pattern.text] = text
    return found


def _first(patterns: list[HostPattern], host: str) -> HostPattern | None:
    return next((pattern for pattern in patterns if pattern.matches(host)), None)


def _refuse(rule: str, reason: str) -> Verdict:
    return Verdict(action="refuse", rule=rule, reason=reason)


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < float("inf")


def _wrong(option: str, value: object, wanted: str) -> InvalidOption:
    return InvalidOption(
        f"{option} is {wanted}, not {value!r:.200}.",
        hint="See the table in docs/network.md.",
        option=option,
        value=value,
    )


def _unreached(option: str, name: str, why: str) -> InvalidOption:
    return InvalidOption(
        f"{option}[{name!r}] can never be used: {why}.",
        hint="Take one of the two out.",
        option=option,
        value=name,
    )
