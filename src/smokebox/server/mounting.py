"""Which bucket somebody may have mounted: one that they can open, or one that the server offers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from smokebox.engine.mounts.request import Request, parse_request
from smokebox.sandbox.access import Access

if TYPE_CHECKING:
    from smokebox.server.call import Call


def request_for(
    call: Call, bucket: str, path: str, *, prefix: str, read_only: bool, access: Access
) -> Request:
    """What is to be mounted. Only who runs the server may lead it to private addresses."""
    settings = call.state.settings
    cwd = call.sandbox.cwd
    offered = settings.buckets.get(bucket) if access == Access() else None
    if offered is None:
        return parse_request(
            bucket,
            path,
            cwd=cwd,
            prefix=prefix,
            read_only=read_only,
            access=access,
            private=settings.bucket_private or not settings.needs_keys,
        )
    inside = "/".join(part for part in (offered.prefix, prefix.strip("/")) if part)
    found = parse_request(
        offered.bucket,
        path,
        cwd=cwd,
        prefix=inside,
        read_only=read_only or offered.read_only,
        access=offered.access,
        private=True,
    )
    return replace(found, name=bucket)
