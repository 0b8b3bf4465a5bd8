"""A result has a type: the model gets its schema, the caller a value, both get the faults."""

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

from smokebox.agents.results import FINISH, GIVE_UP, ResultSpec
from smokebox.errors import InvalidOption


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
    ("kind", "given", "value"),
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
def test_a_value_of_the_type_comes_back_from_arguments_text_and_record(
    kind: object, given: dict[str, Any], value: object
) -> None:
    spec: ResultSpec[object] = ResultSpec.of(kind)
    assert spec.schema["type"] == "object"
    assert spec.validate(given) == value
    assert spec.validate(json.dumps(given)) == value
    assert spec.validate(f"```json\n{json.dumps(given)}\n```\n") == value
    assert spec.restore(json.loads(json.dumps(spec.dump(value)))) == value


def test_definitions_are_written_out_where_they_are_used() -> None:
    schema = ResultSpec.of(Invoice).schema
    assert "$ref" not in json.dumps(schema)
    assert schema["properties"]["first"]["properties"]["title"] == {"type": "string"}
    assert schema["properties"]["first"]["properties"]["price"]["description"] == "In euros."
    assert schema["properties"]["status"]["enum"] == ["paid"]


@pytest.mark.parametrize("kind", [Tree, list[Tree], dict[str, Tree] | None], ids=str)
def test_a_type_that_holds_itself_keeps_its_definition_at_the_root(kind: object) -> None:
    spec: ResultSpec[object] = ResultSpec.of(kind)
    assert spec.schema["type"] == "object"
    assert list(spec.schema["$defs"]) == ["Tree"]
    children = spec.schema["$defs"]["Tree"]["properties"]["children"]
    assert children["items"] == {"$ref": "#/$defs/Tree"}


def test_a_tree_is_read() -> None:
    tree = ResultSpec.of(Tree).validate({"name": "a", "children": [{"name": "b"}]})
    assert tree.children[0].name == "b"


def test_a_choice_of_models_is_one_that_providers_take() -> None:
    schema = json.dumps(ResultSpec.of(Pet).schema)
    assert "anyOf" in schema
    assert "oneOf" not in schema
    assert "discriminator" not in schema


@pytest.mark.parametrize(
    "kind", [Any, object, Callable[[], int], subprocess.Popen, type, list[subprocess.Popen[str]]]
)
def test_a_type_that_no_model_can_give_is_refused_at_once(kind: object) -> None:
    with pytest.raises(InvalidOption, match="result: no model can give") as caught:
        ResultSpec.of(kind)
    assert "pydantic model" in caught.value.hint


@pytest.mark.parametrize("schema", [{}, {"properties": {}}, {"description": "x"}])
def test_a_schema_that_says_nothing_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match="not a JSON schema"):
        ResultSpec.of(schema)


def test_faults_name_the_place_and_the_value() -> None:
    spec = ResultSpec.of(Invoice)
    with pytest.raises(ValueError, match="required form") as caught:
        spec.validate({"lines": [{"title": "a", "price": "much"}], "first": {"price": 1}})
    said = str(caught.value)
    assert "lines[0].price: Input should be a valid number, unable to parse string as a" in said
    assert 'not "much"' in said
    assert "first.title: Field required" in said
    assert "pydantic" not in said


def test_many_faults_are_cut() -> None:
    with pytest.raises(ValueError, match="and 12 more") as caught:
        ResultSpec.of(list[int]).validate({"result": ["x"] * 20})
    assert len(str(caught.value)) < 2000


def test_faults_of_a_struct_name_the_place() -> None:
    with pytest.raises(ValueError, match=r"\$\.parts\[0\]"):
        ResultSpec.of(Packet).validate({"size": 1, "parts": ["x"]})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("I think it is 4.", "not JSON"),
        ("", "not JSON"),
        ("4", "one property 'result'"),
        ('{"result": "x"}', "valid integer"),
        ('{"answer": 4}', "one property 'result'"),
    ],
)
def test_text_that_is_no_result_says_why(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ResultSpec.of(int).validate(text)


def test_the_finish_tool_takes_the_result_and_give_up_a_reason() -> None:
    finish, give_up = ResultSpec.of(int).finish_tools()
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
