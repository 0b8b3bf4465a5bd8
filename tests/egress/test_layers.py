"""Layers of an egress policy: settings, and changes made at run time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smokebox.egress.handler import (
    CLIENT,
    HandlerContext,
    HandlerRegistry,
    LocalHandlers,
    NamedHandler,
    Refused,
)
from smokebox.egress.layers import (
    MAX_CHANGES,
    EgressChanges,
    EgressLayers,
    check_opened,
    split_handlers,
)
from smokebox.egress.message import Request, Response
from smokebox.egress.policy import Egress
from smokebox.errors import InvalidOption, LimitReached

NO_CONTEXT: Any = None


async def handler(request: Request, env: Any, context: HandlerContext) -> Request:
    request.headers["x-by"] = "handler"
    return request


async def other(request: Request, env: Any, context: HandlerContext) -> Request:
    request.headers["x-by"] = "other"
    return request


def action(layers: EgressLayers, host: str, port: int = 443) -> str:
    return layers.egress().decide(host, port).action


def with_changes(changes: EgressChanges, **settings: Any) -> EgressLayers:
    return EgressLayers(changes=changes).with_settings(settings)


def test_new_settings_replace_old_ones() -> None:
    layers = EgressLayers().with_settings({"internet": True, "denied_hosts": ["a.test"]})
    layers = layers.with_settings({"denied_hosts": ["c.test"]})
    assert layers.settings == {"denied_hosts": ["c.test"]}
    assert action(layers, "b.test") == "refuse"


@pytest.mark.parametrize("invalid", [{"internet": 1}, {"intranet": True}, {"tcp": ["x"]}])
def test_invalid_settings_are_refused(invalid: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        EgressLayers().with_settings(invalid)


def test_allowing_a_host_does_not_affect_others() -> None:
    layers = with_changes(EgressChanges().allow("new.test"), outbound_by_host={"api.test": "m:a"})
    assert action(layers, "new.test") == "forward"
    assert action(layers, "api.test") == "handle"
    assert action(layers, "b.test") == "refuse"
    unrestricted = with_changes(EgressChanges().allow("new.test"), internet=True)
    assert action(unrestricted, "b.test") == "forward"


def test_allowing_a_host_removes_its_denial() -> None:
    layers = with_changes(EgressChanges().allow("a.test"), internet=True, denied_hosts=["A.test"])
    assert action(layers, "a.test") == "forward"


def test_host_denied_by_a_glob_cannot_be_allowed_by_name() -> None:
    layers = with_changes(EgressChanges().allow("a.test"), denied_hosts=["*.test"])
    with pytest.raises(InvalidOption, match=r"a\.test stays closed: denied_hosts has '\*\.test'"):
        check_opened(layers.egress(), "a.test")


def test_denying_a_host_overrides_all_that_allow_it() -> None:
    changes = EgressChanges().allow("a.test").deny("a.test").deny("api.test").deny("db.test")
    layers = with_changes(
        changes,
        internet=True,
        outbound_by_host={"api.test": "m:a", "*.test": "m:b"},
        tcp=["db.test:5432"],
        pass_through=["db.test"],
    )
    assert action(layers, "a.test") == "refuse"
    assert action(layers, "api.test") == "refuse"
    assert action(layers, "db.test", 5432) == "refuse"
    assert action(layers, "b.test") == "handle"


def test_resent_settings_keep_changes() -> None:
    settings = {"allowed_hosts": ["a.test", "b.test"], "denied_hosts": ["c.test"]}
    layers = with_changes(
        EgressChanges().remove_allowed("a.test").remove_denied("c.test").allow("d.test"), **settings
    )
    resent = layers.with_settings(settings)
    assert resent == layers
    assert [action(resent, f"{letter}.test") for letter in "abcd"] == [
        "refuse",
        "forward",
        "refuse",
        "forward",
    ]


def test_handler_set_at_run_time_overrides_and_can_be_removed() -> None:
    settings = {"outbound_by_host": {"a.test": "m:a", "b.test": "m:b"}, "outbound": "m:all"}
    changes = EgressChanges().set_handler("A.test.", "m:new").set_handler("b.test", None)
    policy = with_changes(changes, **settings).egress()
    assert policy.decide("a.test").handler == "m:new"
    assert policy.decide("b.test").handler == "m:all"
    without = with_changes(changes.set_handler("", None), **settings).egress()
    assert without.decide("b.test").action == "refuse"


def test_internet_can_be_turned_on_and_off_at_run_time() -> None:
    assert action(with_changes(EgressChanges().set_internet(True)), "a.test") == "forward"
    off = with_changes(EgressChanges().set_internet(False), internet=True)
    assert action(off, "a.test") == "refuse"
    back = EgressLayers(settings=off.settings, changes=off.changes.set_internet(None))
    assert action(back, "a.test") == "forward"


@pytest.mark.parametrize("host", ["", "https://a.test", "a b", 7])
def test_change_of_an_invalid_host_is_refused(host: Any) -> None:
    changes = EgressChanges()
    for change in (changes.allow, changes.deny, changes.remove_allowed, changes.remove_denied):
        with pytest.raises(InvalidOption):
            change(host)


def test_number_of_changes_is_limited() -> None:
    changes = EgressChanges(allowed={f"h{number}.test": True for number in range(MAX_CHANGES)})
    with pytest.raises(LimitReached, match="4096 changes"):
        changes.allow("one.more.test")


def test_layers_survive_json_and_ignore_unknown_fields() -> None:
    changes = (
        EgressChanges().allow("a.test").set_handler("b.test", "m:b").set_handler("c.test", None)
    )
    layers = with_changes(changes, outbound=CLIENT, max_requests=7)
    data = json.loads(json.dumps(layers.to_json()))
    assert EgressLayers.from_json(data) == layers
    assert (
        EgressLayers.from_json({"settings": {"added_later": 1}, "changes": {"added_later": 1}})
        == EgressLayers()
    )


def test_functions_stay_in_the_client_and_are_sent_as_markers() -> None:
    split = split_handlers(
        Egress(
            outbound=handler,
            outbound_by_host={"A.test": other, "b.test:81": handler, "c.test": "m:c"},
            allowed_hosts=("*.test",),
        )
    )
    assert split.settings == {
        "outbound": CLIENT,
        "outbound_by_host": {"A.test": CLIENT, "b.test:81": CLIENT, "c.test": "m:c"},
        "allowed_hosts": ["*.test"],
    }
    assert split.handlers == {"": handler, "a.test": other, "b.test:81": handler}


async def test_latest_runner_with_the_slot_handles_the_request() -> None:
    registry = HandlerRegistry()
    layers = EgressLayers().with_settings(
        {"outbound_by_host": {"a.test": CLIENT}, "outbound": "m:all"}
    )
    policy = layers.egress(registry.bind)
    named = policy.decide("b.test").handler
    assert isinstance(named, NamedHandler)
    assert named.__name__ == "m:all"
    bound: Any = policy.decide("a.test").handler

    async def handled_by() -> str:
        request: Request = await bound(Request("GET", "http://a.test/"), None, NO_CONTEXT)
        return request.headers["x-by"]

    with pytest.raises(Refused, match="runs in the process of a client, and none is connected"):
        await handled_by()
    detach_first = registry.attach(LocalHandlers({"a.test": handler}))
    detach_second = registry.attach(LocalHandlers({"a.test": other}))
    registry.attach(LocalHandlers({"": handler}))
    assert registry.slots == {"", "a.test"}
    assert await handled_by() == "other"
    detach_second()
    assert await handled_by() == "handler"
    detach_first()
    detach_first()
    with pytest.raises(Refused):
        await handled_by()


async def test_local_handler_may_respond_itself() -> None:
    async def respond(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response(env)

    registry = HandlerRegistry()
    registry.attach(LocalHandlers({"": respond}))
    bound: Any = registry.bind("", CLIENT)
    response = await bound(Request("GET", "http://a.test/"), "the env", NO_CONTEXT)
    assert await response.text() == "the env"
