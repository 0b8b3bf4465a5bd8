"""The guard of addresses: public ones, grants with and without ports, and the host's own."""

from __future__ import annotations

import pytest

from smokebox.egress.address_guard import AddressGrant, AddressGuard, is_own
from smokebox.errors import InvalidOption
from smokebox.foundation.http1.dial import Endpoint

NAMED = Endpoint("x.test", 80, tls=False, address="10.0.0.7", named=True)
UNNAMED = Endpoint("x.test", 80, tls=False)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "10.0.0.7", "fd00::7"])
def test_private_address_needs_a_grant(address: str) -> None:
    assert not AddressGuard().allows(NAMED, address, 80)
    assert AddressGuard.of(private=True).allows(UNNAMED, address, 80)
    assert not AddressGuard.of(private=False).allows(UNNAMED, address, 80)


def test_trusted_policy_grants_only_what_it_names() -> None:
    guard = AddressGuard(trusts_policy=True)
    assert guard.allows(NAMED, "10.0.0.7", 80)
    assert not guard.allows(UNNAMED, "10.0.0.7", 80)


@pytest.mark.parametrize(
    ("grant", "allowed", "refused"),
    [
        ("10.0.0.0/8", [("10.1.2.3", 22), ("::ffff:10.1.2.3", 1)], [("11.0.0.1", 22)]),
        ("10.0.0.7", [("10.0.0.7", 1)], [("10.0.0.8", 1)]),
        ("10.0.0.7:5432", [("10.0.0.7", 5432)], [("10.0.0.7", 22)]),
        ("fd00::/8", [("fd00::1", 80)], [("fe80::1", 80), ("10.0.0.1", 80)]),
        ("::1", [("::1", 80)], [("127.0.0.1", 80)]),
        ("[::1]:80", [("::1", 80)], [("::1", 81)]),
    ],
)
def test_grant_covers_its_network_and_port(
    grant: str, allowed: list[tuple[str, int]], refused: list[tuple[str, int]]
) -> None:
    parsed = AddressGrant.parse("private", grant)
    assert all(parsed.covers(*one) for one in allowed)
    assert not any(parsed.covers(*one) for one in refused)


@pytest.mark.parametrize("text", ["", "db.internal", "10.0.0.1/8", "10.0.0.7:0", "10.0.0.7:x", "*"])
def test_invalid_grant_is_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="network or an address"):
        AddressGuard.of([text])


def test_own_addresses_are_known_by_their_routes() -> None:
    assert is_own("127.0.0.1")
    assert is_own("127.9.9.9")
    assert is_own("::ffff:127.0.0.1")
