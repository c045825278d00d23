"""``rollout-is schema``: the JSON schema of what ``--format json`` prints."""

from __future__ import annotations

import json

from rollout_is.analysis.schema import summary_schema
from rollout_is.cli import options as o
from rollout_is.cli.output import check_output, write_result


def command(output: o.Output = None, force: o.Force = False) -> int:
    """The JSON schema of the summary (draft 2020-12)."""
    check_output(output, force)
    write_result(json.dumps(summary_schema(), indent=1) + "\n", output, force)
    return 0
