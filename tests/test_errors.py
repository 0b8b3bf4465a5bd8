"""The exception tree: codes, hints, builtin bases and pickling."""

from __future__ import annotations

import errno
import pickle

import pytest

from smokebox import errors
from smokebox.errors import InvalidOption, PathError, PathNotFound, SmokeboxError

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, SmokeboxError)
]


def make(kind: type[SmokeboxError]) -> SmokeboxError:
    if issubclass(kind, PathError):
        return kind("/a/b", hint="Look elsewhere.", attempt=2)
    return kind("it broke.", hint="Fix it.", attempt=2)


@pytest.mark.parametrize("kind", CLASSES)
def test_pickling_keeps_class_message_and_fields(kind: type[SmokeboxError]) -> None:
    before = make(kind)
    after = pickle.loads(pickle.dumps(before))
    assert type(after) is kind
    assert (str(after), after.hint, after.attempt) == (str(before), before.hint, 2)


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in CLASSES]
    assert len(set(codes)) == len(codes)


def test_str_is_the_message_and_the_hint() -> None:
    error = InvalidOption("local() has no option 'cdw'.", hint="Did you mean 'cwd'?")
    assert str(error) == "local() has no option 'cdw'. Did you mean 'cwd'?"


@pytest.mark.parametrize(
    ("kind", "builtin", "number"),
    [
        (errors.PathNotFound, FileNotFoundError, errno.ENOENT),
        (errors.PathExists, FileExistsError, errno.EEXIST),
        (errors.PathIsDirectory, IsADirectoryError, errno.EISDIR),
        (errors.PathNotDirectory, NotADirectoryError, errno.ENOTDIR),
        (errors.AccessDenied, PermissionError, errno.EACCES),
        (errors.StorageFull, OSError, errno.ENOSPC),
    ],
)
def test_path_errors_are_builtin_errors(
    kind: type[PathError], builtin: type[OSError], number: int
) -> None:
    error = kind("/a/b")
    assert isinstance(error, builtin)
    assert (error.errno, error.filename, error.path) == (number, "/a/b", "/a/b")


def test_fields_are_attributes() -> None:
    error = InvalidOption("no.", option="cwd", value=3)
    assert (error.option, error.value) == ("cwd", 3)
    with pytest.raises(AttributeError):
        _ = error.missing


def test_path_error_has_a_default_message() -> None:
    assert str(PathNotFound("/x")) == "no such file or directory: /x"
    assert str(PathNotFound("/x", hint="Make it.")) == "no such file or directory: /x. Make it."
