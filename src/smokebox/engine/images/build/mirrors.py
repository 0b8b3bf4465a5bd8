"""The package mirrors that the host is configured for: pip and npm by variables, apt by handlers.

They are in no layer and no key of the cache. Of pip and npm, settings with a password in them, and
those that name files of the host, are left out.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import socket
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smokebox.egress.pattern import HostPattern, is_public
from smokebox.engine.images.build.apt_mirrors import AptSettings, read_apt

if TYPE_CHECKING:
    from collections.abc import Iterable

    from smokebox.egress.layers import EgressLayers

_PIP_FILES = ("/etc/pip.conf", "~/.config/pip/pip.conf", "~/.pip/pip.conf")
_PIP = {
    "index-url": "PIP_INDEX_URL",
    "extra-index-url": "PIP_EXTRA_INDEX_URL",
    "trusted-host": "PIP_TRUSTED_HOST",
}
# Where images of the distributions look for packages, of a build that may reach every host.
_ARCHIVES = ("*.debian.org", "*.ubuntu.com")
_NPM_FILES = ("/etc/npmrc", "/usr/etc/npmrc", "/usr/local/etc/npmrc", "~/.npmrc")
_NPM_VARIABLE = "npm_config_registry"
_NPM_REGISTRY = re.compile(r"^\s*registry\s*=\s*(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrors:
    """The package mirrors of a host.

    Attributes:
        variables: Environment of RUN, for pip and npm.
        apt: The settings of apt.
        addresses: Addresses of hosts that the build allows, where they are not public.
    """

    variables: dict[str, str] = field(default_factory=dict)
    apt: AptSettings = field(default_factory=AptSettings)
    addresses: dict[str, str] = field(default_factory=dict)

    def route(self, layers: EgressLayers) -> EgressLayers:
        """Return a build's policy, which leads to the mirrors where it allows their hosts.

        For the operator also at the private addresses and with the logins of this host's
        configuration. A tenant needs a grant for such an address, and gets no login.
        """
        policy, settings, operator = layers.egress(), dict(layers.settings), layers.granted is None
        handler = self.apt.handler(logins=operator)
        allowed = (*(policy.allowed_hosts or ()), *(_ARCHIVES if policy.internet else ()))
        names = [HostPattern.parse("allowed_hosts", one) for one in allowed]
        handlers = {
            one.text: handler
            for one in names
            if handler is not None and policy.decide(one.text, 80).action == "forward"
        }
        if handlers:
            own = settings.get("outbound_by_host", {})
            settings["outbound_by_host"] = {**handlers, **own}
        if operator and self.addresses:
            settings["hosts"] = {**self.addresses, **settings.get("hosts", {})}
        return layers.with_settings(settings, layers.granted)


def read_mirrors(allowed: Iterable[str] = ()) -> Mirrors:
    """Read the mirrors of this host, and look up the hosts that a build allows. Blocks."""
    variables = _pip()
    # npm reads both spellings.
    registry = os.environ.get("NPM_CONFIG_REGISTRY") or os.environ.get(_NPM_VARIABLE) or _npm()
    if registry and _is_plain(registry):
        variables[_NPM_VARIABLE] = registry
    return Mirrors(variables=variables, apt=read_apt(), addresses=_private_addresses(allowed))


def _private_addresses(hosts: Iterable[str]) -> dict[str, str]:
    """Return the addresses of those hosts that this host does not have at a public one."""
    found = {}
    for pattern in (HostPattern.parse("allowed_hosts", host) for host in hosts):
        if not pattern.exact:
            continue
        with contextlib.suppress(OSError):
            answers = socket.getaddrinfo(pattern.text, None, type=socket.SOCK_STREAM)
            address = str(answers[0][4][0])
            if not is_public(address):
                found[pattern.text] = address
    return found


def _pip() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in (*_PIP_FILES, os.environ.get("PIP_CONFIG_FILE", "")):
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(os.path.expanduser(path), encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError):
            continue
        for option, variable in _PIP.items():
            if parser.has_option("global", option):
                found[variable] = " ".join(parser.get("global", option).split())
    found.update({name: os.environ[name] for name in _PIP.values() if os.environ.get(name)})
    return {
        name: " ".join(words)
        for name, value in found.items()
        if (
            words := [
                one for one in value.split() if name == _PIP["trusted-host"] or _is_plain(one)
            ]
        )
    }


def _npm() -> str:
    registry = ""
    for path in _NPM_FILES:
        try:
            text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if names := _NPM_REGISTRY.findall(text):
            registry = names[-1]
    return registry


def _is_plain(url: str) -> bool:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme in ("http", "https") and parts.username is None
