"""Tests of checking arguments against a schema."""

from __future__ import annotations

import pytest

from smokebox.agents.schemas import check_arguments
from smokebox.errors import InvalidOption

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 1},
        "count": {"type": "integer", "minimum": 1, "maximum": 10},
        "ratio": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "deep": {"type": "boolean"},
        "mode": {"enum": ["a", "b"]},
        "maybe": {"type": ["string", "null"]},
        "edits": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"old": {"type": "string"}},
                "required": ["old"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["path"],
    "additionalProperties": False,
}


def error_for(**arguments: object) -> str:
    with pytest.raises(InvalidOption) as caught:
        check_arguments("tool", SCHEMA, {"path": "x", **arguments})
    return caught.value.message


def test_valid_arguments_are_unchanged() -> None:
    arguments = {"path": "x", "count": 3, "ratio": 0.5, "deep": True, "edits": [{"old": "y"}]}
    assert check_arguments("tool", SCHEMA, arguments) == arguments


def test_null_counts_as_left_out() -> None:
    assert check_arguments("tool", SCHEMA, {"path": "x", "count": None}) == {"path": "x"}


def test_whole_float_becomes_an_integer() -> None:
    count = check_arguments("tool", SCHEMA, {"path": "x", "count": 3.0})["count"]
    assert isinstance(count, int)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"path": 5}, "'path' must be a string, not an integer: 5."),
        ({"path": None}, "'path' must be a string, not null: null."),
        ({"path": ""}, "'path' must not be empty."),
        ({"path": "\ud800"}, "'path' holds half a surrogate pair at character 0"),
        ({"count": "3"}, "'count' must be an integer, not a string: \"3\"."),
        ({"count": True}, "'count' must be an integer, not a boolean: true."),
        ({"count": 2.5}, "'count' must be an integer, not a number: 2.5."),
        ({"count": 0}, "'count' must be at least 1, not 0."),
        ({"count": 11}, "'count' must be at most 10, not 11."),
        ({"ratio": 0}, "'ratio' must be more than 0, not 0."),
        ({"ratio": 1}, "'ratio' must be less than 1, not 1."),
        ({"ratio": float("nan")}, "'ratio' must be more than 0, not nan."),
        ({"deep": 1}, "'deep' must be a boolean, not an integer: 1."),
        ({"mode": "c"}, '\'mode\' must be one of ["a", "b"], not "c".'),
        ({"maybe": 1}, "'maybe' must be a string or null, not an integer: 1."),
        ({"edits": "no"}, "'edits' must be an array, not a string: \"no\"."),
        ({"edits": [{}]}, "the parameter 'edits[0].old' is missing."),
        ({"edits": [{"old": 1}]}, "'edits[0].old' must be a string, not an integer: 1."),
        ({"edits": [{"old": "", "odl": ""}]}, "there is no parameter 'edits[0].odl'. Did you"),
        ({"file_path": "x"}, "there is no parameter 'file_path'. Did you mean 'path'?"),
        ({"zzz": 1}, "there is no parameter 'zzz'."),
    ],
)
def test_fault_names_the_parameter_and_the_value(
    arguments: dict[str, object], expected: str
) -> None:
    assert expected in error_for(**arguments)


def test_error_lists_all_faults_and_the_parameters() -> None:
    with pytest.raises(InvalidOption) as caught:
        check_arguments("tool", SCHEMA, {"count": "x", "zzz": "y"})
    message = str(caught.value)
    assert message.startswith("tool: there is no parameter 'zzz'. the parameter 'path' is missing.")
    assert "'count' must be" in message
    assert message.endswith(
        "It takes: path, count (optional), ratio (optional), deep (optional), "
        "mode (optional), maybe (optional), edits (optional)."
    )


def test_misspelt_parameter_is_not_reported_as_missing() -> None:
    with pytest.raises(InvalidOption) as caught:
        check_arguments("tool", SCHEMA, {"file_path": "y"})
    assert caught.value.message == "tool: there is no parameter 'file_path'. Did you mean 'path'?"


@pytest.mark.parametrize("arguments", ['{"path": "x"}', ["x"], None, 3])
def test_arguments_must_be_an_object(arguments: object) -> None:
    with pytest.raises(InvalidOption, match="the arguments must be an object, not"):
        check_arguments("tool", SCHEMA, arguments)


def test_long_value_is_shortened_in_the_message() -> None:
    assert len(error_for(count="x" * 10_000)) < 300


def test_unknown_keywords_are_ignored() -> None:
    schema = {"properties": {"x": {"anyOf": [{"type": "string"}]}}}
    assert check_arguments("tool", schema, {"x": 1, "more": 2}) == {"x": 1, "more": 2}
