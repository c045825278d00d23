"""Pytest plugin (entry point ``rollout_is``): a fixture that analyses a dump and an assertion that reads like a limit file.

Nothing is loaded, registered or changed until a test asks for the fixture or calls ``assert_within``.

    def test_run_is_healthy(rollout_is_summary):
        summary = rollout_is_summary("dumps/run-12", by=("step",))
        assert_within(summary, {"masked.mismatch.mismatch_k3_kl": {"max": 1e-3}})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rollout_is.analysis.summary import Summary


@pytest.fixture(scope="session")
def rollout_is_summary() -> Callable[..., Summary]:
    """A function ``(path, doctor=False, **settings) -> Summary``; a dump is analysed once a session, saved JSON needs no torch.

    ``doctor=True`` looks for what limits on ``findings.ID`` need. ``settings`` are those of ``rollout_is.analysis.settings.Settings`` (``by=("step",)``, ``mask="loss"``, ``upper=5.0``).
    """
    known: dict[tuple[str, str], Summary] = {}

    def summary(path: str | Path, doctor: bool = False, **settings: Any) -> Summary:
        key = (str(Path(path).absolute()), repr((doctor, sorted(settings.items()))))
        if key not in known:
            known[key] = _load(str(path), doctor, settings)
        return known[key]

    return summary


def assert_within(
    summary: Summary,
    limits: Mapping[str, Any] | str | Path,
    baseline: Summary | None = None,
    *,
    strict: bool = False,
    builtin: bool = True,
) -> None:
    """Fail the test unless every limit holds.

    Args:
        summary: from ``rollout_is_summary``, ``rollout_is.analyze`` or ``rollout_is.summarize``.
        limits: ``{"masked.token.rollout_is_mean": {"min": 0.98, "max": 1.02}}`` in the shape of the limit file, or its path.
        baseline: for ``max_change``; None takes the one that a limit file names.
        strict: broken limits of severity ``warning`` fail too.
        builtin: the built-in set applies too (valid tokens, all finite, no placeholders, no copied shards).

    Raises:
        AssertionError: a limit is broken or could not be evaluated; the message has one line each.
        UsageError: a limit is not well formed.
    """
    __tracebackhide__ = True
    from rollout_is.analysis.compare.saved import read_saved
    from rollout_is.analysis.gate.builtin import with_builtin
    from rollout_is.analysis.gate.config import limits_from_mapping, load_config
    from rollout_is.analysis.gate.evaluate import evaluate

    if isinstance(limits, str | Path):
        config = load_config(Path(limits))
        chosen, builtin = config.limits, builtin and config.builtin
        if baseline is None and config.baseline is not None:
            baseline = read_saved(config.baseline)
    else:
        chosen = limits_from_mapping(limits, "assert_within")
    verdict = evaluate(summary, with_builtin(chosen) if builtin else chosen, baseline, strict=strict)
    if not verdict.passed:
        raise AssertionError(_message([o for o in verdict.by_urgency() if verdict.counts(o)], len(verdict.outcomes)))


def _message(broken: list[Any], total: int) -> str:
    if not total:
        return "rollout-is: no limit was checked"
    lines = [f"rollout-is: {len(broken)} of {total} limits do not hold"]
    for outcome in broken:
        word = "not evaluated: " if outcome.status == "error" else ""
        lines.append(f"  {outcome.limit.statistic}: {word}{outcome.message}")
        lines.append(f"    limit: {outcome.limit.describe()} ({outcome.limit.origin})")
        if outcome.limit.reason:
            lines.append(f"    why: {outcome.limit.reason}")
    return "\n".join(lines)


def _load(path: str, doctor: bool, settings: Mapping[str, Any]) -> Summary:
    from rollout_is.analysis.compare.saved import is_saved, read_saved

    if is_saved(path):
        if settings:
            raise ValueError(f"{path} is a saved summary: its settings were fixed when it was made")
        return read_saved(path)
    from rollout_is.analysis.pipeline import analyze
    from rollout_is.analysis.settings import Settings

    chosen = Settings(**settings)
    if not doctor:
        return analyze(path, settings=chosen)
    from rollout_is.analysis.gate.examine import examined

    return examined(lambda consumers: analyze(path, settings=chosen, consumers=consumers))
