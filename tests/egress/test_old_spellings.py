"""Options that became fields of `egress=` are refused with the new spelling in the hint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import smokebox
from smokebox import Sandbox, bucket, get_sandbox, virtual
from smokebox.egress.policy import egress_fields
from smokebox.engine.options import parse_options
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS = [field.name for field in egress_fields()]


def make_host_options(**options: Any) -> object:
    return parse_options("sandbox()", options)  # type: ignore[arg-type]


def make_sandbox(**options: Any) -> object:
    return get_sandbox("never", **options)


def make_virtual(**options: Any) -> object:
    return virtual(**options)


def make_bucket(**options: Any) -> object:
    return bucket("memory:///", **options)


MAKERS = [make_sandbox, make_virtual, make_bucket, make_host_options]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", [*FIELDS, "network"])
def test_flat_option_names_the_new_spelling(make: Callable[..., object], name: str) -> None:
    field = "allowed_hosts" if name == "network" else name
    with pytest.raises(InvalidOption) as caught:
        make(**{name: ["api.github.com"]})
    assert caught.value.hint == f"Use egress=Egress({field}=...)."


@pytest.mark.parametrize("name", [name for name in FIELDS if not name.startswith("outbound")])
def test_attribute_of_a_subclass_names_the_new_spelling(name: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        type("OldSandbox", (Sandbox,), {name: ["api.github.com"]})
    assert caught.value.hint == f"Use egress=Egress({name}=...)."


@pytest.mark.parametrize("name", ["Network", "Allow", "Decision"])
def test_old_classes_are_gone(name: str) -> None:
    assert not hasattr(smokebox, name)
