"""How a number is shown: three significant digits, never cut, null as a dash, the log where float64 ends."""

from __future__ import annotations

import math

from rollout_is.analysis.summary import Statistic

NULL, SAME = "-", "="


def figure(value: float | None) -> str:
    """A real number with three significant digits.

    >>> [figure(x) for x in (0.99115, 1, 0, -7.26e-6, 12345.6, 384.4, 1234.5)]
    ['0.991', '1.00', '0', '-7.26e-6', '1.23e4', '384', '1234']
    """
    if value is None:
        return NULL
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return f"{value}"
    size = abs(value)
    rounded = float(f"{size:.2e}")  # digits by the rounded value, so that 0.99996 is 1.00 and not 1.000
    if rounded >= 1e-3 and size < 9999.5:
        return f"{value:.{max(0, 2 - math.floor(math.log10(rounded)))}f}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def count(value: float | None) -> str:
    """A whole number in full.

    >>> count(110332)
    '110,332'
    """
    return NULL if value is None else f"{int(value):,}"


def percent(part: float, whole: float) -> str:
    """A share in percent; empty when there is no whole.

    >>> percent(110332, 163840)
    '67.3 %'
    """
    return f"{100 * part / whole:.3g} %" if whole else ""


def shown(statistic: Statistic | None) -> str:
    """A statistic's value, or its log where float64 cannot hold the value, or a dash.

    >>> shown(Statistic(None, 1, why="underflow", log_value=-7503.9, has_log=True))
    'exp(-7504)'
    """
    if statistic is None:
        return NULL
    if statistic.value is not None:
        if statistic.value == 0 and statistic.log_value is not None and math.isfinite(statistic.log_value):
            return f"exp({statistic.log_value:.4g})"
        return figure(statistic.value)
    return NULL if statistic.log_value is None else f"exp({statistic.log_value:.4g})"


def sparkline(values: list[float | None], unicode: bool = True) -> str:
    """A series as one character a value; a gap where there is none, flat when all are equal.

    >>> sparkline([1.0, 2.0, None, 8.0])
    '▁▂ █'
    """
    marks = "▁▂▃▄▅▆▇█" if unicode else "_.-=+*#@"
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = high - low
    out = []
    for value in values:
        if value is None or not math.isfinite(value):
            out.append(" ")
        else:
            out.append(marks[0 if span == 0 else round((value - low) / span * (len(marks) - 1))])
    return "".join(out)
