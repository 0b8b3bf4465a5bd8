"""What object stores say when they refuse, as the classes of `smokebox.errors`."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError

from obstore.exceptions import (
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from smokebox.errors import (
    AccessDenied,
    BucketNotFound,
    InvalidOption,
    InvalidPath,
    PathError,
    PathNotFound,
    ServiceUnavailable,
    SmokeboxError,
    StorageFull,
    Unsupported,
)
from smokebox.sandbox.filesystems.filesystem import from_os_error

if TYPE_CHECKING:
    from collections.abc import Iterator

CREDENTIALS_HINT = (
    "Credentials come from access_key= and secret_key= (and session_token=), or else from "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of this process; "
    "anonymous=True asks without any."
)

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"})
_NO_ROOM = frozenset(
    {"QuotaExceeded", "EntityTooLarge", "XMinioStorageFull", "InsufficientStorage"}
)
# Where obstore looks for a machine's own credentials when it was given none.
_METADATA_HOST = "169.254.169.254"


@contextmanager
def translated(path: str, place: str) -> Iterator[None]:
    """Raise what an object store raises inside as an error of ours about `path`.

    `InvalidPathError`, for a listing with keys in it that obstore cannot name, passes.
    """
    try:
        yield
    except (InvalidPathError, SmokeboxError):
        raise
    except (BaseError, HTTPError, URLError, OSError, ValueError) as error:
        raise translate(error, path, place) from error


def translate(error: Exception, path: str, place: str) -> SmokeboxError:
    """The error of ours for what an object store said of `path`; `place` names the store."""
    text = _text(error)
    status, code = _first(_STATUS, text), _first(_CODE, text)
    if code in _NO_BUCKET:
        return BucketNotFound(
            f"there is no bucket {place}.",
            hint="Check its name and endpoint, or make it first.",
            bucket=place,
        )
    if _is_denied(error, text, status):
        return AccessDenied(
            path, f"{place} refused these credentials ({code or status}).", hint=CREDENTIALS_HINT
        )
    if code in _NO_ROOM or status == "507":
        return StorageFull(path, hint="Free some space in the bucket and try again.")
    if isinstance(error, FileNotFoundError) or status == "404":
        return PathNotFound(path)
    return _of_transport(text, status, place) or _of_the_rest(error, text, code, path)


def _is_denied(error: Exception, text: str, status: str) -> bool:
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return True
    return status in ("401", "403") or _METADATA_HOST in text


def _of_transport(text: str, status: str, place: str) -> SmokeboxError | None:
    if "builder error" in text:
        return InvalidOption(
            f"{place} is not reached over https.",
            hint="Pass allow_http=True if it speaks plain http.",
            option="allow_http",
        )
    if "incorrectly configured region" in text or status == "301":
        return InvalidOption(
            f"{place} is in another region.", hint="Pass its region=.", option="region"
        )
    sending = "error sending request" in text or "operation timed out" in text
    if sending or status.startswith("5") or status == "429":
        return ServiceUnavailable(
            f"{place} did not answer ({status or 'no connection'}).",
            hint="Check the endpoint and that the server runs, then try again.",
            service=place,
        )
    return None


def _of_the_rest(error: Exception, text: str, code: str, path: str) -> SmokeboxError:
    number = _first(_OS_ERROR, text)
    if number:
        return from_os_error(OSError(int(number), text), path)
    if isinstance(error, NotSupportedError):
        return Unsupported(f"the store cannot do this at {path}.", hint="Use another store.")
    if code == "KeyTooLongError" or "Could not parse path" in text:
        return InvalidPath(f"{path} cannot be the name of an object.", path=path)
    return PathError(path, f"{code or text}: {path}")


def _text(error: Exception) -> str:
    """What was said, without the debug print, which repeats it at length."""
    if isinstance(error, HTTPError):
        body = error.read(4096).decode(errors="replace")
        return f"status code: {error.code} {body}"
    if isinstance(error, URLError):
        return f"error sending request: {error.reason}"
    return str(error).partition("\n\nDebug source:")[0]


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
