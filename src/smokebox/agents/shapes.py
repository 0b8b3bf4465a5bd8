"""A Python type as a JSON schema, and JSON as a value of that type.

Through pydantic where it is installed and knows the type, else through msgspec.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from smokebox.agents.schemas import inline
from smokebox.errors import InvalidOption

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

MAX_FAULTS = 8
_MAX_SHOWN = 60


class Shape(ABC, Generic[T]):
    """What values of one type look like. `schema` has no references but recursive ones."""

    schema: dict[str, Any]

    @staticmethod
    def of(kind: type[T] | object, what: str) -> Shape[T]:
        """The shape of a type, which `what` names in the error where models cannot fill it."""
        failed = ""
        for made_by in (_ByPydantic, _ByMsgspec):
            try:
                shape: Shape[T] = made_by(kind)
            except ImportError:
                continue
            except Exception as error:
                failed = failed or str(error).split("\n")[0]
                continue
            if not shape.schema:
                failed = "it says nothing about what is wanted"
                break
            return shape
        raise InvalidOption(
            f"{what}: no model can give a value of type {_named(kind)}: {failed.rstrip('.')}.",
            hint="Use a pydantic model, a dataclass, a TypedDict, a msgspec.Struct, or plain "
            "types such as int, list[str] and Literal.",
            option=what,
            value=_named(kind),
        )

    @abstractmethod
    def read(self, value: object) -> T:
        """What was decoded from JSON, as a value. Raises `ValueError` with all faults."""

    @abstractmethod
    def dump(self, value: T) -> object:
        """The value as what JSON can hold."""


class _ByPydantic(Shape[T]):
    def __init__(self, kind: Any) -> None:
        from pydantic import TypeAdapter

        self._adapter: TypeAdapter[T] = TypeAdapter(kind)
        self.schema = inline(self._adapter.json_schema())

    def read(self, value: object) -> T:
        from pydantic import ValidationError

        try:
            # From JSON, where a strict model still takes a date as text.
            return self._adapter.validate_json(_encode(value))
        except ValidationError as error:
            raise ValueError(_faults(error)) from error

    def dump(self, value: T) -> object:
        return self._adapter.dump_python(value, mode="json")


class _ByMsgspec(Shape[T]):
    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind, strict=False)
        self.schema = inline(msgspec.json.schema(kind))

    def read(self, value: object) -> T:
        try:
            return self._decoder.decode(_encode(value))
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from error

    def dump(self, value: T) -> object:
        return msgspec.to_builtins(value)


def _encode(value: object) -> str:
    # The stdlib's, which has no limit on integers.
    return json.dumps(value, allow_nan=False)


def _faults(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_context=False)
    lines = [_fault(cast("dict[str, Any]", fault)) for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        lines.append(f"and {len(faults) - MAX_FAULTS} more.")
    return "\n".join(lines)


def _fault(fault: dict[str, Any]) -> str:
    place = ""
    for step in fault["loc"]:
        place += f"[{step}]" if isinstance(step, int) else f".{step}"
    said = f"{place.lstrip('.')}: {fault['msg']}" if place else str(fault["msg"])
    if fault["type"] == "missing":
        return said
    shown = json.dumps(fault["input"], default=repr)
    return f"{said}, not {shown if len(shown) <= _MAX_SHOWN else shown[:_MAX_SHOWN] + '...'}"


def _named(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) and not _is_generic(kind) else str(kind)


def _is_generic(kind: object) -> bool:
    return bool(getattr(kind, "__args__", ()))
