"""Cases of the acceptance pass, as a user meets them: nothing comparable never passes, hints that can be pasted."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from made import Shard, sequences, shard, write_dump

from rollout_is.cli.app import main


def run(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    out, err = io.StringIO(), io.StringIO()
    code = main([*argv, "--workers", "1"], out, err)
    return code, out.getvalue(), err.getvalue()


def nothing(kind: str) -> Shard:
    """No token that could be compared: masked out (C11), or valid and not finite on one side (C17, C56)."""
    r = -np.arange(1.0, 11.0)
    if kind == "masked":
        return shard(r, r - 0.1, np.zeros(10, bool), [0, 5, 10])
    return shard(r, np.full(10, float(kind)), np.ones(10, bool), [0, 5, 10])


@pytest.mark.parametrize("kind", ["masked", "nan", "-inf"])
@pytest.mark.parametrize("limits", ["", '[limits]\n"coverage.shards" = { min = 1 }\n'])
def test_c11_no_limit_file_passes_a_dump_without_a_comparable_token(tmp_path: Path, kind: str, limits: str) -> None:
    dump = write_dump(tmp_path / "dump", [nothing(kind)])
    file = tmp_path / "limits.toml"
    file.write_text("builtin = false\n" + limits)
    code, out, _ = run("check", str(dump), "--limits", str(file))
    assert code == 1
    assert "no valid token is finite on both sides" in " ".join(out.split())


@pytest.mark.parametrize("kind", ["masked", "nan", "-inf"])
@pytest.mark.parametrize("command", ["analyze", "doctor", "compare", "sweep", "check"])
def test_c11_c17_nothing_comparable_never_exits_0(tmp_path: Path, kind: str, command: str) -> None:
    dump = write_dump(tmp_path / "dump", [nothing(kind)])
    code, _, err = run(command, str(dump))
    assert code == 1, err


@pytest.mark.parametrize("kind", ["masked", "nan"])
def test_c11_the_hint_of_compare_names_the_dump(tmp_path: Path, kind: str) -> None:
    dump = write_dump(tmp_path / "some" / "dump", [nothing(kind)])
    _, _, err = run("compare", str(dump))
    assert str(dump) in err.splitlines()[-2] + err.splitlines()[-1]


def test_c16_the_hint_of_compare_masks_names_the_dump(tmp_path: Path) -> None:
    one = nothing("masked")
    one.columns["mask.pre_rejection"] = ~one.mask
    dump = write_dump(tmp_path / "dump", [one])
    code, _, err = run("compare", str(dump), "--masks", "pre_rejection,response_mask")
    assert code == 1
    assert f"rollout-is inspect {dump}" in err


@pytest.mark.parametrize("d", [-1000.0, -1e30, 1000.0, -50.0])
def test_c76_sweep_survives_weights_beyond_float64(tmp_path: Path, d: float) -> None:
    dump = write_dump(tmp_path / "dump", [sequences([d] * 5, [d] * 5)])
    code, out, err = run("sweep", str(dump))
    assert code == 0, err
    assert "nan" not in out.lower()


def flat(*argv: str) -> str:
    """stdout with its line breaks taken out."""
    return " ".join(run(*argv)[1].split())


def real(seed: int, n: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Train and rollout log-probs of healthy engines."""
    rng = np.random.default_rng(seed)
    r = -0.05 - rng.gamma(0.6, 0.9, n)
    return r + rng.normal(0, 0.01, n), r


@pytest.mark.parametrize("ranks", [4, 1])
def test_c70_zeros_on_one_rank_or_at_one_step(tmp_path: Path, ranks: int) -> None:
    shards = []
    for i in range(4):
        t, r = real(i) if i != 2 else (np.zeros(400), np.zeros(400))
        shards.append(shard(t, r, np.ones(400, bool), list(range(0, 401, 50))))
    dump = write_dump(tmp_path, shards, ranks=ranks)
    text = flat("doctor", str(dump))
    assert "all log-probs zero on both sides " + ("on rank 2" if ranks == 4 else "at step 3") in text
    assert "1. error: all log-probs zero" in flat("analyze", str(dump))


@pytest.mark.parametrize("kind", ["probability", "nll"])
def test_c74_a_column_of_another_quantity_is_an_error(tmp_path: Path, kind: str) -> None:
    t, r = real(74)
    t, r = (np.exp(t), np.exp(r)) if kind == "probability" else (-t, -r)
    dump = write_dump(tmp_path, [shard(t, r, np.ones(400, bool), list(range(0, 401, 50)))])
    assert "1. error: 400 valid tokens (100 %) with a positive" in flat("doctor", str(dump))


def test_c74_a_few_badly_rounded_values_are_a_warning(tmp_path: Path) -> None:
    t, r = real(75)
    r[[3, 77, 200, 391]] = 0.06
    dump = write_dump(tmp_path, [shard(t, r, np.ones(400, bool), list(range(0, 401, 50)))])
    assert "warning: 4 valid tokens (1 %) with a positive rollout log-prob, up to 0.06" in flat("doctor", str(dump))


def test_c47_the_next_command_of_the_odd_one_out_can_be_run(tmp_path: Path) -> None:
    t, _ = real(47)
    again = t + np.random.default_rng(1).normal(0, 0.01, 400)
    one = shard(
        t,
        t + np.random.default_rng(2).normal(0, 0.3, 400),
        np.ones(400, bool),
        list(range(0, 401, 50)),
        **{"logprobs.train_again": again},
    )
    dump = write_dump(tmp_path, [one])
    assert "compare " + str(dump) + " --logprobs train,train_again" in flat("doctor", str(dump))
    code, out, err = run("compare", str(dump), "--logprobs", "train,train_again")
    assert code == 0 and "rollout is the odd one out" in out, err


def test_c40_veto_by_length(tmp_path: Path) -> None:
    """One token in a thousand vetoes; ten sequences of 10 tokens and ten of 1000, each long one holding one bad token."""
    d = np.zeros(10 * 10 + 10 * 1000)
    d[100 + np.arange(10) * 1000] = -12.0
    d[0] = -12.0
    cu = [*range(0, 100, 10), *range(100, 10101, 1000)]
    r = -1.0 - np.arange(len(d)) % 3
    dump = write_dump(tmp_path, [shard(r + d, r, np.ones(len(d), bool), cu)])
    out = run("analyze", str(dump), "--veto-lower", "1e-4", "--by", "length")[1]
    rows = {line.split()[0]: line.split() for line in out[out.index("by length, masked") :].splitlines() if line}
    header = rows["length"]
    at = header.index("veto_seq") - len(header)  # "valid tokens" and "abs diff" are two words each
    assert (rows["8..15"][at], rows["512..1023"][at]) == ("0.100", "1.00")
    assert (rows["8..15"][at - 1], rows["512..1023"][at - 1]) == ("0.0100", "0.00100")
    assert "veto_seq" not in run("analyze", str(dump), "--by", "length")[1]


def test_c68_a_step_with_nan_is_marked_in_the_series(tmp_path: Path) -> None:
    shards = []
    for i in range(5):
        t, r = real(i)
        if i == 3:
            t[40:110] = np.nan
        shards.append(shard(t, r, np.ones(400, bool), list(range(0, 401, 50))))
    dump = write_dump(tmp_path, shards)
    assert "NaN or infinite and left out: step 4 (70 of 400)" in flat("analyze", str(dump), "--by", "step")
    assert "and left out" not in flat("analyze", str(dump), "--by", "step", "--steps", "1:3").partition("by step")[2]


def test_c86_a_negative_kl_says_that_it_may(tmp_path: Path) -> None:
    for name, ds, said in (("below", [0.2, 0.1, -0.05], True), ("above", [-0.2, -0.1, 0.05], False)):
        dump = write_dump(tmp_path / name, [sequences(ds)])
        assert ("a sample estimate may be negative" in flat("analyze", str(dump))) is said


@pytest.mark.parametrize(("d", "shown"), [(1000.0, "exp(1e+03)"), (-1000.0, "exp(-1e+03)")])
def test_c76_the_verdict_names_weights_beyond_float64(tmp_path: Path, d: float, shown: str) -> None:
    dump = write_dump(tmp_path, [sequences([d] * 5, [d] * 5)])
    text = flat("analyze", str(dump))
    assert f"mean token weight {shown}: train and rollout are not near each other" in text
    assert "(mean exp|d| exp(1e+03);" in text and "NeMo-RL guide" in text


def test_c17_inspect_names_the_dump_when_no_shard_can_be_read(tmp_path: Path) -> None:
    one = sequences([0.1, 0.2])
    one.rollout = one.rollout[:0]
    dump = write_dump(tmp_path / "dump", [one])
    out, err = io.StringIO(), io.StringIO()
    assert main(["inspect", str(dump)], out, err) == 3
    assert out.getvalue().splitlines()[0].split() == ["dump", str(dump)]
    assert "rollout log-probs missing" in out.getvalue()


def test_c49_sequences_in_another_order_on_one_rank(tmp_path: Path) -> None:
    """The columns of one rank are not the same quantity: said of that rank, and before 'one engine is bad'."""
    shards = []
    for i in range(4):
        t, r = real(i, 1000)
        r = r.reshape(10, 100)[::-1].reshape(-1).copy() if i == 1 else r
        shards.append(shard(t, r, np.ones(1000, bool), list(range(0, 1001, 100))))
    text = flat("doctor", str(write_dump(tmp_path, shards, ranks=4)))
    assert "1. error: no correlation at any lag" in text
    assert "not the same quantity on rank 1 (1 of 4 ranks)" in text
    assert "explains where.rank" in text


@pytest.mark.parametrize("length", [1, 2, 50])
def test_c71_coarse_storage_of_short_sequences_is_no_copy(tmp_path: Path, length: int) -> None:
    """In bf16 single tokens agree on every bit by chance; whole copies of longer sequences are still found."""
    t, r = real(71, 40 * 50)
    t, r = np.minimum(t, -1e-4), np.minimum(r, -1e-4)
    cu = list(range(0, 2001, length))
    one = shard(t, r, np.ones(2000, bool), cu, dtype=torch.bfloat16, token_ids=np.arange(2000))
    assert "bit-identical on both sides" not in flat("doctor", str(write_dump(tmp_path / "chance", [one])))
    if length == 50:
        one.rollout[:300] = one.train[:300]
        assert "6 sequences of 40 (15 %) are bit-identical" in flat("doctor", str(write_dump(tmp_path / "copy", [one])))
