"""Every kind of file that is no whole safetensors file has its own error; what the format allows is accepted."""

import io
import os
import pickle
import time

import pytest
import torch
from safetensors.torch import save_file

from rollout_is.dumps import header as header_module
from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.header import read_header


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refused(path, code, *words):
    with pytest.raises(DumpError) as caught:
        read_header(str(path), "the-shard")
    error = caught.value
    assert error.code == code, error
    assert error.exit_code == 3
    assert error.where.startswith("the-shard")
    for word in words:
        assert word in str(error), error
    return error


def test_reads_what_the_library_writes(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(2, 3, dtype=torch.bfloat16), "y": torch.arange(5)}, path, metadata={"k": "v"})
    header = read_header(str(path))
    assert header.metadata == {"k": "v"}
    assert header.tensors["x"].shape == (2, 3) and header.tensors["x"].dtype == "BF16"
    entry = header.tensors["y"]
    assert path.read_bytes()[entry.start : entry.stop] == b"".join(i.to_bytes(8, "little") for i in range(5))
    assert header.size == path.stat().st_size and header.mtime_ns == path.stat().st_mtime_ns


def test_header_longer_than_the_first_read(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={f"key{i}": "v" * 50 for i in range(2000)})
    assert len(read_header(str(path)).metadata) == 2000


@pytest.mark.parametrize("size", range(8))
def test_c114_empty_or_tiny(tmp_path, size):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x10" * size)
    os.utime(path, (time.time() - 3, time.time() - 3))
    refused(
        path,
        "file-too-small" if size else "file-empty",
        f"{size} bytes" if size else "an empty file",
        "still being written?",
        "3 s ago",
    )


def test_c114_header_longer_than_the_file(raw):
    refused(raw({}, length=99_000_000), "file-truncated", "short by 98,999,998", "still being written?")


def test_c112_short_body(raw):
    refused(raw({"a": entry()}, b"1234567"), "file-truncated", "short by 1", "expected", "found")


def test_c112_extra_bytes(raw):
    refused(raw({"a": entry()}, b"12345678" + b"x" * 5), "file-overlong", "5 extra bytes")


def test_c113_header_too_large(raw):
    refused(raw({}, length=126_000_000), "header-too-large", "126,000,000", "a few long tensors per shard")


def test_c113_git_lfs_pointer(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(path, "file-is-lfs-pointer", "git lfs pull")


def test_text(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_text("step,rank\n1,2\n")
    refused(path, "file-is-text", "step,rank")


def test_pickle_is_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    for protocol in (2, 3, 4, 5):
        path = tmp_path / f"{protocol}.safetensors"
        path.write_bytes(pickle.dumps(Bomb(), protocol))
        refused(path, "file-is-pickle", "never loaded")
    assert not (tmp_path / "exploded").exists()


def test_torch_save(tmp_path):
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, buffer)
    path = tmp_path / "a.safetensors"
    path.write_bytes(buffer.getvalue())
    refused(path, "file-is-zip", "torch.save")


def test_zeros(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(4096))
    refused(path, "file-is-zeros", "zero bytes")


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        (b'{"a\xff": 1}', "header-not-utf8", "0xff"),
        (b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', "header-not-utf8", "surrogate"),
        (b"{", "header-not-json", "expected a JSON header"),
        (b"[1, 2]", "header-not-json", "list"),
        (b"null", "header-not-json", "NoneType"),
        (b'{"a": NaN}', "header-not-json", "NaN"),
        (b"[" * 100_000, "header-not-json", "expected a JSON header"),
        (
            b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 0]}}',
            "header-not-json",
            "digits",
        ),
        (b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "a": {}}', "header-repeated-name", "a"),
        (b'{"__metadata__": {"k": "1", "k": "2"}}', "header-repeated-name", "k"),
        (b'{"__metadata__": {"step": 3}}', "metadata-not-strings", "strings only"),
        (b'{"__metadata__": [1]}', "metadata-not-strings", "object"),
        (b'{"a": 3}', "header-entry", "dtype, shape and data_offsets"),
        (b'{"a": {"dtype": "F32", "shape": [1]}}', "header-entry", "dtype, shape and data_offsets"),
    ],
)
def test_c115_damaged_json(raw, text, code, word):
    refused(raw(text), code, word)


@pytest.mark.parametrize(
    ("spec", "code", "word"),
    [
        (entry(dtype="Q3_K"), "dtype-unknown", "Q3_K"),
        (entry(dtype=7), "dtype-unknown", "7"),
        (entry(dtype=None), "dtype-unknown", "None"),
        (entry(shape=[-2]), "header-shape", "-2"),
        (entry(shape=[True, 2]), "header-shape", "True"),
        (entry(shape=[2.0]), "header-shape", "2.0"),
        (entry(shape=["2"]), "header-shape", "'2'"),
        (entry(shape=[2**63]), "header-shape", "9223372036854775808"),
        (entry(shape=[2**62, 2**62, 2**62]), "header-shape", "found 8"),
        (entry(shape=[1] * 40 + [2]), "header-shape", "32 dimensions"),
        (entry(shape=[3]), "header-shape", "expected 12 bytes"),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, "header-shape", "found 2"),
        (entry(offsets=[8, 0]), "header-offsets", "8, 0"),
        (entry(offsets=[-8, 0]), "header-offsets", "-8"),
        (entry(offsets=[0]), "header-offsets", "two data_offsets"),
        (entry(offsets=[0, 8.0]), "header-offsets", "8.0"),
        (entry(offsets=[False, 8]), "header-offsets", "False"),
        (entry(offsets=[4, 12]), "header-offsets", "leaves a gap"),
    ],
)
def test_damaged_entry(raw, spec, code, word):
    refused(raw({"a": spec}, bytes(8)), code, word)


def test_overlap(raw):
    refused(raw({"a": entry(), "b": entry(offsets=[4, 12])}, bytes(12)), "header-offsets", "overlaps", "b")


def test_gap(raw):
    refused(raw({"a": entry(), "b": entry(offsets=[12, 20])}, bytes(20)), "header-offsets", "leaves a gap", "b")


def test_tensors_in_any_order_of_names(raw):
    header = read_header(str(raw({"b": entry(offsets=[8, 16]), "a": entry()}, bytes(16))))
    assert header.tensors["b"].stop - header.tensors["a"].start == 16


@pytest.mark.parametrize("text", [b"{}", b'{"__metadata__": {"a": "b"}}', b'{"__metadata__": null}', b"{}      "])
def test_c115_no_tensors_is_accepted(raw, text):
    assert read_header(str(raw(text))).tensors == {}


def test_c117_zero_size_tensors_are_accepted(raw):
    header = read_header(str(raw({"a": entry(shape=[0], offsets=[0, 0]), "b": entry(shape=[0, 5], offsets=[0, 0])})))
    assert [tensor.numel for tensor in header.tensors.values()] == [0, 0]


def test_scalar_is_accepted(raw):
    assert read_header(str(raw({"a": entry(shape=[], offsets=[0, 4])}, bytes(4)))).tensors["a"].numel == 1


def test_missing_file(tmp_path):
    refused(tmp_path / "a.safetensors", "file-missing")


def test_dangling_link(tmp_path):
    link = tmp_path / "a.safetensors"
    link.symlink_to(tmp_path / "gone")
    refused(link, "file-missing", "link", "gone")


def test_folder_and_pipe_are_not_waited_for(tmp_path):
    (tmp_path / "a.safetensors").mkdir()
    refused(tmp_path / "a.safetensors", "not-a-file")
    os.mkfifo(tmp_path / "b.safetensors")
    refused(tmp_path / "b.safetensors", "not-a-file")


def test_unreadable(tmp_path, monkeypatch):
    def denied(*args):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.safetensors").write_bytes(b"")
    monkeypatch.setattr(header_module.os, "open", denied)  # root, as which tests may run, may open anything
    refused(tmp_path / "a.safetensors", "file-unreadable", "permission denied", "chmod")


def test_input_output_error(raw, monkeypatch):
    path = raw({"a": entry()}, bytes(8))

    def broken(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(header_module.os, "pread", broken)
    refused(path, "file-unreadable", "Input/output error")


def test_hostile_names_are_shown_escaped(raw):
    error = refused(raw({"a\x1b[2J": 3}), "header-entry")
    assert "\x1b" not in str(error) and "\\x1b" in str(error)


def test_c113_a_header_of_a_million_values(raw):
    refused(
        raw(b'{"a": [' + b"[]," * 1_000_000 + b"[]]}"),
        "header-too-large",
        "1,000,000 values",
        "a few long tensors per shard",
    )
