"""Conversion between text and bytes in UTF-8, with errors that give the offset."""

from __future__ import annotations

from smokebox.errors import InvalidOption, NotText


def decode_file(path: str, data: bytes) -> str:
    """Decode the content of a file. Raises `NotText`."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise NotText(
            f"{path} is not UTF-8 text (byte {error.start}).",
            hint="Use read_bytes.",
            path=path,
            offset=error.start,
        ) from error


def encode_option(option: str, data: str | bytes) -> bytes:
    """Encode an option that is text or bytes. Raises `InvalidOption`."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if not isinstance(data, str):
        raise InvalidOption(
            f"{option} is text or bytes, not {type(data).__name__}.",
            hint="Encode it first, for example with json.dumps(...).encode().",
            option=option,
        )
    try:
        return data.encode()
    except UnicodeEncodeError as error:
        raise InvalidOption(
            f"{option} has a character that UTF-8 cannot encode, at {error.start}.",
            hint="Pass bytes.",
            option=option,
        ) from None
