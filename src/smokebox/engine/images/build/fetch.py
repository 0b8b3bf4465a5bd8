"""Downloads of ADD, under the egress policy of the build. Every redirect is checked again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from smokebox.egress.upstream import EgressFailure, UpstreamPool, UpstreamRequest
from smokebox.egress.urls import join_url, parse_url
from smokebox.errors import Forbidden, LimitReached, ServiceUnavailable
from smokebox.foundation.http1.dial import Endpoint

if TYPE_CHECKING:
    from smokebox.egress.layers import EgressLayers
    from smokebox.egress.upstream import UpstreamResponse
    from smokebox.egress.urls import Url

MAX_BYTES = 256 << 20
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 10


async def fetch(url: str, layers: EgressLayers) -> bytes:
    """Return the body of a URL.

    Raises:
        Forbidden: The policy does not allow the host, or a redirect's.
        ServiceUnavailable: There is no successful response.
        LimitReached: The body is too long.
    """
    policy = layers.egress()
    pool = UpstreamPool(policy.guard)
    try:
        place = parse_url(url)
        for _ in range(_MAX_REDIRECTS + 1):
            verdict = policy.decide(place.host, place.port)
            if verdict.action not in ("forward", "tunnel"):
                raise Forbidden(
                    f"the egress policy of the build does not allow {place.host}",
                    hint=f"Pass egress=Egress(allowed_hosts=[{place.host!r}]) or "
                    f"--egress {place.host}.",
                )
            address = verdict.address
            endpoint = Endpoint(
                place.host,
                place.port,
                tls=place.scheme == "https",
                address=address,
                named=address is not None,
            )
            with contextlib.ExitStack() as stack:
                response = await _get(pool, endpoint, place)
                stack.callback(response.release)
                if response.status not in _REDIRECTS:
                    return await _body(response, url)
                place = parse_url(join_url(place, _header(response, "location")))
        raise _failed(url, f"more than {_MAX_REDIRECTS} redirects")
    except EgressFailure as error:
        raise _failed(url, error.reason) from error
    finally:
        pool.close()


async def _get(pool: UpstreamPool, endpoint: Endpoint, place: Url) -> UpstreamResponse:
    fields = [("User-Agent", "smokebox"), ("Accept", "*/*")]
    return await pool.send(
        UpstreamRequest(
            method="GET",
            endpoint=endpoint,
            target=place.target,
            host=place.authority,
            fields=fields,
            close=True,
        )
    )


async def _body(response: UpstreamResponse, url: str) -> bytes:
    if response.status != 200:
        raise _failed(url, f"the server responds {response.status} {response.reason}".rstrip())
    data = bytearray()
    while not response.done:
        data += await response.read()
        if len(data) > MAX_BYTES:
            raise LimitReached(
                f"{url} is longer than {MAX_BYTES} bytes", hint="Use RUN curl.", limit=MAX_BYTES
            )
    return bytes(data)


def _header(response: UpstreamResponse, name: str) -> str:
    return next((value for key, value in response.fields if key.lower() == name), "")


def _failed(url: str, reason: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"{url} could not be fetched: {reason}",
        hint="Check the URL and the egress policy of the build.",
        service="http",
    )
