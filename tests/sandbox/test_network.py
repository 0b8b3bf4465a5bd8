"""The policy: what it covers, what it refuses, and what it does not accept."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from smokebox.errors import InvalidOption
from smokebox.sandbox.addresses import is_public
from smokebox.sandbox.network import Allow, Network, check_network
from smokebox.sandbox.urls import join_url, parse_url

COVERED = [
    ("https://api.example.com/v1/", "https://api.example.com/v1/users?q=1#part"),
    ("https://api.example.com/v1/", "https://API.EXAMPLE.COM:443/v1/"),
    ("https://api.example.com/v1", "https://api.example.com/v1"),
    ("https://api.example.com/v1", "https://api.example.com/v1/x"),
    ("https://api.example.com", "https://api.example.com"),
    ("https://api.example.com", "https://api.example.com/any/thing"),
    ("https://api.example.com:8443", "https://api.example.com:8443/"),
    ("http://api.example.com:80", "http://api.example.com/"),
    ("https://*.example.com", "https://a.example.com/"),
    ("https://*.example.com", "https://a.b.example.com/"),
    ("https://[::1]:8080/", "https://[0:0:0:0:0:0:0:1]:8080/x"),
    ("https://api.example.com", "https://api.example.com./"),
    ("https://api.example.com", "https://api.example.com/%C3%A9/é"),
    ("*", "http://anything.example/"),
]

NOT_COVERED = [
    ("https://api.example.com/v1/", "https://api.example.com/v1"),
    ("https://api.example.com/v1", "https://api.example.com/v10"),
    ("https://api.example.com/v1", "https://api.example.com/V1"),
    ("https://api.example.com", "http://api.example.com/"),
    ("https://api.example.com", "https://api.example.com:8443/"),
    ("https://api.example.com", "https://api.example.com.evil.test/"),
    ("https://api.example.com", "https://evil.test/api.example.com"),
    ("https://*.example.com", "https://example.com/"),
    ("https://*.example.com", "https://evilexample.com/"),
    ("https://*.example.com", "https://.example.com/"),
]


@pytest.mark.parametrize(("entry", "url"), COVERED)
def test_an_entry_covers_what_is_inside_it(entry: str, url: str) -> None:
    assert Network(allow=[entry]).decide("GET", url).allowed


@pytest.mark.parametrize(("entry", "url"), NOT_COVERED)
def test_an_entry_covers_nothing_else(entry: str, url: str) -> None:
    assert not Network(allow=[entry]).decide("GET", url).allowed


AMBIGUOUS = [
    "https://a.test/v1/../x", "https://a.test/v1/./x", "https://a.test/v1/%2e%2e/x",
    "https://a.test/v1/..;/x", "https://a.test/a%2fb", "https://a.test/a%5cb",
    "https://a.test/a\\b", "https://a.test/%252e%252e/x", "https://a.test/%00", "https://a.test/%0d",
    "https://a.test/%zz", "https://user@a.test/", "https://user:pw@a.test/", "https://a.test@evil/",
    "https://a.test\\@evil/", "https://a.test /", "https://a.test/\n", "https://", "https:///x",
    "//a.test/", "a.test", "ftp://a.test/", "file:///etc/passwd", "javascript:1", "https://a.test:0/",
    "https://a.test:99999/", "https://a.test:x/", "https://0x7f.1/", "https://2130706433/",
    "https://017700000001/", "https://127.1/", "https://[::1/", "https://[x]/", "https://ünï.test/",
    "https://*.a.test/", "https://a..test/", "https://-a.test/",
]  # fmt: skip


@pytest.mark.parametrize("url", AMBIGUOUS)
def test_a_url_that_could_be_read_two_ways_is_refused(url: str) -> None:
    decision = Network(allow=["*"]).decide("GET", url)
    assert not decision.allowed
    assert decision.url is None and decision.reason


def test_only_listed_methods_are_allowed_and_the_refusal_names_them() -> None:
    network = Network(allow=["https://a.test/"])
    assert network.decide("HEAD", "https://a.test/").allowed
    decision = network.decide("POST", "https://a.test/")
    assert not decision.allowed and "only GET, HEAD" in decision.reason


def test_the_methods_of_the_policy_hold_where_an_entry_names_none() -> None:
    network = Network(
        allow=["https://a.test/", Allow(url="https://b.test/", methods=["PUT"])], methods=["POST"]
    )
    assert network.decide("POST", "https://a.test/").allowed
    assert not network.decide("GET", "https://a.test/").allowed
    assert network.decide("PUT", "https://b.test/").allowed
    assert not network.decide("POST", "https://b.test/").allowed


def test_the_most_precise_entry_gives_the_headers() -> None:
    network = Network(
        allow=[
            Allow(url="https://*.a.test/", headers={"X": "any-host"}),
            Allow(url="https://x.a.test/", headers={"X": "this-host"}),
            Allow(url="https://x.a.test/deep/", headers={"X": "this-path"}),
        ]
    )
    assert network.decide("GET", "https://y.a.test/").headers == {"X": "any-host"}
    assert network.decide("GET", "https://x.a.test/").headers == {"X": "this-host"}
    assert network.decide("GET", "https://x.a.test/deep/er").headers == {"X": "this-path"}


def test_nothing_is_allowed_by_default() -> None:
    assert not Network().decide("GET", "https://example.com/").allowed


def test_secrets_are_not_in_what_is_printed() -> None:
    network = Network(allow=[Allow(url="https://a.test/", headers={"X-Key": "hidden-value"})])
    assert "hidden" not in repr(network) + str(network.decide("GET", "https://a.test/"))


def test_a_policy_travels_to_another_process() -> None:
    network = Network(
        allow=["https://a.test/v1/", Allow(url="https://b.test/", headers={"X": "y"})]
    )
    assert pickle.loads(pickle.dumps(network)) == network


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"alow": []}, "Did you mean 'allow'"),
    ({"allow": "https://a.test/"}, "list of URLs"),
    ({"allow": [3]}, "URL or an Allow"),
    ({"allow": ["a.test"]}, "scheme, host and path"),
    ({"allow": ["https://a.test/?q=1"]}, "query"),
    ({"allow": ["https://a.test/#x"]}, "query"),
    ({"allow": ["https://*.*.test/"]}, "host name"),
    ({"allow": ["https://a.*.test/"]}, "host name"),
    ({"allow": ["https://u:p@a.test/"]}, "user name"),
    ({"methods": ["get"]}, "upper-case"),
    ({"methods": "GET"}, "upper-case"),
    ({"methods": []}, "upper-case"),
    ({"timeout": 0}, "positive"),
    ({"timeout": True}, "positive"),
    ({"max_response_bytes": -1}, "positive"),
    ({"max_redirects": -1}, "whole number"),
    ({"ca_file": "/nowhere.pem"}, "names no file"),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES)
def test_a_mistake_in_the_policy_is_told_where_it_is_made(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        Network(**options)


ENTRY_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"url": "https://*.a.test/", "private": True}, "one host by name"),
    ({"url": "https://a.test/", "headers": {"a b": "c"}}, "name of a header"),
    ({"url": "https://a.test/", "headers": {"Host": "c"}}, "belongs to the connection"),
    ({"url": "https://a.test/", "headers": {"X": "a\r\nY: b"}}, "printable ASCII"),
    ({"url": "https://a.test/", "headers": {"X": ""}}, "printable ASCII"),
    ({"url": "https://a.test/", "headers": ["X"]}, "mapping"),
    ({"url": 3}, "is a str"),
    ({"url": "https://a.test/", "header": {}}, "Did you mean 'headers'"),
]


@pytest.mark.parametrize(("options", "words"), ENTRY_MISTAKES)
def test_a_mistake_in_an_entry_is_told_where_it_is_made(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidOption, match=words):
        Allow(**options)


def test_a_bad_secret_is_not_in_the_error() -> None:
    with pytest.raises(InvalidOption) as caught:
        Allow(url="https://a.test/", headers={"X-Key": "hidden\n"})
    assert "hidden" not in str(caught.value) + repr(caught.value.fields)


def test_a_list_of_urls_is_a_policy() -> None:
    network = check_network(["https://a.test/"])
    assert isinstance(network, Network) and network.decide("GET", "https://a.test/x").allowed
    assert check_network(None) is None
    with pytest.raises(InvalidOption, match="network is a Network"):
        check_network(True)  # type: ignore[arg-type]


PRIVATE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "168.63.129.16", "224.0.0.1",
    "255.255.255.255", "240.0.0.1", "198.18.0.1", "::", "::1", "::ffff:10.0.0.1", "::127.0.0.1",
    "::ffff:7f00:1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "fc00::1",
    "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "2001:db8::1", "2001::1",
    "::ffff:0:10.0.0.1", "3fff::1", "5f00::1", "name",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_lead_inside_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "172.32.0.1", "2606:2800:220:1::1", "64:ff9b::808:808"]
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


JOINED = [
    ("/x", "https://a.test/x"),
    ("x", "https://a.test/d/x"),
    ("../x", "https://a.test/x"),
    ("../../../x", "https://a.test/x"),
    ("?q", "https://a.test/d/f?q"),
    ("//b.test/x", "https://b.test/x"),
    ("http://b.test/", "http://b.test/"),
    ("./", "https://a.test/d/"),
    ("..", "https://a.test/"),
    ("javascript:x", "javascript:x"),
    ("x?a=/../b", "https://a.test/d/x?a=/../b"),
]


@pytest.mark.parametrize(("reference", "url"), JOINED)
def test_a_redirect_is_read_from_where_it_came(reference: str, url: str) -> None:
    assert join_url(parse_url("https://a.test/d/f?old"), reference) == url
