"""Random faults over random dumps, a few seeds of what benchmarks/planted_faults.py measures at length."""

from __future__ import annotations

import doctored  # noqa: F401  # puts benchmarks/ on the path
import numpy as np
import planted_faults
import planted_kinds
import pytest


@pytest.mark.parametrize("seed", [1000, 1001])
def test_every_planted_fault_is_named(seed: int) -> None:
    missed = []
    for id, fault, dump in planted_faults.planted(seed):
        findings = planted_faults.examine(dump)
        for finding in findings:
            shown = finding.evidence["places"]
            assert len(shown) <= 3
            assert shown or finding.id in ("copies.zero", "scale.metadata") or finding.severity == "info", finding
            assert finding.message and finding.source and finding.next and finding.evidence["strength_is"]
        if planted_faults.named(findings, id) != "named":
            missed.append((id, fault, [f.id for f in findings]))
    assert len(missed) <= 1, missed  # a small dump can be too small for a weak fault; docs/doctor.md gives the rates


@pytest.mark.parametrize("kind", planted_faults.NEGATIVES)
def test_healthy_dumps_of_every_kind_are_silent(kind: str) -> None:
    for seed in range(2000, 2006):
        dump = planted_faults.random_dump(np.random.default_rng([seed, len(kind)]), kind)
        found = [f.id for f in planted_faults.examine(dump) if f.severity != "info"]
        assert found == (["copies.identical"] if kind == "none" and found else [])


def test_faults_in_combination_are_both_named() -> None:
    for first, second, dump in planted_faults.combined(3000):
        if second.startswith(
            "where."
        ):  # one or two bad sequences, or a mild rank, beside a fault of all tokens: see the rates
            continue
        findings = planted_faults.examine(dump)
        assert planted_faults.named(findings, first) == "named", (first, second)
        assert planted_faults.named(findings, second) == "named", (first, second)


def test_every_fault_has_an_explanation() -> None:
    from rollout_is.analysis.doctor.texts import findings as pages

    names = set(pages())
    for id in (*planted_kinds.FAULTS, *planted_kinds.PARTIAL):
        assert id in names or any(name.startswith(id + ".") for name in names)
