"""Notes are data: what a reader of the figures must know, stated once, carried in JSON and shown as footnotes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "notice", "warning", "error"]


@dataclass(frozen=True, order=True)
class Note:
    """One remark on the data or the figures.

    Attributes:
        code: stable kebab-case id such as ``positive-logprobs``.
        severity: ``info`` < ``notice`` < ``warning`` < ``error``.
        metric: the statistic id, column or shard that it concerns; empty for the dump as a whole.
        message: one sentence with the evidence in it.

    >>> Note("mask-values", "notice", "response_mask", "mask has values {0, 1, 2}, treated as on/off").code
    'mask-values'
    """

    code: str
    severity: Severity
    metric: str
    message: str
