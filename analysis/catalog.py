"""Every statistic as data: what it is, which way it points, where it comes from, what to do about it.

``explain`` prints it, ``compare`` and ``check`` take the direction from it, tables take the words. No number is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from rollout_is.analysis.catalog_entry import Entry
from rollout_is.analysis.catalog_mismatch import MISMATCH
from rollout_is.analysis.catalog_weights import PER_SEQUENCE, VETO, level_entries
from rollout_is.analysis.summary import SECTIONS, VIEWS


@cache
def catalog() -> Mapping[tuple[str, str], Entry]:
    """All statistics by (section, name), in print order.

    >>> catalog()["mismatch", "mismatch_kl"].better
    'near 0'
    """
    entries: list[Entry] = []
    for level in ("token", "sequence", "geometric"):
        entries += level_entries(level)
    entries += [*PER_SEQUENCE, *VETO, *MISMATCH]
    return {(entry.section, entry.name): entry for entry in entries}


def lookup(statistic_id: str) -> Entry | None:
    """The entry of a statistic id, with or without its view.

    Args:
        statistic_id: such as ``masked.token.rollout_is_mean`` or ``token.rollout_is_mean``; a bare name that is defined in
            one section only is enough too.

    >>> lookup("masked.token.rollout_is_mean").unit
    'token'
    >>> lookup("masked.token.rollout_is_meen") is None
    True
    """
    head, _, rest = statistic_id.partition(".")
    path = rest if head in VIEWS and rest else statistic_id
    section, _, name = path.partition(".")
    if name:
        return catalog().get((section, name))
    found = find(section)
    return found[0] if len(found) == 1 else None


def find(name: str) -> tuple[Entry, ...]:
    """All entries of a bare name, one a section that defines it.

    >>> [entry.section for entry in find("rollout_is_mean")]
    ['token', 'sequence', 'geometric']
    """
    return tuple(entry for (_, other), entry in catalog().items() if other == name)


def names(section: str) -> tuple[str, ...]:
    """Names of a section in print order.

    >>> names("veto")
    ('rollout_is_catastrophic_token_fraction', 'rollout_is_veto_fraction')
    """
    return tuple(name for other, name in catalog() if other == section)


def ids(views: tuple[str, ...] = ("unmasked", "padded", "masked")) -> Iterator[str]:
    """Every statistic id of these views, in print order."""
    for view in views:
        for section in SECTIONS:
            for name in names(section):
                yield f"{view}.{section}.{name}"
