"""What a file that is no safetensors file really is, judged by its first bytes, so that the error can say it."""

from __future__ import annotations

import time


def what_is_it(first: bytes) -> tuple[str, str, str, str] | None:
    """(what it is, why it usually happens, the way out, error code), or None when nothing else is recognised.

    >>> what_is_it(b"PK\\x03\\x04....")[3]
    'file-is-zip'
    """
    if first.startswith(b"version https://git-lfs"):
        return (
            "a git-LFS pointer (the text that stands for a file that was not downloaded)",
            "the repository was cloned without git-lfs",
            "git lfs pull",
            "file-is-lfs-pointer",
        )
    if first.startswith(b"PK\x03\x04"):
        return (
            "a zip archive (torch.save writes one)",
            "the file was written by torch.save and named .safetensors",
            "name it .pt and run rollout-is convert, or write it with DumpWriter",
            "file-is-zip",
        )
    if first[:1] == b"\x80" and first[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05") and first[8:9] != b"{":
        return (
            "a pickle, which is never loaded (it can run code)",
            "the file was written by pickle.dump and named .safetensors",
            "write it with DumpWriter",
            "file-is-pickle",
        )
    if not any(first[:64]):
        return (
            "zero bytes only",
            "space was reserved and never written, or the disk was full",
            "dump this shard again",
            "file-is-zeros",
        )
    head = first[:8]
    if len(head) == 8 and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head):
        return (
            f"text beginning {first[:24].decode('ascii', 'replace')!r}",
            "this is another kind of file, whatever its name",
            "give rollout-is the dump, not this file",
            "file-is-text",
        )
    return None


def age(mtime_ns: int) -> str:
    """How long ago a file changed, in words: a shard that is seconds old may not be whole yet."""
    seconds = time.time() - mtime_ns / 1e9
    if seconds < 0:
        return "changed in the future, by this clock"
    if seconds < 120:
        return f"changed {seconds:.0f} s ago"
    if seconds < 7200:
        return f"changed {seconds / 60:.0f} min ago"
    if seconds < 172800:
        return f"changed {seconds / 3600:.0f} h ago"
    return f"changed {seconds / 86400:.0f} days ago"
