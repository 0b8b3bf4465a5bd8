"""The option --egress: allowed hosts, and fields of the policy by name."""

from __future__ import annotations

import pytest

from smokebox.cli.options import parse_egress_words
from smokebox.egress.policy import Egress, parse_egress
from smokebox.errors import InvalidOption


def test_words_become_the_fields_of_a_policy() -> None:
    words = [
        "api.github.com",
        "allowed_hosts=a.test,b.test",
        "internet=true",
        "scrub=false",
        "tcp=b.test:5432",
        "hosts=b.test=10.0.0.7:99",
        "outbound_by_host=a.test=package.module:handler",
        "max_requests=9",
        "requests_per_second=0.5",
    ]
    assert parse_egress(parse_egress_words(words)) == Egress(
        allowed_hosts=["api.github.com", "a.test", "b.test"],
        internet=True,
        scrub=False,
        tcp=["b.test:5432"],
        hosts={"b.test": "10.0.0.7:99"},
        outbound_by_host={"a.test": "package.module:handler"},
        max_requests=9,
        requests_per_second=0.5,
    )


def test_no_words_change_nothing() -> None:
    assert parse_egress_words(None) is None


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("alowed_hosts=a.test", "Did you mean 'allowed_hosts'"),
        ("internet=yes", "internet is True or False"),
        ("max_bytes=many", "max_bytes is a positive number"),
        ("hosts=a.test", "takes NAME=VALUE"),
    ],
)
def test_invalid_words_are_refused(word: str, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        parse_egress(parse_egress_words([word]))
