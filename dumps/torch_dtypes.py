"""safetensors dtype names and the torch dtypes of the same bits. Imports torch: import this only where tensors are handled."""

from __future__ import annotations

import torch

TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in TORCH.items()}
