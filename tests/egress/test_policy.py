"""Decisions of an egress policy, and options refused at definition."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smokebox.egress.handler import CLIENT, HandlerContext, handler_name, run_handler
from smokebox.egress.message import Request, Response
from smokebox.egress.policy import Egress, EgressInForce
from smokebox.errors import InvalidOption


async def handler(request: Request, env: Any, context: HandlerContext) -> Request:
    return request


async def other(request: Request, env: Any, context: HandlerContext) -> Request:
    return request


class CallableHandler:
    async def __call__(self, request: Request, env: Any, context: HandlerContext) -> Request:
        return request


HOSTS = ["api.example.com", "example.com", "evil.example.com", "other.test", "192.0.2.7", "::1"]


def decide(policy: Egress, host: str, port: int = 443, *, sni: bool = False) -> tuple[str, str]:
    verdict = policy.decide(host, port, sni=sni)
    return verdict.action, verdict.rule


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("port", [22, 80, 443])
def test_default_refusal_names_the_option_to_set(host: str, port: int) -> None:
    verdict = Egress().decide(host, port)
    assert verdict.action == "refuse"
    assert host in verdict.reason
    assert ("allowed_hosts=" in verdict.reason) or ("tcp=" in verdict.reason)
    assert not Egress().resolves(host)
    assert Egress().closed


def test_denied_hosts_override_everything_else() -> None:
    policy = Egress(
        internet=True, allowed_hosts=["*.example.com"], denied_hosts=["evil.*"], outbound=handler
    )
    assert decide(policy, "evil.example.com") == ("refuse", "denied_hosts['evil.*']")
    assert decide(policy, "api.example.com") == ("handle", "outbound")


def test_host_outside_allowed_hosts_is_refused_despite_a_handler() -> None:
    policy = Egress(allowed_hosts=["api.test"], outbound=handler, internet=True)
    assert decide(policy, "other.test") == ("refuse", "allowed_hosts")
    assert decide(policy, "api.test")[0] == "handle"


def test_empty_allowed_hosts_refuse_every_host() -> None:
    policy = Egress(allowed_hosts=[], internet=True)
    assert decide(policy, "other.test") == ("refuse", "allowed_hosts")


def test_exact_name_overrides_globs_and_precise_globs_override_others() -> None:
    table = {"*": "m:a", "*.example.com": "m:b", "api.example.com": "m:c", "*.com": "m:d"}
    policy = Egress(outbound_by_host=table)
    found = {
        host: policy.decide(host).handler
        for host in ("api.example.com", "www.example.com", "b.com", "x.test", "example.com")
    }
    assert found == {
        "api.example.com": "m:c",
        "www.example.com": "m:b",
        "b.com": "m:d",
        "x.test": "m:a",
        "example.com": "m:d",
    }


def test_allowed_hosts_are_forwarded_without_internet() -> None:
    policy = Egress(allowed_hosts=["api.test"])
    assert decide(policy, "api.test") == ("forward", "allowed_hosts['api.test']")
    assert decide(policy, "API.test.", 80) == ("forward", "allowed_hosts['api.test']")


def test_other_ports_need_tcp_or_a_handler_with_the_port() -> None:
    policy = Egress(internet=True, tcp=["db.test:5432"], outbound_by_host={"api.test:8080": "m:a"})
    assert decide(policy, "db.test", 5432) == ("tunnel", "tcp['db.test:5432']")
    assert decide(policy, "db.test", 5433) == ("refuse", "tcp")
    assert decide(policy, "db.test", 443) == ("forward", "internet")
    assert decide(policy, "api.test", 8080) == ("handle", "outbound_by_host['api.test:8080']")
    assert decide(policy, "api.test", 443) == ("forward", "internet")


def test_pass_through_applies_only_to_the_server_name_of_tls() -> None:
    policy = Egress(pass_through=["pinned.test"])
    assert decide(policy, "pinned.test", sni=True) == ("tunnel", "pass_through['pinned.test']")
    assert decide(policy, "pinned.test")[0] == "refuse"
    assert policy.resolves("pinned.test")
    assert not policy.closed


def test_opened_host_is_forwarded_and_does_not_affect_others() -> None:
    restricted = EgressInForce(allowed_hosts=["a.test"], opened_hosts=["b.test"])
    assert decide(restricted, "b.test") == ("forward", "allow_host('b.test')")
    assert decide(restricted, "a.test")[0] == "forward"
    unrestricted = EgressInForce(opened_hosts=["b.test"], outbound_by_host={"c.test": handler})
    assert decide(unrestricted, "c.test")[0] == "handle"
    assert decide(unrestricted, "b.test")[0] == "forward"
    assert decide(unrestricted, "d.test")[0] == "refuse"


def test_verdict_has_the_address_of_the_host() -> None:
    policy = Egress(internet=True, hosts={"pypi.test": "127.0.0.1:8081", "six.test": "[::1]:80"})
    assert policy.decide("pypi.test").address == "127.0.0.1:8081"
    assert policy.decide("six.test").address == "[::1]:80"
    assert policy.decide("b.test").address is None


def test_spellings_of_an_address_are_the_same_host() -> None:
    policy = Egress(internet=True, denied_hosts=["192.0.2.7", "2001:db8::1"])
    for host in ("192.0.2.7", "::ffff:192.0.2.7", "::FFFF:c000:207", "2001:DB8:0::1"):
        assert decide(policy, host)[0] == "refuse", host


def test_internationalized_names_match_in_punycode() -> None:
    policy = Egress(allowed_hosts=["bücher.test"])
    assert decide(policy, "xn--bcher-kva.test")[0] == "forward"


@given(st.sampled_from(HOSTS), st.integers(1, 65535), st.booleans(), st.booleans())
def test_denied_host_is_refused_with_any_other_options(
    host: str, port: int, internet: bool, sni: bool
) -> None:
    policy = Egress(
        internet=internet,
        denied_hosts=[host],
        allowed_hosts=["*"],
        outbound=handler,
        tcp=["*:22", "*:443"],
        pass_through=["*"],
    )
    assert policy.decide(host, port, sni=sni).action == "refuse"
    assert not policy.resolves(host)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allowed_hosts": "api.test"}, "allowed_hosts is a list"),
        ({"allowed_hosts": ["https://api.test/v1"]}, "is a URL"),
        ({"allowed_hosts": ["api.test:443"]}, "is not a host name"),
        ({"allowed_hosts": [""]}, "is not a host"),
        ({"allowed_hosts": [7]}, "is not a host"),
        ({"denied_hosts": ["a" * 64 + ".test"]}, "longer than 63"),
        ({"denied_hosts": [".".join(["abcdefgh"] * 30)]}, "longer than 253"),
        ({"denied_hosts": ["a b"]}, "is not a host name"),
        ({"outbound_by_host": {"": handler}}, "is not a host"),
        ({"outbound_by_host": {"https://a.test": handler}}, "is a URL"),
        ({"outbound_by_host": {"a.test": 7}}, r"outbound_by_host\['a.test'\] is a function"),
        ({"outbound_by_host": {"a.test": "no path"}}, "is a function, or"),
        ({"outbound_by_host": {"a.test": "@clients"}}, "is a function, or"),
        ({"outbound_by_host": {"a.test": len}}, "does not take"),
        ({"outbound_by_host": [handler]}, "is a table"),
        ({"outbound_by_host": {"A.test": handler, "a.test.": other}}, "two handlers for 'a.test'"),
        ({"outbound_by_host": {"a.test:0": handler}}, "port from 1 to 65535"),
        ({"outbound_by_host": {"a.test:65536": handler}}, "port from 1 to 65535"),
        ({"outbound": lambda request: request}, "does not take"),
        ({"tcp": ["db.test"]}, "port from 1 to 65535"),
        ({"tcp": ["db.test:70000"]}, "port from 1 to 65535"),
        ({"tcp": "db.test:1"}, "is a list"),
        ({"hosts": {"*.test": "127.0.0.1"}}, "without globs"),
        ({"hosts": {"a.test": "127.0.0.1:99999"}}, "port from 1 to 65535"),
        ({"hosts": {"a.test": 1}}, "is not a host"),
        ({"hosts": {"a.test": "*.b.test"}}, "single addresses"),
        ({"internet": "yes"}, "internet is True or False"),
        ({"scrub": None}, "scrub is True or False"),
        ({"max_requests": 0}, "max_requests is a positive number"),
        ({"max_bytes": True}, "max_bytes is a positive number"),
        ({"requests_per_second": float("inf")}, "requests_per_second is a positive"),
        ({"alowed_hosts": []}, "has no option 'alowed_hosts'"),
        ({"allowed_hosts": ["b.test"], "outbound_by_host": {"a.test": handler}}, "never be used"),
        ({"denied_hosts": ["*.test"], "outbound_by_host": {"a.test": handler}}, "never be used"),
        ({"denied_hosts": ["*.test"], "tcp": ["a.test:22"]}, "never be used"),
    ],
)
def test_invalid_options_are_refused_at_definition(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message) as caught:
        Egress(**options)
    assert caught.value.hint


@pytest.mark.parametrize(
    "value", [handler, CallableHandler(), functools.partial(handler), "package.module:name", CLIENT]
)
def test_function_object_or_path_can_be_a_handler(value: Any) -> None:
    assert Egress(outbound=value).decide("a.test").handler is value


def test_handler_name_is_its_function_path_or_class() -> None:
    assert handler_name(handler) == "handler"
    assert handler_name("m:a") == "m:a"
    assert handler_name(CallableHandler()) == "CallableHandler"
    assert handler_name(None) is None


async def test_plain_function_can_be_a_handler() -> None:
    request, response = Request("GET", "http://a.test/"), Response("x")
    context: Any = None
    assert await run_handler(lambda r, e, c: response, request, None, context) is response
    with pytest.raises(TypeError, match="neither a Request nor a Response"):
        await run_handler(lambda r, e, c: None, request, None, context)  # type: ignore[arg-type, return-value]
