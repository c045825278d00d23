"""Policies as text: a preset with its own bounds, or rules put together.

    NAME                          a preset:                verl/token_tis
    NAME:upper=U,lower=L          with other bounds:       icepop:lower=0.5,upper=2
    RULE+RULE+...                 rules, all must pass:    token:truncate:upper=2+veto:lower=1e-4

    RULE = STATISTIC:ACTION:key=value,...
      STATISTIC  token sequence geometric | token.K sum.K mean.K max.K with K = k1 k2 k3 | mean.mult | token.dprob
      ACTION     truncate (cap at upper) | clip (cut to [lower, upper]) | raw (weight as it is) | zero | mask
      keys       lower= upper= safety= | exclusive (a value on a bound fails) | advantage=negative|sign | normalize=token|sequence
    veto:lower=L,upper=U            any token beyond rejects its sequence (veto:zero:... keeps it in n with weight 0)

``truncate``, ``clip`` and ``raw`` set the weight, at most once. ``zero`` on a level without such a rule weights the survivors by that
level (IcePop); ``mask`` alone leaves weight 1. Bounds are named, never placed, and lower < upper.
"""

from __future__ import annotations

from rollout_is.analysis.policies.rules import LEVELS, STATISTICS, Policy, Rule, Weight, check_bounds
from rollout_is.dumps.errors import UsageError

_WEIGHT_ACTIONS = ("truncate", "clip", "raw")
_KEYS = ("lower", "upper", "safety", "exclusive", "advantage", "normalize")


def parse_spec(text: str) -> Policy:
    """The policy that a spec describes.

    Raises:
        UsageError: a word that the grammar does not know, missing or reversed bounds, two weights.

    >>> parse_spec("token:truncate:upper=2").words()
    ['weight = token ratio, truncated at 2']
    >>> parse_spec("token:zero:lower=0.5,upper=5").weight.level
    'token'
    """
    weight: Weight | None = None
    rules: list[Rule] = []
    for piece in text.split("+"):
        found = _piece(text, piece.strip())
        if isinstance(found, Rule):
            rules.append(found)
        elif weight is not None:
            raise _refuse(text, f"expected one weight, found a second: {piece.strip()!r}", "keep one of them")
        else:
            weight = found
    if weight is None:
        zeroed = [rule.statistic for rule in rules if rule.action == "zero" and rule.is_ratio and not rule.veto]
        weight = Weight(zeroed[0]) if zeroed else Weight()
    return Policy(text, weight, tuple(rules))


def _piece(text: str, piece: str) -> Weight | Rule:
    head, *rest = piece.split(":")
    if head == "veto":
        action = rest.pop(0) if rest and rest[0] in ("mask", "zero") else "mask"
        return _rule(text, "token", action, _options(text, rest), veto=True)
    if head not in STATISTICS:
        raise _refuse(
            text, f"expected a preset or one of {', '.join(STATISTICS)}, veto; found {head!r}", "see docs/policies.md"
        )
    if not rest:
        raise _refuse(text, f"expected {head}:ACTION, found {piece!r}", f"for example {head}:mask:lower=0.5,upper=2")
    action, *rest = rest
    options = _options(text, rest)
    if action not in _WEIGHT_ACTIONS:
        return _rule(text, head, action, options)
    if head not in LEVELS:
        raise _refuse(
            text, f"expected a level ({', '.join(LEVELS)}) for {action}, found {head!r}", "weights are ratios"
        )
    lower, upper = _number(text, options, "lower"), _number(text, options, "upper")
    if (action == "truncate" and (upper is None or lower is not None)) or (
        action == "clip" and (upper is None or lower is None)
    ):
        wanted = "upper=" if action == "truncate" else "lower= and upper="
        raise _refuse(
            text, f"expected {wanted} for {action}, found {piece!r}", "truncate caps the top, clip cuts both ends"
        )
    check_bounds(f"--policy {text}", lower, upper, ratio=True)
    normalize = options.get("normalize")
    if normalize not in (None, "token", "sequence"):
        raise _refuse(text, f"expected normalize=token or normalize=sequence, found {normalize!r}", "")
    return Weight(head, lower, upper, _number(text, options, "safety"), normalize)


def _rule(text: str, statistic: str, action: str, options: dict[str, str], veto: bool = False) -> Rule:
    if action not in ("mask", "zero"):
        known = ", ".join((*_WEIGHT_ACTIONS, "zero", "mask"))
        raise _refuse(text, f"expected one of {known}, found {action!r}", "see docs/policies.md")
    lower, upper = _number(text, options, "lower"), _number(text, options, "upper")
    if lower is None and upper is None:
        raise _refuse(text, f"expected lower= or upper= for {statistic}:{action}, found neither", "bounds are named")
    check_bounds(f"--policy {text}", lower, upper, ratio=statistic in LEVELS)
    advantage = options.get("advantage")
    if advantage not in (None, "negative", "sign"):
        raise _refuse(text, f"expected advantage=negative or advantage=sign, found {advantage!r}", "")
    inclusive = "exclusive" not in options
    return Rule(statistic, action, lower, upper, inclusive, veto, advantage, _number(text, options, "safety"))


def _options(text: str, rest: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in ",".join(rest).split(",") if rest else []:
        key, _, value = item.strip().partition("=")
        if key not in _KEYS:
            raise _refuse(
                text, f"expected one of {', '.join(_KEYS)}, found {key!r}", "bounds are named: lower=, upper="
            )
        options[key] = value.strip()
    return options


def _number(text: str, options: dict[str, str], key: str) -> float | None:
    if key not in options:
        return None
    try:
        return float(options[key])
    except ValueError:
        raise _refuse(text, f"expected a number for {key}=, found {options[key]!r}", "") from None


def _refuse(text: str, problem: str, fix: str) -> UsageError:
    return UsageError(f"--policy {text}", problem, "", fix, code="policy-spec")
