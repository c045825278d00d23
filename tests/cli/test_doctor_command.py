"""``rollout-is doctor`` from the command line: formats, exit codes, and six unlabelled dumps named by it alone."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from doctored import Shard, logprobs
from safetensors.torch import save_file

from rollout_is.analysis.doctor.texts import findings as pages
from rollout_is.cli.app import main

ROOT = Path(__file__).resolve().parents[2]


def run(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(list(argv), stdout=out, stderr=err)
    return code, out.getvalue(), err.getvalue()


def write(
    folder: Path, change: Callable[[np.random.Generator, np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]
) -> str:
    """A dump of two ranks and three steps with one change on it."""
    rng = np.random.default_rng(7)
    folder.mkdir(exist_ok=True)
    for step in (1, 2, 3):
        for rank in (0, 1):
            r = logprobs(rng, 3000) - 0.1
            t, r = change(rng, r + rng.normal(0, 0.01, 3000), r, rank)
            name = folder / f"step_{step:04}_rank_{rank}.safetensors"
            metadata = {"format": "rollout-is/1", "step": str(step), "rank": str(rank), "world_size": "2"}
            save_file(Shard(t, r, [100] * 30).tensors(), name, metadata)
    return str(folder)


def _shift(rng, t, r, rank):  # type: ignore[no-untyped-def]
    return np.concatenate([np.roll(x, 1) for x in np.split(t, 30)]), r


def _divided(rng, t, r, rank):  # type: ignore[no-untyped-def]
    return t, r / 0.8


def _truncated(rng, t, r, rank):  # type: ignore[no-untyped-def]
    return r + np.log(rng.uniform(0.85, 0.99, len(r))), r


def _zeros(rng, t, r, rank):  # type: ignore[no-untyped-def]
    return t - 1.5, np.where(np.arange(len(r)) % 100 >= 80, 0.0, r - 1.5)


def _copied(rng, t, r, rank):  # type: ignore[no-untyped-def]
    return r, r


def _bad_rank(rng, t, r, rank):  # type: ignore[no-untyped-def]
    return (r - 1 + rng.normal(0, 0.3, len(r)) if rank else t - 1), r - 1


SIX = {
    "alignment.lag": _shift,
    "scale.divided": _divided,
    "support.truncated": _truncated,
    "placeholder.tail": _zeros,
    "copies.identical": _copied,
    "where.rank": _bad_rank,
}


@pytest.mark.parametrize("id", SIX)
def test_six_unlabelled_dumps_are_named(tmp_path: Path, id: str) -> None:
    code, out, err = run("doctor", write(tmp_path / "dump", SIX[id]), "--format", "json", "-q")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["schema"] == "rollout-is/doctor/1"
    assert found["findings"][0]["id"] == id
    assert [f["id"] for f in found["findings"] if f["severity"] == "error"] == (
        [] if id == "copies.identical" else [id]
    )


def test_the_table_says_what_where_why_and_what_next(tmp_path: Path) -> None:
    dump = write(tmp_path / "dump", _shift)
    code, out, _ = run("doctor", dump)
    assert code == 0
    assert out.startswith("1 finding in 18,000 valid tokens of 180 sequences, worst first\n")
    assert "1. error: shift by one suspected, lag -1 fits" in out
    assert "[alignment.lag]" in out
    for label in ("touches", "strength", "at ", "or else", "source", "next"):
        assert re.search(rf"^   {label}", out, re.MULTILINE), label
    assert max(len(line) for line in out.splitlines() if "next " not in line) <= 100
    assert "\nnotice: " in out  # what the foundation notes comes last and is no fault


def test_a_healthy_dump_is_one_line() -> None:
    code, out, err = run("doctor", str(ROOT / "sample_dumps" / "tiny_lm"))
    assert code == 0
    assert re.fullmatch(
        r"ok: no fault found in [\d,]+ valid tokens of [\d,]+ sequences\n(\ninfo: .*\n( +.*\n)*)*", out
    ), out
    assert err == ""


def test_fail_on_turns_findings_into_an_exit_code(tmp_path: Path) -> None:
    faulty, copied = write(tmp_path / "a", _shift), write(tmp_path / "b", _copied)
    assert run("doctor", faulty, "--fail-on", "error")[0] == 1
    assert run("doctor", copied, "--fail-on", "warning")[0] == 0
    assert run("doctor", copied, "--fail-on", "notice")[0] == 1
    assert run("doctor", faulty, "--fail-on", "sometimes")[0] == 2


def test_markdown_and_csv_hold_the_same_findings(tmp_path: Path) -> None:
    dump = write(tmp_path / "dump", _truncated)
    found = json.loads(run("doctor", dump, "-f", "json")[1])["findings"]
    markdown = run("doctor", dump, "-f", "markdown")[1]
    rows = list(csv.DictReader(io.StringIO(run("doctor", dump, "-f", "csv")[1])))
    assert [row["id"] for row in rows] == [f["id"] for f in found]
    assert rows[0]["message"] == found[0]["message"]
    for f in found:
        assert f"`{f['id']}`" in markdown


def test_output_goes_to_a_file_once(tmp_path: Path) -> None:
    dump, target = write(tmp_path / "dump", _copied), tmp_path / "report.md"
    assert run("doctor", dump, "-f", "markdown", "-o", str(target))[0] == 0
    assert "copies.identical" in target.read_text()
    assert run("doctor", dump, "-o", str(target))[0] == 2


def test_nothing_valid_is_one_and_an_unreadable_dump_three(tmp_path: Path) -> None:
    code, out, _ = run("doctor", str(ROOT / "sample_dumps" / "all_masked"))
    assert code == 1
    assert out.startswith("nothing to examine: no valid tokens")
    code, out, err = run("doctor", str(tmp_path / "none"))
    assert (code, out) == (3, "") or (code, out) == (2, "")
    assert "Traceback" not in err


def test_a_saved_summary_holds_no_tokens(tmp_path: Path) -> None:
    saved = tmp_path / "summary.json"
    assert run("analyze", str(ROOT / "sample_dumps" / "tiny_lm"), "-q", "-f", "json", "-o", str(saved))[0] == 0
    code, out, err = run("doctor", str(saved))
    assert (code, out) == (2, "")
    assert "expected a dump, found a saved summary" in err


def test_c72_a_shard_without_rollout_logprobs_is_an_error(tmp_path: Path) -> None:
    dump = Path(write(tmp_path / "dump", _copied))
    columns = Shard(np.zeros(10) - 1, np.zeros(10) - 1, [10]).tensors()
    del columns["rollout_logprobs"]
    save_file(columns, dump / "step_0004_rank_0.safetensors", {"format": "rollout-is/1"})
    code, _, err = run("doctor", str(dump))
    assert code == 3
    assert "rollout" in err


def test_c43_and_c47_lengths_that_differ_are_an_error_before_any_statistics(tmp_path: Path) -> None:
    columns = Shard(np.zeros(30) - 1, np.zeros(30) - 1, [6] * 5).tensors()
    for name, size in (("short", 25), ("long", 35)):
        folder = tmp_path / name
        folder.mkdir()
        rollout = columns["rollout_logprobs"].repeat(2)[:size].clone()
        save_file({**columns, "rollout_logprobs": rollout}, folder / "a.safetensors", {"format": "rollout-is/1"})
        code, _, err = run("doctor", str(folder))
        assert code == 3
        assert str(size) in err and "30" in err


@pytest.mark.parametrize("id", sorted(pages()))
def test_every_finding_can_be_explained(id: str) -> None:
    code, out, err = run("explain", id)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == id
    assert "what" in out


def test_every_id_in_the_code_has_a_page() -> None:
    families = "alignment|scale|support|placeholder|missing|copies|passes|where|tails|weights|numerics"
    used = set()
    for file in (ROOT / "analysis" / "doctor").glob("*.py"):
        if file.name not in ("causes.py", "texts.py"):
            used |= set(re.findall(rf'"((?:{families})\.[a-z_]+)"', file.read_text()))
    assert len(used) > 20
    assert used <= set(pages())


def test_any_number_of_workers_gives_the_same_bits(tmp_path: Path) -> None:
    dump = write(tmp_path / "dump", _bad_rank)
    one, two = (json.loads(run("doctor", dump, "-q", "-f", "json", "--workers", n)[1])["findings"] for n in "12")
    assert one == two
