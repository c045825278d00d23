"""Every recorded number of the trainers' own code, reproduced: metrics, applied weights and keep masks.

The vectors are records of five cases; the whole reference folder is run too where it lies beside the checkout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rollout_is.analysis.profiles import Pack, Result, packs_of, profile

TESTS = Path(__file__).parents[1]
VECTORS = TESTS / "vectors" / "parity"
REFERENCE = TESTS.parents[1] / "shared" / "reference" / "parity"
FILES = {
    "xtuner": "xtuner",
    "xtuner-before-1788": "xtuner_prefix",
    "verl": "verl_new",
    "verl-2026-01": "verl_old",
    "slime": "slime",
    "nemo-rl": "nemo_rl",
    "trl": "trl",
}


@cache
def packs(folder: Path, case: str) -> list[Pack]:
    out: list[Pack] = []
    with safe_open(folder / "inputs" / f"{case}.safetensors", "pt") as f:
        names = set(f.keys())
        for rank in range(int(f.metadata()["ranks"])):
            for pack in range(len(names)):
                at = f"rank{rank}/pack{pack}/"
                if at + "cu_seqlens" in names:
                    out += packs_of(
                        *(
                            f.get_tensor(at + n)
                            for n in ("train_logprobs", "rollout_logprobs", "response_mask", "cu_seqlens")
                        ),
                        segment_is_pad=f.get_tensor(at + "segment_is_pad"),
                        rank=rank,
                    )
    return out


def records(folder: Path, name: str) -> dict[str, list[dict[str, Any]]]:
    """settings (as JSON) -> the records under them."""
    out: dict[str, list[dict[str, Any]]] = {}
    for record in json.loads((folder / f"{FILES[name]}.json").read_text()):
        out.setdefault(json.dumps(record["settings"]), []).append(record)
    return out


def close(found: float, want: float, name: str) -> bool:
    if not (math.isfinite(found) and math.isfinite(want)):
        return found == want or (math.isnan(found) and math.isnan(want))
    spread = name.endswith("_std") and not name.endswith("seq_std")  # computed as E[w^2] - E[w]^2 in float32
    return abs(found - want) <= (1e-3 * max(1.0, abs(want)) if spread else 3e-6 + 2e-5 * abs(want))


def wrong(folder: Path, name: str, settings: str, wanted: list[dict[str, Any]]) -> Iterator[str]:
    """What is not reproduced, as sentences."""
    stored = folder / f"{FILES[name]}.safetensors"
    arrays = load_file(stored) if stored.exists() else {}
    done: dict[str, Result] = {}
    for record in wanted:
        case, scope = record["case"], record["scope"]
        all_packs = packs(folder, case)
        if case not in done:
            done[case] = profile(name, json.loads(settings)).run(all_packs)
        result, at = done[case], f"{case} {scope} {record.get('rank', '')} {record.get('pack', '')}"
        if "error" in record or result.error:
            if ("error" in record) != bool(result.error):
                yield f"{at}: trainer error {record.get('error')!r}, ours {result.error!r}"
            continue
        chosen = [i for i, p in enumerate(all_packs) if p.rank == record.get("rank", p.rank)]
        if scope == "pack":
            chosen = [chosen[record["pack"]]]
        metrics = result.per_pack[chosen[0]] if scope == "pack" and result.per_pack else result.metrics
        for key, value in record.get("metrics", {}).items():
            if key not in metrics or not close(metrics[key], float(value), key):
                yield f"{at}: {key} is {metrics.get(key)}, trainer {value}"
        sizes = [p.train.numel() for p in all_packs]
        for key in ("weights", "keep"):
            if key in record:
                ours = getattr(result, key)
                if ours is None:
                    yield f"{at}: no {key}"
                    continue
                pieces = ours.split(sizes)
                mine, theirs = torch.cat([pieces[i] for i in chosen]).float(), arrays[record[key]].float()
                if not torch.allclose(mine, theirs, rtol=2e-5, atol=3e-6, equal_nan=True):
                    yield f"{at}: {key} differ by up to {(mine - theirs).abs().max()}"


CASES = [(name, settings, wanted) for name in FILES for settings, wanted in records(VECTORS, name).items()]


@pytest.mark.parametrize(
    ("name", "settings", "wanted"), CASES, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)]
)
def test_reproduces_the_recorded_numbers(name: str, settings: str, wanted: list[dict[str, Any]]) -> None:
    assert not list(wrong(VECTORS, name, settings, wanted))


@pytest.mark.skipif(not REFERENCE.exists(), reason="an extra: the whole reference folder ../shared is not here")
@pytest.mark.parametrize("name", FILES)
def test_reproduces_the_whole_reference_folder(name: str) -> None:
    everything = records(REFERENCE, name)
    assert sum(len(wanted) for wanted in everything.values()) > 300
    assert not [w for settings, wanted in everything.items() for w in wrong(REFERENCE, name, settings, wanted)]


def test_the_fix_of_the_padding_rows_moves_the_numbers_as_published() -> None:
    """Several pad segments a pack and one all-padding rank, token level (trainer_metrics, corrections, item 8)."""
    settings = {"rollout_is_threshold": [2.0, 0.5]}
    before, after = (
        profile(name, settings).run(packs(VECTORS, "case_04")) for name in ("xtuner-before-1788", "xtuner")
    )
    at = "rollout_is/mismatch/rollout_is_"
    assert before.metrics[at + "seq_min"] == 0.0 and after.metrics[at + "seq_min"] > 0.9
    assert before.metrics[at + "eff_sample_size"] == math.inf
    assert after.metrics[at + "eff_sample_size"] == pytest.approx(0.995, abs=5e-4)
    assert before.metrics[at + "mean"] == pytest.approx(0.499, abs=5e-4)
    assert after.metrics[at + "mean"] == pytest.approx(0.998, abs=5e-4)
    assert after.weights is not None and before.weights is not None and torch.equal(before.weights, after.weights)
