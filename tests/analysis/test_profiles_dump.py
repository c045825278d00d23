"""Profiles over a dump: steps and ranks put together, ours beside the logged value, and the audit of what a trainer logged."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_is.analysis.profiles import packs_of, parse, profile
from rollout_is.cli.app import main
from rollout_is.dumps.errors import UsageError
from rollout_is.dumps.writer import DumpWriter

XT = {"rollout_is_threshold": [2.0, 0.5]}


def run(*args: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    return main(["analyze", *args], stdout=out, stderr=err), out.getvalue(), err.getvalue()


def rank_tensors(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Two packs: eight sequences with prompts, the second pack with three pad segments at its end."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = [30, 20, 40, 10, 25, 35, 15, 12, 9, 9, 9]
    total = sum(lengths)
    rollout = -torch.rand(total, generator=generator) * 3 - 0.01
    train = rollout + 0.05 * torch.randn(total, generator=generator)
    mask = torch.ones(total, dtype=torch.bool)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    for start in offsets[:-1].tolist():
        mask[start : start + 3] = False
    mask[-27:] = False
    rollout[~mask] = 0.0
    return {
        "train_logprobs": train,
        "rollout_logprobs": rollout,
        "response_mask": mask,
        "cu_seqlens": offsets,
        "cu_packs": torch.tensor([0, 100, total]),
    }


def as_trainer(name: str, settings: dict[str, Any], step: int) -> dict[str, float]:
    packs = []
    for rank in (0, 1):
        tensors = rank_tensors(rank, step)
        packs += packs_of(**tensors, rank=rank)
    return profile(name, settings).run(packs).metrics


def write(folder: Path, metrics: dict[int, dict[str, float]] | None = None, steps: tuple[int, ...] = (1, 2)) -> str:
    for rank in (0, 1):
        with DumpWriter(folder, rank=rank, world_size=2) as writer:
            for step in steps:
                extra = {} if metrics is None else {"trainer_metrics": metrics[step]}
                writer.write(step=step, **rank_tensors(rank, step), **extra)
    return str(folder)


def test_metrics_are_those_of_the_profile_run_on_the_steps_packs(tmp_path: Path) -> None:
    code, out, _ = run(write(tmp_path / "d"), "--as", "xtuner:rollout_is_threshold=[2.0,0.5]", "-f", "json")
    assert code == 0
    report = json.loads(out)["profiles"][0]
    want = {step: as_trainer("xtuner", XT, step) for step in (1, 2)}
    for step, metrics in want.items():
        assert report["steps"][str(step)] == pytest.approx(metrics)
    assert report["metrics"] == pytest.approx({k: (want[1][k] + want[2][k]) / 2 for k in want[1]})
    assert report["name"] == "xtuner" and report["settings"]["rollout_is_threshold"] == [2.0, 0.5]
    by_name = {d["metric"]: d for d in report["differs"]}
    ppl = by_name["mismatch/mismatch_training_ppl"]
    assert "one value a pack" in ppl["why"] and ppl["ours"] == report["ours"]["mismatch/mismatch_training_ppl"]


def test_the_fix_of_the_padding_shows_beside_the_exact_value(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", steps=(1,))
    texts = [f"{name}:rollout_is_threshold=[2.0,0.5]" for name in ("xtuner-before-1788", "xtuner")]
    before, after = json.loads(run(folder, "--as", texts[0], "--as", texts[1], "-f", "json")[1])["profiles"]
    name = "rollout_is/mismatch/rollout_is_seq_min"
    assert before["metrics"][name] == 0.0
    assert after["metrics"][name] == pytest.approx(after["ours"][name], rel=1e-5)
    why = {d["metric"]: d["why"] for d in before["differs"]}
    assert why[name] == "padding rows counted as 0"


def test_the_table_reads(tmp_path: Path) -> None:
    code, out, err = run(write(tmp_path / "d"), "--as", "verl:rollout_is=token")
    assert (code, err) == (0, "")
    assert "what verl would have logged (mode=decoupled, rows=real, rollout_is=token, rollout_is_threshold=2.0)" in out
    assert any(line.split()[:1] == ["rollout_corr/kl"] for line in out.splitlines())
    assert max(map(len, out.splitlines())) <= 100


def audit(folder: str, text: str) -> list[dict[str, Any]]:
    code, out, err = run(folder, "--as", text, "--audit", "-f", "json")
    assert code == 0, err
    entries: list[dict[str, Any]] = json.loads(out)["audit"]["entries"]
    return entries


def test_audit_names_padding_rows_and_says_what_it_should_have_been(tmp_path: Path) -> None:
    name = "rollout_is/mismatch/rollout_is_seq_min"
    logged = {step: as_trainer("xtuner-before-1788", XT, step) for step in (1, 2)}
    folder = write(tmp_path / "d", {s: {name: m[name], "loss": 1.0} for s, m in logged.items()})
    entries = audit(folder, "xtuner:rollout_is_threshold=[2.0,0.5]")
    assert [e["step"] for e in entries] == ["1", "2"]
    for entry in entries:
        assert entry["logged"] == 0.0
        assert entry["reproduced_by"] == ["padding rows counted (xtuner before the fix)"]
        want = as_trainer("xtuner", XT, int(entry["step"]))[name]
        assert entry["ours"] == pytest.approx(want, rel=1e-5)
        assert (
            "= padding rows counted" in entry["verdict"]
            and f"over valid sequences it is {want:.4g}" in entry["verdict"]
        )


def test_audit_of_verl_finds_padding_rows_in_the_batch(tmp_path: Path) -> None:
    settings = {"rollout_is": "token", "rows": "all"}
    logged = {step: as_trainer("verl", settings, step) for step in (1, 2)}
    keys = ("rollout_corr/training_ppl", "rollout_corr/rollout_is_seq_min", "rollout_corr/kl")
    folder = write(tmp_path / "d", {s: {k: m[k] for k in keys} for s, m in logged.items()})
    by_name = {e["metric"]: e for e in audit(folder, "verl:rollout_is=token") if e["step"] == "1"}
    assert by_name["rollout_corr/training_ppl"]["reproduced_by"][0] == "padding rows counted"
    assert "padding rows counted" in by_name["rollout_corr/rollout_is_seq_min"]["verdict"]
    assert "exact value over valid tokens" in by_name["rollout_corr/kl"]["verdict"]


def test_audit_says_when_nothing_reproduces_a_number(tmp_path: Path) -> None:
    name = "rollout_is_seq_mean"  # the last part of the logged name is enough
    folder = write(tmp_path / "d", {s: {name: 0.123456} for s in (1, 2)})
    entry = audit(folder, "xtuner:rollout_is_threshold=[2.0,0.5]")[0]
    assert entry["reproduced_by"] == []
    assert "reproduced by none of them; nearest: padding rows counted" in entry["verdict"]
    text = run(folder, "--as", "xtuner:rollout_is_threshold=[2.0,0.5]", "--audit")[1]
    assert "audit of what the trainer logged, as xtuner: 2 numbers, 2 not reproduced" in text


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--as", "xtuner", "--audit"), 2, "expected trainer_metrics in the metadata of the shards, found none"),
        (("--audit",), 2, "expected exactly one --as NAME, found 0"),
        (("--as", "xtunner"), 2, "did you mean xtuner?"),
        (("--as", "xtuner:rollout_is_treshold=[2,1]"), 2, "did you mean rollout_is_threshold?"),
        (
            ("--as", "xtuner:rollout_is_threshold=[0.8,1.2]"),
            2,
            "expected [upper, lower] with upper > lower >= 0, found [0.8, 1.2]",
        ),
        (("--as", "verl:rollout_is=word"), 2, "expected one of null, token, sequence, found 'word'"),
        (("--as", "verl:rollout_is=token,rollout_is_threshold=2_1"), 2, "with lo < hi"),
        (("--as", "trl:@missing.json"), 2, "expected a JSON file of settings"),
        (("--as", "trl:vllm_importance_sampling_clip_max=-1"), 2, "expected a number >= 0 or null, found -1"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, args: tuple[str, ...], code: int, message: str) -> None:
    found = run(write(tmp_path / "d", steps=(1,)), *args)
    assert found[:2] == (code, "")
    assert message in found[2]


def test_trainer_metrics_that_are_no_numbers_are_an_error(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {k: v.contiguous() for k, v in rank_tensors(0, 1).items()}
    save_file(tensors, tmp_path / "a.safetensors", {"step": "1", "rank": "0", "trainer_metrics": "[1, 2]"})
    code, _, err = run(str(tmp_path), "--as", "xtuner", "--audit")
    assert code == 3 and "expected a JSON object of numbers" in err


def test_settings_are_read_from_text_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.6_1.4,0.01"}))
    from_file = parse(f"verl:@{file}")
    from_text = parse("verl:rollout_rs=token_k1,seq_mean_k3,rollout_rs_threshold=0.6_1.4,0.01")
    assert from_file.settings == from_text.settings
    assert parse("xtuner:rollout_is_threshold=[5.0,0.5],rollout_is_mode=both").settings["rollout_is_threshold"] == [
        5.0,
        0.5,
    ]
    with pytest.raises(UsageError, match="expected key=value"):
        parse("trl:3.0")


def test_a_pack_boundary_inside_a_segment_is_refused() -> None:
    tensors = rank_tensors(0, 1)
    with pytest.raises(ValueError, match="to be a segment boundary"):
        packs_of(**{**tensors, "cu_packs": torch.tensor([0, 101, 214])})


def test_how_a_trainer_fails_is_told_and_is_no_number(tmp_path: Path) -> None:
    code, out, _ = run(
        write(tmp_path / "d"), "--as", "verl:rollout_is=token,rollout_is_threshold=0.001_0.002", "-f", "json"
    )
    data = json.loads(out)
    assert code == 0
    assert data["profiles"][0]["metrics"] == {}
    assert any(n["code"] == "profile-error" and "ZeroDivisionError" in n["message"] for n in data["notes"])


def test_audit_leads_the_report_and_its_findings_are_explained(tmp_path: Path) -> None:
    logged = {step: as_trainer("xtuner-before-1788", XT, step) for step in (1, 2)}
    folder = write(tmp_path / "d", {s: {k: v for k, v in m.items() if math.isfinite(v)} for s, m in logged.items()})
    code, out, _ = run(folder, "--as", "xtuner:rollout_is_threshold=[2.0,0.5]", "--audit")
    assert code == 0
    assert out.startswith("1. ") and "numbers that the trainer logged count padding rows" in out.split("dump ")[0]
    body = out[out.index("audit of what") :]
    assert body.index("rollout_is_seq_min") < body.index("mismatch_training_ppl") < body.index("the exact value: ")
    page = io.StringIO()
    assert (
        main(["explain", "audit.padding-rows", "audit.not-reproduced", "policy-rejects", "xtuner/both"], stdout=page)
        == 0
    )
    assert "pad segments of a pack" in page.getvalue()
