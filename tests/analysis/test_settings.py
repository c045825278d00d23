"""What is asked for is refused in the words that it was asked in."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rollout_is.analysis.settings import Settings
from rollout_is.dumps.errors import UsageError


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["lower", "upper", "veto_lower", "veto_upper"])
def test_a_bad_bound_is_named_as_it_was_given(name: str, bound: float) -> None:
    given: dict[str, Any] = {name: bound}
    with pytest.raises(UsageError, match="expected a finite bound > 0") as error:
        Settings(**given)
    assert error.value.where == f"--{name.replace('_', '-')} {bound}"


def test_reversed_bounds() -> None:
    with pytest.raises(UsageError, match="reversed"):
        Settings(lower=3.0, upper=2.0)
    with pytest.raises(UsageError, match="reversed"):
        Settings(veto_lower=2.0, veto_upper=1.0)
    with pytest.raises(UsageError, match="equal"):
        Settings(lower=2.0, upper=2.0)


def test_an_upper_bound_that_the_lower_one_cannot_follow_from() -> None:
    with pytest.raises(UsageError, match="above 1") as caught:
        Settings(upper=0.5)
    assert "--lower" not in str(caught.value).splitlines()[0]
