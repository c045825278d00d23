"""Every sample reads to the figures that stand beside it; the rollout-only ones are answered."""

import importlib.util
import itertools
from pathlib import Path

import pytest

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry

_spec = importlib.util.spec_from_file_location("foreign_conftest", Path(__file__).parent / "conftest.py")
shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(shared)


@pytest.mark.parametrize(("path", "expected"), shared.sample_cases(True))
def test_sample_reads_to_its_figures(path, expected, read, agrees):
    agrees(read(path), expected)


@pytest.mark.parametrize(("path", "expected"), shared.sample_cases(False))
def test_rollout_only_sample_is_answered(path, expected):
    with pytest.raises(DumpError) as caught:
        registry.find(path)
    assert caught.value.code == "rollout-only"
    assert caught.value.why.startswith("it lacks the trainer's log-probs")
    assert "train_data" in caught.value.fix
    if path.suffix == ".pt":
        assert f"{expected['num_sequences']} sequences" in caught.value.problem
        assert f"{expected['num_valid_response_tokens']} response tokens" in caught.value.problem
        stated = float(caught.value.problem.rpartition(" ")[2].rstrip(")"))
        assert stated == pytest.approx(expected["mean_rollout_logprob"], abs=1e-6)


def test_reading_in_slices_gives_the_same_values(samples):
    import numpy as np

    for path in ("nemo_rl/exp_001", "prime_rl/token_exports", "xtuner/hook_packed", "slime/v2_dump_details/train_data"):
        for info in registry.find(samples / path):
            with registry.open_shard(info) as shard:
                for role in ("train", "rollout", "mask"):
                    whole = shard.read(role, 0, info.positions).clone()
                    cuts = [*range(0, info.positions, 37), info.positions]
                    parts = [shard.read(role, a, b).clone() for a, b in itertools.pairwise(cuts)]
                    assert np.array_equal(whole.numpy(), np.concatenate([part.numpy() for part in parts]))
                assert shard.read("train", 5, 5).numel() == 0


def test_the_whole_dump_folder_counts_each_token_once(samples, read):
    found = read(samples / "miles" / "dp2_dump_details")
    assert {shard.info.format for shard in found} == {"miles/train_data"}
    assert sum(int(shard.mask.sum()) for shard in found) == 78
    message = " ".join(found[0].messages)
    assert "2 files are left out: miles/train_data holds the same rollouts" in message
    assert (
        "2 files hold no train log-probs, left out: dashboard_columns/rollout_0.parquet, rollout_data/0.pt" in message
    )
    assert "1 files hold text only, left out: trajectory/0.jsonl" in message


def test_two_formats_in_one_folder_are_refused(samples):
    with pytest.raises(DumpError, match=r"torch-hook.*verl/DataProto") as caught:
        registry.find(samples / "verl")
    assert caught.value.code == "several-formats"
