"""The buckets of a project, offered by a server to whoever may ask it."""

from __future__ import annotations

from pathlib import Path

from smokebox.client.bindings import load
from smokebox.errors import InvalidOption
from smokebox.sandbox.access import with_environment
from smokebox.server.settings import Bucket


def offered(folder: str) -> dict[str, Bucket]:
    """The buckets of the smokebox.toml in a folder, with the credentials of its .env."""
    project = load(Path(folder))
    if not project.buckets:
        raise InvalidOption(
            f"no smokebox.toml in {folder} or above names a bucket.",
            hint='Write one with [buckets.NAME] and bucket = "...", or leave --buckets out.',
            option="--buckets",
            value=folder,
        )
    return {
        name: Bucket(
            bucket=one.target,
            prefix=one.prefix,
            read_only=one.read_only,
            access=with_environment(one.access),
        )
        for name, one in ((name, project.bucket(name)) for name in project.buckets)
    }
