"""Every exception Smokebox raises, in one tree.

    SmokeboxError
    ├── InvalidOption        also ValueError          an unknown option, or a bad value
    ├── InvalidPath          also ValueError          empty, NUL, or not UTF-8
    ├── PathError            also OSError             what went wrong at one path
    │   ├── PathNotFound     also FileNotFoundError
    │   ├── PathExists       also FileExistsError
    │   ├── PathIsDirectory  also IsADirectoryError
    │   ├── PathNotDirectory also NotADirectoryError
    │   ├── DirectoryNotEmpty
    │   ├── SymlinkLoop
    │   ├── AccessDenied     also PermissionError     permissions, read-only, credentials
    │   ├── FileTooLarge
    │   └── StorageFull
    ├── NotText              also ValueError          not UTF-8 where text was asked for
    ├── Unsupported                                   cannot be done; nothing was changed
    ├── BucketNotFound       also FileNotFoundError
    ├── ServiceUnavailable   also ConnectionError     a remote peer did not answer
    ├── DeadlineExceeded     also TimeoutError        an operation took too long
    ├── SandboxGone                                   the sandbox stopped under the call
    │   └── SandboxRestarted                          the handle is of a former run
    ├── NotFound             also LookupError         no sandbox, session, process, backup or image
    ├── Conflict                                      the name, or the place, is taken
    ├── ProcessEnded                                  it ended before what was waited for
    ├── LimitReached                                  the sandbox may not have more
    ├── RequestTooLarge                               a request that no server would read
    ├── Unauthorized                                  no key, or one that opens nothing
    ├── Forbidden                                     a key that does not open this
    ├── GitError                                      a repository that was not cloned
    ├── ModelError                                    a model that gave no answer
    │   ├── ModelUnavailable                          overloaded, limited, cut off, stalled
    │   ├── ContextOverflow                           more than the model can read
    │   └── ModelRefused                              a key, a name or a request it rejects
    ├── SessionBusy                                   a session that works on something else
    ├── Fenced                                        another writer has taken the session
    ├── Aborted                                       work that was called off
    ├── ResultUnavailable                             a model that gave no valid result
    ├── StoreTooNew                                   a record that a later version wrote
    ├── IsolationUnavailable                          this host cannot isolate as asked
    ├── BadSnapshot          also ValueError
    └── MissingDependency    also ImportError         an extra that is not installed

A command that fails is not here: a non-zero exit is a result.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class SmokeboxError(Exception):
    """The root: what failed, in `message`; what to do next, in `hint`.

    `code` is stable and meant for programs, `retryable` says whether the same
    call can succeed later, and `fields` holds what the message was made from.
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
    """An option nobody knows, or a value it cannot take. Fields: `option`, `value`."""

    code = "invalid_option"


class InvalidPath(SmokeboxError, ValueError):
    """A path that no sandbox can hold. Fields: `path`."""

    code = "invalid_path"


class PathError(SmokeboxError, OSError):
    """Something went wrong at one path, which is in `path` (and in OSError's `filename`)."""

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
    """Permissions, a read-only place, or credentials that do not open it."""

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
    """Bytes that are not UTF-8 where text was asked for. Fields: `path`, `offset`."""

    code = "not_text"


class Unsupported(SmokeboxError):
    """The sandbox cannot do this, and has changed nothing. Fields: `operation`, `sandbox`."""

    code = "unsupported"


class BucketNotFound(SmokeboxError, FileNotFoundError):
    """The object store answered that there is no such bucket. Fields: `bucket`."""

    code = "bucket_not_found"


class ServiceUnavailable(SmokeboxError, ConnectionError):
    """A remote peer did not answer. Fields: `service`."""

    code = "service_unavailable"
    retryable = True


class DeadlineExceeded(SmokeboxError, TimeoutError):
    """An operation took longer than it may. Fields: `operation`, `timeout`."""

    code = "deadline_exceeded"
    retryable = True


class SandboxGone(SmokeboxError):
    """The sandbox stopped under the call. Fields: `reason`."""

    code = "sandbox_gone"
    retryable = True


class SandboxRestarted(SandboxGone):
    """What the handle stood for ended with a former run of the sandbox. Fields: `reason`."""

    code = "sandbox_restarted"
    retryable = False


class NotFound(SmokeboxError, LookupError):
    """Nothing has that name. Fields: `kind` ("session", "process", ...), `name`."""

    code = "not_found"


class Conflict(SmokeboxError):
    """A name or a place is taken. Fields: `kind`, `name`."""

    code = "conflict"


class ProcessEnded(SmokeboxError):
    """A process ended before what was waited for came. Fields: `process`, `exit_code`."""

    code = "process_ended"


class LimitReached(SmokeboxError):
    """A limit of the sandbox holds it back. Fields: `limit`."""

    code = "limit_reached"
    retryable = True


class RequestTooLarge(SmokeboxError):
    """The body of a request is longer than the server takes. Fields: `limit`, in bytes."""

    code = "request_too_large"


class Unauthorized(SmokeboxError):
    """The server wants a key, and got none, or one that it does not know."""

    code = "unauthorized"


class Forbidden(SmokeboxError):
    """The key is known, and not for this. Fields: `key`."""

    code = "forbidden"


class GitError(SmokeboxError):
    """A repository could not be cloned. Fields: `reason`, `url` (without credentials).

    `reason` is one of "repository_not_found", "branch_not_found", "authentication",
    "network", which alone can be retried, and "failed".
    """

    code = "git_failed"

    def __init__(self, message: str, *, hint: str = "", **fields: object) -> None:
        super().__init__(message, hint=hint, **fields)
        self.retryable = fields.get("reason") == "network"


class ModelError(SmokeboxError):
    """A model gave no answer. Fields: `model`."""

    code = "model_error"


class ModelUnavailable(ModelError):
    """It may answer later: overloaded, limited, cut off, silent.

    Fields: `model`, `retry_after` (seconds, or None), `status` (of HTTP, or None).
    """

    code = "model_unavailable"
    retryable = True


class ContextOverflow(ModelError):
    """The conversation is longer than the model can read. Fields: `model`."""

    code = "context_overflow"


class ModelRefused(ModelError):
    """The provider rejects the key, the model's name, or the request. Fields: `model`, `status`."""

    code = "model_refused"


class SessionBusy(SmokeboxError):
    """The session works on something else, here or in another process. Fields: `session`."""

    code = "session_busy"
    retryable = True


class Fenced(SmokeboxError):
    """Another writer has taken the session: nothing more is written here. Fields: `session`."""

    code = "fenced"


class Aborted(SmokeboxError):
    """The work was called off. Fields: `reason`."""

    code = "aborted"


class ResultUnavailable(SmokeboxError):
    """A model gave no valid result. Fields: `reason`, and `text`, what it said instead."""

    code = "result_unavailable"


class StoreTooNew(SmokeboxError):
    """A record that a later version of Smokebox wrote. Fields: `version`."""

    code = "store_too_new"


class IsolationUnavailable(SmokeboxError):
    """This host cannot isolate as asked; the hint says what mends it. Fields: `tier`."""

    code = "isolation_unavailable"


class BadSnapshot(SmokeboxError, ValueError):
    """Bytes that are not a snapshot, or one made by something incompatible."""

    code = "bad_snapshot"


class MissingDependency(SmokeboxError, ImportError):
    """An optional part is not installed. Fields: `package`, `extra`."""

    code = "missing_dependency"
