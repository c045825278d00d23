"""Files that trainers write without train log-probs: recognised, and answered with what they lack and the shortest way to it.

Also the refusal of pickles and torch files that no format claims, with the name that blocks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollout_is.dumps.errors import DumpError
from rollout_is.dumps.foreign.rebuild import TENSOR_NAMES
from rollout_is.dumps.foreign.sniff import Sniffed
from rollout_is.dumps.foreign.unpickle import refusal


@dataclass(frozen=True)
class Answer:
    """What to say about one kind of file.

    Attributes:
        what: the file, as its trainer's users call it.
        test: whether a file is of this kind.
        lacks: what an analysis misses in it.
        way: the shortest way to get it.
        code: ``rollout-only`` or ``text-only``.
    """

    what: str
    test: Callable[[Sniffed], bool]
    lacks: str
    way: str
    code: str = "rollout-only"


_TRAIN = "the trainer's log-probs: it holds the engine's side only"


def _jsonl(*keys: str) -> Callable[[Sniffed], bool]:
    return lambda file: file.kind == "jsonl" and file.keys >= set(keys)


def _rollout_data(file: Sniffed) -> bool:
    return (
        file.kind == "torch"
        and file.keys >= {"rollout_id", "samples", "rollout_log_probs"}
        and "log_probs" not in file.keys
    )


def _text(file: Sniffed) -> bool:
    asked = {"prompt", "prompts", "input", "messages", "content", "raw_prompt"}
    said = {"response", "responses", "completion", "completions", "output", "messages", "content"}
    return file.kind == "jsonl" and bool(file.keys & asked) and bool(file.keys & said)


ANSWERS: tuple[Answer, ...] = (
    Answer(
        "rollout data of slime or miles",
        _rollout_data,
        _TRAIN,
        "run with --dump-details DIR and give DIR/train_data",
    ),
    Answer(
        "miles' dashboard columns",
        lambda file: file.kind == "parquet" and file.keys >= {"rollout_log_probs", "sample_index"},
        _TRAIN,
        "give the train_data folder beside it",
    ),
    Answer(
        "a debug rollout of xtuner",
        lambda file: any(name.endswith("rl_data.RolloutState") for name in file.names),
        _TRAIN,
        "add the three lines of docs/trainers/xtuner.md after compute_actor_logprobs",
    ),
    Answer(
        "a rollout batch of verl (skip.rollout_tq)",
        lambda file: file.kind == "torch" and "tensordict._reductions._make_td" in file.names,
        "old_log_probs, and a form that can be read without running code (an unconsolidated TensorDict)",
        "add the hook of docs/trainers/verl.md after old_log_probs are computed",
    ),
    Answer(
        "a replay buffer of NeMo-RL",
        lambda file: file.kind == "torch" and file.keys >= {"trajectories", "trajectory_versions"},
        "prev_logprobs: trajectories are stored before the trainer scores them",
        "give logs/exp_NNN: train_data_step*.jsonl holds both sides",
    ),
    Answer(
        "a rollout batch of ROLL",
        lambda file: "roll.distributed.scheduler.protocol.DataProto" in file.names,
        _TRAIN,
        "dump with DumpWriter after the trainer's log-probs are computed: docs/trainers/others.md",
    ),
    Answer(
        "ROLL's logging board",
        lambda file: file.kind == "jsonl" and "log_probs2" in file.keys,
        "the engine's log-probs: logprobs and log_probs2 are two forwards of the trainer (a determinism check)",
        "dump with DumpWriter where infer_logprobs is at hand: docs/trainers/others.md",
        "train-only",
    ),
    Answer(
        "a training stream of PipelineRL",
        _jsonl("seq_boundaries", "old_logprobs"),
        "the trainer's log-probs: old_logprobs is the engine's side",
        "dump with DumpWriter in the loss, where new_logprobs is computed: docs/trainers/others.md",
    ),
    Answer(
        "an actor stream of PipelineRL",
        lambda file: file.kind == "jsonl" and file.keys >= {"input_ids", "labels", "logprobs"},
        _TRAIN,
        "dump with DumpWriter in the loss: docs/trainers/others.md",
    ),
    Answer(
        "saved rollouts of open-instruct",
        _jsonl("response_tokens", "logprobs"),
        "the trainer's log-probs and a mask (tool tokens hold 0.0, the last token may be NaN)",
        "dump with DumpWriter in grpo_fast.py beside local_logprobs: docs/trainers/others.md",
    ),
    Answer(
        "micro-batches of prime-rl's file transport",
        lambda file: file.kind == "msgpack",
        "trainer_logprobs: it holds the engine's side only",
        "set trainer.enable_token_export = true and give <output_dir>/token_exports",
    ),
    Answer(
        "a capture store of tinker-cookbook",
        lambda file: file.kind == "sqlite" and "wire_rows" in file.keys,
        "training_logprobs: forward_backward outputs are not stored",
        "dump with DumpWriter where training_logprobs_D is at hand: docs/trainers/others.md",
    ),
    Answer(
        "a capture of tinker-cookbook",
        lambda file: file.kind == "jsonl" and "samples" in file.keys and "model_path" in file.keys,
        "training_logprobs: forward_backward outputs are not stored",
        "dump with DumpWriter where training_logprobs_D is at hand: docs/trainers/others.md",
    ),
    Answer(
        "AReaL's rollout log",
        _jsonl("task_id", "seqlen", "head_version"),
        "log-probs of either side: it holds lengths, versions and text",
        "dump with DumpWriter in the actor, where prox_logp is at hand: docs/trainers/others.md",
        "text-only",
    ),
    Answer(
        "TRL's logged completions",
        lambda file: file.kind == "parquet" and file.keys >= {"completion", "prompt"},
        "log-probs of either side: it holds text, rewards and advantages",
        "add the subclass of docs/trainers/trl.md (one line in your script)",
        "text-only",
    ),
    Answer(
        "ms-swift's logged completions",
        lambda file: (
            file.kind == "jsonl" and "completion" in file.keys and isinstance(file.row.get("completion"), list)
        ),
        "log-probs of either side: it holds text",
        "dump with DumpWriter in the loss: docs/trainers/others.md",
        "text-only",
    ),
    Answer(
        "verl's generation log (trainer.rollout_data_dir)",
        _jsonl("input", "output", "score"),
        "token ids and log-probs of either side: it holds text and scores",
        "add the hook of docs/trainers/verl.md",
        "text-only",
    ),
    Answer(
        "a log of rollouts",
        _text,
        "log-probs of either side: it holds text",
        "dump with DumpWriter: docs/trainers/ has the lines for your trainer",
        "text-only",
    ),
)


def answer(file: Sniffed, where: str, *, count: bool = True) -> DumpError | None:
    """The error that helps the owner of a file that no format can read; None for a file that means nothing to us.

    Args:
        file: a file as sniffed.
        where: its name for messages.
        count: also open rollout files that can be counted safely, to say what they hold.
    """
    for entry in ANSWERS:
        if entry.test(file):
            held = _held(file, where) if count and entry.test is _rollout_data else ""
            return DumpError(
                where,
                f"expected train and rollout log-probs, found {entry.what}{held}",
                f"it lacks {entry.lacks}",
                entry.way,
                code=entry.code,
            )
    if file.kind == "pickle":
        blocked = sorted(name for name in file.names if name not in TENSOR_NAMES)
        if blocked:
            return refusal(where, blocked[0])
    if file.kind == "torch":
        from rollout_is.dumps.foreign import torchfile

        try:
            torchfile.check(file.path, where)
        except DumpError as error:
            return error
    return None


def _held(file: Sniffed, where: str) -> str:
    """What a rollout file of slime or miles holds, in numbers."""
    import math

    from rollout_is.dumps.foreign import torchfile

    try:
        samples = torchfile.load(file.path, where)["samples"]
        tokens, total = 0, 0.0
        for sample in samples:
            logprobs = [float(value) for value in sample["rollout_log_probs"] or []]
            mask = sample.get("loss_mask") or [1] * len(logprobs)  # None means that every token counts
            kept = [value for value, keep in zip(logprobs, mask, strict=True) if keep]
            tokens += len(kept)
            total += math.fsum(kept)
    except (DumpError, KeyError, TypeError, ValueError):  # the answer stands without the numbers
        return ""
    mean = f", mean rollout log-prob {total / tokens:.9g}" if tokens else ""
    return f" ({len(samples)} sequences, {tokens} response tokens{mean})"
