"""What each note on the data means: its code, what was seen, why it usually happens, what to do."""

from __future__ import annotations

from collections.abc import Mapping

Page = tuple[tuple[str, str], ...]

# code -> (what, why it usually happens, what to do)
_NOTES: dict[str, tuple[str, str, str]] = {
    "mask-values": (
        "the mask holds values other than 0 and 1; each value above 0 counts as valid, none as a weight",
        "document ids or loss weights were dumped as a mask",
        "check that the mask is the response mask; weights belong into another column",
    ),
    "no-valid-tokens": (
        "the mask is 0 everywhere: nothing could be measured",
        "another mask column, labels all -100, or a dump written after rejection",
        "inspect the dump, then choose the mask with --mask or --column mask=NAME",
    ),
    "fully-masked-content": (
        "segments without a valid token whose log-probs are real",
        "a filter or a rejection rule masked them before the dump",
        "dump the mask before rejection too (mask.pre_rejection), and read it with --mask pre_rejection",
    ),
    "fully-masked-pad-like": (
        "segments without a valid token that hold one fill value: padding",
        "packs and batches are filled up",
        "nothing: they are counted apart; compare padded with masked to see what counting them would do",
    ),
    "nonfinite-valid": (
        "NaN or infinite log-probs at valid tokens; left out of every mean, their sequences left out of the product level",
        "the engine returned NaN, temperature 0 on one side, or a weight update raced a forward pass",
        "analyze --top 20 lists them first; check fails on any",
    ),
    "nonfinite-masked": ("NaN or infinity where the mask is 0", "fill values", "nothing: they change no figure"),
    "identical-sides": (
        "both sides are equal to the last bit at every valid token",
        "the trainer's forward pass was skipped, or one column was copied; bitwise consistent stacks exist too",
        "make sure that the trainer computed its own log-probs",
    ),
    "both-zero": (
        "both sides are exactly 0 at valid tokens",
        "a file that was rewritten while it was read, or placeholders on both sides",
        "dump again; agreement of zeros says nothing",
    ),
    "all-zero-side": (
        "one side is exactly 0 at every valid token: a placeholder, not a log-prob",
        "the engine did not return log-probs, or a pass was skipped",
        "ask the engine for log-probs of the sampled tokens",
    ),
    "constant-value": (
        "one value is repeated on one side where the other side is not near it",
        "placeholders at tool or prompt tokens inside the mask, or a fill value",
        "take those tokens out of the mask, or have them scored",
    ),
    "positive-logprobs": (
        "log-probs above 0, kept as they are",
        "unfused log-softmax in low precision",
        "up to 1e-6 is rounding; above, compute log-probs in float32",
    ),
    "dtype-resolution": (
        "log-probs stored in 16 bits: differences below the stated resolution are rounding",
        "the engine or the hook returns bf16 or f16",
        "dump float32",
    ),
    "mask-fill-values": ("values found where the mask is 0, for the curious", "", "nothing: they change no figure"),
    "outside-tokens": (
        "positions past the last boundary of cu_seqlens; all masked, so they are padding",
        "the pad tail of a pack has no segment of its own",
        "nothing: the masked figures are the same in either layout",
    ),
    "empty-shard": (
        "a shard without positions",
        "a rank had no data at this step",
        "nothing: it contributes nothing, never a 0",
    ),
    "shard-left-out": (
        "a shard that could not be read was left out (--allow-partial)",
        "a crash while writing, a broken copy",
        "dump it again; the figures are those of the other shards",
    ),
    "no-pre-rejection-mask": (
        "only one mask was dumped",
        "trainers overwrite the mask when they reject tokens",
        "dump the mask before rejection too, as mask.pre_rejection, to see what was rejected",
    ),
    "tokens-differ": (
        "token_ids and rollout_token_ids, both dumped, are not the same tokens: the two sides scored different text",
        "the response was decoded and encoded again before training, or a chat template rewrote the history",
        "hand the engine's token ids to the trainer; what follows the first difference is in no figure",
    ),
    "cp-slices": (
        "shards hold slices of sequences, as context parallelism left them (metadata cp_size above 1)",
        "every rank dumped its own part; token figures are right, figures of sequences are those of slices",
        "gather the slices before the dump: only the trainer knows their layout",
    ),
    "column-in-some-shards": (
        "group_ids or a further mask that some shards have and others lack",
        "steps of two versions of the hook in one dump, or a rank that did not write the column",
        "read the steps apart with --steps, or dump the column in every shard",
    ),
    "pad-with-valid-tokens": (
        "segments marked as padding hold tokens that the mask lets through",
        "the mask of the pad tail is not 0, or the flags belong to other segments",
        "mask the padding, or correct segment_is_pad; the mask decides what is counted",
    ),
    "rejected-share": (
        "tokens and sequences that are valid under a further mask of the dump and not under the mask in use",
        "the trainer rejected them before the dump (the rule, not the mask, says why), or the further mask is wider by design",
        "compare DUMP --masks pre_rejection,response_mask; judge the correction by what it took out as well as by what it left",
    ),
    "duplicate-sequences": (
        "sequences that are equal bit for bit to others",
        "a batch filled up with copies of real rows, or one shard written twice",
        "read the figures without them, which stand beside",
    ),
    "duplicate-shards": (
        "a shard repeats another one's sequences",
        "two ranks wrote the same data (tensor or sequence parallel copies), or a file was copied",
        "dump only on the ranks that own data",
    ),
    "masks-identical": (
        "the mask is on everywhere: masking changes nothing",
        "the dump holds response tokens only, or the wrong mask was dumped",
        "check the mask if prompts are in the dump",
    ),
    "bounds-not-used": (
        "cu_seqlens or lengths stand beside rectangular columns and were not used: a row is a segment",
        "the trainer dumps both",
        "check that rows are sequences; else dump packed columns",
    ),
    "tensors-unused": (
        "tensors that play no role here",
        "the trainer dumps more than log-probs",
        "--column ROLE=NAME gives one a role",
    ),
    "policy-oddity": (
        "the framework's own rule does something that its name does not say",
        "it is reproduced as it is",
        "read the sentence; explain the policy by its name",
    ),
    "policy-rejects": (
        "the policy rejects a large share of tokens or sequences; both denominators are said",
        "bounds too tight for this mismatch, or a real fault behind it",
        "judge the rejected share before the survivors' good figures; sweep shows other bounds",
    ),
    "policy-unjudged": (
        "valid tokens without a finite log-ratio could not be judged by the policy",
        "NaN or infinite log-probs",
        "mend them first: analyze --top 20",
    ),
    "policy-held": (
        "weights too large for float64 were held at e^300",
        "the policy sets no upper bound at this level",
        "bound it, or use another level",
    ),
    "policy-mask": (
        "the policy was judged under a mask that may already hold a trainer's own rejections",
        "no mask from before rejection was dumped",
        "dump mask.pre_rejection",
    ),
    "profile-error": (
        "the trainer's own code would have failed on this dump",
        "an empty batch, a bound that it refuses, a shape that it does not take",
        "read the sentence; there is no logged figure to compare with",
    ),
    "audit-unknown": (
        "the shards carry logged metrics that the chosen profile does not compute",
        "another trainer, another version, or metrics of another kind",
        "choose the profile that logged them with --as NAME",
    ),
    "files-passed-over": (
        "files that are no shards were passed over",
        "logs and configurations stand beside them",
        "nothing",
    ),
    "duplicates-kept": (
        "several shards for one (step, rank), all kept",
        "a resumed run wrote into the folder of the first attempt",
        "--duplicates newest keeps the last attempt only",
    ),
    "duplicates-left-out": (
        "several shards for one (step, rank), only the newest kept",
        "a resumed run wrote into the folder of the first attempt",
        "nothing, if the newest is the one that you want",
    ),
    "ranks-missing": (
        "some steps lack a rank",
        "a rank died, its file was not copied, or the run is still writing",
        "copy the rest, or read the figures as those of the ranks that are there",
    ),
    "steps-missing": (
        "a gap in the steps",
        "files were removed, or the trainer skipped a dump",
        "check that none was lost",
    ),
    "steps-absent": (
        "steps were asked for that the dump does not hold",
        "a typo, or not dumped",
        "inspect lists the steps",
    ),
    "steps-unknown": (
        "shards without a step number cannot be placed in --steps",
        "neither metadata nor the path says the step",
        "write step into the metadata, or step_00000412 into the path",
    ),
    "shards-left-out": (
        "bad shards were left out (--allow-partial)",
        "a crash while writing, a broken copy",
        "the figures are those of the other shards",
    ),
    "temporary-files": (
        "files under temporary names were ignored",
        "a writer is still at work, or crashed",
        "wait, or remove them",
    ),
    "same-file-twice": ("one file was named twice", "overlapping paths or globs", "nothing: it counts once"),
    "shard-without-tensors": ("a shard holds no tensors", "a rank had nothing to write", "nothing: it counts as empty"),
    "column-ambiguous": (
        "two tensors could play an optional role",
        "both a trainer's name and ours are there",
        "--column role=name settles it",
    ),
    "column-refused": (
        "an optional column does not fit and was left out",
        "another length or dtype than the log-probs",
        "write one value a position, or a segment",
    ),
    "mask-factor-not-applied": (
        "the dump holds a further mask that a trainer multiplies in; it was not applied",
        "sample masks and token masks are stored apart",
        "name the combined mask with --column mask=NAME, or dump it as mask.NAME",
    ),
    "folders-unmarked": (
        "some folders lack the marker of completeness that others have",
        "the run is still writing them, or died in between",
        "wait, or read the figures as those of what is there",
    ),
    "files-left-out": (
        "files of the folder were not read",
        "they hold one side only, text, or the same tokens as others that were read",
        "nothing; name their folder to read them alone",
    ),
    "unfinished-step": ("a step without its marker of completeness was left out", "the run is writing it", "wait"),
    "stages-left-out": (
        "rank files without train log-probs were left out",
        "pipeline stages before the last",
        "nothing",
    ),
    "copies-dropped": (
        "rank files that repeat another one were dropped",
        "tensor-parallel ranks are copies",
        "nothing",
    ),
    "copies-differ": (
        "ranks hold the same sequences with other values; the first rank's were used",
        "a pass that is not deterministic across ranks",
        "compare the files with rollout-is compare",
    ),
    "slices-joined": (
        "context-parallel slices were joined into sequences",
        "their lengths prove the layout",
        "nothing",
    ),
    "parts-joined": ("sequence-parallel parts were joined into packs", "their bounds prove the order", "nothing"),
    "placeholder-train-logprobs": (
        "the train log-probs are placeholders (0 everywhere)",
        "the trainer skipped its own forward pass",
        "set the option that the message names, and dump again",
    ),
    "mask-reconstructed": (
        "the file holds no masks; they were reconstructed from the log-probs",
        "an old version of the trainer",
        "update the trainer; tokens generated with log-prob exactly 0 are missing until then",
    ),
    "rows-dropped-by-trainer": ("the trainer itself left rows out of its dump", "its own filters", "nothing"),
    "pad-rows": ("rows that fill the batch were counted as fully masked", "batch padding for divisibility", "nothing"),
    "train-equals-rollout": (
        "the trainer stored the rollout log-probs as its own",
        "a bypass mode, in which no forward pass of the trainer is made",
        "switch it off for a dump; otherwise nothing is compared",
    ),
    "old-equals-rollout": (
        "the old policy's log-probs are the rollout's",
        "the trainer was told to use rollout log-probs as old ones",
        "compare another pass with --logprobs",
    ),
    "train-policy-current": (
        "the train log-probs are of the current policy, not of the one that sampled",
        "the trainer dumps them from its loss forward",
        "read the figures as engine mismatch plus policy drift; dump the first optimizer step alone to tell them apart",
    ),
    "fully-masked-not-exported": (
        "the trainer does not export sequences without a trainable token",
        "it drops them before it writes",
        "nothing; the count of fully masked sequences is then no evidence",
    ),
    "slices-not-joined": (
        "context-parallel slices could not be joined into sequences",
        "the layout of the slices is not recorded, or slices are missing",
        "dump the layout, or all slices; token statistics hold meanwhile",
    ),
}


def notes() -> Mapping[str, Page]:
    """One page a note code, keyed ``note.CODE``.

    >>> notes()["note.mask-values"][0][0]
    'what'
    """
    return {
        f"note.{code}": tuple((label, text) for label, text in (("what", what), ("why", why), ("do", do)) if text)
        for code, (what, why, do) in _NOTES.items()
    }
