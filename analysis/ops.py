"""The one seam between devices: element-wise passes, segment reductions and histograms on one block.

On the CPU arrays are numpy (its ``reduceat`` is the fastest segment sum measured, and pairwise, hence accurate); on an
accelerator they are float64 torch tensors reduced by the deterministic ``segment_reduce``. No float atomics anywhere.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import numpy as np

from rollout_is.analysis.batch import Floats, Ints

DOT = 8192  # elements a BLAS keeps on one thread
HALF_BINS = (
    4096  # sign, 5 exponent and 6 mantissa bits of a half: 64 bins an octave, 2**-20 wide below 2**-14; negatives last
)


class Ops(Protocol):
    """Array operations on one block; ``Array`` is a numpy array or a torch tensor, float64."""

    def array(self, n: int) -> Any: ...
    def load(self, raw: Any, dtype: Any, out: Any) -> float: ...
    def take_in(self, values: Floats, out: Any) -> None: ...
    def exp(self, x: Any, out: Any) -> None: ...
    def expm1(self, x: Any, out: Any) -> None: ...
    def add(self, a: Any, b: Any, out: Any) -> None: ...
    def subtract(self, a: Any, b: Any, out: Any) -> None: ...
    def multiply(self, a: Any, b: Any, out: Any) -> None: ...
    def absolute(self, x: Any, out: Any) -> None: ...
    def with_reciprocal(self, w: Any, out: Any) -> None: ...
    def segment_sum(self, x: Any, starts: Ints, out: Floats) -> None: ...
    def segment_min(self, x: Any, starts: Ints) -> Floats: ...
    def segment_max(self, x: Any, starts: Ints) -> Floats: ...
    def total(self, x: Any) -> float: ...
    def dot(self, a: Any, b: Any) -> float: ...
    def minmax(self, x: Any) -> tuple[float, float]: ...
    def maximum(self, x: Any) -> float: ...
    def zeros(self, x: Any) -> Ints: ...
    def above(self, x: Any, bound: float) -> Ints: ...
    def fetch(self, x: Any, index: Ints) -> Floats: ...
    def put(self, x: Any, index: Ints, values: Any) -> None: ...
    def copy(self, x: Any) -> Any: ...
    def half_histogram(self, x: Any) -> Ints: ...
    def host(self, x: Any) -> Floats: ...


def _numpy_exp_is_vectorised() -> bool:
    # numpy's exp and expm1 run on AVX-512 kernels where the CPU has them and are an order slower elsewhere, where torch's win.
    # numpy says so only in a private module, whose name changed with numpy 2.
    for module in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        try:
            features = import_module(module).__cpu_features__
        except (ImportError, AttributeError):
            continue
        return bool(features.get("AVX512_SKX", False))
    return False


def dot(a: Floats, b: Floats) -> float:
    """Sum of products of two float64 vectors, the same bits for any number of BLAS threads.

    A BLAS spreads long vectors over as many threads as the process may use, and the last bits follow. Short rows stay on one.

    >>> dot(np.ones(20000), np.full(20000, 2.0))
    40000.0
    """
    whole = len(a) // DOT * DOT
    rest = float(np.dot(a[whole:], b[whole:]))
    if not whole:
        return rest
    x, y = a[:whole].reshape(-1, DOT), b[:whole].reshape(-1, DOT)
    if hasattr(np, "vecdot"):  # numpy 2
        return float(np.vecdot(x, y).sum()) + rest
    return sum(float(np.dot(p, q)) for p, q in zip(x, y, strict=True)) + rest


class CpuOps:
    """numpy on the host, torch for what numpy lacks (half and bfloat16 conversion)."""

    def __init__(self, block: int) -> None:
        import torch

        self._torch = torch
        self._half = torch.empty(block, dtype=torch.float16)
        self._bits = self._half.view(torch.int16).numpy().view(np.uint16)
        self._keys = torch.empty(block, dtype=torch.int32)
        self._key = self._keys.numpy()
        self._vector_exp = _numpy_exp_is_vectorised()

    def array(self, n: int) -> Any:
        return np.empty(n, dtype=np.float64)

    def load(self, raw: Any, dtype: Any, out: Any) -> float:
        stored = out
        if dtype is self._torch.float32:
            stored = raw.view(np.float32)
            np.copyto(out, stored)
        elif dtype is self._torch.float64:
            np.copyto(out, raw.view(np.float64))
        else:
            self._torch.from_numpy(out).copy_(self._torch.from_numpy(raw).view(dtype))
        return float(np.maximum.reduce(stored))

    def take_in(self, values: Floats, out: Any) -> None:
        np.copyto(out, values)

    def exp(self, x: Any, out: Any) -> None:
        if self._vector_exp:
            np.exp(x, out=out)
        else:
            self._torch.exp(self._torch.from_numpy(x), out=self._torch.from_numpy(out))

    def expm1(self, x: Any, out: Any) -> None:
        if self._vector_exp:
            np.expm1(x, out=out)
        else:
            self._torch.expm1(self._torch.from_numpy(x), out=self._torch.from_numpy(out))

    def add(self, a: Any, b: Any, out: Any) -> None:
        np.add(a, b, out=out)

    def subtract(self, a: Any, b: Any, out: Any) -> None:
        np.subtract(a, b, out=out)

    def multiply(self, a: Any, b: Any, out: Any) -> None:
        np.multiply(a, b, out=out)

    def absolute(self, x: Any, out: Any) -> None:
        np.absolute(x, out=out)

    def with_reciprocal(self, w: Any, out: Any) -> None:
        np.reciprocal(w, out=out)
        np.maximum(out, w, out=out)

    def segment_sum(self, x: Any, starts: Ints, out: Floats) -> None:
        np.add.reduceat(x, starts, out=out)

    def segment_min(self, x: Any, starts: Ints) -> Floats:
        out: Floats = np.minimum.reduceat(x, starts)
        return out

    def segment_max(self, x: Any, starts: Ints) -> Floats:
        out: Floats = np.maximum.reduceat(x, starts)
        return out

    def total(self, x: Any) -> float:
        return float(np.add.reduce(x))

    def dot(self, a: Any, b: Any) -> float:
        return dot(a, b)

    def minmax(self, x: Any) -> tuple[float, float]:
        return float(np.minimum.reduce(x)), float(np.maximum.reduce(x))

    def maximum(self, x: Any) -> float:
        return float(np.maximum.reduce(x))

    def zeros(self, x: Any) -> Ints:
        out: Ints = (x == 0).nonzero()[0]
        return out

    def above(self, x: Any, bound: float) -> Ints:
        out: Ints = (x > bound).nonzero()[0]
        return out

    def fetch(self, x: Any, index: Ints) -> Floats:
        out: Floats = x[index]
        return out

    def put(self, x: Any, index: Ints, values: Any) -> None:
        x[index] = values

    def copy(self, x: Any) -> Any:
        return x.copy()

    def half_histogram(self, x: Any) -> Ints:
        torch = self._torch
        n = len(x)
        self._half[:n].copy_(torch.from_numpy(x))
        # One pass from 2-byte bits to 4-byte keys, which torch counts fastest.
        np.right_shift(self._bits[:n], 4, out=self._key[:n])
        out: Ints = torch.bincount(self._keys[:n], None, HALF_BINS).numpy()
        return out

    def host(self, x: Any) -> Floats:
        out: Floats = x
        return out


class TorchOps:
    """float64 torch tensors on any device; what CUDA runs, and testable on the CPU."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch = torch
        self.device = torch.device(device)

    def array(self, n: int) -> Any:
        return self._torch.empty(n, dtype=self._torch.float64, device=self.device)

    def load(self, raw: Any, dtype: Any, out: Any) -> float:
        out.copy_(self._torch.from_numpy(raw).view(dtype))
        return float(out.max())

    def take_in(self, values: Floats, out: Any) -> None:
        out.copy_(self._torch.from_numpy(values))

    def exp(self, x: Any, out: Any) -> None:
        self._torch.exp(x, out=out)

    def expm1(self, x: Any, out: Any) -> None:
        self._torch.expm1(x, out=out)

    def add(self, a: Any, b: Any, out: Any) -> None:
        self._torch.add(a, b, out=out)

    def subtract(self, a: Any, b: Any, out: Any) -> None:
        self._torch.sub(a, b, out=out)

    def multiply(self, a: Any, b: Any, out: Any) -> None:
        self._torch.mul(a, b, out=out)

    def absolute(self, x: Any, out: Any) -> None:
        self._torch.abs(x, out=out)

    def with_reciprocal(self, w: Any, out: Any) -> None:
        self._torch.reciprocal(w, out=out)
        self._torch.maximum(out, w, out=out)

    def _segment(self, x: Any, starts: Ints, how: str) -> Floats:
        torch = self._torch
        offsets = torch.from_numpy(np.append(starts, len(x))).to(self.device)
        out: Floats = torch.segment_reduce(x, how, offsets=offsets, unsafe=True).cpu().numpy()
        return out

    def segment_sum(self, x: Any, starts: Ints, out: Floats) -> None:
        out[...] = self._segment(x, starts, "sum")

    def segment_min(self, x: Any, starts: Ints) -> Floats:
        return self._segment(x, starts, "min")

    def segment_max(self, x: Any, starts: Ints) -> Floats:
        return self._segment(x, starts, "max")

    def total(self, x: Any) -> float:
        return float(x.sum())

    def dot(self, a: Any, b: Any) -> float:
        return float((a * b).sum())

    def minmax(self, x: Any) -> tuple[float, float]:
        low, high = self._torch.aminmax(x)
        return float(low), float(high)

    def maximum(self, x: Any) -> float:
        return float(x.max())

    def zeros(self, x: Any) -> Ints:
        out: Ints = (x == 0).nonzero().flatten().cpu().numpy()
        return out

    def above(self, x: Any, bound: float) -> Ints:
        out: Ints = (x > bound).nonzero().flatten().cpu().numpy()
        return out

    def fetch(self, x: Any, index: Ints) -> Floats:
        out: Floats = x[self._torch.from_numpy(index).to(self.device)].cpu().numpy()
        return out

    def put(self, x: Any, index: Ints, values: Any) -> None:
        torch = self._torch
        value = torch.as_tensor(values, dtype=torch.float64, device=self.device)
        x[torch.from_numpy(index).to(self.device)] = value

    def copy(self, x: Any) -> Any:
        return x.clone()

    def half_histogram(self, x: Any) -> Ints:
        torch = self._torch
        key = (x.to(torch.float16).view(torch.int16).to(torch.int64) & 0xFFFF) >> 4
        # Integer adds commute, so a scatter is deterministic here though it is atomic on CUDA.
        counts = torch.zeros(HALF_BINS, dtype=torch.int64, device=self.device)
        counts.scatter_add_(0, key, torch.ones_like(key))
        out: Ints = counts.cpu().numpy()
        return out

    def host(self, x: Any) -> Floats:
        out: Floats = x.cpu().numpy()
        return out


def make_ops(device: str, block: int) -> Ops:
    """The operations for a device: ``cpu`` takes numpy, ``cpu:torch`` and accelerators take torch."""
    if device == "cpu":
        return CpuOps(block)
    return TorchOps("cpu" if device == "cpu:torch" else device)
