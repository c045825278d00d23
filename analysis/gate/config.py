"""Limits from TOML: ``rollout-is.toml`` or ``[tool.rollout-is]`` of ``pyproject.toml``, each with the line that it stands on."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_is.analysis.gate.limits import (
    DIRECTIONS,
    STEP_RULES,
    Limit,
    MaxChange,
    Origin,
    PerStep,
)
from rollout_is.analysis.gate.lines import key_lines
from rollout_is.dumps.errors import UsageError

LIMIT_KEYS = ("min", "max", "max_change", "per_step", "severity", "reason")
CHANGE_KEYS = ("relative", "absolute", "direction")
TABLE_KEYS = ("limits", "baseline", "builtin")


@dataclass(frozen=True)
class GateConfig:
    """What a configuration file asks for.

    Attributes:
        limits: in the order of the file.
        baseline: path of the baseline summary, relative paths taken from the file's own folder; None when not given.
        builtin: whether the built-in set applies too (True unless ``builtin = false``).
        path: the file; None when nothing is configured.
    """

    limits: tuple[Limit, ...] = ()
    baseline: str | None = None
    builtin: bool = True
    path: str | None = None


def find_config(start: Path) -> Path | None:
    """The nearest file that configures limits, from ``start`` upwards; ``rollout-is.toml`` before ``pyproject.toml``."""
    folder = start.resolve()
    for place in (folder, *folder.parents):
        own = place / "rollout-is.toml"
        if own.is_file():
            return own
        shared = place / "pyproject.toml"
        if shared.is_file() and "rollout-is" in _load(shared)[0].get("tool", {}):
            return shared
    return None


def load_config(path: Path) -> GateConfig:
    """Read limits from a TOML file.

    Args:
        path: ``pyproject.toml`` (table ``[tool.rollout-is]``) or any other TOML (``[limits]`` or ``[tool.rollout-is.limits]``).

    Raises:
        UsageError: the file is missing, is not TOML, or holds a key or a value that no limit has; names file and line.
    """
    data, text = _load(path)
    lines = key_lines(text)
    prefix: tuple[str, ...] = ()
    if path.name == "pyproject.toml" or "rollout-is" in data.get("tool", {}):
        prefix = ("tool", "rollout-is")
        data = data.get("tool", {}).get("rollout-is", {})
    reader = _Reader(str(path), lines)
    reader.table(data, prefix, "[tool.rollout-is]" if prefix else "the file")
    reader.known(data, TABLE_KEYS, prefix)
    builtin = reader.typed(data, "builtin", bool, prefix, True)
    baseline = reader.typed(data, "baseline", str, prefix, None)
    limits = reader.table(data.get("limits", {}), (*prefix, "limits"), "limits")
    if baseline is not None:
        baseline = str(path.parent / baseline)
    return GateConfig(
        tuple(reader.limits(limits, (*prefix, "limits"), ())),
        baseline,
        builtin,
        str(path),
    )


def limits_from_mapping(limits: Mapping[str, Any], place: str = "given in code") -> tuple[Limit, ...]:
    """Limits from plain data of the same shape as the TOML table: ``{"masked.token.rollout_is_mean": {"min": 0.9}}``.

    >>> limits_from_mapping({"coverage.sequences": {"min": 1}})[0].describe()
    '>= 1'
    """
    return tuple(_Reader(place, {}).limits(limits, (), ()))


def _load(path: Path) -> tuple[dict[str, Any], str]:
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UsageError(
            str(path),
            f"expected a TOML file with limits, found: {error.strerror}",
            "the path is wrong or not readable",
            "write one with: rollout-is baseline DUMP -o main.json --limits-out rollout-is.toml",
            code="limits-unreadable",
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            str(path),
            f"expected UTF-8 text, found byte {error.object[error.start]:#x} at {error.start}",
            "TOML is UTF-8",
            "save the file as UTF-8",
            code="limits-not-utf8",
        ) from None
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        line = getattr(error, "lineno", None) or _line_in(str(error))
        raise UsageError(
            str(Origin(str(path), line)),
            f"expected TOML, found: {error}",
            "a statistic id holds dots, so it needs quotes; numbers, strings and tables follow TOML's rules",
            'write limits as: "masked.mismatch.mismatch_k3_kl" = { max = 1e-3 }',
            code="limits-not-toml",
        ) from None


def _line_in(message: str) -> int | None:
    _, found, rest = message.partition("at line ")
    digits = rest.split(",")[0]
    return int(digits) if found and digits.isdigit() else None


class _Reader:
    """Checks one file's tables, with the line of each complaint."""

    def __init__(self, place: str, lines: Mapping[tuple[str, ...], int]) -> None:
        self.place = place
        self.lines = lines

    def origin(self, path: tuple[str, ...]) -> Origin:
        while path and path not in self.lines:
            path = path[:-1]
        return Origin(self.place, self.lines.get(path))

    def fail(self, path: tuple[str, ...], expected: str, found: str, fix: str = "") -> UsageError:
        name = next((part for part in reversed(path) if not part.isdigit()), "limits")
        return UsageError(
            str(self.origin(path)),
            f"{name}: expected {expected}, found {found}",
            "limits are read strictly: a limit that is misread would pass for ever",
            fix or "see docs/ci.md for every key",
            code="limits-invalid",
        )

    def table(self, value: Any, path: tuple[str, ...], what: str) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.fail(path, f"a table ({what})", _shown(value))
        return value

    def known(self, table: Mapping[str, Any], keys: tuple[str, ...], path: tuple[str, ...]) -> None:
        for key in table:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, 1, 0.5)
                fix = f"did you mean {near[0]!r}?" if near else ""
                raise self.fail((*path, key), f"one of {', '.join(keys)}", f"the unknown key {key!r}", fix)

    def typed(self, table: Mapping[str, Any], key: str, kind: type, path: tuple[str, ...], default: Any) -> Any:
        value = table.get(key, default)
        if value is not default and not isinstance(value, kind):
            raise self.fail((*path, key), {bool: "true or false", str: "a string"}[kind], _shown(value))
        return value

    def limits(self, table: Mapping[str, Any], path: tuple[str, ...], name: tuple[str, ...]) -> Iterator[Limit]:
        """Limits below a table: quoted ids, dotted keys and nested tables all spell the same id."""
        for key, value in table.items():
            here, statistic = (*path, key), (*name, key)
            if isinstance(value, list):
                for number, item in enumerate(value):
                    place = (*here, str(number))
                    yield self.limit(self.table(item, place, "a limit"), place, statistic)
            elif isinstance(value, Mapping) and value and all(isinstance(v, Mapping | list) for v in value.values()):
                if set(value) & set(LIMIT_KEYS):
                    yield self.limit(value, here, statistic)
                else:
                    yield from self.limits(value, here, statistic)
            else:
                fix = f'write "{".".join(statistic)}" = {{ max = {value} }}' if _is_number(value) else ""
                if not isinstance(value, Mapping):
                    raise self.fail(here, "a table such as { max = 1e-3 }", _shown(value), fix)
                yield self.limit(value, here, statistic)

    def limit(self, table: Mapping[str, Any], path: tuple[str, ...], name: tuple[str, ...]) -> Limit:
        self.known(table, LIMIT_KEYS, path)
        low, high = self.number(table, "min", path), self.number(table, "max", path)
        change = self.max_change(table.get("max_change"), (*path, "max_change"))
        if low is None and high is None and change is None:
            raise self.fail(path, "at least one of min, max, max_change", "none of them")
        if low is not None and high is not None and low > high:
            raise self.fail(path, "min <= max", f"min {low} and max {high}", "swap them")
        severity = table.get("severity", "error")
        if severity not in ("error", "warning"):
            raise self.fail((*path, "severity"), '"error" or "warning"', _shown(severity))
        return Limit(
            ".".join(name),
            low,
            high,
            change,
            self.per_step(table.get("per_step"), (*path, "per_step")),
            severity,
            self.origin(path),
            self.typed(table, "reason", str, path, ""),
        )

    def number(
        self, table: Mapping[str, Any], key: str, path: tuple[str, ...], least: float = -math.inf
    ) -> float | None:
        if key not in table:
            return None
        value = table[key]
        if not _is_number(value) or not math.isfinite(value):
            raise self.fail((*path, key), "a finite number", _shown(value))
        if value < least:
            raise self.fail((*path, key), f"a number >= {least:g}", _shown(value))
        return float(value)

    def max_change(self, value: Any, path: tuple[str, ...]) -> MaxChange | None:
        if value is None:
            return None
        if isinstance(value, str) and value.strip().endswith("%"):
            try:
                share = float(value.strip()[:-1]) / 100
            except ValueError:
                share = math.nan
            if not 0 <= share < math.inf:
                raise self.fail(path, 'a percentage such as "50 %"', _shown(value))
            return MaxChange(relative=share)
        if not isinstance(value, Mapping):
            fix = f"write {{ relative = {value} }} or {{ absolute = {value} }}" if _is_number(value) else ""
            raise self.fail(path, 'a table such as { relative = 0.5 } or "50 %"', _shown(value), fix)
        self.known(value, CHANGE_KEYS, path)
        relative, absolute = self.number(value, "relative", path, 0.0), self.number(value, "absolute", path, 0.0)
        if relative is None and absolute is None:
            raise self.fail(path, "relative, absolute or both", "neither")
        direction = value.get("direction", "both")
        if direction not in DIRECTIONS:
            raise self.fail((*path, "direction"), f"one of {', '.join(DIRECTIONS)}", _shown(direction))
        return MaxChange(relative, absolute, direction)

    def per_step(self, value: Any, path: tuple[str, ...]) -> PerStep | None:
        if value is None:
            return None
        if isinstance(value, Mapping):
            self.known(value, ("share",), path)
            share = self.number(value, "share", path, 0.0)
            if share is None or share >= 1:
                raise self.fail(path, "share of steps in [0, 1)", _shown(value))
            return PerStep("share", share)
        rules = [rule for rule in STEP_RULES if rule != "share"]
        if value not in rules:
            near = difflib.get_close_matches(str(value), rules, 1)
            fix = f"did you mean {near[0]!r}?" if near else ""
            raise self.fail(path, f"one of {', '.join(rules)}, or {{ share = 0.1 }}", _shown(value), fix)
        return PerStep(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    names = {dict: "a table", list: "an array"}
    for kind, name in names.items():
        if isinstance(value, kind):
            return name if len(str(value)) > 60 else f"{name} {value}"
    return repr(value)
