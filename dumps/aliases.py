"""The names under which trainers keep the columns of a dump. Data only; the rules are in columns.py.

The first name of a role is the canonical one. Sources: the dumps and metric code of verl, slime, miles, NeMo-RL, SkyRL, prime-rl, xtuner,
TRL, AReaL, PipelineRL, ROLL and open-instruct, read in August 2026. A name that means either side in different trainers
(``logprobs``) is no alias: it must be settled with ``--column``.
"""

from __future__ import annotations

from collections.abc import Mapping

# [T]; without one of each there is nothing to compare.
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "train": (
        "train_logprobs",
        "train_log_probs",
        "training_logprobs",
        "trainer_logprobs",
        "trainer_log_probs",
        "old_log_probs",
        "old_logprobs",
        "old_logp",
        "old_per_token_logps",
        "prev_logprobs",
        "prev_log_probs",
        "action_log_probs",
        "prox_logp",
        "log_probs",
    ),
    "rollout": (
        "rollout_logprobs",
        "rollout_log_probs",
        "generation_logprobs",
        "generation_log_probs",
        "inference_logprobs",
        "inference_log_probs",
        "infer_logprobs",
        "infer_log_probs",
        "sampling_logprobs",
        "sampling_log_probs",
        "sampling_per_token_logps",
    ),
    "mask": (
        "response_mask",
        "loss_mask",
        "loss_masks",
        "completion_mask",
        "token_loss_mask",
        "token_mask",
        "local_loss_mask",
        "new_response_mask",
        "action_mask",
    ),
}
# [T] ids with -100 where the mask would be 0; used only where there is no mask.
LABELS = ("labels", "shifted_labels")
# [S+1]
OFFSETS = (
    "cu_seqlens",
    "cu_seq_lens",
    "cu_seqlens_q",
    "cu_seq_lens_q",
    "cu_seqlens_padded",
    "cu_seqlens_q_padded",
    "seq_boundaries",
)
# [S]; used only where there are no offsets.
LENGTHS = (
    "seq_lens",
    "seq_lens_q",
    "seqlens",
    "seq_lengths",
    "sequence_lengths",
    "sequence_lens",
    "response_lens",
    "response_lengths",
    "total_lengths",
    "input_lengths",
    "lengths",
)
PACKS = ("cu_packs", "pack_offsets")
PACK_LENGTHS = ("pack_lens", "pack_lengths")
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "token_ids": ("token_ids", "input_ids", "tokens"),
    "rollout_token_ids": ("rollout_token_ids", "rollout_input_ids", "engine_token_ids"),
    "advantages": ("advantages",),
    "policy_version": ("policy_version", "policy_versions", "versions", "weight_versions"),
    "entropy": ("entropy", "entropies"),
    "sequence_ids": ("sequence_ids", "sample_indices", "sample_index"),
    "group_ids": ("group_ids", "group_index"),
    "rewards": ("rewards", "reward"),
    "prompt_lens": ("prompt_lens", "prompt_lengths"),
    "segment_is_pad": ("segment_is_pad", "is_pad"),
    "logprobs.ref": ("logprobs.ref", "ref_log_probs", "ref_logprobs", "base_action_log_probs"),
    "logprobs.teacher": ("logprobs.teacher", "teacher_log_probs"),
}
# A second mask that some trainers multiply in. It is not applied, and that is said.
FACTORS = ("sample_mask", "sample_loss_mask", "tool_mask")
# What a user may write for a role besides its own name.
ROLE_NAMES: Mapping[str, str] = {
    "train_logprobs": "train",
    "rollout_logprobs": "rollout",
    "response_mask": "mask",
    "cu_seqlens": "offsets",
    "cu_packs": "packs",
}
