"""Tests of structured results: schemas, values and faults."""

from __future__ import annotations

import datetime
import enum
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pydantic
import pytest

from smokebox.agents.results import FINISH, GIVE_UP, ResultCollector, ResultSpec
from smokebox.errors import InvalidOption
from smokebox.testing import ScriptedModel


class Line(pydantic.BaseModel):
    title: str
    price: Annotated[float, pydantic.Field(ge=0, description="In euros.")]


class Invoice(pydantic.BaseModel):
    lines: list[Line]
    first: Line
    status: Literal["paid"] = "paid"


class Tree(pydantic.BaseModel):
    name: str
    children: list[Tree] = []


class Point(TypedDict):
    x: int
    y: int


@dataclass
class Review:
    verdict: Literal["good", "bad"]
    on: datetime.date


class Packet(msgspec.Struct):
    size: int
    parts: list[int] = []


class Colour(enum.Enum):
    RED = "red"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


@pytest.mark.parametrize(
    ("kind", "arguments", "value"),
    [
        (Line, {"title": "a", "price": 2}, Line(title="a", price=2)),
        (Review, {"verdict": "bad", "on": "2026-01-02"}, Review("bad", datetime.date(2026, 1, 2))),
        (Point, {"x": 1, "y": 2}, {"x": 1, "y": 2}),
        (Packet, {"size": 1}, Packet(1)),
        (int, {"result": 4}, 4),
        (list[str], {"result": ["a"]}, ["a"]),
        (list[Packet], {"result": [{"size": 1}]}, [Packet(1)]),
        (Literal["a", "b"], {"result": "b"}, "b"),
        (int | None, {"result": None}, None),
        (Colour, {"result": "red"}, Colour.RED),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (tuple[int, str], {"result": [1, "a"]}, (1, "a")),
        (Pet, {"result": {"kind": "dog"}}, Dog(kind="dog")),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": 1}, {"a": 1}),
        ({"type": "array", "items": {"type": "string"}}, {"result": ["x"]}, ["x"]),
    ],
    ids=str,
)
def test_result_is_read_from_arguments_text_and_log(
    kind: object, arguments: dict[str, Any], value: object
) -> None:
    spec: ResultSpec[object] = ResultSpec.of(kind)
    assert spec.schema["type"] == "object"
    assert spec.validate(arguments) == value
    assert spec.validate(json.dumps(arguments)) == value
    assert spec.validate(f"```json\n{json.dumps(arguments)}\n```\n") == value
    assert spec.restore(json.loads(json.dumps(spec.dump(value)))) == value


def test_references_are_inlined() -> None:
    schema = ResultSpec.of(Invoice).schema
    assert "$ref" not in json.dumps(schema)
    assert schema["properties"]["first"]["properties"]["title"] == {"type": "string"}
    assert schema["properties"]["first"]["properties"]["price"]["description"] == "In euros."
    assert schema["properties"]["status"]["enum"] == ["paid"]


@pytest.mark.parametrize("kind", [Tree, list[Tree], dict[str, Tree] | None], ids=str)
def test_recursive_type_keeps_its_definition(kind: object) -> None:
    spec: ResultSpec[object] = ResultSpec.of(kind)
    assert spec.schema["type"] == "object"
    assert list(spec.schema["$defs"]) == ["Tree"]
    children = spec.schema["$defs"]["Tree"]["properties"]["children"]
    assert children["items"] == {"$ref": "#/$defs/Tree"}


def test_recursive_value_is_read() -> None:
    tree = ResultSpec.of(Tree).validate({"name": "a", "children": [{"name": "b"}]})
    assert tree.children[0].name == "b"


def test_union_schema_uses_any_of() -> None:
    schema = json.dumps(ResultSpec.of(Pet).schema)
    assert "anyOf" in schema
    assert "oneOf" not in schema
    assert "discriminator" not in schema


@pytest.mark.parametrize(
    "kind", [Any, object, Callable[[], int], subprocess.Popen, type, list[subprocess.Popen[str]]]
)
def test_unsupported_type_is_refused(kind: object) -> None:
    with pytest.raises(InvalidOption, match="result: no model can pass") as caught:
        ResultSpec.of(kind)
    assert "pydantic model" in caught.value.hint


@pytest.mark.parametrize("schema", [{}, {"properties": {}}, {"description": "x"}])
def test_schema_without_type_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match="not a JSON schema"):
        ResultSpec.of(schema)


def test_faults_name_the_place_and_the_value() -> None:
    spec = ResultSpec.of(Invoice)
    with pytest.raises(ValueError, match="required form") as caught:
        spec.validate({"lines": [{"title": "a", "price": "much"}], "first": {"price": 1}})
    message = str(caught.value)
    assert "lines[0].price: Input should be a valid number, unable to parse string as a" in message
    assert 'not "much"' in message
    assert "first.title: Field required" in message
    assert "pydantic" not in message


def test_list_of_faults_is_shortened() -> None:
    with pytest.raises(ValueError, match="and 12 more") as caught:
        ResultSpec.of(list[int]).validate({"result": ["x"] * 20})
    assert len(str(caught.value)) < 2000


def test_faults_of_a_msgspec_struct_name_the_place() -> None:
    with pytest.raises(ValueError, match=r"\$\.parts\[0\]"):
        ResultSpec.of(Packet).validate({"size": 1, "parts": ["x"]})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I think it is 4.", "not JSON"),
        ("", "not JSON"),
        ("4", "one property 'result'"),
        ('{"result": "x"}', "valid integer"),
        ('{"answer": 4}', "one property 'result'"),
    ],
)
def test_invalid_text_is_an_error(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ResultSpec.of(int).validate(text)


def test_finish_takes_the_result_and_give_up_a_reason() -> None:
    finish, give_up = ResultCollector(ResultSpec.of(int), [ScriptedModel()]).tools()
    assert (finish.name, give_up.name) == (FINISH, GIVE_UP)
    assert finish.parameters["properties"] == {"result": {"type": "integer"}}
    assert give_up.parameters["required"] == ["reason"]


def test_plain_types_need_no_pydantic() -> None:
    script = """
import sys
sys.modules["pydantic"] = None
from dataclasses import dataclass
from smokebox.agents.results import ResultSpec

@dataclass
class Point:
    x: int

assert ResultSpec.of(Point).validate({"x": 1}) == Point(1)
assert ResultSpec.of(list[int]).validate({"result": [1]}) == [1]
try:
    ResultSpec.of(Point).validate({"x": "a"})
except ValueError as error:
    assert "$.x" in str(error)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
