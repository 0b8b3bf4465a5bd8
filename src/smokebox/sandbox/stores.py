"""Object stores from a target: a URL, a bucket's name, or an obstore store."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import obstore.store
from obstore.exceptions import BaseError
from obstore.store import (
    AzureStore,
    GCSStore,
    HTTPStore,
    LocalStore,
    MemoryStore,
    S3Store,
)

from smokebox.errors import BucketNotFound, InvalidOption
from smokebox.sandbox.access import BUCKET_NAME

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

    from smokebox.sandbox.access import Access

_STORES = (AzureStore, GCSStore, HTTPStore, LocalStore, MemoryStore, S3Store)
_CLOUDS = {"gs": "Google Cloud Storage", "az": "Azure", "abfs": "Azure", "abfss": "Azure"}

# A server that does not respond is given up after about 30 seconds, one that refuses the connection
# after two. A large body may take longer while data keeps arriving.
_RETRY: RetryConfig = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=100),
        "max_backoff": timedelta(seconds=1),
        "base": 2,
    },
}
_CLIENT: ClientConfig = {"connect_timeout": "5s", "read_timeout": "10s", "timeout": "10min"}


@dataclass(frozen=True, slots=True)
class StoreTarget:
    """A store, the prefix to use in it, and its description for messages."""

    store: ObjectStore
    prefix: str
    label: str


def open_target(target: str | ObjectStore, prefix: str, access: Access) -> StoreTarget:
    """Return the store that `target` names. Sends no request."""
    if isinstance(target, _STORES):
        _refuse_access(access, "a store that is open already", "Pass them to the store instead.")
        return StoreTarget(target, prefix, repr(target))
    if not isinstance(target, str) or not target:
        raise InvalidOption(
            f"a bucket must be a URL, a name or an obstore store, not {target!r}.",
            hint="Pass 's3://name/folder' or 'file:///folder', for example.",
            option="target",
            value=repr(target),
        )
    scheme, separator, _ = target.partition("://")
    if not separator:
        return _s3(target, prefix, access)
    url = urlsplit(target)
    path = unquote(url.path).strip("/")
    if scheme in ("s3", "s3a"):
        return _s3(url.netloc, _join_prefix(path, prefix), access)
    _refuse_access(access, f"{scheme}://", "They are for S3 buckets.")
    if scheme == "memory":
        return StoreTarget(MemoryStore(), _join_prefix(path, prefix), "memory")
    if scheme == "file":
        return _folder(unquote(url.path), prefix)
    if scheme in _CLOUDS:
        return _cloud(target, scheme, url.netloc, _join_prefix(path, prefix))
    raise InvalidOption(
        f"{target!r} is not a bucket: unknown scheme {scheme}://.",
        hint="Use s3://, gs://, az://, file:// or memory://, or a name with endpoint=.",
        option="target",
        value=target,
    )


def _join_prefix(path: str, prefix: str) -> str:
    return "/".join(part for part in (path, prefix.strip("/")) if part)


def _s3(name: str, prefix: str, access: Access) -> StoreTarget:
    if not BUCKET_NAME.fullmatch(name):
        raise InvalidOption(
            f"{name!r} is not a valid bucket name.",
            hint="Use 3 to 63 lower-case letters, digits, dots and hyphens, or a URL.",
            option="target",
            value=name,
        )
    endpoint = access.endpoint or _from_environment("AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    _check_endpoint(endpoint)
    allow_http = access.allow_http
    if allow_http is None:
        allow_http = endpoint.startswith("http://")
    store = S3Store(
        name,
        config=_s3_config(access),
        client_options={**_CLIENT, "allow_http": allow_http},
        retry_config=_RETRY,
    )
    return StoreTarget(store, prefix, f"s3://{name}" + (f" at {endpoint}" if endpoint else ""))


def _s3_config(access: Access) -> S3Config:
    if (access.access_key is None) != (access.secret_key is None):
        raise InvalidOption(
            "access_key and secret_key must be passed together.",
            hint="Pass both, or neither to take them from the environment.",
            option="secret_key" if access.secret_key is None else "access_key",
        )
    config: S3Config = {}
    if access.endpoint is not None:
        config["endpoint"] = access.endpoint
    if access.region is not None:
        config["region"] = access.region
    if access.access_key is not None and access.secret_key is not None:
        config["access_key_id"] = access.access_key
        config["secret_access_key"] = access.secret_key
    if access.session_token is not None:
        config["session_token"] = access.session_token
    if access.anonymous:
        config["skip_signature"] = True
    return config


def _check_endpoint(endpoint: str) -> None:
    url = urlsplit(endpoint)
    if endpoint and (url.scheme not in ("http", "https") or not url.hostname or url.query):
        raise InvalidOption(
            f"endpoint={endpoint!r} is not a valid server URL.",
            hint="Pass endpoint='http://127.0.0.1:9000', for example.",
            option="endpoint",
            value=endpoint,
        )


def _from_environment(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _folder(folder: str, prefix: str) -> StoreTarget:
    if not os.path.isdir(folder):
        raise BucketNotFound(
            f"there is no folder {folder!r}.",
            hint="Create it first, and pass its absolute path: file:///folder.",
            bucket=folder,
        )
    return StoreTarget(LocalStore(folder), prefix, f"file://{folder}")


def _cloud(target: str, scheme: str, name: str, prefix: str) -> StoreTarget:
    try:
        store = obstore.store.from_url(
            f"{scheme}://{name}", client_options=_CLIENT, retry_config=_RETRY
        )
    except (BaseError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidOption(
            f"{target!r} cannot be opened: {reason}",
            hint=f"Set credentials of {_CLOUDS[scheme]} in the environment, or pass a store.",
            option="target",
            value=target,
        ) from error
    return StoreTarget(store, prefix, f"{scheme}://{name}")


def _refuse_access(access: Access, what: str, hint: str) -> None:
    for name in access.__slots__:
        if getattr(access, name) not in (None, False):
            raise InvalidOption(f"{name}= cannot be used with {what}.", hint=hint, option=name)
