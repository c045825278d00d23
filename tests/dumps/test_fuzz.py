"""Damaged files of every kind: a DumpError or a good read, never another exception, a hang, or memory beyond the file's size."""

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.inspection import inspect
from rollout_is.dumps.reader import open_shard
from rollout_is.dumps.scan import scan

QUICK = settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
GOOD = save(
    {
        "train_logprobs": torch.zeros(12),
        "rollout_logprobs": torch.zeros(12, dtype=torch.bfloat16),
        "response_mask": torch.ones(12, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 4, 12], dtype=torch.int32),
        "cu_packs": torch.tensor([0, 12]),
        "rewards": torch.zeros(2),
        "mask.loss": torch.ones(12, dtype=torch.uint8),
    },
    metadata={"step": "3", "rank": "0", "world_size": "1", "layout": "packed"},
)
LENGTH = int.from_bytes(GOOD[:8], "little")
HEADER = json.loads(GOOD[8 : 8 + LENGTH])


def digest(path: Path) -> str:
    """Scan and read everything, as an analysis would; the code of the error, or ``fine``."""
    tracemalloc.start()
    try:
        found = scan(path)
        for info in found.shards:
            with open_shard(info) as opened:
                bounds = opened.offsets()
                assert bounds[0] == 0 and bounds[-1] <= info.positions and bool((bounds[1:] >= bounds[:-1]).all())
                opened.pack_offsets()
                for role in info.columns:
                    if role in ("rewards",):
                        opened.segment_column(role)
                    elif role not in ("offsets", "packs", "lengths", "pack_lengths"):
                        assert opened.read(role, 0, info.positions).numel() == info.positions
        return "fine"
    except DumpError as error:
        assert error.code and error.where and error.problem
        assert all(line.isprintable() for line in str(error).splitlines())
        return error.code
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3_000_000 + 40 * path.stat().st_size, peak
        listed = inspect_or_error(path)
        assert json.dumps(listed)


def inspect_or_error(path: Path) -> object:
    try:
        return inspect(path)
    except DumpError as error:
        assert error.code in ("path-missing", "no-shards", "steps-empty"), error
        return error.code


@pytest.fixture
def target(tmp_path) -> Path:
    return tmp_path / "x.safetensors"


def test_the_undamaged_file_is_fine(target):
    target.write_bytes(GOOD)
    assert digest(target) == "fine"


@QUICK
@given(data=st.data())
def test_flipped_bytes(target, data):
    content = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    target.write_bytes(content)
    digest(target)


@QUICK
@given(cut=st.integers(0, len(GOOD)), extra=st.binary(max_size=20))
def test_cut_and_lengthened(target, cut, extra):
    target.write_bytes(GOOD[:cut] + extra)
    result = digest(target)
    # the last 24 bytes are masks, of which any byte will do: only the length can be wrong
    assert (result == "fine") == (cut + len(extra) == len(GOOD))


@QUICK
@given(content=st.binary(max_size=300), length=st.none() | st.integers(0, 2**64 - 1))
def test_any_bytes(target, content, length):
    target.write_bytes(content if length is None else length.to_bytes(8, "little") + content)
    assert digest(target) != "fine" or b"{" in content


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(["F32", "BF16", "BOOL", "I64", "F8_E4M3", "F4", "C64"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@QUICK
@given(data=st.data())
def test_mutated_headers(target, data):
    header = json.loads(json.dumps(HEADER))
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(header)))
        action = data.draw(st.sampled_from(["drop", "replace", "field", "rename"]))
        value = header[name]
        if action == "drop" and len(header) > 1:
            del header[name]
        elif action == "replace":
            header[name] = data.draw(VALUES)
        elif action == "field" and isinstance(value, dict) and value:
            value[data.draw(st.sampled_from(sorted(value)))] = data.draw(VALUES)
        elif action == "rename":
            header[data.draw(st.text(max_size=8) | st.sampled_from(["old_log_probs", "seq_lens", "labels"]))] = (
                header.pop(name)
            )
    text = json.dumps(header).encode()
    target.write_bytes(len(text).to_bytes(8, "little") + text + GOOD[8 + LENGTH :])
    digest(target)


@QUICK
@given(
    bounds=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 14), max_size=6),
    lengths=st.booleans(),
    packs=st.booleans(),
)
def test_any_bounds(target, bounds, lengths, packs):
    values = torch.tensor(bounds, dtype=torch.int64)
    made = {
        "train_logprobs": torch.zeros(12),
        "rollout_logprobs": torch.zeros(12),
        "response_mask": torch.ones(12),
        "seq_lens" if lengths else "cu_seqlens": torch.tensor([12] if lengths else [0, 12]) if packs else values,
    }
    if packs:
        made["pack_lens" if lengths else "cu_packs"] = values
    target.write_bytes(save(made))
    good = (
        all(value >= 0 for value in bounds) and sum(bounds) <= 12
        if lengths
        else bool(bounds) and bounds[0] == 0 and bounds == sorted(bounds) and bounds[-1] <= 12
    )
    result = digest(target)
    if not (packs and good):
        assert (result == "fine") == good, (bounds, result)
        return
    edges = [sum(bounds[:i]) for i in range(len(bounds) + 1)] if lengths else bounds
    early = len(edges) > 1 and edges[-1] < 12
    inside = any(0 < edge < 12 for edge in edges)
    assert result == ("packs-end-early" if early else "packs-inside-sequence" if inside else "fine"), (bounds, result)


def test_a_header_that_claims_much_allocates_nothing(target):
    claim = {"a": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]}}
    text = json.dumps(claim).encode()
    for content in (len(text).to_bytes(8, "little") + text, (99_999_999).to_bytes(8, "little") + b"{" * 100):
        target.write_bytes(content)
        assert digest(target) == "file-truncated"


def test_a_deeply_nested_header(target):
    text = b'{"a":' * 50_000
    target.write_bytes(len(text).to_bytes(8, "little") + text)
    assert digest(target) == "header-not-json"
