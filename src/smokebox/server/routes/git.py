"""Git repositories, cloned into a sandbox without their credentials."""

from __future__ import annotations

from typing import Any

from smokebox.engine.git.repository import parse_repository
from smokebox.errors import (
    Conflict,
    DeadlineExceeded,
    GitError,
    InvalidOption,
    InvalidPath,
    PathError,
    SandboxGone,
    Unsupported,
)
from smokebox.server.endpoint import ApiCall, endpoint
from smokebox.server.tenancy.ceilings import check_hosts
from smokebox.types import GitCheckout
from smokebox.wire import requests

_ERRORS = (
    InvalidOption,
    InvalidPath,
    PathError,
    Conflict,
    GitError,
    DeadlineExceeded,
    SandboxGone,
    Unsupported,
)


@endpoint("POST", "/sandboxes/{id}/git/checkout", errors=_ERRORS, slow=True)
async def checkout(call: ApiCall, body: requests.CheckOutRepository) -> GitCheckout:
    """Clone a repository from an https or http URL.

    The server fetches it, so credentials never get into the sandbox. It only connects to public
    addresses of other hosts, and to networks that the operator granted. Closing the connection
    cancels the clone and removes what was cloned so far.
    """
    check_hosts(call.principal, [parse_repository(body.url).url.host])
    limit: dict[str, Any] = {} if body.timeout is None else {"timeout": body.timeout}
    return await call.sandbox.git_checkout(
        body.url,
        body.target,
        branch=body.branch,
        depth=body.depth,
        username=body.username,
        password=body.password,
        allow_private=call.private_access,
        **limit,
    )


ENDPOINTS = [checkout]
