"""tiny_lm: a small transformer, trained here on text that Python ships, really sampled and really scored.

The rollout side is a decoder in bfloat16 with a key/value cache, one token a step, as an inference engine works. The train
side is one float32 forward over packed sequences with positions reset at each boundary, as a trainer works. Same weights:
what differs is arithmetic alone, so the noise in the dump is real.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from shardfile import offsets, shard_path, write
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 20264
WIDTH, HEADS, LAYERS, CONTEXT = 96, 4, 2, 160
PROMPT, RESPONSE = 16, 128
PACK = 1024
STEPS, RANKS, PROMPTS, SAMPLES = range(1, 4), 2, 4, 4
CHARS = ["\x00", "\n", *map(chr, range(32, 127))]  # pad, end of paragraph, printable
PAD, END = 0, 1


def paragraphs() -> list[str]:
    """Python's help topics, one paragraph a line, ASCII only."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    lines = (re.sub(r"\s+", " ", block).strip() for block in text.split("\n\n"))
    return [line for line in lines if len(line) > 2 * PROMPT and line.isascii() and line[0].isalpha()]


def encode(text: str) -> list[int]:
    return [CHARS.index(c) for c in text]


class Block(nn.Module):
    """Pre-norm attention and MLP. With a cache it sees one new position, without one a whole masked pack."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None, cache: list[tuple[Tensor, Tensor]] | None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(WIDTH, dim=-1)
        )
        if cache is not None:
            if cache:
                k, v = torch.cat([cache[0][0], k], 2), torch.cat([cache[0][1], v], 2)
            cache[:] = [(k, v)]
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(CHARS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARS))

    def forward(
        self, ids: Tensor, places: Tensor, mask: Tensor | None, caches: list[list[tuple[Tensor, Tensor]]] | None = None
    ) -> Tensor:
        x = self.token(ids) + self.place(places)
        for i, block in enumerate(self.blocks):
            x = block(x, mask, caches[i] if caches is not None else None)
        return self.head(self.norm(x))


def train(model: Model, corpus: Tensor, steps: int, generator: torch.Generator, rate: float) -> float:
    """Next-character training on random windows; the last loss in nats."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    length = PROMPT + RESPONSE
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    places = torch.arange(length)
    loss = torch.zeros(())
    for _ in range(steps):
        first = torch.randint(len(corpus) - length - 1, (20, 1), generator=generator)
        window = corpus[first + torch.arange(length + 1)]
        logits = model(window[:, :-1], places, causal)
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss.detach())


@dataclass
class Sample:
    group: int
    ids: list[int]  # prompt and response
    rollout: list[float]  # of the response
    prompt: int


@torch.no_grad()
def roll_out(model: Model, prompts: list[list[int]], groups: list[int], generator: torch.Generator) -> list[Sample]:
    """Sample a response to each prompt at temperature 1 in bfloat16, one position a step over a key/value cache."""
    engine = Model().bfloat16()
    engine.load_state_dict(model.state_dict())
    samples = [Sample(g, list(p), [], len(p)) for g, p in zip(groups, prompts, strict=True)]
    caches: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(LAYERS)]
    running = [True] * len(samples)
    column = torch.tensor([p[:1] for p in prompts])
    for place in range(PROMPT + RESPONSE - 1):
        logits = engine(column, torch.tensor([place]), None, caches)
        logprobs = logits[:, -1].float().log_softmax(-1)
        if place + 1 < PROMPT:
            column = torch.tensor([[p[place + 1]] for p in prompts])
            continue
        column = logprobs.exp().multinomial(1, generator=generator)
        for i, sample in enumerate(samples):
            if running[i]:
                token = int(column[i])
                sample.ids.append(token)
                sample.rollout.append(float(logprobs[i, token]))
                running[i] = token != END
    return samples


@torch.no_grad()
def score_pack(model: Model, ids: Tensor, lengths: list[int], dtype: torch.dtype) -> Tensor:
    """Log-prob of every token of a pack given those before it in its own segment; 0 at the first of a segment."""
    scorer = Model().to(dtype)
    scorer.load_state_dict(model.state_dict())
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    places = torch.cat([torch.arange(n) for n in lengths])
    mask = (segment[:, None] == segment[None, :]).tril()
    logprobs = scorer(ids[None], places % CONTEXT, mask)[0].float().log_softmax(-1)
    out = torch.zeros(len(ids))
    out[1:] = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
    out[places == 0] = 0.0
    return out


def packs_of(samples: list[Sample]) -> list[list[Sample]]:
    """Samples in order, a new pack when the next one no longer fits."""
    packs: list[list[Sample]] = [[]]
    for sample in samples:
        if sum(len(s.ids) for s in packs[-1]) + len(sample.ids) > PACK - 8:
            packs.append([])
        packs[-1].append(sample)
    return packs


def shard(model: Model, samples: list[Sample], known: set[str], first_id: int) -> dict[str, Tensor]:
    """Pack, score and lay out the columns. The tail of a pack is padded to a multiple of 64 as a segment of its own."""
    columns: dict[str, list[Tensor]] = {k: [] for k in ("train", "prefill", "rollout", "mask", "ids")}
    lengths: list[int] = []
    ends = [0]
    table: list[tuple[int, int, float, int, bool]] = []
    for pack in packs_of(samples):
        here = [len(s.ids) for s in pack]
        tail = -sum(here) % 64 or 64
        ids = torch.tensor([t for s in pack for t in s.ids] + [PAD] * tail)
        for s in pack:
            words = "".join(CHARS[t] for t in s.ids[s.prompt :]).split()
            reward = sum(w.strip(".,:;()") in known for w in words) / max(1, len(words))
            table.append((first_id + len(table), s.group, reward, s.prompt, False))
            columns["rollout"].append(torch.tensor([0.0] * s.prompt + s.rollout))
            columns["mask"].append(torch.arange(len(s.ids)) >= s.prompt)
        table.append((-1, -1, 0.0, 0, True))
        columns["rollout"].append(torch.zeros(tail))
        columns["mask"].append(torch.zeros(tail, dtype=torch.bool))
        columns["train"].append(score_pack(model, ids, [*here, tail], torch.float32))
        columns["prefill"].append(score_pack(model, ids, [*here, tail], torch.bfloat16))
        columns["ids"].append(ids.int())
        lengths += [*here, tail]
        ends.append(sum(lengths))
    sequence, group, reward, prompt, pad = zip(*table, strict=True)
    return {
        "train_logprobs": torch.cat(columns["train"]),
        "logprobs.prefill": torch.cat(columns["prefill"]),
        "rollout_logprobs": torch.cat(columns["rollout"]),
        "response_mask": torch.cat(columns["mask"]),
        "token_ids": torch.cat(columns["ids"]),
        "cu_seqlens": offsets(lengths),
        "cu_packs": torch.tensor(ends, dtype=torch.int32),
        "sequence_ids": torch.tensor(sequence),
        "group_ids": torch.tensor(group),
        "rewards": torch.tensor(reward, dtype=torch.float32),
        "prompt_lens": torch.tensor(prompt, dtype=torch.int32),
        "segment_is_pad": torch.tensor(pad),
    }


def tiny_lm(root: Path) -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(SEED)
    lines = paragraphs()
    corpus = torch.tensor(encode("\n".join(lines) + "\n"))
    known = {w.strip(".,:;()") for line in lines for w in line.split()}
    model = Model()
    print(f"  {sum(p.numel() for p in model.parameters())} weights, {len(corpus)} characters")
    print(f"  loss {train(model, corpus, 1200, generator, 3e-3):.2f}")
    next_id, next_group = 0, 0
    for step in STEPS:
        train(model, corpus, 8, generator, 3e-4)  # the policy moves on between steps, as in a run
        for rank in range(RANKS):
            chosen = torch.randint(len(lines), (PROMPTS,), generator=generator).tolist()
            prompts = [encode(lines[i][:PROMPT]) for i in chosen for _ in range(SAMPLES)]
            groups = [next_group + i for i in range(PROMPTS) for _ in range(SAMPLES)]
            samples = roll_out(model, prompts, groups, generator)
            tensors = shard(model, samples, known, next_id)
            next_id += len(samples)
            next_group += PROMPTS
            write(
                shard_path(root / "tiny_lm", step, rank),
                tensors,
                {
                    "format": "rollout-is/1",
                    "layout": "packed",
                    "step": str(step),
                    "rank": str(rank),
                    "world_size": str(RANKS),
                    "train_policy": "current",
                    "train_temperature": "1.0",
                    "rollout_temperature": "1.0",
                    "train_dtype": "float32",
                    "rollout_dtype": "bfloat16",
                    "run": "tiny-lm",
                    "trainer": "sample",
                },
            )
