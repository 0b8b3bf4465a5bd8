"""Every exception Smokebox raises, in one tree.

    SmokeboxError
    ├── InvalidOption        also ValueError          an unknown option, or a bad value
    ├── InvalidPath          also ValueError          empty, NUL, or not UTF-8
    ├── PathError            also OSError             a failure at one path
    │   ├── PathNotFound     also FileNotFoundError
    │   ├── PathExists       also FileExistsError
    │   ├── PathIsDirectory  also IsADirectoryError
    │   ├── PathNotDirectory also NotADirectoryError
    │   ├── DirectoryNotEmpty
    │   ├── SymlinkLoop
    │   ├── AccessDenied     also PermissionError     permissions, read-only, credentials
    │   ├── FileTooLarge
    │   └── StorageFull
    ├── NotText              also ValueError          not UTF-8 where text was expected
    ├── Unsupported                                   not supported; nothing was changed
    ├── BucketNotFound       also FileNotFoundError
    ├── ServiceUnavailable   also ConnectionError     a remote peer did not respond
    ├── DeadlineExceeded     also TimeoutError        an operation took too long
    ├── SandboxGone                                   the sandbox stopped during the call
    │   └── SandboxRestarted                          the handle belongs to an earlier run
    ├── NotFound             also LookupError         no sandbox, session, process, backup or image
    ├── Conflict                                      a name or path is taken or in use
    ├── ProcessEnded                                  the process ended before the awaited event
    ├── LimitReached                                  a limit of the sandbox was reached
    ├── RequestTooLarge                               the body is over the server's limit
    ├── Unauthorized                                  the key is missing or unknown
    ├── Forbidden                                     the key does not allow this
    ├── GitError                                      a repository could not be cloned
    ├── ImageError                                    an image or a layer of it is not usable
    ├── RegistryError                                 an image could not be pulled or pushed
    ├── InvalidDockerfile    also ValueError          a Dockerfile that is not valid
    ├── BuildFailed                                   an instruction of a build failed
    ├── ModelError                                    a model gave no response
    │   ├── ModelUnavailable                          overloaded, rate-limited, cut off, stalled
    │   ├── ContextOverflow                           longer than the model's context
    │   └── ModelRefused                              the provider rejects the key or the request
    ├── SessionBusy                                   the session works on something else
    ├── Fenced                                        another writer has taken the session
    ├── Aborted                                       the work was aborted
    ├── ResultUnavailable                             a model gave no valid result
    ├── StoreTooNew                                   a later version wrote the record
    ├── IsolationUnavailable                          this host cannot run the requested tier
    ├── BadSnapshot          also ValueError
    ├── MissingDependency    also ImportError         an extra is not installed
    └── NotAwaited           also AttributeError      `await` is missing before the call

A command that fails raises nothing: a non-zero exit code is a result.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class SmokeboxError(Exception):
    """Base of all errors: `message` says what failed, `hint` what to do next.

    `code` is stable and meant for programs. `retryable` is true if the same call can succeed
    later. `fields` has the values in the message; each is also an attribute.
    """

    code: ClassVar[str] = "error"
    retryable: bool = False

    def __init__(self, message: str, *, hint: str = "", **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.fields = fields

    def __str__(self) -> str:
        if not self.hint:
            return self.message
        stop = "" if self.message.endswith((".", "!", "?")) else "."
        return f"{self.message}{stop} {self.hint}"

    def __getattr__(self, name: str) -> object:
        # `self.fields` itself may be missing while unpickling: look in __dict__ only.
        fields: dict[str, object] = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.fields))


def _rebuild(
    kind: type[SmokeboxError], message: str, hint: str, fields: dict[str, object]
) -> SmokeboxError:
    return kind(message, hint=hint, **fields)


class InvalidOption(SmokeboxError, ValueError):
    """An unknown option, or an invalid value of one. Fields: `option`, `value`."""

    code = "invalid_option"


class InvalidPath(SmokeboxError, ValueError):
    """A path that is not valid in any sandbox. Fields: `path`."""

    code = "invalid_path"


class PathError(SmokeboxError, OSError):
    """A failure at one path, which is in `path` (and in OSError's `filename`)."""

    code = "path_error"
    reason: ClassVar[str] = "cannot use"
    number: ClassVar[int] = errno.EIO

    def __init__(self, path: str, message: str = "", *, hint: str = "", **fields: object) -> None:
        SmokeboxError.__init__(self, message or f"{self.reason}: {path}", hint=hint, **fields)
        self.path = path
        self.errno = self.number
        self.strerror = self.message
        self.filename = path

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_at_path, (type(self), self.path, self.message, self.hint, self.fields))


def _rebuild_at_path(
    kind: type[PathError], path: str, message: str, hint: str, fields: dict[str, object]
) -> PathError:
    return kind(path, message, hint=hint, **fields)


class PathNotFound(PathError, FileNotFoundError):
    code = "path_not_found"
    reason = "no such file or directory"
    number = errno.ENOENT


class PathExists(PathError, FileExistsError):
    code = "path_exists"
    reason = "already exists"
    number = errno.EEXIST


class PathIsDirectory(PathError, IsADirectoryError):
    code = "path_is_directory"
    reason = "is a directory"
    number = errno.EISDIR


class PathNotDirectory(PathError, NotADirectoryError):
    code = "path_not_directory"
    reason = "not a directory"
    number = errno.ENOTDIR


class DirectoryNotEmpty(PathError):
    code = "directory_not_empty"
    reason = "directory not empty"
    number = errno.ENOTEMPTY


class SymlinkLoop(PathError):
    code = "symlink_loop"
    reason = "too many levels of symbolic links"
    number = errno.ELOOP


class AccessDenied(PathError, PermissionError):
    """Missing permissions, a read-only path, or credentials that were refused."""

    code = "access_denied"
    reason = "access denied"
    number = errno.EACCES


class FileTooLarge(PathError):
    code = "file_too_large"
    reason = "file too large"
    number = errno.EFBIG


class StorageFull(PathError):
    code = "storage_full"
    reason = "no space left"
    number = errno.ENOSPC


class NotText(SmokeboxError, ValueError):
    """Bytes that are not UTF-8 where text was expected. Fields: `path`, `offset`."""

    code = "not_text"


class Unsupported(SmokeboxError):
    """The sandbox does not support this. Nothing changed. Fields: `operation`, `sandbox`."""

    code = "unsupported"


class BucketNotFound(SmokeboxError, FileNotFoundError):
    """The object store has no such bucket. Fields: `bucket`."""

    code = "bucket_not_found"


class ServiceUnavailable(SmokeboxError, ConnectionError):
    """A remote peer did not respond. Fields: `service`."""

    code = "service_unavailable"
    retryable = True


class DeadlineExceeded(SmokeboxError, TimeoutError):
    """An operation timed out. Fields: `operation`, `timeout`."""

    code = "deadline_exceeded"
    retryable = True


class SandboxGone(SmokeboxError):
    """The sandbox stopped during the call. Fields: `reason`."""

    code = "sandbox_gone"
    retryable = True


class SandboxRestarted(SandboxGone):
    """The handle belongs to an earlier run of the sandbox. Fields: `reason`."""

    code = "sandbox_restarted"
    retryable = False


class NotFound(SmokeboxError, LookupError):
    """Nothing has that name. Fields: `kind` ("session", "process", ...), `name`."""

    code = "not_found"


class Conflict(SmokeboxError):
    """A name or path is taken or in use. Fields: `kind`, `name`."""

    code = "conflict"


class ProcessEnded(SmokeboxError):
    """A process ended before the awaited event. Fields: `process`, `exit_code`."""

    code = "process_ended"


class LimitReached(SmokeboxError):
    """A limit of the sandbox or of the server was reached. Fields: `limit`."""

    code = "limit_reached"
    retryable = True


class RequestTooLarge(SmokeboxError):
    """The body of a request is over the server's limit. Fields: `limit`, in bytes."""

    code = "request_too_large"


class Unauthorized(SmokeboxError):
    """The server requires an API key, and got none or an unknown one."""

    code = "unauthorized"


class Forbidden(SmokeboxError):
    """The key is valid, and does not allow this. Fields: `key`."""

    code = "forbidden"


class GitError(SmokeboxError):
    """A repository could not be cloned. Fields: `reason`, `url` (without credentials).

    `reason` is "repository_not_found", "branch_not_found", "authentication", "network" or
    "failed". Only "network" can be retried.
    """

    code = "git_failed"

    def __init__(self, message: str, *, hint: str = "", **fields: object) -> None:
        super().__init__(message, hint=hint, **fields)
        self.retryable = fields.get("reason") == "network"


class ImageError(SmokeboxError):
    """An image, or a layer of it, is damaged, unsafe or incomplete. Fields: `reason`, `image`.

    `reason` is "damaged", "mismatch" (not what its digest says), "unsafe", "unsupported" or
    "missing" (of a layer). `image` is the digest or name of what is not usable.
    """

    code = "image_error"


class RegistryError(SmokeboxError):
    """An image could not be pulled or pushed. Fields: `reason`, `registry`, `image`.

    `reason` is "authentication", "denied", "rate_limit" (with `retry_after`, seconds or None),
    "network", "digest" (the registry sent other content than it promised), "platform",
    "unsupported" or "failed". Only "rate_limit" and "network" can be retried. An image that does
    not exist is `NotFound` with kind "image".
    """

    code = "registry_failed"

    def __init__(self, message: str, *, hint: str = "", **fields: object) -> None:
        super().__init__(message, hint=hint, **fields)
        self.retryable = fields.get("reason") in ("network", "rate_limit")


class InvalidDockerfile(SmokeboxError, ValueError):
    """A Dockerfile is not valid. Fields: `file`, `line`."""

    code = "invalid_dockerfile"


class BuildFailed(SmokeboxError):
    """An instruction of a build failed. Its last output is in `output`.

    Fields: `instruction`, `file`, `line`, `exit_code` (None if it is no command), `output`, and
    `sandbox`, the id of a sandbox with the files at that point if one was asked for.
    """

    code = "build_failed"


class ModelError(SmokeboxError):
    """A model gave no response. Fields: `model`."""

    code = "model_error"


class ModelUnavailable(ModelError):
    """The model is overloaded, rate-limited, cut off or silent, and may respond later.

    Fields: `model`, `retry_after` (seconds, or None), `status` (of HTTP, or None).
    """

    code = "model_unavailable"
    retryable = True


class ContextOverflow(ModelError):
    """The conversation is longer than the model's context. Fields: `model`."""

    code = "context_overflow"


class ModelRefused(ModelError):
    """The provider rejects the key, the model's name, or the request. Fields: `model`, `status`."""

    code = "model_refused"


class SessionBusy(SmokeboxError):
    """The session works on something else, here or in another process. Fields: `session`."""

    code = "session_busy"
    retryable = True


class Fenced(SmokeboxError):
    """Another writer has taken the session; this one may not write. Fields: `session`."""

    code = "fenced"


class Aborted(SmokeboxError):
    """The work was aborted. Fields: `reason`."""

    code = "aborted"


class ResultUnavailable(SmokeboxError):
    """A model gave no valid result. Fields: `reason`, and `text`, its last message."""

    code = "result_unavailable"


class StoreTooNew(SmokeboxError):
    """A later version of Smokebox wrote the record. Fields: `version`."""

    code = "store_too_new"


class IsolationUnavailable(SmokeboxError):
    """This host cannot run the requested tier; the hint has the fix. Fields: `tier`."""

    code = "isolation_unavailable"


class BadSnapshot(SmokeboxError, ValueError):
    """Bytes that are not a snapshot, or one of an incompatible version."""

    code = "bad_snapshot"


class MissingDependency(SmokeboxError, ImportError):
    """An optional dependency is not installed. Fields: `package`, `extra`."""

    code = "missing_dependency"


class NotAwaited(SmokeboxError, AttributeError):
    """A result was used before it was awaited. Fields: `attribute`."""

    code = "not_awaited"


_BY_NUMBER: dict[int, type[PathError]] = {
    errno.ENOENT: PathNotFound,
    errno.EEXIST: PathExists,
    errno.EISDIR: PathIsDirectory,
    errno.ENOTDIR: PathNotDirectory,
    errno.ENOTEMPTY: DirectoryNotEmpty,
    errno.ELOOP: SymlinkLoop,
    errno.EACCES: AccessDenied,
    errno.EPERM: AccessDenied,
    errno.EROFS: AccessDenied,
    errno.EFBIG: FileTooLarge,
    errno.ENOSPC: StorageFull,
    errno.EDQUOT: StorageFull,
}


def from_os_error(error: OSError, path: str) -> PathError:
    """Return the `PathError` subclass for an `OSError` about `path`."""
    kind = _BY_NUMBER.get(error.errno or 0)
    if kind is None:
        return PathError(path, f"{error.strerror or error}: {path}")
    if kind is StorageFull:
        return StorageFull(path, hint="Free some space and try again.")
    return kind(path)
