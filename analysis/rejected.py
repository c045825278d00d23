"""What further masks hold that the mask in use does not: the share that a rejection took out before the figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout_is.analysis.batch import Ints, Unit
from rollout_is.dumps.notes import Note

ALARM = 0.1  # survivors look healthy when a tenth and more of the tokens or sequences is gone (NeMo-RL#4243)


@dataclass
class Rejected:
    """Tokens and sequences valid under a further mask, and those of them that the mask in use leaves out.

    Attributes:
        tokens, lost: valid under the further mask; of them, masked out now.
        sequences, lost_sequences: with a token valid under the further mask; of them, fully masked now.
        cut: (shard, segment) -> [tokens, tokens valid now] of segments longer than a unit, whose parts are still apart.
    """

    tokens: int = 0
    lost: int = 0
    sequences: int = 0
    lost_sequences: int = 0
    cut: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    @staticmethod
    def of(unit: Unit, eligible: Ints, valid: Ints, lost: int) -> Rejected:
        """One unit: int64 [s] tokens valid under the further mask and under the one in use, and the tokens left out."""
        tokens = int(eligible.sum())
        if unit.fragment:
            return Rejected(tokens, lost, cut={(unit.id.shard, unit.first): [tokens, int(valid.sum())]})
        some = eligible > 0
        return Rejected(tokens, lost, int(some.sum()), int((some & (valid == 0)).sum()))

    def add(self, other: Rejected) -> None:
        """Take in what another unit saw."""
        for name in ("tokens", "lost", "sequences", "lost_sequences"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for key, counts in other.cut.items():
            own = self.cut.setdefault(key, [0, 0])
            own[0], own[1] = own[0] + counts[0], own[1] + counts[1]

    def whole(self) -> tuple[int, int]:
        """Sequences, and those lost, with the parts of cut segments put together."""
        cut = [kept for tokens, kept in self.cut.values() if tokens]
        return self.sequences + len(cut), self.lost_sequences + sum(kept == 0 for kept in cut)


def rejected_notes(found: dict[str, Rejected], mask: str, segments: int) -> list[Note]:
    """Notes ``rejected-share``: a warning for a mask from before rejection that lost much, information for others.

    Args:
        found: by further mask.
        mask: name of the mask in use.
        segments: non-empty segments of the dump: the second denominator.
    """
    notes = []
    for role, one in sorted(found.items()):
        if not one.lost:
            continue
        sequences, gone = one.whole()
        message = f"{mask} leaves out {_share(one.lost, one.tokens)} of the {one.tokens:,} tokens valid under {role}"
        if gone:
            message += (
                f", and {_share(gone, sequences)} of its {sequences:,} sequences ({100 * gone / max(segments, 1):.3g} % "
                f"of all {segments:,} segments)"
            )
        message += ": the figures are those of the survivors"
        before = role.startswith("mask.pre_")  # any other mask may well be wider: an attention mask holds the prompts
        alarming = max(one.lost / one.tokens, gone / max(sequences, 1)) > ALARM
        severity = ("warning" if alarming else "notice") if before else "info"
        notes.append(Note("rejected-share", severity, role, message))  # type: ignore[arg-type]
    return notes


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.3g} % ({count:,})"
