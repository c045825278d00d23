"""Files of rollout-is/1 that must load for ever, with every value as it was written."""

import json
from pathlib import Path

import pytest

from rollout_is.dumps.reader import open_shard
from rollout_is.dumps.scan import scan

FOLDER = Path(__file__).parents[1] / "vectors" / "v1"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
SHAPES = {  # step, rank, layout, positions, segments, offsets, packs
    "packed": (412, 3, "packed", 12, 3, [0, 4, 8, 12], None),
    "every_column": (1, 0, "packed", 12, 3, [0, 4, 8, 12], [0, 8, 12]),
    "trainer_names": (None, None, "packed", 8, 2, [0, 3, 6], None),
    "lengths": (0, None, "packed", 8, 3, [0, 3, 3, 7], None),
    "rectangular": (None, 0, "rectangular", 6, 2, [0, 3, 6], None),
    "empty": (None, None, "packed", 0, 0, [0], None),
    "no_tensors": (None, None, "packed", 0, 0, [0], None),
}
SEGMENTS = ("sequence_ids", "group_ids", "rewards", "prompt_lens", "segment_is_pad")


def test_every_file_is_tested():
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == EXPECTED.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_loads(name):
    step, rank, layout, positions, segments, offsets, packs = SHAPES[name]
    found = scan(FOLDER / f"{name}.safetensors")
    (info,) = found.shards
    assert (info.step, info.rank, info.layout, info.positions, info.segments) == (
        step,
        rank,
        layout,
        positions,
        segments,
    )
    assert info.metadata == EXPECTED[name]["metadata"] and found.problems == ()
    tensors = EXPECTED[name]["tensors"]
    assert set(info.columns.values()) == tensors.keys() - ({"cu_seqlens"} if layout == "rectangular" else set())
    with open_shard(info) as opened:
        assert opened.offsets().tolist() == offsets
        found_packs = opened.pack_offsets()
        assert (None if found_packs is None else found_packs.tolist()) == packs
        for role, tensor in info.columns.items():
            if role in ("offsets", "packs", "lengths"):
                continue
            expected = tensors[tensor]
            part = opened.segment_column(role) if role in SEGMENTS else opened.read(role, 0, positions)
            if role == "mask" and "labels" in info.columns:
                assert part.tolist() == [value != -100 for value in expected["values"]]
            else:
                assert (
                    str(part.dtype) == expected["dtype"]
                    and [float(value) for value in part.tolist()] == expected["values"]
                )


def test_the_script_that_made_them_still_makes_the_same_values(tmp_path, monkeypatch):
    import importlib.util

    spec = importlib.util.spec_from_file_location("make_v1", FOLDER / "make.py")
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    monkeypatch.setattr(make, "HERE", tmp_path)
    make.main()
    assert json.loads((tmp_path / "expected.json").read_text(encoding="utf-8")) == EXPECTED
