"""A summary that the doctor has looked at, so that limits can name its findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rollout_is.analysis.batch import Consumer
from rollout_is.analysis.doctor.api import diagnosis
from rollout_is.analysis.doctor.consumer import Doctor
from rollout_is.analysis.summary import Summary


def examined(analyze: Callable[[Sequence[Consumer]], Summary]) -> Summary:
    """Analyse with the doctor on the same pass; ``extra["doctor"]["ids"]`` holds every id that was found.

    Args:
        analyze: given consumers, analyses the dump with them.
    """
    found = diagnosis(analyze([Doctor()]))
    return replace(found.summary, extra={**found.summary.extra, "doctor": {"ids": list(found.ids())}})
