"""The registry: cheap for what is not foreign, free of torch for text, and honest about files that change."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry
from rollout_is.dumps.foreign.format import Format


def test_every_format_is_found_once():
    names = [form.name for form in registry.known_formats()]
    assert len(names) == len(set(names))
    assert set(names) >= {
        "nemo-rl/train_data",
        "slime/train_data-v1",
        "slime/train_data-v2",
        "miles/train_data",
        "miles/policy_loss_debug",
        "skyrl/training_input",
        "prime-rl/token_export",
        "verl/DataProto",
        "torch-hook",
    }
    assert all(isinstance(form, Format) for form in registry.known_formats())


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"{", b"[]", b'{"schema": "rollout-is/summary/1"}', b"\x80", b"\x00" * 64]
)
def test_other_files_are_none_of_ours(tmp_path, content):
    (tmp_path / "x.bin").write_bytes(content)
    assert registry.find(tmp_path / "x.bin") is None
    assert registry.find(tmp_path) is None


def test_an_empty_folder_is_none_of_ours(tmp_path):
    assert registry.find(tmp_path) is None


def test_text_is_recognised_without_torch(samples, tmp_path):
    code = (
        "import sys\n"
        "from rollout_is.dumps.foreign import registry\n"
        f"assert len(registry.find({str(samples / 'nemo_rl')!r})) == 3\n"
        f"assert registry.find({str(tmp_path)!r}) is None\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_recognised_by_content_and_not_by_name(samples, tmp_path, read_one):
    source = samples / "slime" / "v2_dump_details" / "train_data" / "0.pt"
    (tmp_path / "no_suffix").write_bytes(source.read_bytes())
    found = read_one(tmp_path / "no_suffix")
    assert (found.info.format, found.info.step) == ("slime/train_data-v2", 0)  # the step is in the file


def test_a_file_that_changes_after_the_scan_is_an_error(samples, tmp_path):
    for relative in ("nemo_rl/exp_001/train_data_step1.jsonl", "verl/hook_save_to_disk/step_1_padded.pt"):
        path = tmp_path / relative.rpartition("/")[2]
        path.write_bytes((samples / relative).read_bytes())
        (info,) = registry.find(path)
        with open(path, "ab") as file:
            file.write(b"\n")
        with pytest.raises(DumpError) as caught:
            registry.open_shard(info)
        assert caught.value.code == "file-changed"


def test_a_text_file_that_changes_while_it_is_read_is_an_error(samples, tmp_path):
    path = tmp_path / "train_data_step1.jsonl"
    path.write_bytes((samples / "nemo_rl/exp_001/train_data_step1.jsonl").read_bytes())
    (info,) = registry.find(path)
    with registry.open_shard(info) as shard:
        shard.read("train", 0, 10)
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(DumpError, match="changed while"):
            shard.read("train", 100, 200)


def test_infos_cross_processes(samples):
    import pickle

    (info, *_) = registry.find(samples / "miles" / "dp2_dump_details" / "train_data")
    with registry.open_shard(pickle.loads(pickle.dumps(info))) as shard:
        assert np.isfinite(shard.read("train", 0, info.positions).numpy()).all()


def test_unreadable_neighbours_are_said(samples, tmp_path, read):
    (tmp_path / "a.pt").write_bytes((samples / "verl/hook_save_to_disk/step_1_padded.pt").read_bytes())
    (tmp_path / "b.pt").write_bytes((samples / "slime/v2_dump_details/rollout_data/0.pt").read_bytes())
    torch.save({"w": torch.zeros(2)}, tmp_path / "model.pt")  # means nothing to us
    (found,) = read(tmp_path)
    assert found.notes["files-left-out"].message == "1 files hold no train log-probs, left out: b.pt"


def test_a_cut_off_torch_file_is_an_error(samples, tmp_path):
    whole = (samples / "verl/hook_save_to_disk/step_1_padded.pt").read_bytes()
    path = tmp_path / "step_1.pt"
    for keep in (len(whole) - 1, len(whole) // 2, 100):
        path.write_bytes(whole[:keep])
        with pytest.raises(DumpError, match="cut off or is still being written"):
            registry.find(path)
