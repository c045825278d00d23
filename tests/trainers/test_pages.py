"""The snippets of docs/trainers run on what those places hold, and what they write is what the trainer held."""

import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import torch

from rollout_is import DumpWriter
from rollout_is.dumps.foreign import registry, torchfile
from rollout_is.dumps.foreign.format import Format
from rollout_is.dumps.foreign.packed import Rows
from rollout_is.dumps.reader import open_shard
from rollout_is.dumps.scan import scan
from rollout_is.dumps.step_dump import StepDump

DOCS = Path(__file__).parents[2] / "docs"


def snippets(page, containing):
    """The python blocks of a page that contain a text."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    found = [block for block in blocks if containing in block]
    assert found, f"{page} has no block with {containing!r}"
    return found


def run(source, **names):
    namespace = dict(names)
    exec(compile(source, "page", "exec"), namespace)  # noqa: S102  our own pages
    return SimpleNamespace(**namespace)


def valid(folder):
    """Valid (train, rollout) pairs of all shards, in order."""
    pairs = []
    for info in scan(folder).shards:
        with open_shard(info) as shard:
            mask = shard.read("mask", 0, info.positions) != 0
            columns = [shard.read(role, 0, info.positions)[mask].tolist() for role in ("train", "rollout")]
            pairs += zip(*columns, strict=True)
    return pairs


LENGTHS = [3, 1, 4]
TRAIN = [torch.linspace(-3, -1, n) for n in LENGTHS]
ROLLOUT = [train + 0.125 for train in TRAIN]
MASK = [torch.tensor([1, 0, 1]), torch.tensor([0]), torch.tensor([1, 1, 1, 0])]
WANTED = [
    (float(t), float(r))
    for ts, rs, ms in zip(TRAIN, ROLLOUT, MASK, strict=True)
    for t, r, m in zip(ts, rs, ms, strict=True)
    if m
]


def pad(columns, side="right"):
    return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_side=side)


def pack(size=1, rank=0):
    """xtuner's loss arguments and sequence context of one pack with 8 tokens of padding in two segments."""
    tail = torch.zeros(8)
    labels = torch.where(torch.cat([*MASK, tail]) > 0, 9, -100)[None]
    columns = {
        "shifted_labels": labels,
        "old_logprobs": torch.cat([*TRAIN, tail - 6.5])[None],
        "rollout_logprobs": torch.cat([*ROLLOUT, tail])[None],
        "advantages": torch.ones(1, 16),
    }
    parts = {key: column.chunk(size, dim=1)[rank] for key, column in columns.items()}
    own = sum(i >= 8 for i in range(rank * 16 // size, (rank + 1) * 16 // size))  # each rank knows its own padding only
    sequence = SimpleNamespace(cu_seq_lens_q=torch.tensor([0, 3, 4, 8, 12, 16], dtype=torch.int32), num_padding=own)
    return SimpleNamespace(**parts), sequence


def test_xtuner(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    helper = run(snippets("trainers/xtuner.md", "def columns")[0])
    loss, sequence = pack()
    place = {"dp_rank": 0, "dp_size": 1, "sp_rank": 0, "rollout_idx": 5}
    names = {
        "self": SimpleNamespace(),
        "loss_ctx_list": [SimpleNamespace(loss_kwargs=loss)],
        "seq_ctx_list": [sequence],
    }
    ran = run(
        snippets("trainers/xtuner.md", "loss_ctx_list")[0], StepDump=StepDump, columns=helper.columns, **place, **names
    )
    ran.self.dump.close()
    assert valid("dump") == WANTED
    (info,) = scan("dump").shards
    assert (info.step, info.metadata["trainer"]) == (5, "xtuner")
    with open_shard(info) as shard:
        assert shard.segment_column("segment_is_pad").tolist() == [False] * 3 + [True] * 2


def test_xtuner_under_sequence_parallelism():
    helper = run(snippets("trainers/xtuner.md", "def columns")[0])
    ranks = [pack(size=2, rank=rank) for rank in range(2)]
    loss, sequence = ranks[0]
    partner = {id(getattr(loss, key)): getattr(ranks[1][0], key) for key in vars(loss)}
    together = helper.columns(loss, sequence, gather=lambda tensor: [tensor, partner[id(tensor)]], num_padding=8)
    whole = helper.columns(*pack())
    assert together.keys() == whole.keys()
    assert all(torch.equal(together[key], whole[key]) for key in whole)


def test_verl_driver(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    helper = run(snippets("trainers/verl.md", "def columns(batch)")[0])
    inside = pad([torch.ones(n, dtype=torch.int64) for n in LENGTHS])
    batch = SimpleNamespace(
        batch={
            "old_log_probs": pad(TRAIN),
            "rollout_log_probs": pad(ROLLOUT),
            "response_mask": pad(MASK),
            "attention_mask": torch.cat([torch.ones(3, 5, dtype=torch.int64), inside], dim=1),
            "responses": torch.arange(12).reshape(3, 4),
        },
        non_tensor_batch={"uid": ["b", "a", "b"]},
    )
    lines = snippets("trainers/verl.md", "self.dump = DumpWriter")[0]
    run(lines, DumpWriter=DumpWriter, self=SimpleNamespace(global_steps=7), columns=helper.columns, batch=batch)
    assert valid("dump") == WANTED
    (info,) = scan("dump").shards
    assert (info.step, info.positions) == (7, 8)  # the padding is not written
    with open_shard(info) as shard:
        one, other, again = shard.segment_column("group_ids").tolist()
        assert one == again != other


def test_verl_engine(tmp_path):
    helper = run(snippets("trainers/verl.md", "def micro_batch")[0])
    data = {"rollout_log_probs": pad(ROLLOUT), "response_mask": pad(MASK), "old_log_probs": pad(TRAIN) - 1}
    with StepDump(tmp_path, train_policy="current") as dump:
        dump.add(helper.micro_batch(pad(TRAIN), data))
        dump.end_step(0)
    assert valid(tmp_path) == WANTED
    (info,) = scan(tmp_path).shards
    assert "logprobs.old" in info.columns


def megatron(monkeypatch, tensor_rank):
    mpu = SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: tensor_rank,
        get_data_parallel_rank=lambda: 1,
        get_data_parallel_world_size=lambda: 2,
    )
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["megatron.core"].mpu = mpu


def test_slime_hook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = {"log_probs": TRAIN, "rollout_log_probs": ROLLOUT, "loss_masks": MASK}
    megatron(monkeypatch, tensor_rank=1)
    run(snippets("trainers/slime.md", "def dump")[0]).dump(None, 3, data)
    assert not Path("dump").exists()  # a copy
    megatron(monkeypatch, tensor_rank=0)
    source = snippets("trainers/slime.md", "def dump")[0]
    namespace = {}
    exec(compile(source, "page", "exec"), namespace)  # noqa: S102  our own page
    namespace["dump"](None, 3, {"loss_masks": MASK})  # a stage without log-probs
    assert not Path("dump").exists()
    namespace["dump"](None, 3, data)
    namespace["WRITER"].close()
    assert [path.name for path in Path("dump").rglob("*.safetensors")] == ["rank_00001.safetensors"]
    (info,) = scan("dump", allow_partial=True).shards
    with open_shard(info) as shard:
        assert shard.read("train", 0, info.positions).tolist() == torch.cat(TRAIN).tolist()


def test_nemo_rl_driver(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    helper = run(snippets("trainers/nemo_rl.md", "def columns")[0])
    train_data = {
        "prev_logprobs": pad(TRAIN),
        "generation_logprobs": pad(ROLLOUT),
        "token_mask": pad(MASK),
        "sample_mask": torch.tensor([1.0, 1.0, 0.0]),
        "input_lengths": torch.tensor(LENGTHS),
    }
    lines = snippets("trainers/nemo_rl.md", "dump = DumpWriter")[0]
    run(lines, DumpWriter=DumpWriter, columns=helper.columns, train_data=train_data, step=2)
    assert valid("dump") == WANTED[:2]  # the third row is dropped by its sample mask


def test_others(tmp_path):
    source = snippets("trainers/others.md", "columns = padded")[0]
    flat = {"train_flat": torch.cat(TRAIN), "rollout_flat": torch.cat(ROLLOUT), "mask_flat": torch.cat(MASK)}
    parts = {name.replace("_flat", "_parts"): column.chunk(2) for name, column in flat.items()}
    names = {
        "train_logprobs": pad(TRAIN), "rollout_logprobs": pad(ROLLOUT), "mask": pad(MASK), "lengths": LENGTHS,
        "train_list": TRAIN, "rollout_list": ROLLOUT, "mask_list": MASK, "cu_seqlens": torch.tensor([0, 3, 4, 8]),
    }  # fmt: skip
    head, *lines = re.split(r"^(?=columns = )", source, flags=re.MULTILINE)
    assert len(lines) == 4
    three = snippets("trainers/others.md", "dump.end_step(step)")[0]
    for number, line in enumerate(lines):
        columns = run(head + line, **flat, **parts, **names).columns
        place = {"dp_rank": 0, "dp_size": 1, "is_owner": True, "step": 0, "columns": columns}
        folder = tmp_path / str(number)
        ran = run(three.replace('"dump"', repr(str(folder))), StepDump=StepDump, **place)
        ran.dump.close()
        assert valid(folder) == WANTED


def test_the_example_of_a_format(tmp_path, monkeypatch):
    source = snippets("formats.md", "class MyTrainer")[0]
    made = run(source, Format=Format, Rows=Rows, torchfile=torchfile).MyTrainer()
    known = registry.known_formats()
    monkeypatch.setattr(registry, "known_formats", lambda: (made, *known))
    rows = [{"my_train": t, "my_rollout": r, "my_mask": m} for t, r, m in zip(TRAIN, ROLLOUT, MASK, strict=True)]
    torch.save({"rows": rows}, tmp_path / "step_4.pt")
    (info,) = registry.find(tmp_path)
    assert (info.format, info.step, info.segments) == ("mine/dump", 4, 3)
    assert valid(tmp_path) == WANTED


def test_the_pages_name_every_format_and_every_helper():
    text = (DOCS / "formats.md").read_text()
    assert all(form.name.removesuffix("-v1") in text for form in registry.known_formats())
    others = (DOCS / "trainers/others.md").read_text()
    for page in (DOCS / "trainers").glob("*.md"):
        assert page.stem in ("others", "README") or f"({page.name})" in others
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
