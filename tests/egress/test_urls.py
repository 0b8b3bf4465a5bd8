"""URLs in normal form, refused ambiguous URLs, and private addresses."""

from __future__ import annotations

import pytest

from smokebox.egress.pattern import is_public
from smokebox.egress.urls import join_url, parse_url
from smokebox.errors import InvalidOption

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
def test_ambiguous_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidOption):
        parse_url(url)


NORMAL_FORMS = [
    ("https://API.EXAMPLE.COM:443/v1/", "https://api.example.com/v1/"),
    ("https://api.example.com", "https://api.example.com/"),
    ("http://api.example.com:80/x?q=1#part", "http://api.example.com/x?q=1"),
    ("https://[0:0:0:0:0:0:0:1]:8080/x", "https://[::1]:8080/x"),
    ("https://api.example.com./", "https://api.example.com/"),
    ("https://api.example.com/%C3%A9/é", "https://api.example.com/%C3%A9/%C3%A9"),
]


@pytest.mark.parametrize(("url", "normal"), NORMAL_FORMS)
def test_url_is_normalized(url: str, normal: str) -> None:
    assert str(parse_url(url)) == normal


PRIVATE = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "168.63.129.16", "224.0.0.1",
    "255.255.255.255", "240.0.0.1", "198.18.0.1", "::", "::1", "::ffff:10.0.0.1", "::127.0.0.1",
    "::ffff:7f00:1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "fc00::1",
    "fd00:ec2::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "2001:db8::1", "2001::1",
    "::ffff:0:10.0.0.1", "3fff::1", "5f00::1", "name",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_private_address_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["93.184.216.34", "8.8.8.8", "172.32.0.1", "2606:2800:220:1::1", "64:ff9b::808:808"]
)
def test_internet_address_is_public(address: str) -> None:
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
def test_redirect_is_resolved_against_the_request_url(reference: str, url: str) -> None:
    assert join_url(parse_url("https://a.test/d/f?old"), reference) == url
