"""Shapes, dtypes and lengths of one shard, judged from its header."""

import pytest
import torch

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.memory import describe_tensors


def tensors(count=8, **changes):
    made = {
        "train_logprobs": torch.zeros(count),
        "rollout_logprobs": torch.zeros(count),
        "response_mask": torch.ones(count, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 3, count]),
    }
    made.update(changes)
    return {name: tensor for name, tensor in made.items() if tensor is not None}


def described(metadata=None, columns=None, **changes):
    return describe_tensors(tensors(**changes), name="the-shard", metadata=metadata, columns=columns)


def refused(code, *words, metadata=None, **changes):
    with pytest.raises(DumpError) as caught:
        described(metadata, **changes)
    assert caught.value.code == code, caught.value
    for word in words:
        assert word in str(caught.value), caught.value


def test_packed():
    info, notes = described()
    assert (info.layout, info.positions, info.segments, notes) == ("packed", 8, 2, ())
    assert info.dtypes == {"train": "F32", "rollout": "F32", "mask": "BOOL", "offsets": "I64"}


def test_c28_one_row_is_flat():
    row = torch.zeros(1, 8)
    info, _ = described(train_logprobs=row, cu_seqlens=torch.tensor([[0, 8]], dtype=torch.int32))
    assert (info.layout, info.positions, info.segments) == ("packed", 8, 1)


def test_one_row_without_bounds_is_no_sequence():
    row = torch.zeros(1, 8)
    changes = {"train_logprobs": row, "rollout_logprobs": row, "response_mask": row, "cu_seqlens": None}
    refused("column-missing", "cu_seqlens missing", "layout", **changes)
    info, _ = described({"layout": "rectangular"}, **changes)
    assert (info.layout, info.positions, info.segments) == ("rectangular", 8, 1)


def test_rectangular():
    rows = torch.zeros(4, 2)
    info, _ = described(
        train_logprobs=rows, rollout_logprobs=rows, response_mask=rows, cu_seqlens=None, rewards=torch.zeros(4)
    )
    assert (info.layout, info.positions, info.segments) == ("rectangular", 8, 4)
    assert info.columns["rewards"] == "rewards"


def test_rectangular_with_lengths_of_its_rows():
    rows = torch.zeros(4, 2)
    info, _ = described(
        train_logprobs=rows,
        rollout_logprobs=rows,
        response_mask=rows,
        cu_seqlens=None,
        response_lens=torch.ones(4, dtype=torch.int64),
    )
    assert (info.layout, info.segments, "offsets" in info.columns) == ("rectangular", 4, False)


def test_rows_beside_offsets_need_a_word():
    rows = torch.zeros(4, 2)
    changes = {"train_logprobs": rows, "rollout_logprobs": rows, "response_mask": rows}
    refused("layout-ambiguous", "[4, 2]", "cu_seqlens", "metadata key layout", **changes)
    assert described({"layout": "packed"}, **changes)[0].segments == 2
    assert described({"layout": "rectangular"}, **changes)[0].segments == 4


@pytest.mark.parametrize("name", ["train_logprobs", "rollout_logprobs", "response_mask"])
@pytest.mark.parametrize("shape", [(2, 1, 4), (1, 1, 8), ()])
def test_wrong_rank(name, shape):
    refused("shape-rank", name, str(list(shape)), **{name: torch.zeros(shape)})


def test_a_mean_in_place_of_the_tokens_is_told_so():
    refused("shape-rank", "a mean", "before they are averaged", train_logprobs=torch.tensor(-1.0))


def test_a_missing_mask_is_not_blamed_on_the_engine():
    with pytest.raises(DumpError) as caught:
        described(response_mask=None)
    assert "engine" not in caught.value.why and "hook" in caught.value.why


def test_c28_a_trailing_axis_on_one_side():
    refused("shape-differs", "[8, 1]", "[8]", rollout_logprobs=torch.zeros(8, 1))
    flat = {
        "train_logprobs": torch.zeros(8, 1),
        "rollout_logprobs": torch.zeros(8, 1),
        "response_mask": torch.zeros(8, 1),
    }
    refused("layout-ambiguous", "[8, 1]", **flat)


def test_rows_transposed_on_one_side():
    rows = torch.zeros(4, 2)
    refused(
        "shape-differs", "[2, 4]", train_logprobs=rows, rollout_logprobs=rows.T, response_mask=rows, cu_seqlens=None
    )


def test_c43_lengths_differ_by_the_number_of_sequences():
    made = {
        "train_logprobs": torch.zeros(30),
        "rollout_logprobs": torch.zeros(25),
        "response_mask": torch.zeros(30),
        "cu_seqlens": torch.arange(0, 31, 6),
    }
    refused(
        "length-differs", "rollout_logprobs has 5 fewer", "[30]", "[25]", "equals the number of sequences (5)", **made
    )


def test_c47_one_extra_value_a_row_names_the_odd_one_out():
    made = {
        "train_logprobs": torch.zeros(600),
        "rollout_logprobs": torch.zeros(720),
        "response_mask": torch.zeros(600),
        "cu_seqlens": torch.arange(0, 601, 5),
        "logprobs.train_again": torch.zeros(600),
    }
    refused(
        "length-differs",
        "rollout_logprobs has 120 more",
        "equals the number of sequences (120)",
        "logprobs.train_again [600]",
        **made,
    )


def test_lengths_differ_by_something_else():
    with pytest.raises(DumpError) as caught:
        described(response_mask=torch.ones(7))
    assert "response_mask has 1 fewer" in caught.value.problem and "number of sequences" not in caught.value.problem


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train_logprobs", "train log-probs missing"),
        ("rollout_logprobs", "rollout log-probs missing"),
        ("response_mask", "mask missing"),
        ("cu_seqlens", "cu_seqlens missing"),
    ],
)
def test_c17_required_columns(name, words):
    refused("column-missing", words, **{name: None})


def test_c17_a_column_of_size_zero_is_missing():
    refused("column-missing", "rollout log-probs missing", "0 elements", rollout_logprobs=torch.zeros(0))


def test_c117_all_of_size_zero_is_an_empty_shard():
    info, _ = describe_tensors(tensors(0, cu_seqlens=torch.tensor([0])))
    assert (info.positions, info.segments) == (0, 0)
    info, _ = describe_tensors(tensors(0, cu_seqlens=torch.zeros(0, dtype=torch.int32)))
    assert (info.positions, info.segments) == (0, 0)


def test_c115_no_tensor_at_all_is_an_empty_shard_with_a_note():
    info, notes = describe_tensors({}, name="x")
    assert info.positions == 0 and [note.code for note in notes] == ["shard-without-tensors"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("train_logprobs", torch.int32),
        ("rollout_logprobs", torch.bool),
        ("cu_seqlens", torch.float32),
        ("cu_seqlens", torch.int16),
        ("cu_seqlens", torch.uint32),
    ],
)
def test_wrong_dtypes(name, dtype):
    refused("dtype-unsupported", name, **{name: tensors()[name].to(dtype)})


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ],
)
def test_any_dtype_is_a_mask(dtype):
    described(response_mask=torch.ones(8).to(dtype))


def test_complex_is_refused():
    refused("dtype-unsupported", "complex64", train_logprobs=torch.zeros(8, dtype=torch.complex64))


def test_c51_companion_column_with_a_value_too_many_per_sequence():
    info, notes = described(advantages=torch.zeros(10), entropy=torch.zeros(8))
    assert "advantages" not in info.columns and "entropy" in info.columns
    (note,) = notes
    assert (note.code, note.severity, note.metric) == ("column-refused", "warning", "advantages")
    assert "2 more than tokens" in note.message and "equals the number of sequences (2)" in note.message


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("rewards", torch.zeros(3), "[2]"),
        ("group_ids", torch.zeros(2), "F32"),
        ("token_ids", torch.zeros(8), "F32"),
        ("mask.loss", torch.ones(9), "1 more than tokens"),
        ("logprobs.ref", torch.zeros(8, dtype=torch.int64), "I64"),
        ("policy_version", torch.zeros(7, dtype=torch.int64), "1 fewer than tokens"),
    ],
)
def test_optional_columns_that_do_not_fit_are_left_out_with_a_note(name, tensor, words):
    info, (note,) = described(**{name: tensor})
    assert name not in info.columns and words in note.message and note.metric == name


def test_labels_are_served_as_bool():
    info, _ = described(response_mask=None, labels=torch.zeros(8, dtype=torch.int64))
    assert (info.dtypes["mask"], info.dtypes["labels"]) == ("BOOL", "I64")
    refused("dtype-unsupported", "labels", response_mask=None, labels=torch.zeros(8))


def test_unknown_layout():
    refused("metadata-layout", "ragged", metadata={"layout": "ragged"})


def test_flat_columns_cannot_be_rectangular():
    refused("shape-layout", "[8]", metadata={"layout": "rectangular"})


def test_stacked_offsets():
    refused("shape-offsets", "[2, 3]", "shifted", cu_seqlens=torch.tensor([[0, 1, 4], [0, 2, 4]]))
    refused("shape-offsets", "[0]", "dump [0]", cu_seqlens=torch.zeros(0, dtype=torch.int64))
    refused("shape-offsets", "[]", "a single number", cu_seqlens=torch.tensor(3))
    refused("shape-offsets", "[2, 3]", cu_packs=torch.tensor([[0, 1, 4], [0, 2, 4]]))


def test_tensors_without_a_role_are_said():
    _, (note,) = described(advantage_s=torch.zeros(8), foo=torch.zeros(1))
    assert (note.code, note.severity) == ("tensors-unused", "info") and "advantage_s, foo" in note.message


def test_lengths_beside_rows_are_said():
    rows = torch.zeros(4, 2)
    changes = {"train_logprobs": rows, "rollout_logprobs": rows, "response_mask": rows, "cu_seqlens": None}
    _, (note,) = described(**changes, response_lens=torch.ones(4, dtype=torch.int64))
    assert note.code == "bounds-not-used" and "response_lens" in note.message
