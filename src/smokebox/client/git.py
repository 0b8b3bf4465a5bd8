"""Repositories, cloned into a sandbox."""

from __future__ import annotations

from smokebox.client.handle import Handle
from smokebox.options import check_timeout
from smokebox.types import GitCheckout
from smokebox.wire import requests


class Git(Handle):
    """`git_checkout`."""

    async def git_checkout(
        self,
        url: str,
        target: str | None = None,
        *,
        branch: str | None = None,
        depth: int | None = None,
        timeout: float | None = None,
        username: str | None = None,
        password: str | None = None,
    ) -> GitCheckout:
        """Clone a repository from an https or http URL, by default into a directory of its name.

        The server asks for it: credentials never get into the sandbox. Cancelling ends the
        clone, of which then nothing is left.
        """
        body = requests.GitCheckout(
            url=url,
            target=target,
            branch=branch,
            depth=depth,
            timeout=check_timeout(timeout),
            username=username,
            password=password,
        )
        return await self._ask(GitCheckout, "POST", "/git/checkout", body=body, timeout=None)
