"""Typed access to JSON of images, which is untrusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smokebox.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_ITEMS = 10_000


class Fields:
    """A JSON object. Missing and null fields are empty; one of the wrong type raises `ImageError`.

    `where` names the object in errors.
    """

    def __init__(self, value: object, where: str) -> None:
        if value is not None and not isinstance(value, dict):
            raise damaged(where, "an object")
        self.values: Mapping[str, object] = value or {}
        self.where = where

    def text(self, name: str) -> str:
        """Return a text."""
        value = self.values.get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or "\0" in value:
            raise self._damaged(name, "a text")
        return value

    def number(self, name: str) -> int:
        """Return a whole number that is not negative."""
        value = self.values.get(name)
        if value is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._damaged(name, "a number")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a list of texts; None where there is none. A single text is a list of one."""
        value = self.values.get(name)
        if value is None:
            return None
        items = self._items(name, [value] if isinstance(value, str) else value)
        if not all(isinstance(one, str) and "\0" not in one for one in items):
            raise self._damaged(name, "a list of texts")
        return tuple(str(one) for one in items)

    def dictionary(self, name: str) -> dict[str, str]:
        """Return an object whose values are texts."""
        fields = self.fields(name)
        return {key: fields.text(key) for key in fields.values}

    def fields(self, name: str) -> Fields:
        """Return an object."""
        return Fields(self.values.get(name), f"{self.where}.{name}")

    def objects(self, name: str) -> list[Fields]:
        """Return a list of objects."""
        items = self._items(name, self.values.get(name) or [])
        return [Fields(one, f"{self.where}.{name}[{at}]") for at, one in enumerate(items)]

    def _items(self, name: str, value: object) -> list[object]:
        if not isinstance(value, list) or len(value) > _MAX_ITEMS:
            raise self._damaged(name, f"a list of at most {_MAX_ITEMS} items")
        return value

    def _damaged(self, name: str, expected: str) -> ImageError:
        return damaged(f"{self.where}.{name}", expected)


def damaged(where: str, expected: str) -> ImageError:
    """Return the error for a field that is not what the specification says."""
    return ImageError(
        f"the image is damaged: {where} is not {expected}.",
        hint="Build it again, or pull it again.",
        reason="damaged",
        image=where,
    )
