"""Tail probabilities of the normal and of Student's t, and Holm's correction: all that the tests of ``compare`` need."""

from __future__ import annotations

import math
from collections.abc import Sequence


def normal_two_sided(z: float) -> float:
    """Probability that a standard normal is at least ``|z|`` away from 0.

    Args:
        z: any float.

    Returns:
        a probability in [0, 1]; exact in the far tail (no ``1 - cdf``).

    >>> round(normal_two_sided(1.959963984540054), 12)
    0.05
    """
    return math.erfc(abs(z) / math.sqrt(2.0))


def t_two_sided(t: float, df: float) -> float:
    """Probability that Student's t with ``df`` degrees of freedom is at least ``|t|`` away from 0.

    Args:
        t: any float, infinities included.
        df: degrees of freedom, > 0; need not be whole (Welch).

    Returns:
        a probability in [0, 1].

    Raises:
        ValueError: ``df`` is not positive.

    Source: P(|T| > t) = I_x(df / 2, 1 / 2) at x = df / (df + t^2) (Abramowitz and Stegun 26.7.1).

    >>> round(t_two_sided(12.706204736432095, 1), 9)
    0.05
    """
    if not df > 0:
        raise ValueError(f"expected degrees of freedom > 0, found {df}")
    if math.isinf(t):
        return 0.0
    if math.isinf(df):
        return normal_two_sided(t)
    square = t * t
    return incomplete_beta(df / 2.0, 0.5, df / (df + square), square / (df + square))


def incomplete_beta(a: float, b: float, x: float, complement: float | None = None) -> float:
    """Regularised incomplete beta function I_x(a, b).

    Args:
        a, b: > 0.
        x: in [0, 1].
        complement: 1 - x where the caller knows it better than the subtraction does.

    Returns:
        a probability in [0, 1], about 1e-13 relative.

    Source: the continued fraction of Abramowitz and Stegun 26.5.8, evaluated by Lentz's method.

    >>> round(incomplete_beta(2.0, 3.0, 0.5), 12)
    0.6875
    """
    rest = 1.0 - x if complement is None else complement
    if x <= 0.0:
        return 0.0
    if rest <= 0.0:
        return 1.0
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest),
    )
    if x < (a + 1.0) / (a + b + 2.0):  # where the fraction converges fast
        return front * _beta_fraction(a, b, x) / a
    return 1.0 - front * _beta_fraction(b, a, rest) / b


def _beta_fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c = 1.0
    d = 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0), tiny)
    value = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        factor = 1.0
        for term in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + term * d, tiny)
            c = _away_from_zero(1.0 + term / c, tiny)
            factor = c * d
            value *= factor
        if abs(factor - 1.0) < 1e-15:
            break
    return value


def _away_from_zero(x: float, tiny: float) -> float:
    return x if abs(x) > tiny else tiny


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the chance of any false alarm among the rows stays below the level.

    Args:
        p_values: raw two-sided p-values, any order.

    Returns:
        corrected p-values in the same order, each >= its raw one and <= 1.

    Source: Holm 1979, valid under any dependence between the rows.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = [0.0] * len(p_values)
    running = 0.0
    for place, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = running
    return corrected


def welch_df(se_a: float, n_a: int, se_b: float, n_b: int) -> float:
    """Degrees of freedom of the difference of two independent means (Welch and Satterthwaite).

    Args:
        se_a, se_b: standard errors, >= 0, not both 0.
        n_a, n_b: how many clusters each rests on, >= 2.

    >>> welch_df(1.0, 11, 1.0, 11)
    20.0
    """
    scale = max(se_a, se_b)  # fourth powers of small errors underflow
    a, b = (se_a / scale) ** 2, (se_b / scale) ** 2
    return (a + b) ** 2 / (a * a / (n_a - 1) + b * b / (n_b - 1))
