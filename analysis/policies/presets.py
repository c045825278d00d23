"""The corrections that trainers ship, by name: each a rule of the vocabulary with the framework's own bounds and oddities."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollout_is.analysis.policies.rules import LEVELS, Policy, Rule, Weight, check_bounds
from rollout_is.analysis.policies.spec import parse_spec
from rollout_is.dumps.errors import UsageError


@dataclass(frozen=True)
class Bounds:
    """The numbers that a preset is built from; None is an open end."""

    lower: float | None = None
    upper: float | None = None
    veto_lower: float | None = None
    veto_upper: float | None = None
    level: str = "token"


Built = tuple[Weight, tuple[Rule, ...]]


@dataclass(frozen=True)
class Preset:
    """One correction of one framework.

    Attributes:
        build: bounds -> weight and rules.
        bounds: the framework's own numbers.
        default: whether the framework has it on, and with what.
        source: framework and snapshot, with the section of its documentation or code.
        oddity: what surprises a reader of its name; empty for none.
        takes: which of the bounds can be given.
    """

    build: Callable[[Bounds], Built]
    bounds: Bounds
    default: str
    source: str
    oddity: str = ""
    takes: tuple[str, ...] = field(default=("lower", "upper"))


def _weight(
    level: str | None = None, *, safety: float | None = None, normalize: str | None = None
) -> Callable[[Bounds], Built]:
    """Cut the weight of a level to the bounds that are given."""
    return lambda b: (Weight(level or b.level, b.lower, b.upper, safety, normalize), ())


def _reject(
    statistic: str, action: str, weight: str = "none", *, safety: float | None = None, advantage: str | None = None
) -> Callable[[Bounds], Built]:
    """One rule, survivors weighted by ``weight`` as it is."""

    def build(b: Bounds) -> Built:
        name = b.level if statistic == "level" else statistic
        level = b.level if weight == "level" else weight
        rule = Rule(name, action, b.lower, b.upper, advantage=advantage, safety=None if name in LEVELS else safety)
        return Weight(level, safety=None if level == "none" else safety), (rule,)

    return build


def _xtuner(mask: bool, truncate: bool) -> Callable[[Bounds], Built]:
    def build(b: Bounds) -> Built:
        rules = [Rule(b.level, "mask", b.lower, b.upper)] if mask else []
        if b.veto_lower is not None or b.veto_upper is not None:
            rules.append(Rule("token", "mask", b.veto_lower, b.veto_upper, veto=True))
        cut = (b.lower, b.upper) if truncate else (None, None)
        return Weight(b.level, *cut, safety=20.0), tuple(rules)

    return build


def _verl_k1(statistic: str, weight: Weight | None = None) -> Callable[[Bounds], Built]:
    """verl compares -log ratio with [ln lower, ln upper]: the bounds act on 1 / ratio."""

    def build(b: Bounds) -> Built:
        low, high = (None if x is None else math.log(x) for x in (b.lower, b.upper))
        return weight or Weight(), (Rule(statistic, "mask", low, high, safety=20.0),)

    return build


def _mis(b: Bounds) -> Built:
    veto = Rule("token", "mask", b.veto_lower, None, veto=True)
    return Weight("token", None, b.upper, 20.0, "token"), (Rule("token", "mask", b.lower, b.upper), veto)


_VERL, _XT = "verl 1dda039b, rollout_corr_helper.py", "xtuner b934f462, rl/rollout_is.py"
_SLIME, _NEMO = "slime 624b824a", "NeMo-RL 7ea279ab, loss_functions.py"
_TRL, _SKY = "TRL f2cd5771, grpo_trainer.py", "SkyRL a9564572, off_policy_correction_utils.py"
_SWIFT, _OPEN = "ms-swift 3602360a, grpo_trainer.py", "OpenRLHF 3c3be623, models/loss.py"
_ROLL, _AREAL = "ROLL 8eb27cc2, train_infer_corrections.py", "AReaL 4aef98d8, utils/functional"
_PRIME, _OI = "prime-rl 559b4477, trainer/rl/loss.py", "open-instruct e6c3044a, grpo_utils.py"
_LEVEL = ("lower", "upper", "level")
_BOTH = "cuts the bottom too, although it is described as capping the top: small weights are raised to the lower bound"
_SKY_ODD = "documented as exclusive, is inclusive; the loss denominator stays as it was"
_STAYS = "a rejected token stays in the loss denominator with weight 0"
_THETA = "made for the current policy: on a dump of the old policy it judges the engine mismatch instead"

PRESETS: dict[str, Preset] = {
    "none": Preset(lambda b: (Weight(), ()), Bounds(), "no correction", "the reference to compare with", "", ()),
    "xtuner/truncate": Preset(_xtuner(False, True), Bounds(0.5, 5.0), "off; token level", _XT, _BOTH, _LEVEL),
    "xtuner/mask": Preset(
        _xtuner(True, False), Bounds(0.5, 5.0), "off", _XT, "weights of the survivors are not cut", _LEVEL
    ),
    "xtuner/both": Preset(
        _xtuner(True, True),
        Bounds(0.5, 5.0, None, 20.0),
        "off; the shipped configurations use these bounds",
        _XT,
        "configuration takes (upper, lower); rejected tokens leave the KL loss and its denominator as well",
        (*_LEVEL, "veto_lower", "veto_upper"),
    ),
    "verl/token_tis": Preset(
        _weight("token", safety=20.0),
        Bounds(None, 2.0),
        "the preset of this name",
        _VERL,
        "logged mean is of the cut weights",
        ("upper",),
    ),
    "verl/seq_tis": Preset(
        _weight("sequence", safety=20.0), Bounds(None, 2.0), "dataclass default", _VERL, "", ("upper",)
    ),
    "verl/token_icepop": Preset(
        _reject("token", "zero", "token", safety=20.0),
        Bounds(0.5, 5.0),
        "the preset of this name",
        _VERL,
        f"{_STAYS}; with every token out of range its metrics divide by zero",
    ),
    "verl/seq_is_rs": Preset(
        lambda b: _verl_k1("sum.k1", Weight("sequence", None, b.upper, 20.0))(b),
        Bounds(0.5, 2.0),
        "the preset of this name",
        _VERL,
        "rejection bounds act on 1 / ratio (k1 = -log ratio)",
    ),
    "verl/geo_rs": Preset(
        _verl_k1("mean.k1"),
        Bounds(0.999, 1.001),
        "the preset of this name",
        _VERL,
        "bounds act on 1 / ratio (k1 = -log ratio)",
    ),
    "verl/token_k1": Preset(
        _verl_k1("token.k1"),
        Bounds(0.5, 2.0),
        "off",
        _VERL,
        "bounds act on 1 / ratio: 0.6 and 1.4 accept ratios 0.714 to 1.667",
    ),
    "verl/k3_rs": Preset(
        _reject("mean.k3", "mask", safety=20.0), Bounds(None, 0.01), "the preset of this name", _VERL, "", ("upper",)
    ),
    "slime/tis": Preset(
        _weight("token"),
        Bounds(None, 2.0),
        "off",
        f"{_SLIME}, megatron_utils/loss.py",
        "the ratio is not bounded before exp",
        ("upper",),
    ),
    "slime/icepop": Preset(_reject("token", "zero", "token"), Bounds(0.5, 2.0), "custom function path", _SLIME, _STAYS),
    "slime/mis": Preset(
        _mis,
        Bounds(0.5, 2.0, 1e-4),
        "the shipped example",
        f"{_SLIME}, train_infer_mismatch_helper/mis.py",
        "the veto works only inside rejection, which then takes the truncation's bounds; the loss denominator stays; "
        "normalised per micro-batch there, per step here",
        ("lower", "upper", "veto_lower"),
    ),
    "slime/opsm": Preset(
        _reject("mean.k1", "zero", advantage="negative"),
        Bounds(None, 1e-4),
        "off",
        _SLIME,
        f"{_STAYS}; {_THETA}",
        ("upper",),
    ),
    "icepop": Preset(
        _reject("token", "zero", "token"), Bounds(0.5, 5.0), "the published method", "IcePop (2025)", _STAYS
    ),
    "nemo-rl/is": Preset(_weight("token"), Bounds(), "off", _NEMO, "a weight that overflows float32 becomes 0", ()),
    "nemo-rl/tis": Preset(
        _weight("token"),
        Bounds(None, 2.0),
        "off, no default bound",
        _NEMO,
        "a weight that overflows float32 becomes 0, not the cap",
    ),
    "nemo-rl/icepop": Preset(_reject("token", "zero", "token"), Bounds(0.5, 5.0), "off", _NEMO, _STAYS),
    "nemo-rl/seq-mask-tis": Preset(
        _reject("geometric", "zero", "token"),
        Bounds(0.999, 1.002),
        "off; suggested bounds",
        _NEMO,
        "not truncated: surviving tokens carry their raw ratio; rejected sequences stay in the denominator",
    ),
    "nemo-rl/seq-logprob-error": Preset(
        _reject("mean.mult", "mask"),
        Bounds(None, 1.5),
        "off; no default (1.5 here)",
        "NeMo-RL 7ea279ab, grpo.py",
        "",
        ("upper",),
    ),
    "prime-rl/dppo-tv": Preset(
        _reject("token.dprob", "zero", "token", advantage="sign"),
        Bounds(-0.2, 0.2),
        "on",
        _PRIME,
        f"bounds are on probabilities; advantage 0 is tested like a negative one; {_THETA}",
    ),
    "prime-rl/ipo": Preset(_reject("token.dprob", "zero", "token"), Bounds(-0.1, 0.1), "off", _PRIME, _THETA),
    "areal/token_mask": Preset(
        _reject("token", "mask", "token"),
        Bounds(None, 5.0),
        "on with decoupled loss",
        _AREAL,
        "the loss denominator stays",
    ),
    "areal/token_clamp": Preset(_weight("token"), Bounds(None, 5.0), "off", _AREAL, ""),
    "areal/sequence_mask": Preset(
        _reject("geometric", "mask", "geometric"),
        Bounds(None, 5.0),
        "off",
        _AREAL,
        "the weight is the geometric mean whatever is tested",
    ),
    "trl/token_truncate": Preset(
        _weight("token"), Bounds(None, 3.0), "off", _TRL, "logged extremes are of the cut weights"
    ),
    "trl/token_mask": Preset(_reject("token", "zero", "token"), Bounds(None, 3.0), "off", _TRL, _STAYS),
    "trl/sequence_truncate": Preset(
        _weight("sequence"), Bounds(None, 3.0), "off", _TRL, "the product is not bounded before exp"
    ),
    "trl/sequence_mask": Preset(
        _reject("sequence", "zero", "sequence"),
        Bounds(None, 3.0),
        "on, the default",
        _TRL,
        f"upper bound only; {_STAYS}",
    ),
    "trl/off_policy_mask": Preset(
        _reject("mean.k1", "zero", advantage="negative"),
        Bounds(None, 0.1),
        "off; no default (0.1 here)",
        _TRL,
        _THETA,
        ("upper",),
    ),
    "openrlhf/tis": Preset(_weight("token"), Bounds(0.5, 5.0), "off", _OPEN, _BOTH),
    "openrlhf/icepop": Preset(_reject("token", "zero", "token"), Bounds(0.5, 5.0), "off", _OPEN, _STAYS),
    "openrlhf/seq-mask-tis": Preset(
        _reject("geometric", "zero", "token"),
        Bounds(0.5, 5.0),
        "off",
        _OPEN,
        "surviving tokens are not cut, although a comment says so",
    ),
    "skyrl/token_tis": Preset(_weight("token", safety=20.0), Bounds(None, 2.0), "off", _SKY, "", ("upper",)),
    "skyrl/sequence_tis": Preset(_weight("sequence", safety=20.0), Bounds(None, 5.0), "off", _SKY, "", ("upper",)),
    "skyrl/sequence_mask": Preset(_reject("sequence", "mask"), Bounds(0.5, 2.0), "off", _SKY, _SKY_ODD),
    "skyrl/geometric_mask": Preset(_reject("geometric", "mask"), Bounds(0.99, 1.01), "off", _SKY, _SKY_ODD),
    "skyrl/outlier": Preset(
        lambda b: (Weight(), (Rule("token", "mask", b.lower, b.upper, veto=True),)),
        Bounds(1e-4, 100.0),
        "off; suggested bounds",
        _SKY,
    ),
    "skyrl/token_mask": Preset(_reject("token", "mask"), Bounds(0.5, 2.0), "off; both bounds mandatory", _SKY, ""),
    "roll/is_weight": Preset(_weight("token"), Bounds(None, 1.2), "off", _ROLL, ""),
    "roll/ratio_filter": Preset(
        _reject("token", "mask"),
        Bounds(0.8, 1.2),
        "off",
        _ROLL,
        "in its token-mean loss the rejected tokens are still trained on",
    ),
    "ms-swift/token_truncate": Preset(
        _weight("token", safety=20.0), Bounds(None, 2.0), "off", _SWIFT, "scales the KL term too", ("upper",)
    ),
    "ms-swift/token_mask": Preset(
        _reject("token", "zero", "token"), Bounds(None, 2.0), "off", _SWIFT, "never rejects a small ratio", ("upper",)
    ),
    "ms-swift/sequence_truncate": Preset(
        _weight("geometric"),
        Bounds(None, 2.0),
        "off",
        _SWIFT,
        "its sequence weight is the geometric mean, not the product",
        ("upper",),
    ),
    "ms-swift/sequence_mask": Preset(
        _reject("geometric", "zero", "token"),
        Bounds(None, 2.0),
        "off",
        _SWIFT,
        "tests the geometric mean; survivors carry raw ratios",
        ("upper",),
    ),
    "open-instruct/rho-clamp": Preset(
        _weight("token", safety=10.0), Bounds(None, 2.0), "on", _OI, "log-ratio held in +-10"
    ),
    "open-instruct/rho-mask": Preset(
        _reject("token", "zero", "token", safety=10.0), Bounds(0.5, 2.0), "off", _OI, _STAYS
    ),
    "deepseek/off-policy-mask": Preset(
        _reject("mean.k1", "zero", advantage="negative"),
        Bounds(None, 0.1),
        "published without a value (0.1 here)",
        "DeepSeek-V3.2 report, off-policy sequence masking",
        f"only sequences with a negative advantage; {_THETA}",
        ("upper",),
    ),
    "tinker/cispo": Preset(
        _weight("token"), Bounds(None, 4.0), "per loss", "tinker-cookbook 9dfcc3a2 (server loss)", ""
    ),
}
SHARE_NOTED = 0.1  # rejecting more than this is worth a note


def parse_policy(text: str) -> Policy:
    """A preset by name, a preset with its own bounds, or a spec of rules.

    Raises:
        UsageError: no such preset or rule, a bound that it does not take, bounds <= 0 or reversed.

    >>> parse_policy("verl/token_tis:upper=3").weight.upper
    3.0
    >>> parse_policy("token:truncate:upper=3").weight.upper
    3.0
    """
    name, _, rest = text.partition(":")
    if name in PRESETS:
        return _with_bounds(text, name, rest)
    if "/" in name or not rest:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise UsageError(
            f"--policy {text}",
            f"expected a preset or a spec, found {name!r}{hint}",
            f"presets: {', '.join(sorted(PRESETS))}",
            "a spec looks like token:truncate:upper=2",
            code="unknown-policy",
        )
    return parse_spec(text)


def _with_bounds(text: str, name: str, rest: str) -> Policy:
    preset = PRESETS[name]
    values: dict[str, object] = dict(vars(preset.bounds))
    for item in rest.split(",") if rest else []:
        key, _, value = item.strip().partition("=")
        if key not in preset.takes:
            raise UsageError(
                f"--policy {text}",
                f"expected one of {', '.join(preset.takes) or 'no bounds'}, found {key!r}",
                "bounds are named, and a preset takes those of its framework",
                f"for example {name}:{preset.takes[0]}=..." if preset.takes else "",
                code="policy-spec",
            )
        if key == "level":
            if value not in LEVELS:
                raise UsageError(
                    f"--policy {text}", f"expected level {', '.join(LEVELS)}, found {value!r}", code="policy-spec"
                )
            values[key] = value
            continue
        try:
            values[key] = None if value in ("none", "null") else float(value)
        except ValueError:
            raise UsageError(
                f"--policy {text}", f"expected a number for {key}=, found {value!r}", code="policy-spec"
            ) from None
    bounds = Bounds(**values)  # type: ignore[arg-type]
    weight, rules = preset.build(preset.bounds)
    on_k1 = any(rule.statistic.endswith(".k1") for rule in rules) and name.startswith("verl/")
    ratio = on_k1 or any(rule.is_ratio for rule in rules) or (weight.level != "none" and not rules)
    check_bounds(f"--policy {text}", bounds.lower, bounds.upper, ratio=ratio)
    check_bounds(f"--policy {text} (veto)", bounds.veto_lower, bounds.veto_upper, ratio=True)
    weight, rules = preset.build(bounds)
    return Policy(text, weight, rules, preset.oddity)


def explain_policy(text: str) -> Mapping[str, object]:
    """What ``explain PRESET`` prints: the rule in words, the framework's default, the source, the oddity.

    >>> explain_policy("trl/sequence_mask")["default"]
    'on, the default'
    """
    policy = parse_policy(text)
    preset = PRESETS.get(text.partition(":")[0])
    return {
        "name": text,
        "rule": policy.words(),
        "rejected": policy.denominators,
        "default": preset.default if preset else "not a preset",
        "source": preset.source if preset else "a spec of yours",
        "oddity": policy.note,
    }
