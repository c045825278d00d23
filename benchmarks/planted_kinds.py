"""Faults to plant: each takes a healthy dump and a size, and changes it as the public reports describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from planted import Dump, Shard, log_softmax, pick, sample

Fault = Callable[[Dump, list[Shard]], None]


def lag(dump: Dump, shards: list[Shard]) -> None:
    """One side shifted by 1 to 3 inside each sequence."""
    k = int(dump.rng.choice([-3, -2, -1, 1, 2, 3]))
    for s in shards:
        r = s.get("rollout")
        for i in s.sequences:
            s.set("rollout", i, np.roll(r[i], k))


def lag_varies(dump: Dump, shards: list[Shard]) -> None:
    """A lag of its own for each sequence."""
    for s in shards:
        r = s.get("rollout")
        for i in s.sequences:
            s.set("rollout", i, np.roll(r[i], int(dump.rng.choice([-2, -1, 1, 2, 3]))))


def lag_inside(dump: Dump, shards: list[Shard]) -> None:
    """A value lost in the first third of most sequences: aligned before it, shifted after."""
    for s in shards:
        r = s.get("rollout")
        for i in s.sequences:
            cut = min(len(i) // 2, int(dump.rng.integers(135, 200)))
            s.set("rollout", i[cut:], np.append(r[i[cut:]][1:], -1.5))


def growing(dump: Dump, shards: list[Shard]) -> None:
    """Each sequence lost its last value before packing; the pack was filled up with zeros."""
    for s in shards:
        for a, b in zip(s.packs[:-1], s.packs[1:], strict=True):
            inside = [(int(x), int(y)) for x, y in zip(s.cu[:-1], s.cu[1:], strict=True) if a <= x and y <= b]
            kept = np.concatenate([s.rollout[x : y - 1] for x, y in inside])
            s.rollout[a:b] = np.append(kept, np.zeros(int(b - a) - len(kept)))


def first_token(dump: Dump, shards: list[Shard]) -> None:
    """The first valid token of every sequence belongs to another position."""
    for s in shards:
        i = np.array([x[0] for x in s.sequences])
        s.set("rollout", i, s.get("rollout")[i] - dump.rng.uniform(0.8, 6, len(i)))


def last_token(dump: Dump, shards: list[Shard]) -> None:
    """The last valid token of every sequence is wrong."""
    for s in shards:
        i = np.array([x[-1] for x in s.sequences])
        s.set("rollout", i, s.get("rollout")[i] - dump.rng.uniform(0.8, 6, len(i)))


def periodic(dump: Dump, shards: list[Shard]) -> None:
    """One wrong train value at the end of every slice of a split."""
    period = int(dump.rng.choice([128, 256, 500]))
    for s in shards:
        i = np.flatnonzero(s.at % period == period - 1)
        s.set("train", i, s.get("train")[i] - dump.rng.uniform(3, 9, len(i)))


def unrelated(dump: Dump, shards: list[Shard]) -> None:
    """The rollout rows of each shard in another order."""
    for s in shards:
        s.set("rollout", np.arange(len(s.at)), dump.rng.permutation(s.get("rollout")))


def _temperature(dump: Dump, shards: list[Shard], tempered: str) -> None:
    t = float(dump.rng.choice([0.5, 0.6, 0.7, 0.8, 1.3, 1.5]))
    for s in shards:
        sharp = log_softmax(s.logits / t)
        s.token = sample(dump.rng, sharp)
        noisy = s.logits + s.noise
        if tempered == "train":
            s.set("train", np.arange(len(s.at)), pick(log_softmax(noisy / t), s.token))
            s.set("rollout", np.arange(len(s.at)), pick(log_softmax(s.logits), s.token))
        else:
            s.set("train", np.arange(len(s.at)), pick(log_softmax(noisy), s.token))
            s.set("rollout", np.arange(len(s.at)), pick(sharp, s.token))


def temperature_train(dump: Dump, shards: list[Shard]) -> None:
    """Sampled at T, trainer at T, engine reports raw log-probs."""
    _temperature(dump, shards, "train")


def temperature_rollout(dump: Dump, shards: list[Shard]) -> None:
    """Sampled and reported at T, trainer at 1."""
    _temperature(dump, shards, "rollout")


def divided(dump: Dump, shards: list[Shard]) -> None:
    """Log-probs divided by a temperature after the softmax."""
    t = float(dump.rng.choice([0.6, 0.7, 0.8, 1.25]))
    for s in shards:
        s.set("rollout", np.arange(len(s.at)), s.get("rollout") / t)


def log_base(dump: Dump, shards: list[Shard]) -> None:
    """Base 2 or 10 on one side."""
    base = float(dump.rng.choice([2.0, 10.0]))
    for s in shards:
        s.set("rollout", np.arange(len(s.at)), s.get("rollout") / np.log(base))


def probabilities(dump: Dump, shards: list[Shard]) -> None:
    """exp() applied on one side."""
    for s in shards:
        s.set("rollout", np.arange(len(s.at)), np.exp(s.get("rollout")))


def negated(dump: Dump, shards: list[Shard]) -> None:
    """Negative log-likelihoods on one side."""
    for s in shards:
        s.set("rollout", np.arange(len(s.at)), -s.get("rollout"))


def truncated(dump: Dump, shards: list[Shard]) -> None:
    """Top-p sampling, log-probs normalised over the kept set."""
    top_p = float(dump.rng.choice([0.7, 0.8, 0.9, 0.95]))
    for s in shards:
        log_p = log_softmax(s.logits)
        order = np.argsort(-log_p, axis=1)
        ranked = np.take_along_axis(np.exp(log_p), order, axis=1)
        keep = np.zeros(log_p.shape, bool)
        np.put_along_axis(keep, order, np.cumsum(ranked, axis=1) - ranked < top_p, axis=1)
        kept = np.where(keep, log_p, -np.inf)
        kept -= np.log(np.where(keep, np.exp(log_p), 0).sum(axis=1, keepdims=True))
        s.token = sample(dump.rng, kept)
        s.set("rollout", np.arange(len(s.at)), pick(kept, s.token))
        s.set("train", np.arange(len(s.at)), pick(log_softmax(s.logits + s.noise), s.token))


def top_candidate(dump: Dump, shards: list[Shard]) -> None:
    """The log-prob of the most likely candidate instead of that of the sampled token."""
    for s in shards:
        s.set("rollout", np.arange(len(s.at)), log_softmax(s.logits).max(axis=1))


def zeros_stray(dump: Dump, shards: list[Shard]) -> None:
    """0.0 at 1 to 10 % of tokens."""
    share = dump.rng.uniform(0.01, 0.1)
    for s in shards:
        s.set("rollout", np.flatnonzero(dump.rng.random(len(s.at)) < share), 0.0)


def zeros_tail(dump: Dump, shards: list[Shard]) -> None:
    """0.0 from a position on in a third of the sequences."""
    for s in shards:
        for i in s.sequences[::3]:
            s.set("rollout", i[len(i) // 2 :], 0.0)


def zeros_span(dump: Dump, shards: list[Shard]) -> None:
    """Tool spans left in the mask: 0.0 on the rollout side, unlikely text on the train side."""
    for s in shards:
        for i in s.sequences[::2]:
            a = len(i) // 3
            span = i[a : a + 12]
            s.set("rollout", span, 0.0)
            s.set("train", span, -dump.rng.gamma(2.0, 2.0, len(span)))


def prompt_included(dump: Dump, shards: list[Shard]) -> None:
    """The mask covers the prompt, where the rollout side is 0."""
    for s in shards:
        prompt = np.flatnonzero(~s.mask[: s.cu[-2]])
        s.train[prompt] = -dump.rng.gamma(2.0, 1.5, len(prompt))
        s.mask[prompt] = True


def last_zero(dump: Dump, shards: list[Shard]) -> None:
    """The last valid token was never scored."""
    for s in shards:
        i = np.array([x[-1] for x in s.sequences])
        s.set("rollout", i, 0.0)
        s.set("train", i, -dump.rng.gamma(2.0, 1.5, len(i)))


def fill(dump: Dump, shards: list[Shard]) -> None:
    """A constant at 2 to 20 % of tokens."""
    value = float(dump.rng.choice([-1.0, -100.0, -9999.0, 1.0]))
    share = dump.rng.uniform(0.02, 0.2)
    for s in shards:
        s.set("rollout", np.flatnonzero(dump.rng.random(len(s.at)) < share), value)


def nan(dump: Dump, shards: list[Shard]) -> None:
    """A few NaN."""
    for s in shards:
        s.set("rollout", dump.rng.integers(0, len(s.at), 3), np.nan)


def identical(dump: Dump, shards: list[Shard]) -> None:
    """Train copied into rollout."""
    for s in shards:
        s.rollout[s.mask] = s.train[s.mask]


def both_zero(dump: Dump, shards: list[Shard]) -> None:
    """Nothing was written."""
    for s in shards:
        s.rollout[:] = s.train[:] = 0.0


def _stale(dump: Dump, s: Shard, index: Any, size: float) -> None:
    shift = dump.rng.standard_normal(s.logits.shape, np.float32) * size
    t = pick(log_softmax(s.logits + s.noise + shift), s.token)
    s.set("train", index, t[index])


def stale(dump: Dump, shards: list[Shard]) -> None:
    """Weights of other steps on the train side, on the given shards."""
    size = float(dump.rng.uniform(0.25, 0.6))
    for s in shards:
        _stale(dump, s, np.arange(len(s.at)), size)


def catastrophic(dump: Dump, shards: list[Shard]) -> None:
    """5 to 25 % of the sequences are garbage on the rollout side."""
    share = dump.rng.uniform(0.05, 0.25)
    for s in shards:
        for n, i in enumerate(s.sequences):
            if n == 0 or dump.rng.random() < share:
                s.set("rollout", i, s.get("rollout")[i] - dump.rng.gamma(4.0, 1.0, len(i)))


def versions(dump: Dump, shards: list[Shard]) -> None:
    """New weights half-way through each response, recorded."""
    for s in shards:
        version = np.zeros(len(s.mask), np.int64)
        late = np.concatenate([i[len(i) // 2 :] for i in s.sequences])
        version[s.at[late]] = 1
        early = np.setdiff1d(np.arange(len(s.at)), late)
        _stale(dump, s, early, 0.4)
        s.extra["policy_version"] = version


def position(dump: Dump, shards: list[Shard]) -> None:
    """From position 64 on the mismatch is twenty times larger."""
    for s in shards:
        late = [i[64:] for i in s.sequences if len(i) > 64]
        if late:
            _stale(dump, s, np.concatenate(late), 0.5)


def prefix(dump: Dump, shards: list[Shard]) -> None:
    """A stale prefix cache: the first 16 tokens are off."""
    for s in shards:
        _stale(dump, s, np.concatenate([i[:16] for i in s.sequences]), 0.7)


def routing(dump: Dump, shards: list[Shard]) -> None:
    """3 to 6 % of tokens routed to other experts."""
    share = dump.rng.uniform(0.03, 0.06)
    for s in shards:
        _stale(dump, s, np.flatnonzero(dump.rng.random(len(s.at)) < share), 1.5)


def reference(dump: Dump, shards: list[Shard]) -> None:
    """The engine kept sampling from the reference weights, whose log-probs are in the dump."""
    for s in dump.shards:
        s.extra["logprobs.ref"] = (s.rollout + 0.0).astype(np.float32)
        _stale(dump, s, np.arange(len(s.at)), 0.4)


# id -> the faults that must be named by it (or by an id with that prefix)
FAULTS: dict[str, tuple[Fault, ...]] = {
    "alignment.lag": (lag,),
    "alignment.lag_varies": (lag_varies,),
    "alignment.lag_inside": (lag_inside,),
    "alignment.growing": (growing,),
    "alignment.first_token": (first_token,),
    "alignment.last_token": (last_token,),
    "alignment.periodic": (periodic,),
    "alignment.unrelated": (unrelated,),
    "scale.temperature": (temperature_train, temperature_rollout),
    "scale.divided": (divided,),
    "scale.log_base": (log_base,),
    "scale.probabilities": (probabilities,),
    "scale.sign": (negated,),
    "support.truncated": (truncated,),
    "support.top_candidate": (top_candidate,),
    "placeholder": (zeros_stray, fill),
    "placeholder.tail": (zeros_tail,),
    "placeholder.span": (zeros_span,),
    "placeholder.start": (prompt_included,),
    "placeholder.last": (last_zero,),
    "missing.nonfinite": (nan,),
    "copies.identical": (identical,),
    "copies.zero": (both_zero,),
    "copies.closer_to_ref": (reference,),
    "where.sequences": (catastrophic,),
    "where.version": (versions,),
    "where.position": (position, prefix),
    "tails.routing": (routing,),
}
# faults planted on one rank, or from a step on
PARTIAL: dict[str, Fault] = {"where.rank": stale, "where.step": stale, "copies.some_ranks": identical}
