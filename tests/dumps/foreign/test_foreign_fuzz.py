"""Damaged copies of every sample: they read, or end in one of our errors; nothing else ever comes out."""

import random

import pytest

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry

FILES = [
    "skyrl/dumped_data/global_step_1_training_input.pkl",
    "verl/hook_save_to_disk/step_1.dp",
    "verl/hook_save_to_disk/step_1_padded.pt",
    "slime/v2_dump_details/train_data/0.pt",
    "slime/v1_dump_details/train_data/0_0.pt",
    "miles/dp2_dump_details/policy_loss_debug/rank_0_call_0.pt",
    "xtuner/hook_packed/rollout_1_rank0.pt",
    "nemo_rl/exp_001/train_data_step1.jsonl",
    "prime_rl/token_exports/step_0/rank_0.jsonl",
]


def damaged(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        # The head of a torch file is its pickle, and the end its directory: most of the meaning.
        at = rng.choice(
            [rng.randrange(len(data)), rng.randrange(min(len(data), 3000)), len(data) - 1 - rng.randrange(300)]
        )
        kind = rng.random()
        if kind < 0.6:
            data[at] = rng.randrange(256)
        elif kind < 0.8:
            del data[at : at + rng.randrange(1, 50)]
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 8))
    return bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_damage_ends_in_our_errors(samples, tmp_path, name):
    rng = random.Random(f"{name} 3")
    data = (samples / name).read_bytes()
    path = tmp_path / name.rpartition("/")[2]
    refused = 0
    for _ in range(40):
        path.write_bytes(damaged(data, rng))
        try:
            for info in registry.find(path) or []:
                with registry.open_shard(info) as shard:
                    shard.offsets()
                    for role in ("train", "rollout", "mask"):
                        assert shard.read(role, 0, info.positions).numel() == info.positions
        except DumpError as error:
            refused += 1
            assert error.code
            assert len(str(error)) < 2000
    assert refused > 5


def test_names_in_an_archive_that_are_no_text(samples, tmp_path):
    """Found by the loop above: zipfile raises UnicodeDecodeError for its directory."""
    data = (samples / "verl/hook_save_to_disk/step_1.dp").read_bytes()
    at = data.rindex(b"archive/data.pkl")
    path = tmp_path / "a.dp"
    flagged = bytearray(data)
    flagged[at : at + 1] = b"\xe9"
    flagged[at - 46 + 9] |= 0x08  # the flag that says UTF-8
    path.write_bytes(bytes(flagged))
    with pytest.raises(DumpError) as caught:
        registry.find(path)
    assert caught.value.code == "torch-file-unreadable"
