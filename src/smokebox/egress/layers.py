"""Layers of a sandbox's policy: its settings, and the changes made at run time over them.

Both are plain JSON and stored in the record. Changes override settings, also settings that are
sent again later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeAlias

from smokebox.egress.handler import CATCH_ALL, CLIENT, HandlerOption, check_handler
from smokebox.egress.pattern import HostPattern, HostPort
from smokebox.egress.policy import (
    Egress,
    EgressInForce,
    TenantEgress,
    egress_fields,
    handler_key,
    parse_entry,
)
from smokebox.errors import InvalidOption, LimitReached

MAX_CHANGES = 4096

Bind: TypeAlias = Callable[[str, str], HandlerOption]
"""Returns the handler to call for a slot and the name in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressChanges:
    """Changes made at run time.

    `allowed` and `denied` have True for an added host and False for a removed one, and
    `handlers` has a handler by slot, or None to remove it.
    """

    allowed: Mapping[str, bool] = field(default_factory=dict)
    denied: Mapping[str, bool] = field(default_factory=dict)
    handlers: Mapping[str, str | None] = field(default_factory=dict)
    internet: bool | None = None

    def allow(self, host: str) -> EgressChanges:
        """Allow a host, and remove a denial of exactly this name."""
        name = HostPattern.parse("allow_host", host).text
        return self._with(allowed={name: True}, denied={name: False})

    def deny(self, host: str) -> EgressChanges:
        """Deny a host, even if something else allows it."""
        name = HostPattern.parse("deny_host", host).text
        return self._with(allowed={name: False}, denied={name: True})

    def remove_allowed(self, host: str) -> EgressChanges:
        """Remove the entry of exactly this name from the allowed hosts."""
        return self._with(allowed={HostPattern.parse("allowed_hosts", host).text: False})

    def remove_denied(self, host: str) -> EgressChanges:
        """Remove the entry of exactly this name from the denied hosts."""
        return self._with(denied={HostPattern.parse("denied_hosts", host).text: False})

    def set_handler(self, slot: str, handler: str | None) -> EgressChanges:
        """Set the handler of a slot; None removes it."""
        key = slot if slot == CATCH_ALL else handler_key(slot)
        if handler is not None:
            check_handler(f"outbound_by_host[{slot!r}]" if slot else "outbound", handler)
        return self._with(handlers={key: handler})

    def set_internet(self, internet: bool | None) -> EgressChanges:
        """Turn the internet on or off; None leaves that to the settings."""
        return replace(self, internet=internet)

    def _with(
        self,
        *,
        allowed: Mapping[str, bool] | None = None,
        denied: Mapping[str, bool] | None = None,
        handlers: Mapping[str, str | None] | None = None,
    ) -> EgressChanges:
        changed = replace(
            self,
            allowed={**self.allowed, **(allowed or {})},
            denied={**self.denied, **(denied or {})},
            handlers={**self.handlers, **(handlers or {})},
        )
        if max(map(len, (changed.allowed, changed.denied, changed.handlers))) > MAX_CHANGES:
            raise LimitReached(
                f"a sandbox can have at most {MAX_CHANGES} changes to its network.",
                hint="Use globs such as '*.example.com', or put the hosts into its settings.",
                limit=MAX_CHANGES,
            )
        return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressLayers:
    """The policy settings of a sandbox, and the changes made since.

    `granted` are the networks granted to the tenant who set them; None for the operator.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: EgressChanges = field(default_factory=EgressChanges)
    granted: Sequence[str] | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EgressLayers:
        """Decode the result of `to_json`, also of another version."""
        changes, known = data.get("changes", {}), {one.name for one in fields(EgressChanges)}
        names = {one.name for one in egress_fields()}
        granted = data.get("granted")
        return cls(
            settings={k: v for k, v in data.get("settings", {}).items() if k in names},
            changes=EgressChanges(**{k: v for k, v in changes.items() if k in known}),
            granted=None if granted is None else tuple(granted),
        )

    def to_json(self) -> dict[str, Any]:
        """Encode both for the record."""
        granted = None if self.granted is None else list(self.granted)
        return {
            "settings": dict(self.settings),
            "changes": asdict(self.changes),
            "granted": granted,
        }

    def with_settings(
        self, settings: Mapping[str, Any], granted: Sequence[str] | None = None
    ) -> EgressLayers:
        """Replace the settings, and keep the changes made at run time."""
        Egress(**settings)
        return replace(self, settings=dict(settings), granted=granted)

    def egress(self, bind: Bind | None = None) -> EgressInForce:
        """Return the policy in force. `bind` replaces the names of handlers by functions."""
        changes, policy = self.changes, Egress(**self.settings)
        denied = _apply(policy.denied_hosts, changes.denied)
        allowed, opened = policy.allowed_hosts, _apply((), changes.allowed)
        if allowed is not None:
            allowed = [one for one in allowed if changes.allowed.get(_normal(one), True)]
        named: dict[str, Any] = {handler_key(k): v for k, v in policy.outbound_by_host.items()}
        named[CATCH_ALL] = policy.outbound
        named.update(changes.handlers)
        handlers = {
            slot: bind(slot, one) if bind is not None else one
            for slot, one in named.items()
            if one is not None
        }
        reach = _Reach(denied, None if allowed is None else [*allowed, *opened])
        overrides: dict[str, Any] = {
            "internet": policy.internet if changes.internet is None else changes.internet,
            "allowed_hosts": allowed,
            "denied_hosts": denied,
            "outbound": handlers.pop(CATCH_ALL, None),
            "outbound_by_host": {k: v for k, v in handlers.items() if reach.has(parse_entry(k))},
            "tcp": [one for one in policy.tcp if reach.has(HostPort.parse("tcp", one))],
            "pass_through": [
                one for one in policy.pass_through if reach.has(HostPattern.parse("hosts", one))
            ],
        }
        return EgressInForce(
            **{**self.settings, **overrides}, opened_hosts=opened, granted=self.granted
        )


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """Settings in which each function is replaced by `@client`, and the functions by slot.

    `granted` are the networks of a `TenantEgress`; None for any other policy.
    """

    settings: dict[str, Any]
    handlers: dict[str, HandlerOption]
    granted: Sequence[str] | None


def split_handlers(policy: Egress) -> SplitPolicy:
    """Split a policy into plain JSON, without fields that have their default, and functions."""
    settings: dict[str, Any] = {}
    handlers: dict[str, HandlerOption] = {}
    default = Egress()
    for one in egress_fields():
        value = getattr(policy, one.name)
        if value != getattr(default, one.name):
            settings[one.name] = _as_json(value)
    if callable(policy.outbound):
        settings["outbound"], handlers[CATCH_ALL] = CLIENT, policy.outbound
    for name, handler in policy.outbound_by_host.items():
        if callable(handler):
            settings["outbound_by_host"][name] = CLIENT
            handlers[handler_key(name)] = handler
    granted = tuple(policy.granted) if isinstance(policy, TenantEgress) else None
    return SplitPolicy(settings, handlers, granted)


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def check_opened(policy: Egress, host: str) -> None:
    """Raise `InvalidOption` if a glob still denies a host that was just allowed."""
    pattern = HostPattern.parse("allow_host", host)
    if not pattern.exact:
        return
    for one in policy.denied_hosts:
        if HostPattern.parse("denied_hosts", one).matches(pattern.text):
            raise InvalidOption(
                f"{host} stays closed: denied_hosts has {one!r}.",
                hint=f"Call remove_denied_host({one!r}) first.",
                option="denied_hosts",
                value=one,
            )


class _Reach:
    """The hosts that can be reached. Entries for others are left out of a policy in force.

    `Egress` refuses entries that can never be used, and a change may make one so.
    """

    def __init__(self, denied: Sequence[str], allowed: Sequence[str] | None) -> None:
        self._denied = [HostPattern.parse("denied_hosts", one) for one in denied]
        self._allowed = None
        if allowed is not None:
            self._allowed = [HostPattern.parse("allowed_hosts", one) for one in allowed]

    def has(self, entry: HostPattern | HostPort) -> bool:
        """Return whether an entry can be used. A glob can, for some host."""
        pattern = entry.host if isinstance(entry, HostPort) else entry
        if not pattern.exact:
            return True
        if any(one.matches(pattern.text) for one in self._denied):
            return False
        return self._allowed is None or any(one.matches(pattern.text) for one in self._allowed)


def _apply(hosts: Sequence[str], changes: Mapping[str, bool]) -> list[str]:
    """Return the hosts with those that were added, and without those that were removed."""
    merged = {_normal(one): True for one in hosts}
    merged.update(changes)
    return [name for name, present in merged.items() if present]


def _normal(host: str) -> str:
    return HostPattern.parse("hosts", host).text
