"""Summaries satisfy the schema that ``rollout-is schema`` prints, checked by a small validator of our own."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from rollout_is.analysis.schema import summary_schema
from rollout_is.analysis.summary import Summary
from rollout_is.cli.app import main

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
    "boolean": bool,
}


def violations(data: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "$") -> list[str]:
    """The keywords of draft 2020-12 that our schema uses, no more; an unknown keyword is an error, not a pass."""
    known = {"$schema", "$ref", "$defs", "title", "description", "type", "const", "enum", "required", "properties"}
    known |= {"additionalProperties", "propertyNames", "items", "minimum", "if", "then"}
    assert set(schema) <= known, set(schema) - known
    if "$ref" in schema:
        return violations(data, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, at)
    out = []
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(
        isinstance(data, _TYPES[t]) and not (isinstance(data, bool) and t != "boolean") for t in types
    ):
        return [f"{at}: expected {types}, found {data!r}"]
    if "const" in schema and data != schema["const"]:
        out.append(f"{at}: expected {schema['const']!r}")
    if "enum" in schema and data not in schema["enum"]:
        out.append(f"{at}: {data!r} not in {schema['enum']}")
    if "minimum" in schema and isinstance(data, int | float) and data < schema["minimum"]:
        out.append(f"{at}: below {schema['minimum']}")
    if isinstance(data, dict):
        out += [f"{at}: {key} missing" for key in schema.get("required", []) if key not in data]
        for key, value in data.items():
            rule = schema.get("properties", {}).get(key, schema.get("additionalProperties", True))
            if rule is False:
                out.append(f"{at}: unexpected {key}")
            elif rule is not True:
                out += violations(value, rule, root, f"{at}.{key}")
            if "propertyNames" in schema:
                out += violations(key, schema["propertyNames"], root, f"{at}.{key}")
    if isinstance(data, list) and "items" in schema:
        for i, item in enumerate(data):
            out += violations(item, schema["items"], root, f"{at}[{i}]")
    if "if" in schema and not violations(data, schema["if"], root, at):
        out += violations(data, schema["then"], root, at)
    return out


def test_the_command_prints_the_schema() -> None:
    out = io.StringIO()
    assert main(["schema"], stdout=out) == 0
    assert json.loads(out.getvalue()) == summary_schema()


def test_a_summary_satisfies_it(make_summary: Callable[..., Summary]) -> None:
    schema = summary_schema()
    assert violations(json.loads(make_summary().to_json()), schema, schema) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schema"], "rollout-is/summary/2"),
        (["coverage", "positions"], -1),
        (["coverage", "positions"], 1.5),
        (["views", "masked", "token", "rollout_is_mean", "value"], "1"),
        (["views", "masked", "token", "rollout_is_mean", "extra"], 1),
        (["views", "hidden"], {}),
        (["views", "masked", "words"], {}),
        (["groups", "colour"], {}),
        (["notes", 0, "severity"], "fatal"),
        (["notes", 0, "code"], None),
    ],
)
def test_what_is_not_a_summary_does_not(make_summary: Callable[..., Summary], path: list[Any], value: Any) -> None:
    schema = summary_schema()
    data = copy.deepcopy(json.loads(make_summary().to_json()))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert violations(data, schema, schema)


def test_a_null_without_its_reason_does_not(make_summary: Callable[..., Summary]) -> None:
    schema = summary_schema()
    data = json.loads(make_summary().to_json())
    data["views"]["masked"]["token"]["rollout_is_mean"] = {"value": None, "n": 0, "stderr": None}
    assert any("why missing" in line for line in violations(data, schema, schema))
