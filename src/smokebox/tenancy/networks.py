"""Lists of networks and addresses in `server.toml`."""

from __future__ import annotations

from smokebox.egress.address_guard import AddressGrant
from smokebox.errors import InvalidOption


def parse_networks(option: str, value: object) -> tuple[str, ...]:
    """Return a list of IP networks, and of addresses with a port.

    Raises:
        InvalidOption: It has something else. `option` names it.
    """
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidOption(
            f"{option} is a list of IP networks, not {value!r:.200}.",
            hint='Write for example ["10.0.0.0/8", "192.0.2.7"].',
            option=option,
            value=value,
        )
    for text in value:
        AddressGrant.parse(option, text)
    return tuple(value)
