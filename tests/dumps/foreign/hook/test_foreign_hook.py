"""Hook files in every shape that trainers hold at that place."""

import warnings

import pytest
import torch

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry

LENGTHS = [3, 1, 4]
TRAIN = [torch.linspace(-3, -1, n) for n in LENGTHS]
ROLLOUT = [train + 0.125 for train in TRAIN]
MASK = [torch.tensor([1, 0, 1]), torch.tensor([0]), torch.tensor([1, 1, 1, 0])]
CU = torch.tensor([0, 3, 4, 8], dtype=torch.int32)


def packed(**changes):
    pack = {
        "old_logprobs": torch.cat(TRAIN)[None],
        "rollout_logprobs": torch.cat(ROLLOUT)[None],
        "loss_mask": torch.cat(MASK)[None],
        "cu_seqlens": CU,
    } | changes
    return {key: value for key, value in pack.items() if value is not None}


def padded(columns, fill):
    return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_value=fill)


def strided(columns):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this layout a prototype
        return torch.nested.nested_tensor(columns)


SHAPES = {
    "packed [1, T]": packed(),
    "packed [T]": {key: value.flatten() for key, value in packed().items()},
    "lengths in place of offsets": packed(cu_seqlens=None, seq_lens=torch.tensor(LENGTHS)),
    "a list of lengths": packed(cu_seqlens=None, seq_lens=LENGTHS),
    "labels": packed(loss_mask=None, labels=torch.where(torch.cat(MASK) > 0, 17, -100)[None]),
    "bool mask": packed(loss_mask=torch.cat(MASK).bool()),
    "float mask": packed(loss_mask=torch.cat(MASK).float()),
    "int64 offsets": packed(cu_seqlens=CU.long()),
    "a list of packs": [packed(), packed()],
    "dict of lists": {"log_probs": TRAIN, "rollout_log_probs": ROLLOUT, "loss_masks": MASK},
    "dict of lists with two kinds of lengths": {
        "train_log_probs": TRAIN,
        "rollout_log_probs": ROLLOUT,
        "loss_masks": MASK,
        "total_lengths": [9, 9, 9],
        "response_lengths": LENGTHS,
    },
    "lists of numbers": {
        "log_probs": [t.tolist() for t in TRAIN],
        "rollout_log_probs": [r.tolist() for r in ROLLOUT],
        "loss_masks": [m.tolist() for m in MASK],
    },
    "list of dicts": [
        {"train_logprobs": t, "rollout_logprobs": r, "response_mask": m}
        for t, r, m in zip(TRAIN, ROLLOUT, MASK, strict=True)
    ],
    "padded [B, L]": {
        "old_log_probs": padded(TRAIN, 0.0),
        "rollout_log_probs": padded(ROLLOUT, -9999.0),
        "response_mask": padded(MASK, 0),
    },
    "micro-batches [b, L]": [
        {
            "old_log_probs": padded(TRAIN[part], 0.0),
            "rollout_log_probs": padded(ROLLOUT[part], 0.0),
            "response_mask": padded(MASK[part], 0),
        }
        for part in (slice(0, 2), slice(1, 3))
    ],
    "nested, strided": {
        "old_log_probs": strided(TRAIN),
        "rollout_log_probs": strided(ROLLOUT),
        "response_mask": strided(MASK),
    },
    "nested, jagged": {
        "old_log_probs": torch.nested.nested_tensor(TRAIN, layout=torch.jagged),
        "rollout_log_probs": torch.nested.nested_tensor(ROLLOUT, layout=torch.jagged),
        "response_mask": torch.nested.nested_tensor(MASK, layout=torch.jagged),
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(tmp_path, read_one, shape):
    torch.save(SHAPES[shape], tmp_path / "step_6_rank_2.pt")
    found = read_one(tmp_path)
    assert (found.info.format, found.info.step, found.info.rank) == ("torch-hook", 6, 2)
    valid = [(t[m], r[m]) for t, r, m in found.rows()]
    wanted = [(t[m > 0].double(), r[m > 0].double()) for t, r, m in zip(TRAIN, ROLLOUT, MASK, strict=True)]
    if shape == "a list of packs":
        wanted = wanted * 2
        assert found.packs.tolist() == [0, 8, 16]
    if shape == "micro-batches [b, L]":
        wanted = [wanted[0], wanted[1], wanted[1], wanted[2]]
    assert len(valid) == len(wanted)
    for (train, rollout), (t, r) in zip(valid, wanted, strict=True):
        assert train.tolist() == t.tolist()
        assert rollout.tolist() == r.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_kept(tmp_path, read_one, dtype):
    torch.save(packed(rollout_logprobs=torch.cat(ROLLOUT).to(dtype)), tmp_path / "a.pt")
    found = read_one(tmp_path / "a.pt")
    assert found.info.dtypes["rollout"] == {"float16": "F16", "bfloat16": "BF16", "float64": "F64"}[str(dtype)[6:]]
    assert found.rollout.tolist() == torch.cat(ROLLOUT).to(dtype).double().tolist()


def test_a_tail_past_the_bounds_is_a_pad_segment(tmp_path, read_one):
    mask = torch.cat([*MASK[:2], torch.zeros(4, dtype=torch.int64)])
    torch.save([packed(cu_seqlens=CU[:3], loss_mask=mask)] * 2, tmp_path / "a.pt")
    found = read_one(tmp_path / "a.pt")
    assert found.offsets.tolist() == [0, 3, 4, 8, 11, 12, 16]
    assert found.columns["segment_is_pad"].tolist() == [False, False, True] * 2


def test_a_valid_token_past_the_bounds_is_an_error(tmp_path):
    torch.save(packed(cu_seqlens=CU[:3]), tmp_path / "a.pt")
    with pytest.raises(DumpError) as caught:
        registry.find(tmp_path / "a.pt")
    assert caught.value.code == "valid-past-end"


def test_xtuner_padding_segments(samples, read_one):
    found = read_one(samples / "xtuner/hook_packed/rollout_1_rank0.pt")
    assert (
        found.columns["segment_is_pad"].tolist()
        == [False] * 3 + [True] + [False] * 3 + [True] + [False] * 2 + [True] * 5
    )
    assert found.packs.tolist() == [0, 64, 128, 192, 256]
    assert found.info.columns["mask"] == "shifted_labels != -100"


def split(content, size, rank):
    parts = []
    for pack in content:
        part = dict(pack)
        for key in ("shifted_labels", "rollout_logprobs", "old_logprobs"):
            part[key] = pack[key].chunk(size, dim=1)[rank].clone()
        width = part["old_logprobs"].shape[1]
        inside = range(rank * width, (rank + 1) * width)
        part["num_padding"] = sum(i >= pack["old_logprobs"].shape[1] - pack["num_padding"] for i in inside)
        parts.append(part)
    return parts


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallel_parts_are_joined(samples, tmp_path, read, size):
    whole = samples / "xtuner/hook_packed/rollout_1_rank0.pt"
    content = torch.load(whole, weights_only=True)
    for group in range(2):  # two data-parallel groups that differ
        changed = [
            pack | {"cu_seq_lens_q": pack["cu_seq_lens_q"][: len(pack["cu_seq_lens_q"])]} for pack in content[group:]
        ]
        for rank in range(size):
            torch.save(split(changed, size, rank), tmp_path / f"rollout_1_rank{group * size + rank}.pt")
    found = read(tmp_path)
    (reference,) = read(whole)
    assert [shard.info.rank for shard in found] == [0, size]
    assert found[0].train.tolist() == reference.train.tolist()
    assert found[0].mask.tolist() == reference.mask.tolist()
    assert found[0].columns["segment_is_pad"].tolist() == reference.columns["segment_is_pad"].tolist()
    assert found[1].train.tolist() == reference.train[64:].tolist()
    assert f"{size} sequence-parallel parts joined" in found[0].notes["parts-joined"].message


def test_a_lone_sequence_parallel_part_is_refused(samples, tmp_path):
    content = torch.load(samples / "xtuner/hook_packed/rollout_1_rank0.pt", weights_only=True)
    torch.save(split(content, 2, 0), tmp_path / "rollout_1_rank0.pt")
    for given in (tmp_path, tmp_path / "rollout_1_rank0.pt"):
        with pytest.raises(DumpError, match="expected 2 sequence-parallel parts") as caught:
            registry.find(given)
        assert caught.value.code == "sequence-parallel-part"


def test_nemo_rl_loss_inputs_with_a_row_mask_and_two_kinds_of_bounds(tmp_path, read_one):
    content = {
        "prev_logprobs": padded(TRAIN, 0.0),
        "generation_logprobs": padded(ROLLOUT, 0.0),
        "token_mask": padded(MASK, 0),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        "input_lengths": torch.tensor(LENGTHS),
        "cu_seqlens_q": CU,
        "cu_seqlens_q_padded": torch.tensor([0, 4, 8, 12]),
    }
    torch.save(content, tmp_path / "rank0_mb0.pt")
    found = read_one(tmp_path)
    assert found.mask.sum() == 2  # row 2 is dropped by its sample mask
    assert found.info.columns["mask"] == "token_mask * sample_mask"


def test_groups_and_tokens_of_the_verl_hook(tmp_path, read_one):
    content = {
        "old_log_probs": padded(TRAIN, 0.0),
        "rollout_log_probs": padded(ROLLOUT, 0.0),
        "response_mask": padded(MASK, 0),
        "responses": torch.arange(12).reshape(3, 4),
        "uid": ["x", "y", "x"],
    }
    torch.save(content, tmp_path / "step_3.pt")
    found = read_one(tmp_path)
    assert found.columns["group_ids"].tolist() == [0, 1, 0]
    assert found.columns["token_ids"].tolist() == list(range(12))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (packed(cu_seqlens=None), "bounds-missing"),
        ({**packed(cu_seqlens=None), "old_logprobs": torch.cat(TRAIN)}, "bounds-missing"),
        (packed(cu_seqlens=torch.tensor([0, 3, 9])), "offsets-past-end"),
        (packed(cu_seqlens=torch.tensor([1, 3, 8])), "offsets-start"),
        (packed(loss_mask=None), "column-missing"),
        (packed(loss_mask=torch.ones(1, 4)), "row-lengths-differ"),
        (packed(old_log_probs=torch.cat(TRAIN)[None]), "column-ambiguous"),
        (packed(old_logprobs=torch.ones(1, 8, dtype=torch.int64)), "wrong-dtype"),
        ({"log_probs": TRAIN, "rollout_log_probs": ROLLOUT[:2], "loss_masks": MASK}, "row-lengths-differ"),
        ({"log_probs": TRAIN, "rollout_log_probs": TRAIN[::-1], "loss_masks": MASK}, "row-lengths-differ"),
        ({"log_probs": [["a"]], "rollout_log_probs": [[1.0]], "loss_masks": [[1]]}, "not-numbers"),
        ([packed(), 7], "wrong-structure"),
        ({"log_probs": [], "rollout_log_probs": [], "loss_masks": []}, "no-sequences"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, content, code):
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(DumpError) as caught:
        registry.find(tmp_path / "a.pt")
    print(caught.value)
    assert caught.value.code == code or code.startswith("offsets-")
    assert "a.pt" in caught.value.where
