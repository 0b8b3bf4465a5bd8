"""The egress policy of a sandbox: its fields, and the order in which they decide.

1. `denied_hosts`: refused.
2. `allowed_hosts`, once set, refuses every host that it does not match, handler or not.
3. `tcp` names a host and a port: the connection is passed through as bytes. Other ports than
   80 and 443 are refused here, unless an entry of `outbound_by_host` names the port.
4. `pass_through`: TLS to these hosts is passed through unopened, by the server name it sends.
5. `outbound_by_host`: the exact name, then the most precise glob.
6. `outbound`: the handler for all other hosts.
7. Hosts that `allowed_hosts` matches, or that were opened at run time, are forwarded.
8. `internet=True`: so is everything else.
9. Refused.

`smokebox.egress.outbound` enforces the decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeAlias

from smokebox.egress.address_guard import AddressGuard
from smokebox.egress.handler import HandlerOption, check_handler
from smokebox.egress.pattern import HostPattern, HostPort, normal_host
from smokebox.errors import InvalidOption
from smokebox.options import strict_fields

Action: TypeAlias = Literal["refuse", "handle", "forward", "tunnel"]

WEB_PORTS = (80, 443)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision of a policy about one host and port.

    `rule` is the entry that decided. `address` is where `hosts` places the host, with or
    without a port; such an address may be private.
    """

    action: Action
    rule: str
    handler: HandlerOption | None = field(default=None, repr=False)
    address: str | None = None
    reason: str = ""


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Egress:
    """Hosts that a sandbox may reach, and the handlers its requests pass. By default none.

    A host is a name, an address or a glob: `*.example.com` matches every name below
    example.com and not example.com itself. A handler is a function
    `(request, env, context)`, or `"package.module:name"` of one that the server imports.
    The CLI, the API and docs/network.md take the fields and their help from here.
    """

    internet: bool = field(default=False, metadata=_help("Forward requests to every public host."))
    allowed_hosts: Sequence[str] | None = field(
        default=None, metadata=_help("Forward requests to these hosts, and refuse all others.")
    )
    denied_hosts: Sequence[str] = field(
        default=(), metadata=_help("Refuse these hosts, whatever else allows them.")
    )
    outbound_by_host: Mapping[str, HandlerOption] = field(
        default_factory=dict,
        metadata=_help("Handlers by host, glob or `host:port`; the most precise entry runs."),
    )
    outbound: HandlerOption | None = field(
        default=None, metadata=_help("Handler for hosts without one of their own.")
    )
    tcp: Sequence[str] = field(
        default=(), metadata=_help("`host:port` pairs whose connections pass through as bytes.")
    )
    pass_through: Sequence[str] = field(
        default=(), metadata=_help("Hosts whose TLS passes through unopened.")
    )
    hosts: Mapping[str, str] = field(
        default_factory=dict,
        metadata=_help("Addresses by host, with an optional port; these may be private."),
    )
    scrub: bool = field(
        default=True, metadata=_help("Remove what handlers added from the responses of servers.")
    )
    max_requests: int | None = field(
        default=None, metadata=_help("Most requests and connections in one run.")
    )
    max_bytes: int | None = field(
        default=None, metadata=_help("Most bytes in one run, both directions together.")
    )
    requests_per_second: float | None = field(
        default=None, metadata=_help("Most requests and connections in a second.")
    )
    _table: _Table = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("internet", "scrub"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, getattr(self, name), "True or False")
        for name in ("max_requests", "max_bytes", "requests_per_second"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not _positive(value)):
                raise _invalid(name, value, "a positive number, or None for no limit")
        object.__setattr__(self, "_table", _Table(self))

    @property
    def closed(self) -> bool:
        """True when nothing can leave, whatever the host."""
        return self._table.closed

    def decide(self, host: str, port: int = 443, *, sni: bool = False) -> Verdict:
        """Decide about a connection to a host and port.

        Args:
            sni: TLS named the host, so that `pass_through` applies.
        """
        return self._table.decide(normal_host(host), port, sni=sni)

    def resolves(self, host: str) -> bool:
        """Return True when some port of the host may be reached, so that DNS answers for it."""
        return self._table.resolves(normal_host(host))


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class TenantEgress(Egress):
    """A policy set by a tenant: private addresses that it names must be in `granted` networks."""

    granted: Sequence[str] = ()


@strict_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class EgressInForce(Egress):
    """A policy with the hosts that `allow_host` opened at run time.

    They pass `allowed_hosts`, and do not set it: opening one host closes no other. `granted` are
    the networks of a `TenantEgress`; None if the operator set the policy.
    """

    opened_hosts: Sequence[str] = ()
    granted: Sequence[str] | None = None

    @property
    def guard(self) -> AddressGuard:
        """The guard of the addresses that this policy leads to."""
        if self.granted is None:
            return AddressGuard(trusts_policy=True)
        return AddressGuard.of(self.granted)


EgressOption: TypeAlias = "Egress | list[str] | tuple[str, ...] | Mapping[str, Any]"
"""A policy, a list of allowed hosts, or the fields of a policy by name."""


def egress_fields() -> tuple[Field[Any], ...]:
    """Return the fields that users set, in the order of their declaration."""
    return tuple(one for one in fields(Egress) if one.init)


def parse_egress(value: object) -> Egress:
    """Return the policy that an `egress` option stands for. Raises `InvalidOption`."""
    if isinstance(value, Egress):
        return value
    if isinstance(value, Mapping):
        return Egress(**value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return Egress(allowed_hosts=list(value))
    raise InvalidOption(
        f"egress is an Egress or a list of hosts, not {value!r:.200}.",
        hint="Pass egress=Egress(...), or egress=['api.github.com'].",
        option="egress",
        value=value,
    )


def moved_options(spelling: str = "egress=Egress({name}=...)") -> dict[str, str]:
    """Return hints for options that were renamed to `egress`, or became fields of it."""
    hints = {one.name: f"Use {spelling.format(name=one.name)}." for one in egress_fields()}
    return {**hints, "network": hints["allowed_hosts"]}


class _Table:
    """The entries of a policy, parsed and checked."""

    def __init__(self, policy: Egress) -> None:
        self.internet = policy.internet
        allowed = policy.allowed_hosts
        self.allowed = None if allowed is None else _hosts("allowed_hosts", allowed)
        self.denied = _hosts("denied_hosts", policy.denied_hosts)
        opened = policy.opened_hosts if isinstance(policy, EgressInForce) else ()
        self.opened = _hosts("opened_hosts", opened)
        self.tcp = [HostPort.parse("tcp", one) for one in _as_list("tcp", policy.tcp)]
        self.pass_through = _hosts("pass_through", policy.pass_through)
        self.outbound = policy.outbound
        if policy.outbound is not None:
            check_handler("outbound", policy.outbound)
        self.by_host = _handlers(policy.outbound_by_host)
        self.addresses = _addresses(policy.hosts)
        self._check_reach()

    @property
    def closed(self) -> bool:
        hosts = self.allowed or self.opened or self.tcp or self.pass_through
        return not (self.internet or hosts or self.by_host or self.outbound is not None)

    def decide(self, host: str, port: int, *, sni: bool) -> Verdict:
        """Apply the order of the module docstring."""
        if denied := _first(self.denied, host):
            return _refuse(f"denied_hosts[{denied.text!r}]", f"{host} is denied")
        allowed = None if self.allowed is None else _first(self.allowed, host)
        opened = _first(self.opened, host)
        if self.allowed is not None and allowed is None and opened is None:
            return _refuse("allowed_hosts", f"{host} is not in allowed_hosts")
        address = self.addresses.get(host)
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
            reason = f"port {port} of {host} is not listed; tcp=['{host}:{port}'] would open it"
            return _refuse("tcp", reason)
        if self.outbound is not None:
            return Verdict(action="handle", rule="outbound", handler=self.outbound, address=address)
        if allowed is not None:
            rule = f"allowed_hosts[{allowed.text!r}]"
            return Verdict(action="forward", rule=rule, address=address)
        if opened is not None:
            rule = f"allow_host({opened.text!r})"
            return Verdict(action="forward", rule=rule, address=address)
        if self.internet:
            return Verdict(action="forward", rule="internet", address=address)
        return _refuse("internet", f"{host} is not allowed; allowed_hosts=[{host!r}] would open it")

    def resolves(self, host: str) -> bool:
        """Return True when some port of a host may be reached."""
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
        """Refuse entries that `allowed_hosts` or `denied_hosts` makes unusable."""
        named = [("outbound_by_host", name, one[0]) for name, one in self.by_host.items()]
        named += [("tcp", one.text, one.host) for one in self.tcp]
        named += [("pass_through", one.text, one) for one in self.pass_through]
        for option, name, pattern in named:
            if not pattern.exact:
                continue
            if denied := _first(self.denied, pattern.text):
                raise _unreached(option, name, f"denied_hosts has {denied.text!r}")
            if self.allowed is not None and not _first(self.allowed + self.opened, pattern.text):
                raise _unreached(option, name, "allowed_hosts does not match it")


def _hosts(option: str, value: object) -> list[HostPattern]:
    return [HostPattern.parse(option, one) for one in _as_list(option, value)]


def _as_list(option: str, value: object) -> list[object]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _invalid(option, value, "a list of hosts")
    return list(value)


def _handlers(value: object) -> dict[str, tuple[HostPattern, int | None, HandlerOption]]:
    option = "outbound_by_host"
    if not isinstance(value, Mapping):
        raise _invalid(option, value, "a table of handlers by host")
    handlers: dict[str, tuple[HostPattern, int | None, HandlerOption]] = {}
    for name, handler in value.items():
        check_handler(f"{option}[{name!r}]", handler)
        entry = parse_entry(name)
        if entry.text in handlers:
            raise InvalidOption(
                f"{option} has two handlers for {entry.text!r}.",
                hint="Keep one: names are compared in lower case, without a final dot.",
                option=option,
                value=name,
            )
        port = entry.port if isinstance(entry, HostPort) else None
        pattern = entry.host if isinstance(entry, HostPort) else entry
        handlers[entry.text] = (pattern, port, handler)
    return handlers


def handler_key(name: object) -> str:
    """Return an entry of `outbound_by_host` in normal form. Raises `InvalidOption`."""
    return parse_entry(name).text


def parse_entry(name: object) -> HostPattern | HostPort:
    """Parse an entry of `outbound_by_host`: a host, or one port of it."""
    if isinstance(name, str) and "/" not in name and (name.count(":") == 1 or "]:" in name):
        return HostPort.parse("outbound_by_host", name)
    return HostPattern.parse("outbound_by_host", name)


def _addresses(value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise _invalid("hosts", value, "a table of addresses by host")
    addresses = {}
    for name, address in value.items():
        pattern = HostPattern.parse("hosts", name)
        if not pattern.exact:
            raise _invalid("hosts", name, "a table by whole names, without globs")
        text = address if isinstance(address, str) else ""
        if text.count(":") == 1 or "]:" in text:
            host = HostPort.parse("hosts", text).host
        else:
            host = HostPattern.parse("hosts", text.removeprefix("[").removesuffix("]") or address)
        if not host.exact:
            raise _invalid("hosts", address, "a table of single addresses")
        addresses[pattern.text] = text
    return addresses


def _first(patterns: list[HostPattern], host: str) -> HostPattern | None:
    return next((pattern for pattern in patterns if pattern.matches(host)), None)


def _refuse(rule: str, reason: str) -> Verdict:
    return Verdict(action="refuse", rule=rule, reason=reason)


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value < float("inf")


def _invalid(option: str, value: object, wanted: str) -> InvalidOption:
    return InvalidOption(
        f"{option} is {wanted}, not {value!r:.200}.",
        hint="See the table in docs/network.md.",
        option=option,
        value=value,
    )


def _unreached(option: str, name: str, why: str) -> InvalidOption:
    return InvalidOption(
        f"{option}[{name!r}] can never be used: {why}.",
        hint="Remove one of the two.",
        option=option,
        value=name,
    )
