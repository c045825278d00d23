"""Copies: sides that agree bit for bit, or are zero together: then nothing was compared."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_is.analysis.batch import Ints, SequenceTable
from rollout_is.analysis.doctor.state import State, counts, smallest
from rollout_is.analysis.doctor.verdict import Draft, Scene, Scope, percent, plural

MIN_TOKENS = 32
FEW = 4  # tokens; coarse storage rounds fewer to the same bits by chance
TELLING = -0.5  # summed log-prob of a sequence; above it, two engines may well agree on every bit


@dataclass
class Copies(State):
    """Sequences by whether all their tokens are bit-identical on both sides.

    Attributes:
        tokens, sequences: int64 [3] of all; of identical ones; of identical ones with zeros only.
        telling: int64 [2] sequences with enough log-prob to differ, those of them that are identical.
    """

    tokens: Ints = counts(3)
    sequences: Ints = counts(3)
    telling: Ints = counts(2)
    first: float = smallest()

    def finished(self, table: SequenceTable) -> None:
        """Take in the unit's finished sequences."""
        some = table.n > 0
        same = some & (table.sum_abs == 0.0)
        zero = same & (table.sum_train == 0.0)
        speaks = (table.n >= FEW) & (table.sum_train < TELLING)
        for i, chosen in enumerate((some, same, zero)):
            self.tokens[i] += int(table.n[chosen].sum())
            self.sequences[i] += int(chosen.sum())
        self.telling += [int(speaks.sum()), int((speaks & same).sum())]


def _all_same(s: Copies) -> bool:
    return int(s.tokens[0]) >= MIN_TOKENS and int(s.tokens[1]) == int(s.tokens[0])


def _all_zero(s: Copies) -> bool:
    return int(s.tokens[0]) >= MIN_TOKENS and int(s.tokens[2]) == int(s.tokens[0])


def judge(scene: Scene) -> list[Draft]:
    """``copies.zero``, ``copies.identical``, ``copies.some_ranks``, ``copies.some_sequences``."""
    s = scene.pooled(Copies)
    all_tokens, same, zero = (int(x) for x in s.tokens)
    if all_tokens < MIN_TOKENS or same == 0:
        return []
    if zero == all_tokens:
        return [
            _draft(
                "copies.zero",
                "error",
                f"all log-probs zero on both sides ({plural(all_tokens, 'valid token')}): nothing was recorded; a mismatch of 0 "
                "here is not health",
                s,
                zero,
                Scope(),
                "safetensors#762, #764: a file rewritten under an open map reads as zeros",
                ("columns allocated and never filled",),
            )
        ]
    blank = tuple(r for r in scene.ranks if _all_zero(scene.pooled(Copies, ranks=[r])))
    blank_steps = () if blank else tuple(x for x in scene.steps if _all_zero(scene.pooled(Copies, steps=[x])))
    for scope in (Scope(blank), Scope((), blank_steps)):
        if scope != Scope():
            part = scene.pooled(Copies, ranks=scope.ranks, steps=scope.steps)
            return [
                _draft(
                    "copies.zero",
                    "error",
                    f"all log-probs zero on both sides{scope.words(scene)} ({plural(int(part.tokens[2]), 'valid token')}): nothing was "
                    "recorded there; a mismatch of 0 is not health",
                    part,
                    int(part.tokens[2]),
                    scope,
                    "safetensors#762, #764: a file rewritten under an open map reads as zeros",
                    ("columns allocated and never filled",),
                )
            ]
    if same == all_tokens:
        return [
            _draft(
                "copies.identical",
                "notice",
                f"100 % of valid tokens bit-identical ({plural(all_tokens, 'token')}): was the trainer pass skipped, or one column "
                "copied into the other?",
                s,
                same,
                Scope(),
                "verl#4070, #7196: metrics computed in the mode where both sides are the same",
                ("bitwise-consistent engines exist (RL-Kernel): then this is right",),
            )
        ]
    ranks = tuple(r for r in scene.ranks if _all_same(scene.pooled(Copies, ranks=[r])))
    if ranks and len(ranks) < len(scene.ranks):
        part = scene.pooled(Copies, ranks=ranks)
        scope = Scope(ranks)
        return [
            _draft(
                "copies.some_ranks",
                "warning",
                f"bit-identical on both sides{scope.words(scene)}, not on the others: one column copied into the other there, or the "
                "trainer pass skipped",
                part,
                int(part.tokens[1]),
                scope,
                "verl#4070",
                ("ranks that run another code path",),
            )
        ]
    steps = tuple(x for x in scene.steps if _all_same(scene.pooled(Copies, steps=[x])))
    if steps and len(steps) < len(scene.steps):
        part = scene.pooled(Copies, steps=steps)
        scope = Scope((), steps)
        return [
            _draft(
                "copies.some_steps",
                "warning",
                f"bit-identical on both sides{scope.words(scene)}, not at the others: one column copied into the other there",
                part,
                int(part.tokens[1]),
                scope,
                "verl#4070",
                ("a first step without weight update",),
            )
        ]
    speak, copied = (int(x) for x in s.telling)
    if copied >= 3 and copied >= 0.05 * speak:
        words = f"{plural(copied, 'sequence')} of {speak} ({percent(copied / speak)})"
        return [
            _draft(
                "copies.some_sequences",
                "warning",
                f"{words} are bit-identical on both sides while the others are not: missing values replaced by the other side?",
                s,
                same,
                Scope(),
                "SkyRL#1870, slime#1995: rollout log-probs dropped on one path",
                ("sequences that were scored twice by the same engine",),
            )
        ]
    return []


def _draft(
    id: str, severity: str, message: str, s: Copies, tokens: int, scope: Scope, source: str, other: tuple[str, ...]
) -> Draft:
    share = tokens / max(1, int(s.tokens[0]))
    return Draft(
        id,
        severity,
        message,
        share,
        "share of valid tokens that are bit-identical",
        scope,
        tokens=tokens,
        token_share=share,
        sequences=int(s.sequences[1]),
        alternatives=other,
        figures={"identical_share": share},
        source=source,
        next=f"compare the two columns' code paths in the trainer; rollout-is explain {id}",
    )
