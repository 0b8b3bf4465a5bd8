"""Synthetic addresses of host names: allocation, eviction and persistence."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from smokebox.engine.egress.dns import NETWORK, HostAddresses

if TYPE_CHECKING:
    from pathlib import Path


def test_each_name_has_its_own_stable_address() -> None:
    addresses = HostAddresses()
    first = addresses.address_of("a.example")
    assert addresses.address_of("b.example") != first
    assert addresses.address_of("a.example") == first
    assert addresses.name_of(first) == "a.example"
    assert ipaddress.ip_address(first) in NETWORK
    assert addresses.name_of("198.19.255.254") is None


def test_least_recently_used_name_is_evicted_first() -> None:
    addresses = HostAddresses(2)
    kept, evicted = addresses.address_of("kept"), addresses.address_of("evicted")
    addresses.address_of("kept")
    addresses.address_of("another")
    assert addresses.name_of(kept) == "kept"
    assert addresses.name_of(evicted) is None
    assert addresses.address_of("evicted") != evicted


def test_addresses_are_reused_only_after_all_others() -> None:
    addresses = HostAddresses(4)
    addresses.address_of("first")
    addresses._next = int(NETWORK[-2])
    assert addresses.address_of("last") == str(NETWORK[-2])
    # The address of the first name is still in use.
    assert addresses.address_of("next") == str(NETWORK[2])


def test_next_engine_loads_the_names(tmp_path: Path) -> None:
    path = str(tmp_path / "names")
    before, after = HostAddresses(), HostAddresses()
    before.create(path)
    address = before.address_of("a.example")
    after.load(path)
    assert after.name_of(address) == "a.example"
    assert after.address_of("b.example") != address
    recreated = HostAddresses()
    recreated.create(path)
    assert recreated.name_of(address) is None


def test_invalid_lines_of_the_file_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "names"
    path.write_text("198.18.0.7 seven.example\n10.0.0.1 private.example\nmalformed\n198.18.0.8\n")
    addresses = HostAddresses()
    addresses.load(str(path))
    assert addresses.name_of("198.18.0.7") == "seven.example"
    assert addresses.name_of("10.0.0.1") is None
    assert addresses.address_of("next.example") == "198.18.0.8"


def test_file_of_names_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "names"
    addresses = HostAddresses(8)
    addresses.create(str(path))
    for number in range(100):
        addresses.address_of(f"name{number}.example")
    assert len(path.read_text().splitlines()) <= 17
    after = HostAddresses(8)
    after.load(str(path))
    assert after.name_of(addresses.address_of("name99.example")) == "name99.example"
