"""Policies against the weights and masks that the trainers' own code produced (recorded arrays, float32)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from rollout_is.analysis.policies import Policy, Rule, Weight, evaluate, parse_policy
from rollout_is.analysis.profiles import Pack, packs_of

VECTORS = Path(__file__).parents[1] / "vectors" / "parity"


def packs(case: str) -> list[Pack]:
    out: list[Pack] = []
    with safe_open(VECTORS / "inputs" / f"{case}.safetensors", "pt") as f:
        names = sorted({key.rsplit("/", 1)[0] for key in f.keys()})  # noqa: SIM118 - not a dict
        for at in names:
            tensors = (
                f.get_tensor(f"{at}/{n}") for n in ("train_logprobs", "rollout_logprobs", "response_mask", "cu_seqlens")
            )
            out += packs_of(
                *tensors, segment_is_pad=f.get_tensor(f"{at}/segment_is_pad"), rank=int(at[4 : at.index("/")])
            )
    return out


def joined(chosen: list[Pack]) -> dict[str, Any]:
    import torch

    base, offsets = 0, [torch.zeros(1, dtype=torch.int64)]
    for pack in chosen:
        offsets.append(pack.offsets[1:] + base)
        base += pack.train.numel()
    out = {name: torch.cat([getattr(p, name) for p in chosen]).numpy() for name in ("train", "rollout", "mask")}
    return {
        "train_logprobs": out["train"],
        "rollout_logprobs": out["rollout"],
        "response_mask": out["mask"],
        "cu_seqlens": torch.cat(offsets).numpy(),
    }


def xtuner(s: dict[str, Any]) -> Policy | None:
    if s["metrics"] != "rollout_is":
        return None
    level, mode = s["rollout_is_level"], s["rollout_is_mode"]
    hi, lo = s["rollout_is_threshold"]
    rules = []
    if mode != "truncate":
        mask_hi, mask_lo = s.get("rollout_is_mask_threshold") or (hi, lo)
        rules.append(Rule(level, "mask", mask_lo, mask_hi))
    if s.get("rollout_is_veto_threshold"):
        veto_hi, veto_lo = s["rollout_is_veto_threshold"]
        rules.append(Rule("token", "mask", veto_lo or None, veto_hi, veto=True))
    cut = (None, None) if mode == "mask" else (lo, hi)
    return Policy("xtuner", Weight(level, *cut, safety=20.0), tuple(rules))


def verl(s: dict[str, Any]) -> Policy | None:
    if s["metrics"] == "debug" or s["mode"] != "decoupled" or not (s.get("rollout_is") or s.get("rollout_rs")):
        return None
    weight, rules = Weight(), []
    if level := s.get("rollout_is"):
        bound = str(s["rollout_is_threshold"])
        normalize = level if s.get("rollout_is_batch_normalize") else None
        if "_" in bound:
            lo, hi = map(float, bound.split("_"))
            weight, rules = Weight(level, safety=20.0, normalize=normalize), [Rule(level, "zero", lo, hi)]
        else:
            weight = Weight(level, None, float(bound), 20.0, normalize)
    for option, bound in zip(
        (s.get("rollout_rs") or "").split(","), str(s.get("rollout_rs_threshold")).split(","), strict=False
    ):
        if not option:
            continue
        scope, kind = option.rsplit("_", 1)
        name = f"{scope.removeprefix('seq_')}.{kind}"
        if kind == "k1":
            *low, high = map(float, bound.split("_"))
            rules.append(
                Rule(name, "mask", float(np.log(low[0] if low else 1 / high)), float(np.log(high)), safety=20.0)
            )
        else:
            rules.append(Rule(name, "mask", None, float(bound), safety=20.0))
    return Policy("verl", weight, tuple(rules))


def trl(s: dict[str, Any]) -> Policy:
    level, action = s["vllm_importance_sampling_mode"].split("_")
    lo, hi = s["vllm_importance_sampling_clip_min"], s["vllm_importance_sampling_clip_max"]
    if action == "truncate":
        return Policy("trl", Weight(level, lo, hi))
    return Policy("trl", Weight(level), (Rule(level, "zero", lo, hi),))


def nemo(s: dict[str, Any]) -> Policy | None:
    if s["fully_masked_sample_mask"]:
        return None
    kind, hi = s["truncated_importance_sampling_type"], s["truncated_importance_sampling_ratio"]
    lo = s["truncated_importance_sampling_ratio_min"]
    level = "sequence" if s["sequence_level_importance_ratios"] else "token"
    rules = []
    if s["seq_logprob_error_threshold"]:
        rules.append(Rule("mean.mult", "mask", None, s["seq_logprob_error_threshold"]))
    if kind == "tis":
        return Policy("nemo", Weight(level, lo, hi), tuple(rules))
    if kind:
        rules.append(Rule("geometric" if kind == "seq-mask-tis" else "token", "zero", lo, hi))
    return Policy("nemo", Weight(level), tuple(rules))


def slime(s: dict[str, Any]) -> Policy | None:
    if not s["use_tis"] or s.get("tis_batch_normalize"):  # its normalisation is per micro-batch
        return None
    path = s["custom_tis_function_path"]
    if path != "mis":
        lo, hi = s["tis_clip_low"] or None, s["tis_clip"]
        if path == "icepop":
            return Policy("slime", Weight("token"), (Rule("token", "zero", lo, hi),))
        return Policy("slime", Weight("token", lo, hi))
    level, mode, hi = s["tis_level"], s["tis_mode"], s["tis_upper_bound"]
    lo = s["tis_lower_bound"] or 1 / hi
    rules = [Rule(level, "mask", lo, hi)] if mode == "mask" else []
    cut = {"truncate": (None, hi), "clip": (lo, hi), "mask": (None, None)}[mode]
    if s["use_rs"]:
        rules.append(Rule(s["rs_level"], "mask", s["rs_lower_bound"] or lo, s["rs_upper_bound"] or hi))
        if s["rs_veto_threshold"]:
            rules.append(Rule("token", "mask", s["rs_veto_threshold"], None, veto=True))
    return Policy("slime", Weight(level, *cut, safety=20.0), tuple(rules))


BUILDERS = {"xtuner": xtuner, "verl_new": verl, "trl": trl, "nemo_rl": nemo, "slime": slime}


def records(name: str) -> Iterator[tuple[dict[str, Any], Policy]]:
    for record in json.loads((VECTORS / f"{name}.json").read_text()):
        if ("weights" in record or "keep" in record) and (policy := BUILDERS[name](record["settings"])):
            yield record, policy


@pytest.mark.parametrize("name", BUILDERS)
def test_weights_and_masks_are_those_of_the_trainer(name: str) -> None:
    arrays = load_file(VECTORS / f"{name}.safetensors")
    checked = 0
    for record, policy in records(name):
        chosen = packs(record["case"])
        if "rank" in record:
            chosen = [p for p in chosen if p.rank == record["rank"]]
        if "pack" in record:
            chosen = [chosen[record["pack"]]]
        if record["scope"] == "pack" and not any(p.mask.any() for p in chosen):
            continue
        applied = evaluate(policy, **joined(chosen))
        label = f"{record['case']} {record['scope']} {record['settings']}"
        survives = applied.keep
        if "keep" in record:
            assert np.array_equal(applied.keep, arrays[record["keep"]].numpy()), label
        if "weights" in record:
            theirs = arrays[record["weights"]].numpy()
            assert np.allclose(applied.weights[survives], theirs[survives], rtol=2e-5, atol=3e-6), label
        checked += 1
    assert checked > 30


def test_presets_are_what_the_frameworks_settings_say() -> None:
    both = {"metrics": "rollout_is", "rollout_is_level": "token", "rollout_is_mode": "both"}
    pairs = [
        (
            "xtuner/both",
            xtuner(both | {"rollout_is_threshold": [5.0, 0.5], "rollout_is_veto_threshold": [20.0, 0.0]}),
        ),
        (
            "verl/token_tis",
            verl({"mode": "decoupled", "metrics": "", "rollout_is": "token", "rollout_is_threshold": 2.0}),
        ),
        (
            "verl/seq_is_rs",
            verl(
                {
                    "mode": "decoupled",
                    "metrics": "",
                    "rollout_is": "sequence",
                    "rollout_is_threshold": 2.0,
                    "rollout_rs": "seq_sum_k1",
                    "rollout_rs_threshold": "0.5_2.0",
                }
            ),
        ),
        (
            "verl/k3_rs",
            verl({"mode": "decoupled", "metrics": "", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": "0.01"}),
        ),
        (
            "trl/sequence_mask",
            trl(
                {
                    "vllm_importance_sampling_mode": "sequence_mask",
                    "vllm_importance_sampling_clip_min": None,
                    "vllm_importance_sampling_clip_max": 3.0,
                }
            ),
        ),
    ]
    for name, policy in pairs:
        preset = parse_policy(name)
        assert policy is not None and (preset.weight, preset.rules) == (policy.weight, policy.rules), name
