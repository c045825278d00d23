"""Where ``explain`` finds its pages. Adding pages = a function and one line in ``PROVIDERS``.

A provider is ``module:function``; the function takes nothing and returns ``{key: ((label, text), ...)}``, plain data, so that it
can live in any room. Keys are ids as reports print them (``token.rollout_is_mean``, ``note.mask-values``, ``alignment.lag``).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

Explanation = tuple[tuple[str, str], ...]

PROVIDERS = (
    "rollout_is.analysis.catalog_pages:statistics",
    "rollout_is.analysis.catalog_pages:counts",
    "rollout_is.analysis.catalog_pages:views",
    "rollout_is.analysis.catalog_pages:findings",
    "rollout_is.analysis.catalog_notes:notes",
    "rollout_is.analysis.doctor.texts:findings",
    "rollout_is.analysis.policies.pages:pages",
)


def explanations() -> Mapping[str, Explanation]:
    """All pages of all providers; no torch.

    >>> dict(explanations()["token.rollout_is_min"])["better"]
    'near 1'
    """
    pages: dict[str, Explanation] = {}
    for provider in PROVIDERS:
        module, _, function = provider.partition(":")
        for key, page in getattr(importlib.import_module(module), function)().items():
            pages[key] = tuple(page)
    return pages
