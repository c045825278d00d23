"""What was measured, apart from the figures: settings, columns, dtypes and metadata, and where two summaries differ in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_is.analysis.summary import Summary

# Settings that change how much is shown or where it runs, never what a figure means.
_PRESENTATION = frozenset({"by", "top", "device", "only", "workers", "steps"})
# Metadata that is bound to differ between two runs.
_PLACE = frozenset(
    {"format", "layout", "step", "rank", "world_size", "run", "trainer_metrics", "host", "time", "date", "seed"}
)
# Roles whose columns and dtypes bear on the figures.
_SIDES = ("train", "rollout", "mask", "logprobs")
# Differences in these change what a figure means; any other is a circumstance that a change may come from.
_DEFINING = ("mask", "train", "rollout", "train_policy", "temperature", "logprob", "polic", "weight")
# The settings that only some statistics depend on, by a part of the statistic's name.
_BOUNDS = {"lower": "fraction", "upper": "fraction", "veto_lower": "veto", "veto_upper": "veto"}


@dataclass(frozen=True)
class Difference:
    """One setting that differs between two sides.

    Attributes:
        key: such as ``settings.mask`` or ``metadata.logprobs_mode``.
        a, b: the value on either side as text; ``not recorded`` where a side does not say.
        defining: the two sides do not measure the same quantity; otherwise a circumstance (dtype, engine).
    """

    key: str
    a: str
    b: str
    defining: bool

    @property
    def known(self) -> bool:
        """Whether it is known to bear on the figures; metadata of a trainer's own (a commit, a time) may or may not."""
        return self.defining or not self.key.startswith("metadata.") or "dtype" in self.key


def conditions(summary: Summary) -> dict[str, str]:
    """Everything recorded that a comparison should hold equal, as text by dotted key.

    >>> from rollout_is.analysis.summary import Summary
    >>> conditions(Summary({"metadata": {"logprobs_mode": "raw", "rank": "3"}}, {}, {"mask": "loss"}, {}))
    {'settings.mask': 'loss', 'metadata.logprobs_mode': 'raw'}
    """
    found: dict[str, str] = {}
    for key, value in _flat(summary.settings):
        if key.split(".")[0] not in _PRESENTATION:
            found[f"settings.{key}"] = value
    for part in ("columns", "dtypes", "metadata"):
        section = summary.source.get(part)
        for key, value in _flat(section if isinstance(section, Mapping) else {}):
            if part != "metadata" and not key.startswith(_SIDES):
                continue  # the dtype of offsets bears on no figure
            if key.split(".")[0] not in _PLACE:
                found[f"{part}.{key}"] = value
    return found


def settings_differences(a: Summary, b: Summary) -> tuple[Difference, ...]:
    """Where the conditions of two summaries differ, those that define the quantity first."""
    left, right = conditions(a), conditions(b)
    keys = list(dict.fromkeys([*left, *right]))
    found = [
        Difference(key, left.get(key, "not recorded"), right.get(key, "not recorded"), _defines(key))
        for key in keys
        if left.get(key) != right.get(key)
    ]
    return tuple(sorted(found, key=lambda difference: not difference.defining))


def concerns(difference: Difference, statistic_id: str) -> bool:
    """Whether this difference makes the statistic another quantity on the other side.

    >>> concerns(Difference("settings.upper", "2", "5", True), "masked.token.rollout_is_mean")
    False
    >>> concerns(Difference("settings.mask", "loss", "response_mask", True), "masked.token.rollout_is_mean")
    True
    """
    if not difference.defining:
        return False
    part = _BOUNDS.get(difference.key.removeprefix("settings."))
    if part is not None:
        return part in statistic_id
    if ("polic" in difference.key and "train_policy" not in difference.key) or "weight" in difference.key:
        return statistic_id.startswith("corrected.")
    return not statistic_id.startswith("coverage.")


def _defines(key: str) -> bool:
    head, _, rest = key.partition(".")
    if head == "settings":
        return True
    if head == "metadata":
        return any(part in rest.lower() for part in _DEFINING) and "dtype" not in rest.lower()
    return False


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value)
    return str(value)
