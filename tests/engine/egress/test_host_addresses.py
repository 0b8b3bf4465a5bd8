"""Made-up addresses, each for one name."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from smokebox.engine.egress.dns import NETWORK, HostAddresses

if TYPE_CHECKING:
    from pathlib import Path


def test_a_name_keeps_its_address_and_an_address_its_name() -> None:
    names = HostAddresses()
    first = names.address_of("a.example")
    assert names.address_of("b.example") != first
    assert names.address_of("a.example") == first
    assert names.name_of(first) == "a.example"
    assert ipaddress.ip_address(first) in NETWORK
    assert names.name_of("198.19.255.254") is None


def test_the_least_used_name_is_forgotten_first() -> None:
    names = HostAddresses(2)
    kept, forgotten = names.address_of("kept"), names.address_of("forgotten")
    names.address_of("kept")
    names.address_of("another")
    assert names.name_of(kept) == "kept"
    assert names.name_of(forgotten) is None
    assert names.address_of("forgotten") != forgotten


def test_addresses_are_used_again_only_after_all_others() -> None:
    names = HostAddresses(4)
    names.address_of("first")
    names._next = int(NETWORK[-2])
    assert names.address_of("last") == str(NETWORK[-2])
    # The first is still known, and keeps its address.
    assert names.address_of("one more") == str(NETWORK[2])


def test_another_engine_knows_the_names_of_before(tmp_path: Path) -> None:
    path = str(tmp_path / "names")
    before, after = HostAddresses(), HostAddresses()
    before.create(path)
    address = before.address_of("a.example")
    after.load(path)
    assert after.name_of(address) == "a.example"
    assert after.address_of("b.example") != address
    again = HostAddresses()
    again.create(path)
    assert again.name_of(address) is None


def test_what_is_broken_in_the_file_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "names"
    path.write_text("198.18.0.7 seven.example\n10.0.0.1 inside.example\nnothing\n198.18.0.8\n")
    names = HostAddresses()
    names.load(str(path))
    assert names.name_of("198.18.0.7") == "seven.example"
    assert names.name_of("10.0.0.1") is None
    assert names.address_of("next.example") == "198.18.0.8"


def test_the_file_does_not_grow_with_every_name(tmp_path: Path) -> None:
    path = tmp_path / "names"
    names = HostAddresses(8)
    names.create(str(path))
    for number in range(100):
        names.address_of(f"name{number}.example")
    assert len(path.read_text().splitlines()) <= 17
    after = HostAddresses(8)
    after.load(str(path))
    assert after.name_of(names.address_of("name99.example")) == "name99.example"
