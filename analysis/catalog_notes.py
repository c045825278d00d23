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
}


def notes() -> Mapping[str, Page]:
    """One page a note code, keyed ``note.CODE``.

    >>> notes()["note.mask-values"][0][0]
    'what'
    """
    return {f"note.{code}": (("what", what), ("why", why), ("do", do)) for code, (what, why, do) in _NOTES.items()}
