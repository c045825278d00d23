"""Reading columns by slices, against safetensors' own reader; and files that change under the reader's hands."""

import os
import time

import pytest
import torch
from safetensors.torch import load_file

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.reader import open_shard
from rollout_is.dumps.scan import scan

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MASKS = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    *FLOATS,
]
NAMES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}


def only_shard(dump, **options):
    (info,) = scan(dump, **options).shards
    return info


def refused(code, *words, call):
    with pytest.raises(DumpError) as caught:
        call()
    assert caught.value.code == code, caught.value
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("train", FLOATS)
@pytest.mark.parametrize("rollout", FLOATS)
def test_c118_slices_of_every_float(shard, dump, train, rollout):
    values = torch.randn(1000, generator=torch.manual_seed(0))
    path = shard(
        train_logprobs=values.to(train),
        rollout_logprobs=(values + 1).to(rollout),
        response_mask=torch.ones(1000),
        cu_seqlens=torch.tensor([0, 1000]),
    )
    stored = load_file(path)
    info = only_shard(dump)
    assert (info.dtypes["train"], info.dtypes["rollout"]) == (NAMES[train], NAMES[rollout])
    with open_shard(info) as opened:
        for start, stop in ((0, 1000), (0, 0), (1000, 1000), (1, 2), (3, 900), (999, 1000), (0, 1000)):
            for role, name in (("train", "train_logprobs"), ("rollout", "rollout_logprobs")):
                part = opened.read(role, start, stop)
                assert part.dtype == stored[name].dtype and torch.equal(part, stored[name][start:stop])


@pytest.mark.parametrize("dtype", MASKS)
def test_masks_of_every_dtype(shard, dump, dtype):
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 0, 0]).to(dtype)
    shard(response_mask=mask)
    with open_shard(only_shard(dump)) as opened:
        part = opened.read("mask", 1, 7)
        assert part.dtype == dtype and part.tolist() == mask[1:7].tolist()


def test_c119_bool_bytes_two_and_three_are_on(shard, dump):
    path = shard(response_mask=torch.tensor([2, 3, 0, 1, 255, 0, 0, 0], dtype=torch.uint8))
    path.write_bytes(_as_bool(path))
    with open_shard(only_shard(dump)) as opened:
        part = opened.read("mask", 0, 8)
        assert part.dtype == torch.bool and part.tolist() == [True, True, False, True, True, False, False, False]
        assert int(part.sum()) == 4 and bytes(part.view(torch.uint8).tolist()) == b"\1\1\0\1\1\0\0\0"


def _as_bool(path):
    """The same file with U8 called BOOL: the bytes of the body stay."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].replace(b'"U8"', b'"BOOL"')
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_labels_are_served_as_the_mask(shard, dump, dtype):
    labels = torch.tensor([-100, 5, 0, -100, 7, -100, -100, -100], dtype=dtype)
    shard(response_mask=None, labels=labels)
    with open_shard(only_shard(dump)) as opened:
        assert opened.read("mask", 0, 8).tolist() == (labels != -100).tolist()
        assert opened.read("mask", 4, 6).tolist() == [True, False]
        assert opened.read("labels", 0, 8).tolist() == labels.tolist()


def test_rectangular_rows_are_segments(shard, dump):
    rows = torch.arange(6.0).reshape(2, 3)
    shard(train_logprobs=rows, rollout_logprobs=rows.clone(), response_mask=torch.ones(2, 3), cu_seqlens=None)
    with open_shard(only_shard(dump)) as opened:
        assert opened.offsets().tolist() == [0, 3, 6]
        assert opened.read("train", 2, 5).tolist() == [2, 3, 4]
        assert opened.pack_offsets() is None


def test_one_row_bounds_and_lengths(shard, dump):
    shard(cu_seqlens=torch.tensor([[0, 3, 8]], dtype=torch.int32))
    with open_shard(only_shard(dump)) as opened:
        assert opened.offsets().tolist() == [0, 3, 8] and opened.offsets().dtype == torch.int64
    shard(cu_seqlens=None, response_lens=torch.tensor([3, 0, 4], dtype=torch.int32))
    with open_shard(only_shard(dump)) as opened:
        assert opened.offsets().tolist() == [0, 3, 3, 7]


@pytest.mark.parametrize(
    ("bounds", "code"),
    [
        ([5, 13, 17], "offsets-start"),
        ([0, 4, 3], "offsets-decrease"),
        ([0, 9], "offsets-past-end"),
        ([3, 5], "offsets-are-lengths"),
    ],
)
def test_c107_bad_bounds_name_file_tensor_and_index(shard, dump, bounds, code):
    shard("step_1/rank_0", cu_seqlens=torch.tensor(bounds))
    with open_shard(only_shard(dump)) as opened:
        refused(code, "step_1/rank_0.safetensors: cu_seqlens", call=opened.offsets)


def test_packs(shard, dump):
    shard(cu_packs=torch.tensor([0, 5, 8], dtype=torch.int32))
    with open_shard(only_shard(dump)) as opened:
        assert opened.pack_offsets().tolist() == [0, 5, 8]
    shard(cu_packs=torch.tensor([0, 4, 8]))
    with open_shard(only_shard(dump)) as opened:
        refused("packs-inside-sequence", "cu_packs[1]", call=opened.pack_offsets)
    shard(pack_lens=torch.tensor([3, 5]))
    with open_shard(only_shard(dump)) as opened:
        assert opened.pack_offsets().tolist() == [0, 3, 8]


def test_segment_columns(shard, dump):
    shard(rewards=torch.tensor([[1.0, 0.5, 0.0]]), group_ids=torch.tensor([7, 7, 9]))
    with open_shard(only_shard(dump)) as opened:
        assert opened.segment_column("rewards").tolist() == [1.0, 0.5, 0.0]
        assert opened.segment_column("group_ids").tolist() == [7, 7, 9]
        assert opened.segment_column("prompt_lens") is None
        with pytest.raises(ValueError, match="no role of segments"):
            opened.segment_column("train")


def test_segment_columns_outlive_the_shard(shard, dump):
    shard(rewards=torch.tensor([1.0, 0.5, 0.0]))
    with open_shard(only_shard(dump)) as opened:
        rewards, bounds = opened.segment_column("rewards"), opened.offsets()
        opened.read("train", 0, 8)
    assert rewards.tolist() == [1.0, 0.5, 0.0] and bounds.tolist() == [0, 3, 5, 8]


def test_other_masks_and_scoring_passes(shard, dump):
    shard(
        **{
            "mask.loss": torch.zeros(8),
            "logprobs.again": torch.full((8,), -7.0),
            "logprobs.prefill": torch.full((8,), -9.0),
        }
    )
    info = only_shard(dump)
    with open_shard(info, mask="loss", train="again", rollout="prefill") as opened:
        assert opened.read("mask", 0, 8).sum() == 0
        assert opened.read("train", 0, 1).item() == -7 and opened.read("rollout", 0, 1).item() == -9
        assert opened.read("logprobs.prefill", 0, 1).item() == -9
    with open_shard(info, train="rollout", rollout="again") as opened:
        assert opened.read("train", 0, 1).item() == pytest.approx(-1.1) and opened.read("rollout", 0, 1).item() == -7
    refused("column-missing", "--mask nope", "response_mask, loss", call=lambda: open_shard(info, mask="nope"))
    refused(
        "column-missing", "--logprobs, train side nope", "again, prefill", call=lambda: open_shard(info, train="nope")
    )


def test_the_masks_tensor_may_be_named_itself(shard, dump):
    shard(response_mask=None, loss_mask=torch.ones(8))
    with open_shard(only_shard(dump), mask="loss_mask") as opened:
        assert opened.read("mask", 0, 8).sum() == 8


def test_empty_shards(shard, raw, dump):
    raw(b"{}", name="a")
    with open_shard(only_shard(dump), mask="loss", train="again") as opened:
        assert opened.offsets().tolist() == [0]
        assert opened.read("train", 0, 0).numel() == opened.read("mask", 0, 0).numel() == 0
        assert opened.pack_offsets() is None and opened.segment_column("rewards") is None


def test_reading_past_the_end_is_a_bug_of_the_caller(shard, dump):
    shard()
    with open_shard(only_shard(dump)) as opened:
        for start, stop in ((0, 9), (-1, 3), (5, 4)):
            with pytest.raises(ValueError, match="expected 0 <= start"):
                opened.read("train", start, stop)
        refused("column-missing", "entropy", call=lambda: opened.read("entropy", 0, 1))


def test_zero_length_segments(shard, dump):
    shard(cu_seqlens=torch.tensor([0, 0, 4, 4, 8, 8]))
    info = only_shard(dump)
    assert info.segments == 5
    with open_shard(info) as opened:
        assert opened.offsets().tolist() == [0, 0, 4, 4, 8, 8]


# Files that change


def test_changed_between_scan_and_open(shard, dump):
    path = shard()
    info = only_shard(dump)
    os.utime(path, ns=(1, 1))
    refused("file-changed", "file changed while being read", call=lambda: open_shard(info))


def test_rewritten_while_open(shard, dump):
    path = shard()
    info = only_shard(dump)

    def rewrite():
        with open_shard(info) as opened:
            opened.read("train", 0, 8)
            time.sleep(0.01)
            with path.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"\0\0\0\0")

    refused("file-changed", "file changed while being read", call=rewrite)


def test_truncated_while_open(shard, dump):
    path = shard()
    info = only_shard(dump)

    def truncate():
        with open_shard(info) as opened:
            os.truncate(path, info.size - 40)
            for role in info.columns:
                opened.read(role, 0, 1)
            for role in ("train", "rollout", "mask"):
                opened.read(role, 0, 8)

    refused("file-changed", call=truncate)


def test_deleted_while_open_is_still_read_whole(shard, dump):
    path = shard()
    with open_shard(only_shard(dump)) as opened:
        path.unlink()
        assert opened.read("train", 0, 8).tolist()[0] == -1
    refused("file-missing", call=lambda: open_shard(opened.info))


def test_an_error_inside_is_not_hidden_by_a_changed_file(shard, dump):
    path = shard()
    info = only_shard(dump)
    with pytest.raises(KeyError, match="mine"), open_shard(info):
        path.write_bytes(b"")
        raise KeyError("mine")


def test_short_reads_are_continued(shard, dump, monkeypatch):
    shard()
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:3]], at))
    with open_shard(only_shard(dump)) as opened:
        assert opened.read("train", 0, 8).tolist() == [-1.0, -2.0, -3.0, -1.5, -0.5, 0.0, 0.0, 0.0]


def test_no_descriptor_leaks(shard, dump):
    shard()
    info = only_shard(dump)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with open_shard(info) as opened:
            opened.read("train", 0, 8)
        with pytest.raises(DumpError):
            open_shard(info, mask="nope")
    assert len(os.listdir("/proc/self/fd")) == before


def test_repeated_reads_allocate_nothing(shard, dump):
    shard(
        train_logprobs=torch.zeros(4096),
        rollout_logprobs=torch.zeros(4096),
        response_mask=torch.ones(4096),
        cu_seqlens=torch.tensor([0, 4096]),
    )
    with open_shard(only_shard(dump)) as opened:
        first = opened.read("train", 0, 1024)
        assert all(opened.read("train", at, at + 1024).data_ptr() == first.data_ptr() for at in range(0, 4096, 1024))
