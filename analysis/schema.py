"""The JSON schema of ``rollout-is/summary/1`` (draft 2020-12), written by hand: the contract that others build on.

Readers must ignore keys that they do not know; ours are never renamed within a schema number.
"""

from __future__ import annotations

from typing import Any

from rollout_is.analysis.catalog import catalog
from rollout_is.analysis.settings import GROUPINGS
from rollout_is.analysis.summary import SCHEMA, SECTIONS, VIEWS

_NUMBER_OR_NULL = {"type": ["number", "null"]}
_COUNT = {"type": "integer", "minimum": 0}
_COUNTS = (
    "positions",
    "valid_tokens",
    "segments",
    "sequences",
    "fully_masked",
    "fully_masked_with_content",
    "zero_length",
    "shards",
    "steps",
    "ranks",
    "nonfinite_valid_tokens",
)


def summary_schema() -> dict[str, Any]:
    """The schema as plain data.

    >>> summary_schema()["properties"]["schema"]
    {'const': 'rollout-is/summary/1'}
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMA,
        "description": "What rollout-is analyze --format json prints. A statistic's id is its path below views.",
        "type": "object",
        "required": [
            "schema",
            "source",
            "coverage",
            "settings",
            "runtime",
            "findings",
            "views",
            "groups",
            "worst",
            "notes",
        ],
        "properties": {
            "schema": {"const": SCHEMA},
            "source": {"type": "object", "description": "paths, format, columns and dtypes that were read"},
            "coverage": _coverage(),
            "settings": {"type": "object", "description": "bounds, mask, scoring passes, groupings"},
            "runtime": {
                "type": "object",
                "description": "workers, ranks, kernel, host, times: the only block that differs between equal analyses",
            },
            "findings": {"type": "array", "items": {"$ref": "#/$defs/finding"}},
            "views": {"$ref": "#/$defs/views"},
            "groups": {
                "type": "object",
                "description": "grouping -> key -> figures",
                "propertyNames": {"enum": list(GROUPINGS)},
                "additionalProperties": {"type": "object", "additionalProperties": {"$ref": "#/$defs/group"}},
            },
            "worst": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "object"}}},
            "notes": {"type": "array", "items": {"$ref": "#/$defs/note"}},
            "profiles": {"type": "array", "items": {"type": "object"}},
        },
        "$defs": {
            "statistic": _statistic(),
            "views": _views(),
            "group": _group(),
            "finding": _finding(),
            "note": _note(),
        },
    }


def _coverage() -> dict[str, Any]:
    return {"type": "object", "required": list(_COUNTS), "properties": dict.fromkeys(_COUNTS, _COUNT)}


def _statistic() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["value", "n", "stderr"],
        "properties": {
            "value": {
                **_NUMBER_OR_NULL,
                "description": "float64; null when there is none, and then why says the reason",
            },
            "n": {**_COUNT, "description": "tokens or sequences that it is taken over"},
            "stderr": {**_NUMBER_OR_NULL, "description": "standard error clustered by sequence or group"},
            "why": {"type": "string"},
            "log_value": {**_NUMBER_OR_NULL, "description": "natural log of the value, for statistics of weights"},
        },
        "additionalProperties": False,
        "if": {"properties": {"value": {"type": "null"}}},
        "then": {"required": ["why"]},
    }


def _views() -> dict[str, Any]:
    statistic = {"$ref": "#/$defs/statistic"}
    sections = {
        section: {
            "type": "object",
            "properties": {name: statistic for other, name in catalog() if other == section},
            "additionalProperties": statistic,
        }
        for section in SECTIONS
    }
    view = {"type": "object", "properties": sections, "additionalProperties": False}
    return {"type": "object", "properties": dict.fromkeys(VIEWS, view), "additionalProperties": False}


def _group() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["positions", "valid_tokens", "sequences", "views"],
        "properties": {
            "positions": _COUNT,
            "valid_tokens": _COUNT,
            "sequences": _COUNT,
            "views": {"$ref": "#/$defs/views"},
        },
    }


def _finding() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "type": "object",
        "required": ["id", "severity", "message"],
        "properties": {
            "id": text,
            "severity": {"enum": ["error", "warning", "notice", "info"]},
            "message": text,
            "evidence": {"type": "object"},
            "source": {**text, "description": "where the threshold comes from"},
            "next": {**text, "description": "the command to run next"},
        },
    }


def _note() -> dict[str, Any]:
    text = {"type": "string"}
    return {
        "type": "object",
        "required": ["code", "severity", "metric", "message"],
        "properties": {
            "code": text,
            "severity": {"enum": ["info", "notice", "warning", "error"]},
            "metric": text,
            "message": text,
        },
        "additionalProperties": False,
    }
