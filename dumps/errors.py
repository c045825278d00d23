"""The one family of errors that a user can cause or meet; each knows its exit code, and the CLI catches it in one place.

Everything else that escapes is a bug in rollout-is (exit code 70).
"""

from __future__ import annotations


class RolloutIsError(Exception):
    """Base of every error that is reported to a user without a traceback.

    Four lines: where, what was expected and what came, why it usually happens, what to do.

    Args:
        where: file, tensor, sequence and index, as far as they are known.
        problem: what was expected and what came.
        why: why this usually happens (may be empty).
        fix: the way out (may be empty).
        code: stable kebab-case id, such as ``file-truncated``.

    >>> print(DumpError("a.safetensors: cu_seqlens[0]", "expected 0, found 5", "shard starts mid-sequence", "re-dump"))
    a.safetensors: cu_seqlens[0]
      expected 0, found 5
      why: shard starts mid-sequence
      fix: re-dump
    """

    exit_code = 70

    def __init__(self, where: str, problem: str, why: str = "", fix: str = "", *, code: str = "") -> None:
        super().__init__(where, problem, why, fix)
        self.where = where
        self.problem = problem
        self.why = why
        self.fix = fix
        self.code = code

    def __str__(self) -> str:
        lines = [self.where, f"  {self.problem}"]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:  # crosses process boundaries with its fields
        return (_rebuild, (type(self), self.where, self.problem, self.why, self.fix, self.code))


def _rebuild(kind: type[RolloutIsError], where: str, problem: str, why: str, fix: str, code: str) -> RolloutIsError:
    return kind(where, problem, why, fix, code=code)


class UsageError(RolloutIsError):
    """Wrong usage or configuration (exit code 2)."""

    exit_code = 2


class DumpError(RolloutIsError):
    """A dump that cannot be read or is inconsistent (exit code 3)."""

    exit_code = 3


class WorkLostError(RolloutIsError):
    """A worker or rank was killed, or memory or time ran out (exit code 75)."""

    exit_code = 75
