"""Sequence and pack bounds: what is wrong with them is said, and where."""

import pytest
import torch

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.offsets import check_offsets, check_packs, lengths_to_offsets


def refused(values, positions, code, *words, check=check_offsets, dtype=torch.int64):
    with pytest.raises(DumpError) as caught:
        check(torch.tensor(values, dtype=dtype), positions, "the-shard: cu")
    assert caught.value.code == code, caught.value
    for word in words:
        assert word in str(caught.value), caught.value


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("values", [[0], [0, 4, 12], [0, 4, 8], [0, 4, 4, 9, 9], [0, 0, 12], [0, 0]])
def test_c109_c09_good_offsets(values, dtype):
    found = check_offsets(torch.tensor(values, dtype=dtype), 12, "x")
    assert found.dtype == torch.int64 and found.tolist() == values


def test_c107_not_from_zero_and_past_the_end():
    refused([5, 13, 17], 7, "offsets-start", "cu[0]", "found 5", "at most 7", "found 17")


def test_past_the_end():
    refused([0, 4, 9], 7, "offsets-past-end", "cu[2]", "found 9", "2 past the end")


def test_c109_padding_with_minus_one():
    refused([0, 4, 9, -1, -1], 9, "offsets-decrease", "cu[3]", "found -1", "padding such as -1")


def test_negative_first():
    refused([-1, 4], 9, "offsets-start", "found -1")


def test_c110_int32_wrap():
    refused([0, 1_000_000, 2147483000, -2147483296], 10, "offsets-decrease", "cu[3]", "int32 wrap?", dtype=torch.int32)


def test_decrease_is_no_wrap_when_small():
    with pytest.raises(DumpError) as caught:
        check_offsets(torch.tensor([0, 5, 3, 9]), 9, "x")
    assert "wrap" not in caught.value.problem and "x[2]" in caught.value.where


def test_int64_extremes_do_not_pass_by_overflow():
    refused([0, 2**63 - 1], 9, "offsets-past-end")
    refused([0, 2**63 - 1, -(2**63)], 9, "offsets-decrease")


def test_c110_totals_are_int64():
    big = 2**31 - 1
    offsets = lengths_to_offsets(torch.tensor([big, big, 5], dtype=torch.int32), 2 * big + 5, "x")
    assert offsets.tolist() == [0, big, 2 * big, 2 * big + 5]


def test_lengths_given_as_offsets():
    refused([3, 5, 4], 12, "offsets-are-lengths", "sum to 12", "lengths")
    refused([0, 7, 5], 12, "offsets-are-lengths", "sum to 12")


def test_offsets_that_happen_to_sum_to_the_end_are_offsets():
    assert check_offsets(torch.tensor([0, 12]), 12, "x").tolist() == [0, 12]
    assert check_offsets(torch.tensor([0, 4, 8]), 12, "x").tolist() == [0, 4, 8]


def test_lengths():
    assert lengths_to_offsets(torch.tensor([3, 0, 2], dtype=torch.int32), 6, "x").tolist() == [0, 3, 3, 5]
    assert lengths_to_offsets(torch.tensor([], dtype=torch.int32), 6, "x").tolist() == [0]
    refused([3, -1], 6, "lengths-negative", "cu[1]", "found -1", check=lengths_to_offsets)
    refused([3, 4], 6, "lengths-past-end", "sum of 7", check=lengths_to_offsets)
    refused([0, 3, 6], 6, "lengths-are-offsets", "sum of 9", check=lengths_to_offsets)
    refused([2**62, 2**62, 2**62], 6, "lengths-past-end", check=lengths_to_offsets)


@pytest.mark.parametrize("check", [check_offsets, lengths_to_offsets])
def test_dtype_and_rank(check):
    refused([0.0, 4.0], 4, "dtype-unsupported", "float32", check=check, dtype=torch.float32)
    refused([[0, 4], [0, 4]], 8, "shape-offsets", "[2, 2]", check=check)


def test_empty():
    assert check_offsets(torch.zeros(0, dtype=torch.int32), 0, "x").tolist() == [0]
    refused([], 3, "offsets-empty", "[0]")


@pytest.mark.parametrize("packs", [[0, 8], [0, 3, 8], [0, 3, 3, 8], [0, 8, 10], [0], [0, 5, 8, 12]])
def test_packs_on_sequence_bounds(packs):
    bounds = torch.tensor([0, 3, 5, 8])
    assert check_packs(torch.tensor(packs), bounds, "x").tolist() == packs


def test_packs_inside_a_sequence():
    with pytest.raises(DumpError) as caught:
        check_packs(torch.tensor([0, 3, 6, 8]), torch.tensor([0, 3, 5, 8]), "the-shard: cu_packs")
    assert caught.value.code == "packs-inside-sequence"
    assert (
        "cu_packs[2]" in str(caught.value)
        and "found 6" in str(caught.value)
        and "sequence 2 [5, 8)" in str(caught.value)
    )


def test_packs_that_end_before_the_last_sequence_are_refused() -> None:
    offsets = torch.tensor([0, 4, 12])
    with pytest.raises(DumpError, match=r"last sequence bound \(12\), found 4") as caught:
        check_packs(torch.tensor([0, 4]), offsets, "a: cu_packs")
    assert caught.value.code == "packs-end-early"
    assert check_packs(torch.tensor([0, 4, 16]), offsets, "a: cu_packs").tolist() == [0, 4, 16]  # into the pad tail
