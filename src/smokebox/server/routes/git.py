"""Repositories, cloned into a sandbox without their credentials."""

from __future__ import annotations

from typing import Any

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
from smokebox.server.call import Call
from smokebox.server.endpoint import endpoint
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
async def checkout(call: Call, body: requests.GitCheckout) -> GitCheckout:
    """Clone a repository from an https or http URL.

    The server asks for it, so credentials never get into the sandbox, and asks public
    addresses only, unless it is one user's own or was started so. Closing the connection ends
    the clone, of which then nothing is left.
    """
    settings = call.state.settings
    limit: dict[str, Any] = {} if body.timeout is None else {"timeout": body.timeout}
    return await call.sandbox.git_checkout(
        body.url,
        body.target,
        branch=body.branch,
        depth=body.depth,
        username=body.username,
        password=body.password,
        allow_private=settings.git_private or not settings.needs_keys,
        **limit,
    )


ENDPOINTS = [checkout]
