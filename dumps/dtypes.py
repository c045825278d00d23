"""The dtypes that safetensors knows, and which of them each kind of column may have. No torch."""

from __future__ import annotations

# Bits of one element. Several below one byte exist; they can stand in a file, but never in a column that we read.
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
SIGNED = frozenset({"I8", "I16", "I32", "I64"})
INTEGERS = SIGNED | {"U8", "U16", "U32", "U64"}
NUMBERS = FLOATS | INTEGERS | {"BOOL"}
OFFSETS = frozenset({"I32", "I64"})


def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype that a column may have.

    >>> itemsize("BF16")
    2
    """
    return BITS[dtype] // 8


def allowed(role: str) -> frozenset[str]:
    """The dtypes that a column in this role may be stored in.

    >>> sorted(allowed("offsets"))
    ['I32', 'I64']
    """
    if role in ("train", "rollout", "entropy", "advantages") or role.startswith("logprobs."):
        return FLOATS
    if role in ("offsets", "packs", "lengths", "pack_lengths"):
        return OFFSETS
    if role == "labels":
        return SIGNED
    if role in ("token_ids", "rollout_token_ids", "sequence_ids", "group_ids", "prompt_lens"):
        return INTEGERS
    return frozenset(NUMBERS)  # masks, rewards, versions, segment_is_pad
