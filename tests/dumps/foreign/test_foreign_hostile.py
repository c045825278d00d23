"""Files made to run code or to exhaust memory: nothing runs, the refusal names what blocked it, and it comes quickly."""

import io
import os
import pickle
import struct
import time
import zipfile

import pytest
import torch

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign import registry, unpickle

VERL = frozenset({"verl.protocol.DataProto"})


class Runs:
    """Unpickling it calls a function."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def refused(path, code="pickle-refused"):
    start = time.monotonic()
    with pytest.raises(DumpError) as caught:
        registry.find(path)
    assert time.monotonic() - start < 30
    assert caught.value.code == code
    return str(caught.value)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_os_system_is_named_and_not_run(tmp_path, protocol):
    witness = tmp_path / "ran"
    path = tmp_path / "global_step_1_training_input.pkl"
    path.write_bytes(pickle.dumps(Runs(os.system, f"touch {witness}"), protocol=protocol))
    assert f"{os.system.__module__}.system" in refused(path)
    assert not witness.exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_nested_reduce_inside_a_known_class_is_named(tmp_path, protocol):
    """The outer object is one that a format claims; the call hides in its state."""
    witness = tmp_path / "ran"
    inner = pickle.dumps({"a": [{"b": Runs(eval, f"open({str(witness)!r}, 'w')")}]}, protocol=protocol)
    for head in (
        b"\x80\x02cverl.protocol\nDataProto\n)\x81",
        b"\x80\x02cskyrl_train.training_batch\nTrainingInputBatch\n)\x81",
    ):
        path = tmp_path / "a.pkl"
        path.write_bytes(head + inner[2:-1] + b"b.")
        assert "eval" in refused(path)
    assert not witness.exists()


def test_a_call_hidden_from_the_outline_is_refused_by_the_allow_list(tmp_path):
    """STACK_GLOBAL over strings that were shuffled on the stack: the walk cannot see the name, the wall can."""
    witness = tmp_path / "ran"
    name, module = b"\x8c\x06system", b"\x8c\x05posix"
    shuffled = module + name + b"N0" + b"\x93"  # None pushed and popped again
    data = b"\x80\x04" + shuffled + pickle.dumps((f"touch {witness}",), protocol=2)[2:-1] + b"R."
    with pytest.raises(DumpError) as caught:
        unpickle.load(data, "a.pkl", VERL)
    assert caught.value.code == "pickle-refused"
    assert not witness.exists()


def test_an_allowed_name_has_no_behaviour():
    data = b"\x80\x02cverl.protocol\nDataProto\n(K\x01K\x02tR."
    node = unpickle.load(data, "a.pkl", VERL)
    assert (type(node).__mro__[1], node.name, node.args) == (unpickle.Node, "verl.protocol.DataProto", (1, 2))


def test_the_state_of_one_file_does_not_reach_the_next():
    """BUILD on the class itself could change it for later files, if the class outlived the file."""
    with pytest.raises(DumpError):
        unpickle.load(b"\x80\x02cverl.protocol\nDataProto\n}U\x04nameU\x04evilsb.", "a.pkl", VERL)
    assert unpickle.load(b"\x80\x02cverl.protocol\nDataProto\n)\x81.", "b.pkl", VERL).name == "verl.protocol.DataProto"


def test_a_thousand_deep_memo(tmp_path):
    """Lists that refer to each other a thousand levels deep, and a hundred levels of doubling."""
    deep = [1]
    for _ in range(1000):
        deep = [deep]
    double = ["x"]
    for _ in range(100):
        double = [double, double]
    for value in (deep, double):
        try:
            data = pickle.dumps(value, protocol=2)
        except RecursionError:  # the writer's recursion, not ours: the same opcodes by hand
            data = b"\x80\x02" + b"]" * 1001 + b"a" * 1000 + b"."
        head = b"\x80\x02cverl.protocol\nDataProto\n)\x81"
        path = tmp_path / "a.dp"
        path.write_bytes(head + data[2:-1] + b"b.")
        refused(path, "wrong-structure")


def doubled(levels, start="x"):
    """A tuple that holds the one before twice, again and again: a few bytes a level, endless when written out."""
    value = start
    for _ in range(levels):
        value = (value, value)
    return value


def test_a_key_that_takes_for_ever_to_hash(tmp_path):
    """pickle can write such a key (it hashes nothing); building the dict would never end."""
    key = pickle.dumps(doubled(60), protocol=2)[2:-1]
    for put in (b"}" + key + b"K\x01s", b"}(" + key + b"K\x01u", b"(" + key + b"K\x01d"):
        path = tmp_path / "a.dp"
        path.write_bytes(b"\x80\x02cverl.protocol\nDataProto\n)\x81" + put + b"b.")
        assert "a key of more than" in refused(path, "pickle-damaged")
    path.write_bytes(b"\x80\x04cverl.protocol\nDataProto\n)\x81\x8f(" + key + b"\x90b.")  # a set
    assert "a key of more than" in refused(path, "pickle-damaged")


def test_values_that_are_endless_when_written_out(tmp_path):
    path = tmp_path / "step_1.pt"
    nested = [0.5]
    for _ in range(28):
        nested = [nested, nested]
    torch.save(hook(extra=nested), path)
    refused(path, "nesting-too-deep")
    numbers = [0.5, 0.5]
    for _ in range(20):  # shallow enough for the tree check of a large file, 2 ** 21 numbers as a tensor
        numbers = [numbers, numbers]
    torch.save({"log_probs": numbers, "rollout_log_probs": numbers, "loss_masks": numbers}, path)
    refused(path, "nesting-too-deep")


def test_names_that_are_endless_when_printed(tmp_path):
    """Group names, keys and dtypes come from the file; none is turned into text before its type is known."""
    state = (([2], None, {"old_log_probs": (doubled(60), (1,), b"0000")}), {}, {})
    data = pickle.dumps(state, protocol=2)[2:-1]
    path = tmp_path / "a.dp"
    path.write_bytes(b"\x80\x02cverl.protocol\nDataProto\n)\x81" + data + b"b.")
    refused(path, "wrong-dtype")


def test_a_memo_index_that_would_allocate_gigabytes(tmp_path):
    data = b"\x80\x02cverl.protocol\nDataProto\nr" + struct.pack("<I", 2**31) + b")\x81."
    path = tmp_path / "a.dp"
    path.write_bytes(data)
    assert "memo index" in refused(path, "pickle-damaged")


@pytest.mark.parametrize(
    "tail",
    [
        b"\x8e" + struct.pack("<Q", 2**62),  # BINBYTES8 of 4 EiB
        b"B" + struct.pack("<I", 2**31),
        b"\x96" + struct.pack("<Q", 2**40),  # BYTEARRAY8
        b"\x95" + struct.pack("<Q", 2**60),  # FRAME
        b"\x8b" + struct.pack("<i", 2**30),  # LONG4
        b"",
    ],
)
def test_sizes_beyond_the_file_are_damage(tmp_path, tail):
    path = tmp_path / "a.dp"
    path.write_bytes(b"\x80\x04cverl.protocol\nDataProto\n)\x81" + tail)
    refused(path, "pickle-damaged")


def test_numpy_constructors_allocate_nothing(tmp_path):
    """numpy's own _reconstruct(ndarray, (10**12,), 'd') would ask for 8 TB."""
    data = (
        b"\x80\x02cverl.protocol\nDataProto\n)\x81(}U\x01a"
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(\x8a\x06\x00\x10\xa5\xd4\xe8\x00tU\x01dtRs}}tb."
    )
    path = tmp_path / "a.dp"
    path.write_bytes(data)
    refused(path, "wrong-structure")


def hook(**changes):
    lp = torch.full((2, 3), -1.0)
    return {"train_logprobs": lp, "rollout_logprobs": lp - 1, "response_mask": torch.ones(2, 3)} | changes


def test_torch_files_with_other_globals_are_named_and_not_run(tmp_path):
    witness = tmp_path / "ran"
    path = tmp_path / "step_1.pt"
    torch.save(hook(extra=Runs(os.system, f"touch {witness}")), path)
    assert f"{os.system.__module__}.system" in refused(path)
    torch.save({"x": Runs(os.system, f"touch {witness}")}, path)  # no format claims it
    assert f"{os.system.__module__}.system" in refused(path)
    assert not witness.exists()


def test_legacy_torch_files_are_held_to_the_same_rule(tmp_path, read_one):
    witness = tmp_path / "ran"
    path = tmp_path / "step_1.pt"
    torch.save(hook(), path, _use_new_zipfile_serialization=False)
    assert read_one(path).mask.all()
    torch.save(hook(extra=Runs(os.system, f"touch {witness}")), path, _use_new_zipfile_serialization=False)
    assert f"{os.system.__module__}.system" in refused(path)
    assert not witness.exists()


def test_a_decompression_bomb_is_refused_unopened(tmp_path):
    path = tmp_path / "step_1.pt"
    buffer = io.BytesIO()
    torch.save(hook(), buffer)
    with zipfile.ZipFile(buffer) as plain, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
        packed.writestr("archive/data/9", b"\0" * 200_000_000)
    assert path.stat().st_size < 1_000_000
    message = refused(path, "compressed-archive")
    assert "torch.save never compresses" in message


def test_views_larger_than_their_storage_are_refused(tmp_path):
    path = tmp_path / "step_1.pt"
    one = torch.full((1,), -1.0)
    torch.save(hook(train_logprobs=one.expand(10**6, 10**6)), path)
    assert path.stat().st_size < 10_000
    refused(path, "tensor-not-stored")


def test_nested_tensors_that_reach_outside_their_buffer_are_refused(tmp_path):
    path = tmp_path / "step_1.pt"

    class Nested:
        def __reduce__(self):
            sizes, strides = torch.tensor([[10**6]]), torch.tensor([[1]])
            return torch._utils._rebuild_nested_tensor, (torch.zeros(4), sizes, strides, torch.tensor([0]))

    torch.save(hook(train_logprobs=Nested()), path)
    with pytest.raises(DumpError) as caught:
        registry.find(path)
    assert caught.value.code in (
        "tensor-not-stored",
        "torch-file-unreadable",
    )  # some versions of torch refuse it themselves


def test_cycles_and_depth_are_refused(tmp_path):
    path = tmp_path / "step_1.pt"
    loop = []
    loop.append(loop)
    torch.save(hook(extra=loop), path)
    refused(path, "nesting-too-deep")


def test_bytearray_of_a_given_size_is_refused(tmp_path):
    """torch's own allow-list lets a pickle call bytearray(10**13)."""
    path = tmp_path / "step_1.pt"
    torch.save(hook(extra=Runs(bytearray, 10**13)), path)
    assert "bytearray" in refused(path)


def test_json_nested_without_end(tmp_path):
    path = tmp_path / "train_data_step1.jsonl"
    path.write_text(
        '{"prev_logprobs": [0.0], "generation_logprobs": [0.0]}\n{"generation_logprobs": [1], "x": '
        + "[" * 200_000
        + "}\n"
    )
    with pytest.raises(DumpError) as caught:
        (info,) = registry.find(path)
        with registry.open_shard(info) as shard:
            shard.read("train", 0, info.positions)
    assert caught.value.code in ("json-damaged", "json-truncated")
    path.write_text("[" * 200_000)
    assert registry.find(path) is None
