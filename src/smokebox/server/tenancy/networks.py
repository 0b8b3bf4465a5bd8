"""Lists of networks and addresses in `server.toml`."""

from __future__ import annotations

import ipaddress

from smokebox.egress.pattern import HostPort
from smokebox.errors import InvalidOption


def parse_networks(option: str, value: object, *, ports: bool) -> tuple[str, ...]:
    """Return a list of IP networks, and with `ports` of addresses with a port.

    Raises:
        InvalidOption: It has something else. `option` names it.
    """
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if isinstance(text, str) and (_is_network(text) or (ports and _has_port(text))):
            continue
        more = ', or an address with a port, such as "10.0.0.7:5432"' if ports else ""
        raise InvalidOption(
            f"{option} is a list of IP networks, not of {text!r:.200}.",
            hint=f'Write for example "10.0.0.0/8" or "192.0.2.7"{more}.',
            option=option,
            value=text,
        )
    if not isinstance(value, list):
        raise InvalidOption(
            f"{option} is a list of IP networks, not {value!r:.200}.",
            hint=f"Write [{value!r:.200}].",
            option=option,
            value=value,
        )
    return tuple(value)


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def _has_port(text: str) -> bool:
    try:
        ipaddress.ip_address(HostPort.parse("network", text).host.text)
    except ValueError:  # InvalidOption too.
        return False
    return True
