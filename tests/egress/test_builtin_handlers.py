"""Built-in handlers: the headers they set, the requests they refuse, no secrets in reprs."""

from __future__ import annotations

import base64
import logging
from typing import TYPE_CHECKING, Any

import pytest

import smokebox.egress
from smokebox.egress import (
    Refused,
    Request,
    Response,
    basic,
    bearer,
    chain,
    header,
    log,
    restrict,
    sign_s3,
)
from smokebox.egress.handler import check_handler, handler_name, run_handler
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Callable

    from smokebox.egress import Handler, HandlerContext

SECRET = "s3cret-value"


class FakeContext:
    """A `HandlerContext` that returns a fixed response to `forward`."""

    sandbox_id = "box-7"
    rule = "outbound_by_host['api.test']"

    def __init__(self, response: Response | None = None) -> None:
        self.response = response or Response("forwarded")
        self.forwarded: list[Request] = []

    async def forward(self, request: Request, *, to: str | None = None) -> Response:
        self.forwarded.append(request)
        return self.response


def make_request() -> Request:
    return Request("GET", "https://api.test/v1?key=k", {"authorization": "Bearer placeholder"})


async def run(handler: Handler, request: Request | None = None) -> Any:
    return await run_handler(handler, request or make_request(), None, FakeContext())


async def test_bearer_replaces_the_authorization_of_the_sandbox() -> None:
    result = await run(bearer(SECRET))
    assert result.headers.getall("Authorization") == [f"Bearer {SECRET}"]


async def test_header_sets_any_other_header() -> None:
    assert (await run(header("X-Api-Key", SECRET))).headers["x-api-key"] == SECRET


async def test_basic_sends_user_and_password() -> None:
    scheme, encoded = (await run(basic("me", SECRET))).headers["authorization"].split()
    assert (scheme, base64.b64decode(encoded).decode()) == ("Basic", f"me:{SECRET}")


@pytest.mark.parametrize(
    "handler",
    [
        bearer(SECRET),
        header("x-key", SECRET),
        basic("me", SECRET),
        sign_s3("AK", SECRET, "eu"),
        chain(log, bearer(SECRET)),
    ],
)
def test_repr_and_name_have_no_secret(handler: Handler) -> None:
    text = repr(handler) + str(handler) + str(handler_name(handler)) + f"{handler!r}"
    assert SECRET not in text
    check_handler("outbound", handler)


@pytest.mark.parametrize(
    "make",
    [
        bearer,
        lambda value: header("x-key", value),
        lambda value: basic("me", value),
        lambda value: basic(value, "password"),
        lambda value: sign_s3(value, "secret", "eu"),
        lambda value: sign_s3("key", value, "eu"),
        lambda value: sign_s3("key", "secret", "eu", session_token=value or ""),
    ],
)
@pytest.mark.parametrize("value", [None, "", f"{SECRET}\n", f"{SECRET}\r\nx: y", 7, "\u2603"])
def test_missing_or_invalid_value_is_refused_at_definition(
    make: Callable[[Any], Handler], value: Any
) -> None:
    with pytest.raises(InvalidOption) as caught:
        make(value)
    assert SECRET not in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["", "a b", "host", "Content-Length", "x:y", None])
def test_header_that_cannot_be_set_is_refused(name: Any) -> None:
    with pytest.raises(InvalidOption, match="is not a header that can be set"):
        header(name, "value")


def test_user_with_a_colon_is_refused() -> None:
    with pytest.raises(InvalidOption, match="no colon"):
        basic("a:b", "c")


@pytest.mark.parametrize("region", ["", "EU West", None])
def test_invalid_region_is_refused(region: Any) -> None:
    with pytest.raises(InvalidOption, match="is not a region"):
        sign_s3("key", "secret", region)


async def test_log_writes_a_line_without_secrets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = Request("POST", f"https://user:{SECRET}@api.test/v1?token={SECRET}")
    request.headers["authorization"] = SECRET
    with caplog.at_level(logging.INFO, "smokebox.egress"):
        assert await run(log, request) is request
    assert caplog.messages == [
        "sandbox box-7: POST https://api.test/v1 (outbound_by_host['api.test'])"
    ]


async def test_chain_passes_the_request_on_until_a_handler_responds() -> None:
    async def respond(request: Request, env: Any, context: HandlerContext) -> Response:
        return Response(request.headers["authorization"])

    async def fail(request: Request, env: Any, context: HandlerContext) -> Response:
        raise AssertionError

    result = await run(chain(bearer(SECRET), respond, fail))
    assert await result.text() == f"Bearer {SECRET}"
    assert isinstance(await run(chain(log, bearer(SECRET))), Request)


async def test_refusal_ends_a_chain() -> None:
    async def refuse(request: Request, env: Any, context: HandlerContext) -> Request:
        raise Refused("not today")

    with pytest.raises(Refused, match="not today"):
        await run(chain(refuse, bearer(SECRET)))


@pytest.mark.parametrize("handlers", [(), ("m:a",), (bearer,), (None,)])
def test_chain_of_invalid_handlers_is_refused(handlers: Any) -> None:
    with pytest.raises(InvalidOption):
        chain(*handlers)


@pytest.mark.parametrize("name", smokebox.egress.__all__)
def test_public_name_can_be_imported(name: str) -> None:
    assert getattr(smokebox.egress, name) is not None
    assert name in dir(smokebox.egress)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        smokebox.egress.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("prefix", "path", "allowed"),
    [
        ("/v1", "/v1", True),
        ("/v1", "/v1/users?q=1", True),
        ("/v1", "/v10", False),
        ("/v1", "/V1", False),
        ("/v1/", "/v1", False),
        ("/v1/", "/v1/users", True),
        ("/", "/any/thing", True),
        ("/v1/", "/v1/../v2", False),
        ("/v1/", "/v1/%2e%2e/v2", False),
        ("/v1/", "/v1/..;/v2", False),
        ("/v1/", "/v1/..%2fv2", False),
        ("/v1/", "/v1/..%5cv2", False),
    ],
)
async def test_restrict_allows_only_listed_paths(prefix: str, path: str, allowed: bool) -> None:
    request = Request("GET", f"https://api.test{path}")
    if allowed:
        assert await run(restrict(paths=[prefix]), request) is request
    else:
        with pytest.raises(Refused):
            await run(restrict(paths=[prefix]), request)


async def test_restrict_allows_only_listed_methods() -> None:
    read_only = restrict(methods=["GET", "HEAD"])
    assert (await run(read_only, Request("HEAD", "https://api.test/../x"))).method == "HEAD"
    with pytest.raises(Refused, match="POST is not allowed, only GET, HEAD"):
        await run(read_only, Request("POST", "https://api.test/"))
    disguised = Request("GET", "https://api.test/", {"X-HTTP-Method-Override": "DELETE"})
    with pytest.raises(Refused, match="x-http-method-override"):
        await run(read_only, disguised)


@pytest.mark.parametrize(
    "options",
    [
        {"methods": "GET"},
        {"methods": ["get"]},
        {"methods": []},
        {"paths": ["v1"]},
        {"paths": ["/v1?q"]},
        {"paths": [7]},
    ],
)
def test_restrict_refuses_options_that_never_match(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match="Leave"):
        restrict(**options)
