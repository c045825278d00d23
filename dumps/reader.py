"""Reading the columns of a native shard by slices: pread into reused buffers, no map that could fault, no copy of the file.

The file is compared with the scan before the first byte and after the last: one that changed in between is an error, not zeros.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from rollout_is.dumps.choice import RoleView, choose
from rollout_is.dumps.dtypes import itemsize
from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.header import Header, header_of, open_regular
from rollout_is.dumps.layout import FORMAT
from rollout_is.dumps.served import ServedShard
from rollout_is.dumps.shard import SEGMENT_ROLES, ShardInfo
from rollout_is.dumps.torch_dtypes import TORCH

if TYPE_CHECKING:
    from torch import Tensor

    from rollout_is.dumps.shard import OpenShard

IGNORED_LABEL = -100


def open_shard(
    info: ShardInfo, *, mask: str = "response_mask", train: str = "train", rollout: str = "rollout"
) -> OpenShard:
    """Open a shard of a scan for reading, native or foreign. Use it as a context manager.

    Args:
        info: the shard.
        mask: ``response_mask`` or NAME of a ``mask.NAME`` column: what the role ``mask`` serves.
        train, rollout: ``train``, ``rollout`` or NAME of a ``logprobs.NAME`` column: what those roles serve.

    Raises:
        DumpError: the file changed since the scan, cannot be opened, or does not hold NAME.
    """
    if info.format == FORMAT:
        return FileShard(info, mask=mask, train=train, rollout=rollout)
    roles = choose(info, mask=mask, train=train, rollout=rollout)
    shard: OpenShard = import_module("rollout_is.dumps.foreign.registry").open_shard(info)
    return shard if all(role == served for role, served in roles.items()) else RoleView(shard, roles)


class FileShard(ServedShard):
    """An ``OpenShard`` over one safetensors file."""

    def __init__(
        self, info: ShardInfo, *, mask: str = "response_mask", train: str = "train", rollout: str = "rollout"
    ) -> None:
        super().__init__(info, mask=mask, train=train, rollout=rollout)
        self._readers: dict[str, _Column] = {}
        self._fd = open_regular(info.path, info.name)
        try:
            self._check_unchanged()
            self._header = header_of(self._fd, info.name)
            self._check_header(self._header)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if self._fd >= 0 and exc[:1] in ((), (None,)):
                self._check_unchanged()
        finally:
            self._close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self._close()

    def check(self) -> None:
        """Compare the file with the scan.

        Raises:
            DumpError: it changed.
        """
        self._check_unchanged()

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1
        self._readers.clear()

    def _check_unchanged(self) -> None:
        status = os.fstat(self._fd)
        found = (status.st_size, status.st_mtime_ns)
        if self.info.mtime_ns and found != (self.info.size, self.info.mtime_ns):
            self._changed(f"found {status.st_size:,} bytes and another time of change")

    def _changed(self, found: str) -> None:
        raise DumpError(
            self.info.name,
            f"expected the file of the scan ({self.info.size:,} bytes), {found}: file changed while being read",
            "the run still writes into it, or writes in place",
            "wait for the run; DumpWriter renames whole files into place",
            code="file-changed",
        )

    def _check_header(self, header: Header) -> None:
        """The columns are still those that the scan saw; only then are their byte ranges used."""
        for role, name in self.info.columns.items():
            entry = header.tensors.get(name)
            expected = (
                self.info.dtypes["labels"]
                if role == "mask" and "labels" in self.info.columns
                else self.info.dtypes[role]
            )
            if entry is None or entry.dtype != expected:
                self._changed(f"found another tensor as {name}")
            elif (
                role not in (*SEGMENT_ROLES, "offsets", "lengths", "packs", "pack_lengths")
                and entry.numel != self.info.positions
            ):
                self._changed(f"found another shape of {name}")

    def _whole(self, role: str) -> Tensor:
        entry = self._header.tensors[self.info.columns[role]]
        column = _Column(self.info.name, entry.start, entry.dtype, False)
        return column.read(self._fd, 0, entry.numel)

    def read(self, role: str, start: int, stop: int) -> Tensor:
        """Positions [start, stop) of a [T] column in its stored dtype; valid until the next read of the role.

        Raises:
            DumpError: the file ended early, or the shard has no such column.
        """
        column = self._readers.get(role)
        if column is None:
            column = self._readers[role] = self._reader(role)
        if not 0 <= start <= stop <= self.info.positions:
            raise ValueError(f"expected 0 <= start <= stop <= {self.info.positions}, found {start}, {stop}")
        return column.read(self._fd, start, stop)

    def _reader(self, role: str) -> _Column:
        source = self._role.get(role, role)
        if source in self.info.columns and source not in SEGMENT_ROLES:
            entry = self._header.tensors[self.info.columns[source]]
            return _Column(self.info.name, entry.start, entry.dtype, source == "mask" and "labels" in self.info.columns)
        if self.info.positions == 0:
            return _Column(self.info.name, 0, "BOOL" if role == "mask" else "F32", False)
        self._absent(role)


class _Column:
    """One column of an open file, its buffer, and the views into it: a read of the usual size allocates nothing."""

    def __init__(self, name: str, offset: int, dtype: str, labels: bool) -> None:
        self._name = name
        self._offset = offset
        self._itemsize = itemsize(dtype)
        self._dtype = TORCH[dtype]
        self._count = -1
        self._capacity = -1
        # What is served differs from what is stored in two cases: labels become a mask, and a BOOL byte may be 2 or 3.
        self._off_value = IGNORED_LABEL if labels else 0
        self._converts = labels or dtype == "BOOL"

    def read(self, fd: int, start: int, stop: int) -> Tensor:
        if stop - start != self._count:
            self._fit(stop - start)
        at = self._offset + start * self._itemsize
        got = os.preadv(fd, self._target, at)
        if got != self._bytes:
            self._rest(fd, at, got)
        if self._converts:
            np.not_equal(self._stored, self._off_value, out=self._on)  # ten times faster than torch's
        return self._view

    def _fit(self, count: int) -> None:
        if count > self._capacity:
            self._buffer = torch.empty(count * self._itemsize, dtype=torch.uint8)
            self._memory = self._buffer.numpy().data
            if self._converts:
                self._served = torch.empty(count, dtype=torch.bool)
            self._capacity = count
        self._count = count
        self._bytes = count * self._itemsize
        self._target = [self._memory[: self._bytes]]
        raw = self._buffer[: self._bytes]
        if self._converts:
            self._stored = (raw if self._dtype is torch.bool else raw.view(self._dtype)).numpy()
            self._view = self._served[:count]
            self._on = self._view.numpy()
        else:
            self._view = raw.view(self._dtype)

    def _rest(self, fd: int, at: int, got: int) -> None:
        """A read may end early (2 GB limit, signal); the end of the file may not come before ours."""
        while got < self._bytes:
            more = os.preadv(fd, [self._memory[got : self._bytes]], at + got)
            if more == 0:
                raise DumpError(
                    self._name,
                    f"expected {self._bytes - got:,} more bytes at {at + got:,}, found the end: file changed while being read",
                    "the run truncated it to write it again",
                    "wait for the run; DumpWriter renames whole files into place",
                    code="file-changed",
                )
            got += more
