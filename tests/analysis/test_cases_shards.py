"""Cases of groups K, L, M and N that concern figures: ranks and slices, masks, boundaries, odd but valid files."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from made import (
    Settings,
    Shard,
    analyze,
    assert_agrees,
    codes,
    messages,
    randomly,
    sequences,
    shard,
    stable,
    stat,
    summarize,
    value,
    view,
    write_dump,
)
from safetensors.torch import save_file

from rollout_is.dumps.errors import DumpError

ABS = "masked.mismatch.mismatch_logprob_abs_diff"


def parts_of(n: int) -> list[Shard]:
    rng = np.random.default_rng(100)
    return [sequences(*(0.1 * rng.standard_normal((5, n // 20))).tolist(), r=-1.0 - i) for i in range(4)]


def test_c100_counts_of_one_file_and_of_four(tmp_path: Path) -> None:
    parts = parts_of(1000)
    whole = Shard(
        torch.cat([p.train for p in parts]),
        torch.cat([p.rollout for p in parts]),
        torch.cat([p.mask for p in parts]),
        list(range(0, 1001, 50)),
    )
    one = analyze(write_dump(tmp_path / "one", [whole]))
    four = analyze(write_dump(tmp_path / "four", parts, ranks=4))
    assert stat(one, ABS).n == stat(four, ABS).n == 1000
    assert value(one, ABS) == pytest.approx(value(four, ABS), rel=1e-12)


def test_c102_c103_missing_ranks_are_refused_unless_partial_is_allowed(tmp_path: Path) -> None:
    rng = np.random.default_rng(103)
    shards = [sequences(*(0.1 * rng.standard_normal((8, 4))).tolist(), r=-1.0 - i) for i in range(8)]
    folder = write_dump(tmp_path, shards, ranks=8)
    (folder / "step_00000001" / "rank_00006.safetensors").unlink()
    with pytest.raises(DumpError) as caught:
        analyze(folder)
    assert "6" in str(caught.value) and "8" in str(caught.value)
    got = analyze(folder, allow_partial=True)
    said = messages(got, "ranks-missing")
    assert "7" in said and "8" in said and "6" in said
    assert got.coverage["sequences"] == 56


def test_missing_steps_are_noted(tmp_path: Path) -> None:
    for step in (1, 2, 3, 5, 6):
        sequences([0.1, 0.2], r=-1.0 - step).write(tmp_path / f"step_{step}.safetensors", step=step, rank=0)
    got = analyze(tmp_path)
    said = messages(got, "steps-missing")
    assert "3" in said and "5" in said  # the gap lies between them
    assert got.coverage["shards"] == 5


def test_c104_mask_of_document_ids_is_on_or_off() -> None:
    one = sequences([0.3, 0.1, -0.1], [0.2, 0.3, -0.3])
    one.mask = torch.tensor([0, 1, 1, 0, 2, 2])
    got = one.summarize()
    assert stat(got, ABS).n == 4
    assert value(got, ABS) == pytest.approx(0.2)
    said = messages(got, "mask-values")
    assert all(x in said for x in "012") and "on" in said and "off" in said


def test_c104_fractional_mask_is_on_or_off() -> None:
    one = sequences([0.3, 0.1, -0.1])
    one.mask = torch.tensor([0.0, 0.5, 1.0])
    got = one.summarize()
    assert value(got, ABS) == pytest.approx(0.1)
    messages(got, "mask-values")
    one.mask = torch.tensor([0.0, 1.0, 1.0])
    assert "mask-values" not in codes(one.summarize())


def test_c104_every_position_of_a_soft_mask_is_counted() -> None:
    one = sequences([0.1] * 40)
    one.mask = torch.linspace(0.1, 0.9, 40)
    said = messages(one.summarize(), "mask-values")
    assert "besides 0 and 1: 0.1, " in said and ", ..., treated" in said and "(40 positions" in said
    one.mask = torch.tensor([255] * 3 + [0] * 37, dtype=torch.uint8)
    assert "besides 0 and 1: 255, treated as on/off (3 positions" in messages(one.summarize(), "mask-values")


@pytest.mark.parametrize("bad", [-1.0, math.nan, -0.25, math.inf])
def test_negative_nan_or_infinite_mask_is_an_error(tmp_path: Path, bad: float) -> None:
    one = sequences([0.3, 0.1, -0.1])
    one.mask = torch.tensor([1.0, bad, 1.0])
    with pytest.raises(DumpError, match="mask"):
        one.summarize()
    with pytest.raises(DumpError, match="mask"):
        analyze(write_dump(tmp_path, [one]))


def test_negative_integer_mask_is_an_error() -> None:
    one = sequences([0.3, 0.1, -0.1])
    one.mask = ~torch.tensor([0, 1, 1])  # the classic: -1, -2
    with pytest.raises(DumpError, match="mask"):
        one.summarize()


def test_c106_prompt_included_in_the_mask() -> None:
    rng = np.random.default_rng(106)
    r = -rng.exponential(1.0, 400) - 1e-3
    t = r + 0.01 * rng.standard_normal(400)
    for a in range(0, 400, 40):
        r[a : a + 17] = 0.0  # prompts, valid by mistake
    got = shard(t, r, np.ones(400), range(0, 401, 40)).summarize()
    said = messages(got, "constant-value")
    assert "rollout" in said and ("42" in said or "43" in said or "170" in said)
    assert "response_mask" in stable(got)


def test_c106_the_mask_that_was_used_is_named(tmp_path: Path) -> None:
    one = sequences([0.1, 0.2, 0.3], [0.5])
    one.columns["mask.loss"] = torch.tensor([True, False, True, True])
    got = analyze(write_dump(tmp_path, [one]), settings=Settings(mask="loss"))
    assert got.coverage["valid_tokens"] == 3
    assert value(got, ABS) == pytest.approx(0.3)
    assert "loss" in json.dumps(dict(got.settings)) + json.dumps(got.to_dict()["source"])


def test_c107_boundaries_that_start_elsewhere_and_run_past_the_end(tmp_path: Path) -> None:
    one = sequences([0.1] * 7)
    one.cu = [5, 13, 17]
    for act in (one.summarize, lambda: analyze(write_dump(tmp_path, [one]))):
        with pytest.raises(DumpError) as caught:
            act()
        assert "5" in str(caught.value) and "cu_seqlens" in str(caught.value)
    one.cu = [0, 3, 9]
    with pytest.raises(DumpError) as caught:
        one.summarize()
    assert "9" in str(caught.value) and "7" in str(caught.value)


def test_c109_duplicate_boundaries() -> None:
    d = [0.1, -0.2, 0.3, 0.0, 0.5, -0.5, 0.2, 0.1, -0.1]
    plain, doubled = sequences(d[:4], d[4:]), sequences(d[:4], d[4:])
    doubled.cu = [0, 4, 4, 9, 9]
    a, b = plain.summarize(), doubled.summarize()
    for name in ("masked", "padded", "unmasked"):
        assert view(a, name) == view(b, name)
    assert (b.coverage["sequences"], b.coverage["zero_length"], b.coverage["segments"]) == (2, 2, 4)
    doubled.cu = [0, 4, 9, -1]
    with pytest.raises(DumpError):
        doubled.summarize()


def test_c110_a_wrapped_int32_boundary_is_named() -> None:
    one = sequences([0.1, 0.2, 0.3, 0.4])
    cu = torch.tensor([0, 2, 2_147_483_000, -2_147_483_296], dtype=torch.int32)
    with pytest.raises(DumpError) as caught:
        summarize(one.train, one.rollout, one.mask, cu)
    assert "3" in str(caught.value)
    assert "int32" in str(caught.value) or "past" in str(caught.value) or "2147483000" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_boundaries_of_either_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    one = randomly(np.random.default_rng(110))
    tensors = one.tensors() | {"cu_seqlens": torch.tensor(one.cu, dtype=dtype)}
    save_file(tensors, tmp_path / "a.safetensors", {"format": "rollout-is/1"})
    assert_agrees(analyze(tmp_path), [one])


def test_c117_zero_size_tensors_are_an_empty_shard(tmp_path: Path) -> None:
    empty = Shard(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool), [0])
    got = analyze(write_dump(tmp_path, [empty]))
    assert (got.coverage["shards"], got.coverage["positions"], got.coverage["sequences"]) == (1, 0, 0)
    assert stat(got, ABS).value is None


def test_c119_bool_bytes_other_than_0_and_1_are_on(tmp_path: Path) -> None:
    one = sequences([0.1, 0.2, 0.3], [0.4, 0.5])
    one.mask = torch.tensor([True, False, True, True, False])
    path = one.write(tmp_path / "a.safetensors", step=1, rank=0)
    raw = bytearray(path.read_bytes())
    (size,) = struct.unpack("<Q", raw[:8])
    begin, _ = json.loads(raw[8 : 8 + size])["response_mask"]["data_offsets"]
    raw[8 + size + begin], raw[8 + size + begin + 2] = 2, 3
    path.write_bytes(raw)
    got = analyze(path)
    assert got.coverage["valid_tokens"] == 3
    assert value(got, ABS) == pytest.approx(0.8 / 3)


def test_c122_a_resumed_run_in_the_same_folder(tmp_path: Path) -> None:
    def attempt(name: str, steps: range, size: float) -> None:
        for step in steps:
            one = sequences([size, -size], r=-1.0 - step / 8 - size)
            one.write(tmp_path / name / f"step_{step:08d}" / "rank_00000.safetensors", step=step, rank=0, world_size=1)

    attempt("first", range(1, 6), 0.1)
    attempt("second", range(4, 9), 0.3)
    with pytest.raises(DumpError) as caught:
        analyze(tmp_path)
    assert "4" in str(caught.value)
    everything = analyze(tmp_path, duplicates="all")
    assert everything.coverage["shards"] == 10
    assert value(everything, ABS) == pytest.approx(0.2)


def test_c122_newest_of_two_attempts(tmp_path: Path) -> None:
    import os

    for age, (name, size) in enumerate((("b", 0.1), ("a", 0.3))):
        path = sequences([size, -size]).write(tmp_path / f"{name}.safetensors", step=1, rank=0, world_size=1)
        os.utime(path, (1_000_000 + age, 1_000_000 + age))
    got = analyze(tmp_path, duplicates="newest")
    assert got.coverage["shards"] == 1
    assert value(got, ABS) == pytest.approx(0.3)


def test_duplicate_shards_are_noted(tmp_path: Path) -> None:
    one = randomly(np.random.default_rng(7))
    got = analyze(write_dump(tmp_path, [one, one], ranks=2))
    said = messages(got, "duplicate-shards")
    assert "rank_00001" in said and "from" in said and "rank_00000" in said


def test_steps_select(tmp_path: Path) -> None:
    for step in range(1, 8):
        sequences([step / 10], r=-1.0 - step).write(tmp_path / f"step_{step}.safetensors", step=step, rank=0)
    assert value(analyze(tmp_path, steps="2:4"), ABS) == pytest.approx(0.3)
    assert value(analyze(tmp_path, steps="1,7"), ABS) == pytest.approx(0.4)


def test_places_are_named_by_the_shards_they_lie_in_when_others_are_left_out(tmp_path: Path) -> None:
    """The numbers of the shards that are left have gaps then."""
    rng = np.random.default_rng(104)
    made = [sequences(*(0.1 * rng.standard_normal((4, 5))).tolist(), r=-1.0 - i) for i in range(4)]
    for one in made:
        one.columns = {"token_ids": torch.arange(20), "rollout_token_ids": torch.arange(20)}
    made[2].train[7] = math.nan
    made[3].columns["rollout_token_ids"][12] = 99
    folder = write_dump(tmp_path, made, ranks=4)
    damaged = made[0].tensors() | {"response_mask": torch.full((20,), math.nan)}
    meta = {"format": "rollout-is/1", "step": "1", "rank": "0", "world_size": "4"}
    save_file(damaged, folder / "step_00000001" / "rank_00000.safetensors", meta)
    got = analyze(folder, allow_partial=True)
    assert got.coverage["shards"] == 3
    assert "rank_00002.safetensors position 7" in messages(got, "nonfinite-valid")
    assert "rank_00003.safetensors sequence 2 position 2" in messages(got, "tokens-differ")
