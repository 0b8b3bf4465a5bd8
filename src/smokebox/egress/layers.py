"""What a policy in force is made of: the settings of a sandbox, and changes made at run time.

Both are plain JSON, and kept in the record. Changes win over settings: settings that are sent
again undo none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeAlias

from smokebox.egress.handler import CLIENT, HandlerOption, check_handler
from smokebox.egress.pattern import HostPattern, HostPort
from smokebox.egress.policy import Egress, handler_key, parse_entry
from smokebox.errors import InvalidOption, LimitReached
from smokebox.options import refuse_unknown

SETTINGS = tuple(one.name for one in fields(Egress) if one.init and one.name != "opened_hosts")
"""The names of the settings; None as a value is the default again."""

CATCH_ALL = ""
"""The slot of `outbound`; that of an entry of `outbound_by_host` is its pattern."""

MOST_CHANGES = 4096

Bind: TypeAlias = Callable[[str, str], HandlerOption]
"""Gets a slot and what is written there, and gives the handler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What was changed at run time: hosts that count (True) or do not (False), whatever the
    settings say, and handlers by slot, None where there is to be none."""

    allowed: Mapping[str, bool] = field(default_factory=dict)
    denied: Mapping[str, bool] = field(default_factory=dict)
    handlers: Mapping[str, str | None] = field(default_factory=dict)
    internet: bool | None = None

    def allow(self, host: str) -> Changes:
        """Open a host, and end a denial of that very name."""
        name = HostPattern.parse("allow_host", host).text
        return self._with(allowed={name: True}, denied={name: False})

    def deny(self, host: str) -> Changes:
        """Close a host, whatever opened it."""
        name = HostPattern.parse("deny_host", host).text
        return self._with(allowed={name: False}, denied={name: True})

    def remove_allowed(self, host: str) -> Changes:
        """Have no entry allow that very name."""
        return self._with(allowed={HostPattern.parse("allowed_hosts", host).text: False})

    def remove_denied(self, host: str) -> Changes:
        """Have no entry deny that very name."""
        return self._with(denied={HostPattern.parse("denied_hosts", host).text: False})

    def set_handler(self, slot: str, handler: str | None) -> Changes:
        """Have another handler in a slot, or none."""
        key = slot if slot == CATCH_ALL else handler_key(slot)
        if handler is not None:
            check_handler(f"outbound_by_host[{slot!r}]" if slot else "outbound", handler)
        return self._with(handlers={key: handler})

    def set_internet(self, internet: bool | None) -> Changes:
        """Turn the internet on or off; None leaves that to the settings."""
        return replace(self, internet=internet)

    def _with(
        self,
        *,
        allowed: Mapping[str, bool] | None = None,
        denied: Mapping[str, bool] | None = None,
        handlers: Mapping[str, str | None] | None = None,
    ) -> Changes:
        changed = replace(
            self,
            allowed={**self.allowed, **(allowed or {})},
            denied={**self.denied, **(denied or {})},
            handlers={**self.handlers, **(handlers or {})},
        )
        if max(map(len, (changed.allowed, changed.denied, changed.handlers))) > MOST_CHANGES:
            raise LimitReached(
                f"a sandbox keeps {MOST_CHANGES} changes to its network at most.",
                hint="Use globs such as '*.example.com', or put the hosts into its settings.",
                limit=MOST_CHANGES,
            )
        return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The settings of a sandbox's network as they were given, and what was changed since."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layers:
        """What `to_json` gave, also of another version."""
        changes, known = data.get("changes", {}), {one.name for one in fields(Changes)}
        return cls(
            settings={k: v for k, v in data.get("settings", {}).items() if k in SETTINGS},
            changes=Changes(**{k: v for k, v in changes.items() if k in known}),
        )

    def to_json(self) -> dict[str, Any]:
        """Both, for the record."""
        return {"settings": dict(self.settings), "changes": asdict(self.changes)}

    def with_settings(self, given: Mapping[str, Any]) -> Layers:
        """Other settings where they are given, checked; None is the default again."""
        refuse_unknown("the network of a sandbox", given, SETTINGS)
        merged = {**self.settings, **given}
        kept = {name: value for name, value in merged.items() if value is not None}
        Egress(**kept)
        return replace(self, settings=kept)

    def egress(self, bind: Bind | None = None) -> Egress:
        """The policy in force. `bind` says what stands for a handler that is only named."""
        changes, policy = self.changes, Egress(**self.settings)
        denied = _hosts(policy.denied_hosts, changes.denied)
        gate, opened = policy.allowed_hosts, _hosts((), changes.allowed)
        if gate is not None:
            gate = [one for one in gate if changes.allowed.get(_text(one), True)]
        named: dict[str, Any] = {handler_key(k): v for k, v in policy.outbound_by_host.items()}
        named[CATCH_ALL] = policy.outbound
        named.update(changes.handlers)
        handlers = {
            slot: bind(slot, one) if bind is not None else one
            for slot, one in named.items()
            if one is not None
        }
        reach = _Reach(denied, None if gate is None else [*gate, *opened])
        return replace(
            policy,
            internet=policy.internet if changes.internet is None else changes.internet,
            allowed_hosts=gate,
            opened_hosts=opened,
            denied_hosts=denied,
            outbound=handlers.pop(CATCH_ALL, None),
            outbound_by_host={k: v for k, v in handlers.items() if reach.has(parse_entry(k))},
            tcp=[one for one in policy.tcp if reach.has(HostPort.parse("tcp", one))],
            pass_through=[
                one for one in policy.pass_through if reach.has(HostPattern.parse("hosts", one))
            ],
        )


@dataclass(frozen=True, slots=True)
class Split:
    """Settings in which each function is `@client`, and the functions by slot."""

    settings: dict[str, Any]
    handlers: dict[str, HandlerOption]


def split_handlers(given: Mapping[str, Any]) -> Split:
    """Settings as they are sent, and the handlers that stay here."""
    settings, handlers = dict(given), {}
    outbound = settings.get("outbound")
    if callable(outbound):
        settings["outbound"], handlers[CATCH_ALL] = CLIENT, outbound
    by_host = settings.get("outbound_by_host")
    if isinstance(by_host, Mapping):
        handlers.update({handler_key(name): one for name, one in by_host.items() if callable(one)})
        settings["outbound_by_host"] = {
            name: CLIENT if callable(one) else one for name, one in by_host.items()
        }
    for name in ("allowed_hosts", "denied_hosts", "tcp", "pass_through"):
        if isinstance(settings.get(name), Sequence) and not isinstance(settings[name], str):
            settings[name] = list(settings[name])
    if isinstance(settings.get("hosts"), Mapping):
        settings["hosts"] = dict(settings["hosts"])
    return Split(settings, handlers)


def check_opened(policy: Egress, host: str) -> None:
    """Raise `InvalidOption` where a host that was opened stays closed by a glob."""
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
    """Which single hosts can be reached: what a change has closed is left out of a policy."""

    def __init__(self, denied: Sequence[str], gate: Sequence[str] | None) -> None:
        self._denied = [HostPattern.parse("denied_hosts", one) for one in denied]
        self._gate = None if gate is None else [HostPattern.parse("allowed_hosts", x) for x in gate]

    def has(self, entry: HostPattern | HostPort) -> bool:
        """Whether an entry can speak at all; a glob may, for some host."""
        pattern = entry.host if isinstance(entry, HostPort) else entry
        if not pattern.exact:
            return True
        if any(one.matches(pattern.text) for one in self._denied):
            return False
        return self._gate is None or any(one.matches(pattern.text) for one in self._gate)


def _hosts(given: Sequence[str], changes: Mapping[str, bool]) -> list[str]:
    kept = {_text(one): True for one in given}
    kept.update(changes)
    return [name for name, counts in kept.items() if counts]


def _text(host: str) -> str:
    return HostPattern.parse("hosts", host).text
