"""Checks of names: ids, sessions, processes, terminals, ports, users and labels."""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping
from typing import NoReturn

from smokebox.errors import InvalidOption

RESERVED = frozenset({"admin", "api", "internal", "localhost", "root", "smokebox", "system", "www"})
"""Ids that would be ambiguous in a URL or host name."""

LONGEST_ID = 63
LONGEST_NAME = 128
LONGEST_USER = 32
LONGEST_LABEL = 63
LONGEST_LABEL_VALUE = 255
MAX_LABELS = 64
# The highest uid, (uid_t) -1, means "no user" in system calls.
LAST_UID = 2**32 - 2

_ID = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
# Also used as file names: no slash, and no leading dot or hyphen.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\$?")
_UID = re.compile(r"0|[1-9][0-9]{0,9}")
_IMAGE_SOURCES = frozenset(("archive", "dir", "host", "oci", "recipe", "scratch", "snapshot"))
_IMAGE_NAME = re.compile(
    r"(?:[a-z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
)
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?")
_SNAPSHOT_ID = re.compile(r"snap-[0-9a-f]{32}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def check_id(id: object) -> str:
    """Return `id` if it is a valid sandbox id: a DNS label that is not reserved."""
    text = _text("id", "a sandbox id", id)
    if not 1 <= len(text) <= LONGEST_ID:
        _refuse(
            "id",
            text,
            f"a sandbox id has 1 to {LONGEST_ID} characters, and {_shown(text)} has {len(text)}.",
            "Use a shorter one, for example a hash." if text else "Pass at least one character.",
        )
    if not _ID.fullmatch(text):
        _refuse("id", text, f"{_shown(text)} is not a sandbox id.", _id_hint(text))
    if text in RESERVED:
        _refuse("id", text, f"the sandbox id {text!r} is reserved.", f"Use 'my-{text}'.")
    if text.startswith("xn--"):
        # A browser would display the label in the script that it encodes.
        _refuse("id", text, f"the sandbox id {text!r} begins with 'xn--'.", "Leave that out.")
    return text


def check_session_name(name: object) -> str:
    """Return `name` if it is a valid session name."""
    return _name("session", "a session name", name)


def check_process_id(id: object) -> str:
    """Return `id` if it is a valid process id, and thus a valid name for its log files."""
    return _name("process_id", "a process id", id)


def check_terminal_id(id: object) -> str:
    """Return `id` if it is a valid terminal id."""
    return _name("id", "a terminal id", id)


def check_context_id(id: object) -> str:
    """Return `id` if it is a valid code context id."""
    return _name("context", "a context id", id)


def check_snapshot_name(name: object) -> str:
    """Return `name` if it is a valid name of a snapshot, and not an id."""
    text = _name("name", "the name of a snapshot", name)
    if is_snapshot_id(text):
        _refuse("name", text, f"{text!r} is an id of a snapshot.", "Choose a name for people.")
    return text


def is_snapshot_id(text: str | None) -> bool:
    """Return whether a text is the id of a snapshot, and not a name."""
    return text is not None and _SNAPSHOT_ID.fullmatch(text) is not None


def check_port(port: object, *, option: str = "port") -> int:
    """Return `port` if it is a TCP port: a whole number from 1 to 65535."""
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        _refuse(
            option,
            port,
            f"{option} is a whole number from 1 to 65535, not {_shown(port)}.",
            f"Pass for example {option}=8080.",
        )
    return port


def check_user(user: object) -> str:
    """Return `user` if it is a valid user name, or a uid in digits."""
    if isinstance(user, int) and not isinstance(user, bool):
        _refuse("user", user, "a user is a str, not int.", f"Pass user='{user}' for that uid.")
    text = _text("user", "a user", user)
    if _UID.fullmatch(text) and int(text) <= LAST_UID:
        return text
    if len(text) > LONGEST_USER or not _USER.fullmatch(text):
        _refuse(
            "user",
            text,
            f"{_shown(text)} is neither the name of a user nor a uid.",
            f"Pass a name of at most {LONGEST_USER} letters, digits, '_', '-' and '.' that does "
            f"not begin with a digit, or a uid from 0 to {LAST_UID}, without a group.",
        )
    return text


def check_labels(labels: object) -> dict[str, str]:
    """Return a copy of `labels` if all have valid names and short, printable values."""
    if labels is None:
        return {}
    if not isinstance(labels, Mapping):
        _refuse(
            "labels",
            labels,
            f"labels is a mapping of names to values, not {type(labels).__name__}.",
            "Pass labels={'name': 'value'}.",
        )
    if len(labels) > MAX_LABELS:
        _refuse(
            "labels",
            len(labels),
            f"a sandbox has at most {MAX_LABELS} labels, not {len(labels)}.",
            "Store other data in a file of the sandbox.",
        )
    return {check_label(name): _label_value(name, value) for name, value in labels.items()}


def check_label(name: object) -> str:
    """Return `name` if it is a valid label name."""
    text = _text("labels", "the name of a label", name)
    if len(text) > LONGEST_LABEL or not _LABEL.fullmatch(text):
        _refuse(
            "labels",
            text,
            f"{_shown(text)} is not the name of a label.",
            f"Use at most {LONGEST_LABEL} letters, digits, '-', '_', '.' and '/', "
            "with a letter or digit at both ends.",
        )
    return text


def random_id() -> str:
    """Return a random sandbox id: 80 random bits in 16 letters and digits."""
    return base64.b32encode(secrets.token_bytes(10)).decode().lower()


def _name(option: str, what: str, value: object) -> str:
    text = _text(option, what, value)
    if len(text) > LONGEST_NAME or not _NAME.fullmatch(text):
        _refuse(
            option,
            text,
            f"{_shown(text)} cannot be {what}.",
            f"Use 1 to {LONGEST_NAME} letters, digits and '_.:@+-', "
            "beginning with a letter, a digit or '_'.",
        )
    return text


def _label_value(name: str, value: object) -> str:
    text = _text("labels", f"the value of the label {name!r}", value)
    if len(text) > LONGEST_LABEL_VALUE or _CONTROL.search(text):
        _refuse(
            "labels",
            text,
            f"the label {name!r} cannot have the value {_shown(text)}.",
            f"Use at most {LONGEST_LABEL_VALUE} printable characters.",
        )
    return text


def _text(option: str, what: str, value: object) -> str:
    if not isinstance(value, str):
        _refuse(option, value, f"{what} is a str, not {_shown(value)}.", "Pass a str.")
    return value


def _id_hint(text: str) -> str:
    lowered = text.lower()
    if lowered != text and _ID.fullmatch(lowered) and lowered not in RESERVED:
        return f"Ids are lowercase: use {lowered!r}."
    return (
        "Use lowercase letters, digits and hyphens (a-z, 0-9, -), "
        "with a letter or digit at both ends."
    )


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse(option: str, value: object, message: str, hint: str) -> NoReturn:
    raise InvalidOption(message, hint=hint, option=option, value=value)


def check_image_name(name: object) -> str:
    """Return a name to give an image, such as `app:latest` or `registry.test/team/app:1`."""
    if not isinstance(name, str) or not is_image_name(name):
        raise InvalidOption(
            f"{name!r:.300} is not a name for an image.",
            hint="Use lower-case letters, digits, '.', '_', '-' and '/', and a tag after ':'; the "
            f"names of image sources are taken: {', '.join(sorted(_IMAGE_SOURCES))}.",
            option="names",
            value=name,
        )
    return name


def is_image_name(name: str) -> bool:
    """Return whether an image may have a name."""
    known = len(name) <= 255 and _IMAGE_NAME.fullmatch(name) is not None
    return known and name.partition(":")[0] not in _IMAGE_SOURCES
