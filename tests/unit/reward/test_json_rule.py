import json
from typing import Any

import pytest

from plimsoll.errors import RecipeError
from plimsoll.reward.json_rule import check_options, json_schema

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "extracted", "whole"),
    [
        ('{"a": 1}', 1.0, 1.0),
        (' {"a": 1}\n', 1.0, 1.0),
        ('{"a": "1"}', 0.0, 0.0),
        ('Here: {"a": 1}.', 1.0, 0.0),
        ('{"a": "x"}, no: {"a": 1}', 1.0, 0.0),
        ('{"a": 1}, no: {"a": "x"}', 0.0, 0.0),
        ('```json\n{"a": 1}\n```\nwhere {"a": "x"} would be wrong', 1.0, 0.0),
        ('{"a": 1}\n```json\n{"a": 1\n```', 0.0, 0.0),  # the block counts, and is no JSON
        ('```json\n{"a": "x"}\n```\n```json\n{"a": 1}\n```', 1.0, 0.0),
        ('the set {x, y} gives {"a": 1}', 1.0, 0.0),
        ("[0, 1) contains " + '{"a": 1}', 1.0, 0.0),
        ('{"b": {"a": 1}}', 0.0, 0.0),
        ('{"b": {"a": 1},}', 0.0, 0.0),  # not JSON; nor is the part in it an answer
        ('[{"a": 1}]', 0.0, 0.0),
        ('{"a": 1, "a": 2}', 0.0, 0.0),
        ('{"a": NaN}', 0.0, 0.0),
        ('{"a": -Infinity}', 0.0, 0.0),
        ('{"a": 1e999}', 0.0, 0.0),
        ("{'a': 1}", 0.0, 0.0),
        ("a is 1", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
        ('{"a":' * 100_000, 0.0, 0.0),
    ],
)
def test_validity(response: str, extracted: float, whole: float) -> None:
    assert json_schema("", response, None, schema=SCHEMA) == extracted
    assert json_schema("", response, None, schema=SCHEMA, extract=False) == whole


def test_right_and_wrong() -> None:
    assert json_schema("", '{"a": 1}', None, schema=SCHEMA, right=2.0, wrong=-1.0) == 2.0
    assert json_schema("", "{}", None, schema=SCHEMA, right=2.0, wrong=-1.0) == -1.0


@pytest.mark.parametrize("answer", [SCHEMA, json.dumps(SCHEMA)])
def test_the_rows_answer_is_the_schema_where_the_option_is_none(answer: object) -> None:
    assert json_schema("", '{"a": 1}', answer) == 1.0
    assert json_schema("", '{"a": "x"}', answer) == 0.0


def test_without_any_schema_being_json_is_enough() -> None:
    assert json_schema("", "[1]", "Paris") == 1.0
    assert json_schema("", "[1", "Paris") == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ('{"b": [1, null], "a": 1.0}', {"a": 1, "b": [1, None]}, 1.0),
        ('{"a": 1}', '{"a": 1}', 1.0),
        ('"Paris"', "Paris", 1.0),
        ('{"a": true}', {"a": 1}, 0.0),
        ('{"a": 1, "b": 2}', {"a": 1}, 0.0),
        ("[2, 1]", [1, 2], 0.0),
        ("[1]", [1, 2], 0.0),
        ("0", False, 0.0),
    ],
)
def test_match_answer(response: str, answer: object, expected: float) -> None:
    assert json_schema("", response, answer, match_answer=True) == expected


def test_match_answer_asks_for_the_schema_as_well() -> None:
    assert json_schema("", '{"a": "x"}', {"a": "x"}, schema=SCHEMA, match_answer=True) == 0.0


@pytest.mark.parametrize(
    ("answer", "reason"), [({"type": "objekt"}, r"at \$\.type"), ({"name": "x"}, "no key of JSON Schema .it has name")]
)
def test_a_row_whose_schema_is_none(answer: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        json_schema("", "{}", answer)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objekt"}, r"reward\.options\.schema: it is not a JSON schema: at \$\.type"),
        ({"pattern": "("}, "not a 'regex'"),
        ({"$ref": "http://example.org/x.json"}, "references are not fetched"),
        ({"properties": {"a": {"items": {"$ref": "#/$defs/x"}}}}, r"its \$ref '#/\$defs/x' is not in the schema"),
        ({"$schema": "http://example.org/draft"}, "no draft of JSON Schema"),
        ([], "is a mapping"),
    ],
)
def test_refused_schemas(schema: Any, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        check_options({"schema": schema})


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"x": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/x"}}},
        {"$id": "http://example.org/root", "$defs": {"y": {"$id": "y", "type": "integer"}}, "items": {"$ref": "y"}},
        {"properties": {"$ref": {"type": "integer"}}},  # a property of that name
        {"const": {"$ref": "not a reference"}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "definitions": {"x": {}},
            "not": {"$ref": "#/definitions/x"},
        },
    ],
)
def test_references_within_a_schema(schema: Any) -> None:
    check_options({"schema": schema})
    assert json_schema("", "[[", None, schema=schema) == 0.0


def test_the_draft_is_the_schemas_own() -> None:
    # Draft 4 writes `exclusiveMaximum: true`; later ones want a number there.
    schema = {"$schema": "http://json-schema.org/draft-04/schema#", "maximum": 3, "exclusiveMaximum": True}
    check_options({"schema": schema})
    assert json_schema("", "2", None, schema=schema) == 1.0
    assert json_schema("", "3", None, schema=schema) == 0.0
