"""The accelerator path: the same figures as numpy's within invariant 2's tolerance, and every count the same bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from made import Shard, randomly

from rollout_is.analysis import engine
from rollout_is.analysis.pipeline import check_device
from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Summary
from rollout_is.dumps.errors import UsageError, WorkLostError

COUNTS = ("fraction", "identical", "extreme")
DEVICES = [
    "cpu:torch",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
    ),
]


def summaries(device: str, seed: int, **columns: torch.Tensor) -> tuple[Summary, Summary]:
    one = randomly(np.random.default_rng(seed), segments=40)
    one.columns.update(columns)
    return one.summarize(veto_lower=0.5), one.summarize(veto_lower=0.5, device=device)


def assert_same(want: Summary, got: Summary) -> None:
    assert want.coverage == got.coverage
    found = dict(got.statistics())
    for name, a in want.statistics():
        b = found[name]
        assert (a.n, a.why) == (b.n, b.why), name
        if a.value is None or b.value is None or any(word in name for word in COUNTS) or "log_ratio_p" in name:
            assert a.value == b.value, name
        else:
            assert math.isclose(a.value, b.value, rel_tol=1e-9, abs_tol=1e-11), (name, a.value, b.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_the_same_figures_as_on_the_cpu(device: str, seed: int) -> None:
    assert_same(*summaries(device, seed))


@pytest.mark.parametrize("device", DEVICES)
def test_values_that_float64_weights_cannot_hold(device: str) -> None:
    d = torch.tensor([1000.0, -1000.0, 0.0, 70000.0, -9.0, 0.5], dtype=torch.float64)
    r = torch.full((6,), -2.0, dtype=torch.float64)
    one = Shard(r + d, r, torch.ones(6, dtype=torch.bool), [0, 2, 4, 6])
    assert_same(one.summarize(), one.summarize(device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_non_finite_tokens(device: str) -> None:
    nan, inf = float("nan"), float("inf")
    t = torch.tensor([-1.0, nan, -1.0, -inf, -2.0, -1.0])
    r = torch.tensor([-1.5, -1.0, -inf, -1.0, -2.5, nan])
    one = Shard(t, r, torch.tensor([True, True, True, True, True, False]), [0, 3, 6])
    assert_same(one.summarize(), one.summarize(device=device))


@pytest.mark.parametrize("device", DEVICES)
def test_groupings_and_worst_places(device: str) -> None:
    one = randomly(np.random.default_rng(5), segments=20)
    by = ("position", "probability", "length")
    want, got = one.summarize(by=by, top=5), one.summarize(by=by, top=5, device=device)
    for key in by:
        assert [(k, g.valid_tokens) for k, g in want.groups[key].items()] == [
            (k, g.valid_tokens) for k, g in got.groups[key].items()
        ]
    assert want.worst == got.worst


@pytest.mark.parametrize(("device", "word"), [("mps", "float64"), ("tpu", "cpu, cuda"), ("cuda:99", "CUDA|cuda:0")])
def test_devices_that_cannot_be_used_are_refused(device: str, word: str) -> None:
    with pytest.raises(UsageError, match=word) as met:
        check_device(device)
    assert met.value.exit_code == 2
    assert Settings(device="cpu").device == "cpu"


def test_a_full_device_is_said_to_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    def fail(*_: object) -> None:
        raise OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine.Engine, "run", fail)
    with pytest.raises(WorkLostError, match="out of memory") as met:
        randomly(np.random.default_rng(1)).summarize()
    assert met.value.exit_code == 75
