"""Which tensor plays which role: trainers' names, choices of the user, and refusals where two names fit."""

import pytest

from rollout_is.dumps import aliases
from rollout_is.dumps.columns import check_columns, resolve
from rollout_is.dumps.errors import DumpError, UsageError

CORE = {"train_logprobs", "rollout_logprobs", "response_mask", "cu_seqlens"}


def roles(*names, **columns):
    return resolve(frozenset(names), check_columns(columns), "the-shard").columns


def swapped(out, *names):
    return (CORE - {out}) | set(names)


@pytest.mark.parametrize("name", aliases.REQUIRED["train"])
def test_train_aliases(name):
    assert roles(*swapped("train_logprobs", name))["train"] == name


@pytest.mark.parametrize("name", aliases.REQUIRED["rollout"])
def test_rollout_aliases(name):
    assert roles(*swapped("rollout_logprobs", name))["rollout"] == name


@pytest.mark.parametrize("name", aliases.REQUIRED["mask"])
def test_mask_aliases(name):
    assert roles(*swapped("response_mask", name))["mask"] == name


@pytest.mark.parametrize("name", aliases.OFFSETS)
def test_offsets_aliases(name):
    found = roles(*swapped("cu_seqlens", name))
    assert found["offsets"] == name and "lengths" not in found


@pytest.mark.parametrize("name", aliases.LENGTHS)
def test_lengths_under_their_own_names(name):
    found = roles(*swapped("cu_seqlens", name))
    assert found["offsets"] == found["lengths"] == name


@pytest.mark.parametrize("name", aliases.LABELS)
def test_labels_serve_as_mask(name):
    found = roles(*swapped("response_mask", name))
    assert found["mask"] == found["labels"] == name


def test_no_alias_serves_two_roles():
    every = [name for known in (*aliases.REQUIRED.values(), *aliases.OPTIONAL.values()) for name in known]
    every += [
        *aliases.LABELS,
        *aliases.OFFSETS,
        *aliases.LENGTHS,
        *aliases.PACKS,
        *aliases.PACK_LENGTHS,
        *aliases.FACTORS,
    ]
    assert len(every) == len(set(every))


def test_trainers_as_they_dump():
    nemo = roles("prev_logprobs", "generation_logprobs", "token_loss_mask", "input_lengths")
    assert (nemo["train"], nemo["rollout"], nemo["mask"], nemo["lengths"]) == (
        "prev_logprobs",
        "generation_logprobs",
        "token_loss_mask",
        "input_lengths",
    )
    xtuner = roles("old_logprobs", "rollout_logprobs", "shifted_labels", "cu_seq_lens_q")
    assert (xtuner["train"], xtuner["mask"], xtuner["offsets"]) == ("old_logprobs", "shifted_labels", "cu_seq_lens_q")


def test_a_mask_wins_over_labels_and_offsets_over_lengths():
    found = roles(*CORE, "labels", "response_lens")
    assert found["mask"] == "response_mask" and "labels" not in found
    assert found["offsets"] == "cu_seqlens" and "lengths" not in found


def test_c88_two_candidates_are_an_error_that_lists_them():
    with pytest.raises(DumpError) as caught:
        roles("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "response_mask", "cu_seqlens")
    assert caught.value.code == "column-ambiguous"
    assert "old_log_probs, log_probs" in caught.value.problem and "rollout_log_probs" not in caught.value.problem
    assert "--column train=" in caught.value.fix


def test_c88_a_canonical_name_does_not_win_silently():
    with pytest.raises(DumpError, match="train_logprobs, old_log_probs"):
        roles(*CORE, "old_log_probs")
    assert roles(*CORE, "old_log_probs", train="old_log_probs")["train"] == "old_log_probs"
    assert roles(*CORE, "old_log_probs", train="train_logprobs")["train"] == "train_logprobs"


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (
            swapped("rollout_logprobs", "rollout_log_probs", "inference_logprobs"),
            "rollout_log_probs, inference_logprobs",
        ),
        (swapped("response_mask", "loss_mask", "completion_mask"), "loss_mask, completion_mask"),
        (swapped("response_mask", "labels", "shifted_labels"), "labels, shifted_labels"),
        (swapped("cu_seqlens", "cu_seqlens_q", "cu_seqlens_q_padded"), "cu_seqlens_q, cu_seqlens_q_padded"),
        (swapped("cu_seqlens", "total_lengths", "response_lengths"), "response_lengths, total_lengths"),
        (CORE | {"cu_packs", "pack_offsets"}, "cu_packs, pack_offsets"),
    ],
)
def test_two_candidates(names, word):
    with pytest.raises(DumpError, match=word) as caught:
        roles(*names)
    assert caught.value.code == "column-ambiguous"


def test_a_tensor_taken_by_choice_is_no_candidate_elsewhere():
    found = roles("old_log_probs", "log_probs", "response_mask", "cu_seqlens", rollout="old_log_probs")
    assert (found["train"], found["rollout"]) == ("log_probs", "old_log_probs")


def test_choice_of_labels_and_lengths_keeps_their_meaning():
    found = roles(*swapped("response_mask", "labels"), mask="labels")
    assert found["labels"] == "labels"
    found = roles(*swapped("cu_seqlens", "response_lens", "total_lengths"), offsets="response_lens")
    assert found["lengths"] == "response_lens"
    found = roles(*CORE, "mine", labels="mine", lengths="mine")
    assert found["mask"] == found["labels"] == found["offsets"] == found["lengths"] == "mine"


def test_open_ended_names_never_collide_with_required_roles():
    found = roles(*CORE, "mask.loss", "mask.response_mask", "logprobs.train", "logprobs.prefill")
    assert found["mask"] == "response_mask" and found["train"] == "train_logprobs"
    assert found["mask.loss"] == "mask.loss" and found["logprobs.train"] == "logprobs.train"
    assert found["mask.response_mask"] == "mask.response_mask"


def test_reference_pass_has_an_open_ended_role():
    assert roles(*CORE, "ref_log_probs")["logprobs.ref"] == "ref_log_probs"


def test_two_candidates_for_an_optional_role_are_a_note():
    found = resolve(frozenset(CORE | {"token_ids", "input_ids"}), {}, "x")
    assert "token_ids" not in found.columns
    assert [note.code for note in found.notes] == ["column-ambiguous"]
    assert "input_ids" in found.notes[0].message
    assert roles(*CORE, "token_ids", "input_ids", token_ids="input_ids")["token_ids"] == "input_ids"


def test_a_mask_factor_that_is_not_applied_is_said():
    found = resolve(frozenset(CORE | {"sample_mask"}), {}, "x")
    assert [(note.code, note.severity, note.metric) for note in found.notes] == [
        ("mask-factor-not-applied", "warning", "sample_mask")
    ]


def test_a_chosen_tensor_that_is_absent():
    with pytest.raises(DumpError) as caught:
        roles(*CORE, train="nope")
    assert caught.value.code == "column-not-found"
    for word in ("'nope'", *CORE):
        assert word in caught.value.problem


@pytest.mark.parametrize(
    ("columns", "code"),
    [
        ({"trian": "x"}, "column-role-unknown"),
        ({"mask.": "x"}, "column-role-unknown"),
        ({"train": ""}, "column-role-unknown"),
        ({"train": "x", "train_logprobs": "y"}, "column-role-twice"),
    ],
)
def test_unknown_roles(columns, code):
    with pytest.raises(UsageError) as caught:
        check_columns(columns)
    assert caught.value.code == code and caught.value.exit_code == 2


def test_canonical_names_are_roles_too():
    assert check_columns({"cu_seqlens": "a", "cu_packs": "b", "response_mask": "c"}) == {
        "offsets": "a",
        "packs": "b",
        "mask": "c",
    }
