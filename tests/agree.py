"""Compare what ``rollout_is`` reports with what the oracle expects: value, n, null and reason, log, clustered standard error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from oracle import Expected


def differences(actual: Any, expected: dict[str, Expected], *, rel: float = 1e-9, check_n: bool = True) -> list[str]:
    """Every disagreement between statistics (``actual(id)`` -> object with value, n, stderr, why, log_value) and the oracle."""
    out = []
    for name, want in expected.items():
        got = actual(name)
        if got is None:
            out.append(f"{name}: absent")
            continue
        out += [f"{name}: {problem}" for problem in _problems(got, want, rel, check_n)]
    return out


def _problems(got: Any, want: Expected, rel: float, check_n: bool) -> Iterable[str]:
    if got.value is None and not got.why:
        yield "null without a reason"
    if got.value is not None and not math.isfinite(got.value):
        yield f"not a finite number: {got.value}"
        return
    if check_n and want.n >= 0 and got.n != want.n:
        yield f"n {got.n}, expected {want.n}"
    if want.value is None:
        if got.value is not None:
            yield f"value {got.value!r}, expected null ({want.why or 'float64 cannot hold it'})"
        elif want.why and want.why not in (got.why or ""):
            yield f"reason {got.why!r}, expected one with {want.why!r}"
    elif got.value is None:
        if not want.may_be_null:
            yield f"null ({got.why}), expected {want.value!r}"
    elif want.quantile:
        if abs(got.value - want.value) > max(0.01 * abs(want.value), 1e-6) * (1 + 1e-9):
            yield f"quantile {got.value!r}, expected {want.value!r}"
    elif abs(got.value - want.value) > (rel + want.rel) * abs(want.value) + want.floor:
        yield (
            f"value {got.value!r}, expected {want.value!r} (relative {abs(got.value - want.value) / (abs(want.value) or 1):.2e},"
            f" floor {want.floor:.1e})"
        )
    log, due = got.log_value, want.log
    if due is None and want.value is not None and want.value > 0:
        due = math.log(want.value)
    if want.needs_log and due is not None and log is None:
        yield f"log_value absent, expected {due!r}"
    rounding = (
        want.value is not None and abs(want.value) <= 1e9 * want.floor
    )  # the log of a figure that is mostly rounding
    if log is not None and not rounding and (due is None or abs(log - due) > 1e-9 * max(1.0, abs(due))):
        yield f"log_value {log!r}, expected {due!r}"
    if want.clustered:
        if want.stderr is None:
            if got.stderr is not None:
                yield f"stderr {got.stderr!r}, expected null"
        elif got.stderr is None:
            yield f"stderr null, expected {want.stderr!r}"
        elif abs(got.stderr - want.stderr) > rel * want.stderr + want.stderr_floor:
            yield f"stderr {got.stderr!r}, expected {want.stderr!r}"
