"""``analyze --policy``, ``--as`` and ``--audit``: what rides along on the pass, and how the summary takes it in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_is.analysis.settings import Settings
from rollout_is.analysis.summary import Summary
from rollout_is.dumps.errors import UsageError

if TYPE_CHECKING:
    from rollout_is.analysis.batch import Consumer

PolicyOption = Annotated[
    str | None,
    typer.Option("--policy", metavar="NAME|SPEC", help="add the view corrected: what this correction would do"),
]
AsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--as",
        metavar="NAME[:KEY=VALUE,...]",
        help="what this trainer would have logged (or NAME:@settings.json; repeatable)",
    ),
]
AuditOption = Annotated[
    bool, typer.Option("--audit", help="with one --as: which formula reproduces each number that the trainer logged")
]
NoteAbove = Annotated[
    float,
    typer.Option(
        "--note-above", min=0.0, max=1.0, metavar="SHARE", help="note when a policy rejects more than this share"
    ),
]


@dataclass(frozen=True)
class Extras:
    """What is asked for beside the plain analysis.

    Attributes:
        settings: of the analysis, by step where an audit needs it.
        consumers: for ``analyze``.
        profiles: (label, profile) pairs to report.
        audited: the profile under audit.
        policy: whether there is one.
        note_above: share of rejection that is noted.
        by_step_asked: whether the user asked for the step tables.
    """

    settings: Settings
    consumers: tuple[Consumer, ...] = ()
    profiles: tuple[tuple[str, Any], ...] = ()
    audited: Any = None
    policy: bool = False
    note_above: float = 0.1
    by_step_asked: bool = False

    def finish(self, summary: Summary) -> Summary:
        """The summary with the corrected view, the profiles and the audit."""
        if self.policy:
            from rollout_is.analysis.policies.corrected import with_corrected

            summary = with_corrected(summary, share=self.note_above)
        if self.audited is not None:
            from rollout_is.analysis.findings import findings
            from rollout_is.analysis.profiles.audit import with_audit

            summary = with_audit(replace(summary, findings=summary.findings or findings(summary)), self.audited)
            if not self.by_step_asked:
                groups = {by: group for by, group in summary.groups.items() if by != "step"}
                settings = {**summary.settings, "by": list(_without(self.settings.by, "step"))}
                summary = replace(summary, groups=groups, settings=settings)
        if self.profiles:
            from rollout_is.analysis.profiles.report import with_profiles

            summary = with_profiles(summary, self.profiles)
        return summary


def prepare(
    policy: str | None, as_: Sequence[str] | None, audit: bool, settings: Settings, note_above: float = 0.1
) -> Extras:
    """Read the options before any work is done.

    Raises:
        UsageError: an unknown policy, profile or setting, or ``--audit`` without exactly one ``--as``.
    """
    if audit and len(as_ or ()) != 1:
        raise UsageError(
            "--audit",
            f"expected exactly one --as NAME, found {len(as_ or ())}",
            "an audit recomputes what one trainer logged",
            "for example --as xtuner --audit",
            code="audit-without-profile",
        )
    consumers: list[Consumer] = []
    if policy is not None:
        from rollout_is.analysis.policies.consumer import PolicyConsumer
        from rollout_is.analysis.policies.presets import parse_policy

        consumers.append(PolicyConsumer([parse_policy(policy)], "policy", settings.bounds))
    if not as_:
        return Extras(settings, tuple(consumers), policy=policy is not None, note_above=note_above)

    from rollout_is.analysis.pipeline import FileOpener
    from rollout_is.analysis.profiles.audit import variants
    from rollout_is.analysis.profiles.registry import parse
    from rollout_is.analysis.profiles.steps import ProfileConsumer

    chosen = [parse(text) for text in as_]
    profiles = variants(chosen[0]) if audit else [(text, profile) for text, profile in zip(as_, chosen, strict=True)]
    opener = FileOpener(settings.mask, settings.train, settings.rollout)
    consumers.append(ProfileConsumer(profiles, opener, logged=audit))
    asked = "step" in settings.by
    return Extras(
        replace(settings, by=(*settings.by, "step")) if audit and not asked else settings,
        tuple(consumers),
        tuple(profiles[:1]) if audit else tuple(profiles),
        chosen[0] if audit else None,
        policy is not None,
        note_above,
        asked,
    )


def _without(names: Sequence[str], left_out: str) -> tuple[str, ...]:
    return tuple(name for name in names if name != left_out)
