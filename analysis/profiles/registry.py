"""The known profiles by name, with the settings each takes (the framework's own keys) and how it is run."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout_is.analysis.profiles import nemo_rl, slime, trl, verl, xtuner
from rollout_is.analysis.profiles.rows import Pack, Result, Settings, packs_of
from rollout_is.dumps.errors import UsageError

Runner = Callable[[Sequence[Pack], Settings], Result]


@dataclass(frozen=True)
class Known:
    """A profile before its settings: defaults as data, allowed words of the settings that are words, and the function."""

    defaults: Settings
    run: Runner
    source: str
    words: Mapping[str, tuple[object, ...]]


_LEVELS = ("token", "sequence", "geometric")
_XTUNER = {
    "rollout_is_level": _LEVELS,
    "rollout_is_mode": ("truncate", "mask", "both"),
    "metrics": (None, "mismatch", "rollout_is"),
}
_VERL = {
    "mode": ("decoupled", "bypass"),
    "rows": ("real", "all"),
    "metrics": (None, "debug", "rollout_corr"),
    "rollout_is": (None, "token", "sequence"),
}
_SLIME = {
    "custom_tis_function_path": (None, "mis", "icepop"),
    "tis_level": _LEVELS,
    "rs_level": _LEVELS,
    "tis_mode": ("truncate", "clip", "mask"),
}
_NEMO = {
    "reference_policy_kl_type": ("k1", "k2", "k3"),
    "truncated_importance_sampling_type": (None, "tis", "icepop", "seq-mask-tis"),
    "layout": ("dense", "packed_loop"),
}
_TRL = {
    "vllm_importance_sampling_mode": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}

KNOWN: dict[str, Known] = {
    "xtuner": Known(xtuner.DEFAULTS, xtuner.run, "InternLM/xtuner b934f462", _XTUNER),
    "xtuner-before-1788": Known(
        xtuner.DEFAULTS, lambda packs, s: xtuner.run(packs, s, fixed=False), "InternLM/xtuner e93fe729", _XTUNER
    ),
    "verl": Known(verl.DEFAULTS, verl.run, "verl-project/verl 1dda039b", _VERL),
    "verl-2026-01": Known(
        verl.DEFAULTS, lambda packs, s: verl.run(packs, s, raw=True), "volcengine/verl b178a3cd", _VERL
    ),
    "slime": Known(slime.DEFAULTS, slime.run, "THUDM/slime 624b824a", _SLIME),
    "nemo-rl": Known(nemo_rl.DEFAULTS, nemo_rl.run, "NVIDIA-NeMo/RL 7ea279ab", _NEMO),
    "trl": Known(trl.DEFAULTS, trl.run, "huggingface/trl f2cd5771", _TRL),
}


@dataclass(frozen=True)
class Profile:
    """A trainer's metrics under complete settings.

    Attributes:
        name: as given to ``--as``.
        settings: every key with its value, defaults filled in.
    """

    name: str
    settings: Settings

    def run(self, packs: Sequence[Pack]) -> Result:
        """One training step, all packs of all ranks (``packs_of`` cuts a rank's tensors into them)."""
        return KNOWN[self.name].run(packs, self.settings)

    def __call__(
        self,
        train_logprobs: Tensor,
        rollout_logprobs: Tensor,
        response_mask: Tensor,
        cu_seqlens: Tensor,
        *,
        cu_packs: Tensor | None = None,
        segment_is_pad: Tensor | None = None,
    ) -> Result:
        """One training step of one rank, from packed tensors.

        Args:
            train_logprobs, rollout_logprobs: [T] natural logarithms.
            response_mask: [T], nonzero = response token.
            cu_seqlens: [S+1] segment boundaries.
            cu_packs: [P+1] token offsets of the micro-batches; None is one.
            segment_is_pad: [S] padding segments; None recognises those without response tokens whose rollout log-probs are one fill.

        Returns:
            metrics under the names that the framework logs; weights and keep mask packed like the input.

        >>> import torch
        >>> t = torch.tensor([-2.0, -1.0, -3.0, -0.5, -0.7]); r = torch.tensor([-1.5, -1.2, -1.0, -0.6, -2.0])
        >>> done = profile("trl", {"vllm_importance_sampling_mode": "token_mask"})(t, r, t != 0, torch.tensor([0, 3, 5]))
        >>> round(done.metrics["sampling/importance_sampling_ratio/mean"], 3), [round(w, 3) for w in done.weights.tolist()]
        (0.614, [0.607, 1.221, 0.135, 1.105, 0.0])
        """
        return self.run(
            packs_of(
                train_logprobs,
                rollout_logprobs,
                response_mask,
                cu_seqlens,
                cu_packs=cu_packs,
                segment_is_pad=segment_is_pad,
            )
        )


def profile(name: str, settings: Mapping[str, Any] | None = None) -> Profile:
    """The profile of a trainer.

    Args:
        name: one of ``KNOWN``.
        settings: keys of the framework's own configuration; the rest keep the framework's defaults.

    Raises:
        UsageError: an unknown name, key or word, or thresholds the wrong way round.

    >>> profile("xtuner").settings["rollout_is_level"]
    'token'
    """
    if name not in KNOWN:
        raise UsageError(
            f"--as {name}",
            f"expected one of {', '.join(KNOWN)}, found {name!r}{_near(name, KNOWN)}",
            "no such trainer profile",
            "see docs/profiles.md",
            code="unknown-profile",
        )
    known = KNOWN[name]
    given = dict(settings or {})
    for key, value in given.items():
        _check(name, known, key, value)
    return Profile(name, known.defaults | given)


def _check(name: str, known: Known, key: str, value: Any) -> None:
    where = f"--as {name}: {key}"
    ignored = {"micro_batch"}  # keys that say how a record was taken
    if key not in known.defaults and key not in ignored:
        raise UsageError(
            where,
            f"expected one of {', '.join(known.defaults)}, found {key!r}{_near(key, known.defaults)}",
            "settings carry the names of the framework's own configuration",
            "",
            code="unknown-profile-setting",
        )
    if key in known.words and value not in known.words[key]:
        words = ", ".join("null" if word is None else str(word) for word in known.words[key])
        raise UsageError(where, f"expected one of {words}, found {value!r}", code="profile-setting")
    if name.startswith("xtuner") and key.endswith("threshold") and value is not None:
        pair = isinstance(value, list | tuple) and len(value) == 2 and all(_is_number(v) for v in value)
        if not pair or not value[0] > value[1] >= 0:
            raise UsageError(
                where,
                f"expected [upper, lower] with upper > lower >= 0, found {value!r}",
                "xtuner takes the upper bound first, although its description shows the reverse",
                "for example [2.0, 0.5]",
                code="profile-setting",
            )
    elif isinstance(known.defaults.get(key), bool) and not isinstance(value, bool):
        raise UsageError(where, f"expected true or false, found {value!r}", code="profile-setting")
    elif _takes_number(key) and value is not None and not (_is_number(value) and value >= 0):
        raise UsageError(where, f"expected a number >= 0 or null, found {value!r}", code="profile-setting")
    elif name.startswith("verl") and key.endswith("threshold") and value is not None:
        _check_verl(where, key, value)


def _check_verl(where: str, key: str, value: Any) -> None:
    """Numbers or "lo_hi", a comma list of them for rejection."""
    pieces = str(value).split(",") if key == "rollout_rs_threshold" else [str(value)]
    for piece in pieces:
        bounds = piece.strip().split("_")
        try:
            numbers = [float(bound) for bound in bounds]
        except ValueError:
            numbers = []
        if not numbers or len(numbers) > 2 or min(numbers) <= 0 or (len(numbers) == 2 and not numbers[0] < numbers[1]):
            raise UsageError(
                where, f'expected a number > 0 or "lo_hi" with lo < hi, found {piece!r}', code="profile-setting"
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _takes_number(key: str) -> bool:
    ends = ("_bound", "tis_clip", "tis_clip_low", "clip_min", "clip_max", "_ratio", "ratio_min", "veto_threshold")
    return key.endswith(ends) or key in ("samples_per_rollout", "seq_logprob_error_threshold")


def _near(word: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(word, list(known), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def parse(text: str) -> Profile:
    """``NAME``, ``NAME:key=value,...`` or ``NAME:@settings.json`` as a profile.

    Values are JSON where they can be (numbers, true, null, [2.0, 0.5]) and words otherwise; a piece without ``=`` continues the
    value before it, so that ``rollout_rs=token_k1,seq_mean_k3`` is one value.

    Raises:
        UsageError: as ``profile``, or a file that is not a JSON object.

    >>> parse("verl:rollout_is=token,rollout_is_threshold=0.5_2.0").settings["rollout_is_threshold"]
    '0.5_2.0'
    """
    name, _, rest = text.partition(":")
    if not rest:
        return profile(name)
    if rest.startswith("@"):
        return profile(name, _read(f"--as {text}", rest[1:]))
    settings: dict[str, Any] = {}
    key = ""
    for piece in re.split(r",(?![^\[\"]*[\]\"])", rest):
        if "=" in piece:
            key, _, value = piece.partition("=")
            settings[key.strip()] = _value(value)
        elif key:
            settings[key.strip()] = f"{settings[key.strip()]},{piece}"
        else:
            raise UsageError(f"--as {text}", f"expected key=value, found {piece!r}", code="profile-setting")
    return profile(name, settings)


def _read(where: str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(where, f"expected a JSON file of settings, found {error}", code="profile-setting") from None
    if not isinstance(found, dict):
        raise UsageError(where, f"expected a JSON object, found {type(found).__name__}", code="profile-setting")
    return found


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return {"none": None, "None": None, "True": True, "False": False}.get(text.strip(), text.strip())
    return value
