"""``rollout-is explain NAME``: what a statistic, count, note or finding means, where it comes from, what to do."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated

import typer

from rollout_is.cli import options as o
from rollout_is.cli.explanations import Explanation, explanations
from rollout_is.cli.output import check_output, write_result
from rollout_is.cli.render.terminal import Terminal, detect, for_file
from rollout_is.cli.render.text import wrap
from rollout_is.dumps.errors import UsageError

_MOST_SUGGESTED = 8
_FAMILIES = ("rollout_is_", "mismatch_", "log_ratio_")  # what people leave out of a name


def command(
    name: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="an id, a name, or its end")] = None,
    output: o.Output = None,
    force: o.Force = False,
    color: o.ColorOption = o.Color.auto,
) -> int:
    """What a statistic, count, note or finding means: formula, direction, source, what to do. Without NAME: the list."""
    check_output(output, force)
    terminal = for_file() if output is not None else detect(sys.stdout, color.value)
    known = explanations()
    if not name:
        write_result(_list(known, terminal), output, force)
        return 0
    pages = [_page(key, known[key], terminal) for query in name for key in matches(query, known)]
    write_result("\n".join(pages), output, force)
    return 0


def matches(query: str, known: Mapping[str, Explanation]) -> list[str]:
    """The keys that a query means.

    An id, with or without its view; a bare name (all sections that define it); the one name that ends or starts with it.

    Raises:
        UsageError: nothing, or too much, fits; the message suggests what is near.

    >>> matches("seq_min", explanations())
    ['per_sequence.rollout_is_seq_min']
    """
    text = query.strip()
    if text in known:
        return [text]
    for candidate in (*(prefix + text for prefix in _FAMILIES), text, _without_view(text)):
        if candidate in known:
            return [candidate]
        same = [key for key in known if _bare(key) == candidate]
        if same:
            return same
    low = text.lower().replace("-", "_")
    names = {key: _bare(key).lower().replace("-", "_") for key in known}
    for fits in (
        [key for key in known if names[key].endswith("_" + low)],
        [key for key in known if names[key].startswith(low)],
        [key for key in known if low in names[key]],
    ):
        if fits and low and len({names[key] for key in fits}) == 1:
            return fits
    near = _near(low, names)
    raise UsageError(
        f"explain {query}",
        f"expected the name of a statistic, count, note or finding, found {query!r}",
        "several names fit" if near and any(low in n for n in names.values()) else "no name is spelled like this",
        f"did you mean {', '.join(near)}?" if near else "rollout-is explain lists all names",
        code="explain-unknown",
    )


def _near(low: str, names: Mapping[str, str]) -> list[str]:
    inside = [_bare(key) for key, name in names.items() if low and low in name]
    spelled = difflib.get_close_matches(low, list(names.values()), n=3, cutoff=0.6)
    tails = difflib.get_close_matches(low, [name.split("_", 2)[-1] for name in names.values()], n=3, cutoff=0.75)
    close = [_bare(key) for key, name in names.items() if name in spelled or name.split("_", 2)[-1] in tails]
    return list(dict.fromkeys(inside + close))[:_MOST_SUGGESTED]


def _without_view(text: str) -> str:
    from rollout_is.analysis.summary import VIEWS

    head, _, rest = text.partition(".")
    return rest if head in VIEWS else text


def _bare(key: str) -> str:
    return key.rsplit(".", 1)[-1]


def _page(key: str, explanation: Explanation, terminal: Terminal) -> str:
    lines = [terminal.paint(key, "bold")]
    indent = max(len(label) for label, _ in explanation) + 4
    for label, text in explanation:
        body = wrap(text, max(terminal.width - indent, 20))
        lines.append(terminal.paint(f"  {label}".ljust(indent), "dim") + body[0])
        lines += [" " * indent + line for line in body[1:]]
    return "".join(f"{terminal.plain(line)}\n" for line in lines)


def _list(known: Mapping[str, Explanation], terminal: Terminal) -> str:
    out: list[str] = []
    for title, keys in _by_section(known):
        out.append(terminal.paint(title, "bold"))
        out += wrap(" ".join(keys), terminal.width, indent="  ", first="  ")
    return "".join(f"{terminal.plain(line)}\n" for line in out)


def _by_section(known: Iterable[str]) -> list[tuple[str, list[str]]]:
    sections: dict[str, list[str]] = {}
    for key in known:
        head, dot, name = key.partition(".")
        sections.setdefault(head if dot else "", []).append(name if dot else key)
    return list(sections.items())
