"""convert: the figures of the copy are the figures of the source, bit for bit; shards appear whole or not at all."""

import importlib.util
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from rollout_is import analyze
from rollout_is.cli.app import main
from rollout_is.dumps.convert import convert
from rollout_is.dumps.errors import DumpError, UsageError
from rollout_is.dumps.foreign import registry

_spec = importlib.util.spec_from_file_location("foreign_conftest", Path(__file__).parent / "foreign" / "conftest.py")
shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shared)


def figures(path):
    """What a summary says of the data, without where and when it was computed."""
    found = analyze([str(path)]).to_dict()
    return {key: found[key] for key in ("views", "groups", "coverage")}


def converted_statistics(summary):
    masked = summary["views"]["masked"]
    kl = masked["mismatch"]["mismatch_kl"]["value"]
    return {
        "num_sequences_with_valid_tokens": summary["coverage"]["sequences"],
        "num_valid_response_tokens": summary["coverage"]["valid_tokens"],
        "mean_log_ratio": -kl,
        "mean_abs_log_ratio": masked["mismatch"]["mismatch_logprob_abs_diff"]["value"],
        "max_abs_log_ratio": masked["mismatch"]["mismatch_logprob_abs_diff_max"]["value"],
    }


@pytest.mark.parametrize(("path", "expected"), shared.sample_cases(True))
def test_analysing_the_copy_gives_the_bits_of_the_source(path, expected, tmp_path):
    found = convert(path, tmp_path / "out")
    direct, copied = figures(path), figures(tmp_path / "out")
    assert json.dumps(copied, sort_keys=True) == json.dumps(direct, sort_keys=True)
    for key, value in converted_statistics(copied).items():
        assert value == pytest.approx(expected[key], abs=1e-6), key
    ratios = [r for r in expected["per_sequence_mean_ratio"] if r is not None]
    per_sequence = copied["views"]["masked"]["per_sequence"]
    assert per_sequence["rollout_is_seq_mean"]["value"] == pytest.approx(np.mean(ratios), abs=1e-6)
    assert per_sequence["rollout_is_seq_max"]["value"] == pytest.approx(max(ratios), abs=1e-6)
    assert len(found.shards) == len(registry.find(path))


def test_the_values_are_those_of_the_source(samples_root, tmp_path):
    source = samples_root / "slime/v2_dump_details/train_data/0.pt"
    (shard,) = convert(source, tmp_path).shards
    samples = torch.load(source, weights_only=True)["samples"]
    with safe_open(tmp_path / "0.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("train_logprobs"), torch.cat([s["log_probs"] for s in samples]))
        assert file.get_tensor("train_logprobs").dtype is torch.float32
        assert file.get_tensor("response_mask").dtype is torch.int32
        assert (
            file.get_tensor("cu_seqlens").tolist() == np.cumsum([0] + [s["response_lengths"] for s in samples]).tolist()
        )
        assert file.get_tensor("sequence_ids").tolist() == [s["sample_index"] for s in samples]
        metadata = file.metadata()
    assert {key: metadata[key] for key in ("format", "step", "source_format", "trainer", "train_policy")} == {
        "format": "rollout-is/1",
        "step": "0",
        "source_format": "slime/train_data-v2",
        "trainer": "slime",
        "train_policy": "old",
    }
    assert shard.valid_tokens == 78
    assert set(shard.dropped) >= {"returns", "kl"}


def test_dtype_is_changed_only_on_request_and_the_rounding_counted(samples_root, tmp_path):
    source = samples_root / "nemo_rl/exp_001/train_data_step1.jsonl"
    (kept,) = convert(source, tmp_path / "a").shards
    (single,) = convert(source, tmp_path / "b", dtype="float32").shards
    (half,) = convert(source, tmp_path / "c", dtype="bfloat16").shards
    assert (kept.rounded, single.rounded) == (0, 0)  # the trainer held float32
    with safe_open(tmp_path / "a/train_data_step1.safetensors", "pt") as file:
        train = file.get_tensor("train_logprobs")
        rollout = file.get_tensor("rollout_logprobs")
        assert (train.dtype, file.get_tensor("advantages").dtype) == (torch.float64, torch.float64)
    assert half.rounded == sum(int((x.to(torch.bfloat16).double() != x).sum()) for x in (train, rollout))
    with safe_open(tmp_path / "c/train_data_step1.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("train_logprobs"), train.to(torch.bfloat16))
        assert file.get_tensor("advantages").dtype is torch.float64
    with pytest.raises(UsageError, match="expected one of float16"):
        convert(source, tmp_path / "d", dtype="int8")


def test_an_existing_shard_is_not_replaced_unasked(samples_root, tmp_path):
    source = samples_root / "skyrl"
    convert(source, tmp_path)
    with pytest.raises(UsageError, match="exists"):
        convert(source, tmp_path)
    convert(source, tmp_path, force=True)


def test_the_source_is_never_its_own_target(samples_root, tmp_path):
    convert(samples_root / "skyrl", tmp_path)
    with pytest.raises(UsageError, match="the source itself"):
        convert(tmp_path, tmp_path, force=True)


def test_a_failure_leaves_whole_shards_only(samples_root, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    good = (samples_root / "nemo_rl/exp_001/train_data_step1.jsonl").read_text()
    (source / "train_data_step1.jsonl").write_text(good)
    (source / "train_data_step2.jsonl").write_text(good.replace('"token_ids": [[', '"token_ids": [["x", ', 8))
    with pytest.raises(DumpError, match=r"train_data_step2\.jsonl: row 0"):
        convert(source, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train_data_step1.safetensors"]
    assert analyze([str(tmp_path / "out")]).coverage["valid_tokens"] == 78


def test_a_disk_that_refuses_is_one_error(samples_root, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DumpError, match="No space left") as caught:
        convert(samples_root / "skyrl", tmp_path)
    assert caught.value.code == "dump-write-failed"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("inside", ["", "step"])
def test_a_file_in_the_place_of_a_folder_is_one_error(samples_root, tmp_path, inside):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(DumpError, match=r"Not a directory|File exists") as caught:
        convert(samples_root / "skyrl", tmp_path / "file" / inside)
    assert caught.value.code == "dump-write-failed"
    assert (tmp_path / "file").read_text() == "kept"


def test_files_that_differ_only_in_suffix_do_not_meet(samples_root, tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for name in ("a.pt", "a.pth"):
        (source / name).write_bytes((samples_root / "verl/hook_save_to_disk/step_1_padded.pt").read_bytes())
    found = convert(source, tmp_path / "out")
    assert sorted(shard.path.name for shard in found.shards) == ["a.pt.safetensors", "a.pth.safetensors"]


def test_columns_and_names_of_our_own_format(tmp_path):
    from safetensors.torch import save_file

    lp = torch.tensor([-1.0, -2.0, -3.0])
    tensors = {
        "mine": lp,
        "old_log_probs": lp - 1,
        "rollout_log_probs": lp.clone(),
        "labels": torch.tensor([5, -100, 7]),
    }
    save_file(tensors | {"seq_lens": torch.tensor([2, 1])}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "out", columns={"train": "mine"})
    with safe_open(tmp_path / "out/x.safetensors", "pt") as file:
        assert file.get_tensor("train_logprobs").tolist() == lp.tolist()
        assert file.get_tensor("response_mask").tolist() == [True, False, True]
        assert file.get_tensor("cu_seqlens").tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("mask-value", {"response_mask": torch.tensor([1.0, float("nan"), 0.0])}),
        ("mask-value", {"response_mask": torch.tensor([1.0, float("inf"), 0.0])}),
        ("mask-value", {"response_mask": torch.tensor([1, -2, 0])}),
        ("mask-value", {"mask.loss": torch.tensor([1, -2, 0])}),
        ("valid-outside", {"response_mask": torch.tensor([1, 1, 1])}),
    ],
)
def test_a_copy_that_no_analysis_would_take_is_not_made(tmp_path, code, changes):
    from safetensors.torch import save_file

    lp = torch.tensor([-1.0, -2.0, -3.0])
    tensors = {"train_logprobs": lp, "rollout_logprobs": lp.clone(), "cu_seqlens": torch.tensor([0, 2])}
    save_file(tensors | {"response_mask": torch.tensor([1, 1, 0])} | changes, tmp_path / "x.safetensors")
    with pytest.raises(DumpError) as copied:
        convert(tmp_path / "x.safetensors", tmp_path / "out")
    with pytest.raises(DumpError) as analysed:
        analyze(tmp_path / "x.safetensors")
    assert copied.value.code == analysed.value.code == code
    if "mask.loss" not in changes:
        assert str(copied.value) == str(analysed.value)
    assert not list((tmp_path / "out").iterdir())


def test_columns_reach_hook_files(tmp_path):
    lp = torch.full((2, 3), -1.0)
    content = {"old_log_probs": lp - 1, "log_probs": lp, "rollout_log_probs": lp, "response_mask": torch.ones(2, 3)}
    torch.save(content, tmp_path / "step_1.pt")
    with pytest.raises(DumpError, match="--column train="):
        convert(tmp_path, tmp_path / "out")
    convert(tmp_path, tmp_path / "out", columns={"train": "old_log_probs"})
    with safe_open(tmp_path / "out/step_1.safetensors", "pt") as file:
        assert file.get_tensor("train_logprobs").tolist() == (lp - 1).tolist()
        assert file.get_tensor("train_logprobs").shape == (2, 3)


def test_notes_survive_the_conversion(samples_root, tmp_path):
    from rollout_is.dumps.scan import scan

    source = samples_root / "nemo_rl/exp_002_force_on_policy_ratio"
    convert(source, tmp_path)
    codes = {note.code for note in scan(tmp_path).notes}
    assert "placeholder-train-logprobs" in codes
    assert codes == {note.code for note in scan(source).notes}


def test_the_command(samples_root, tmp_path):
    out, err = io.StringIO(), io.StringIO()
    code = main(["convert", str(samples_root / "prime_rl"), "-o", str(tmp_path / "o")], stdout=out, stderr=err)
    assert code == 0, err.getvalue()
    text = out.getvalue()
    assert "29 valid of 58 positions, 4 segments" in text
    assert "train_logprobs = trainer_logprobs (F64)" in text
    assert "dropped: ce_weights, env_name" in text
    assert "current policy" in err.getvalue()
    assert main(["convert", str(tmp_path), "-o", str(tmp_path / "p"), "--dtype", "int4"], stdout=out, stderr=err) == 2
    assert main(["convert", str(tmp_path / "none"), "-o", str(tmp_path / "p")], stdout=out, stderr=err) == 3


@pytest.fixture
def samples_root():
    return shared.SAMPLES
