"""A real trainer: TRL's GRPO on a tiny model, its log-probs dumped by the class of docs/trainers/trl.md, its own metrics as the oracle.

Needs requirements-trainers.txt (``make test-trainers``); the model, the tokenizer and the data are built here, on the CPU. The
engine is a copy of the model in bfloat16 behind the interface that TRL calls vLLM through, so the two sides really differ.
"""

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is not installed: make test-trainers installs requirements-trainers.txt")

import datasets
import tokenizers
import torch
import transformers
import trl

from rollout_is import analyze
from rollout_is.dumps.reader import open_shard
from rollout_is.dumps.scan import scan

pytestmark = pytest.mark.filterwarnings("default")  # TRL's dependencies warn; those are not ours to fail on

PAGE = Path(__file__).parents[2] / "docs" / "trainers" / "trl.md"
WORDS = [f"w{i}" for i in range(60)]


def documented_class():
    """The class as the page shows it."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    namespace = {}
    exec(compile(source, str(PAGE), "exec"), namespace)  # noqa: S102  our own page
    return namespace["DumpingGRPOTrainer"]


def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS) + 3,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.4,  # far from uniform, or both engines would agree on everything
    )
    return transformers.LlamaForCausalLM(config)


class HalfPrecisionEngine:
    """Samples with a bfloat16 copy of the policy and reports its log-probs, as TRL's vLLM client does."""

    def __init__(self, policy, max_tokens, temperature):
        self.policy, self.max_tokens, self.temperature = policy, max_tokens, temperature
        self.copy = model()
        self.generator = torch.Generator().manual_seed(3)

    def sync_weights(self):
        self.copy.load_state_dict(self.policy.state_dict())
        self.copy.to(torch.bfloat16).eval()

    @torch.no_grad()
    def generate(self, prompts, images, num_generations, profiler):
        completions, logprobs = [], []
        for prompt in prompts:
            ids, scores = list(prompt), []
            while len(scores) < self.max_tokens and (not scores or ids[-1] != 1):
                logits = self.copy(torch.tensor([ids])).logits[0, -1].float() / self.temperature
                distribution = logits.log_softmax(-1)
                ids.append(int(torch.multinomial(distribution.exp(), 1, generator=self.generator)))
                scores.append([float(distribution[ids[-1]])])
            completions.append(ids[len(prompt) :])
            logprobs.append(scores)
        return prompts, completions, logprobs, None


def make(cls, folder, mode, **settings):
    config = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        max_steps=3,
        learning_rate=1e-2,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        temperature=0.9,
        disable_tqdm=True,
        seed=1,
    )
    data = datasets.Dataset.from_dict({"prompt": [f"w{i} w{2 * i % 60} w{7 * i % 60}" for i in range(32)]})
    policy = model()
    trainer = cls(
        model=policy,
        reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        args=config,
        train_dataset=data,
        processing_class=tokenizer(),
        **settings,
    )
    # The correction belongs to vLLM in TRL's settings; here the engine above stands behind the same interface.
    trainer.use_vllm = True
    trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_mode = mode
    trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = None, 1e9
    trainer.vllm_mode = "colocate"
    trainer._last_loaded_step = -1
    trainer.vllm_generation = HalfPrecisionEngine(policy, 12, 0.9)
    return trainer


@pytest.mark.parametrize(("mode", "level"), [("token_truncate", "token"), ("sequence_truncate", "sequence")])
def test_our_figures_are_the_trainers_own(tmp_path, mode, level):
    trainer = make(documented_class(), tmp_path, mode, dump_dir=tmp_path / "dump")
    trainer.train()
    trainer.dump.close()
    logged = [entry for entry in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in entry]
    assert len(logged) == 3

    shards = scan(tmp_path / "dump").shards
    assert [info.step for info in shards] == [0, 1, 2]
    for info, theirs in zip(shards, logged, strict=True):
        summary = analyze([info.path])

        def ours(name, summary=summary):
            return summary.get(f"masked.{name}").value

        assert summary.coverage["sequences"] == 8
        assert ours("mismatch.mismatch_logprob_abs_diff") > 1e-4  # the engines differ: the comparison is not of zeros
        pairs = {
            "sampling/sampling_logp_difference/mean": ours("mismatch.mismatch_logprob_abs_diff"),
            "sampling/sampling_logp_difference/max": ours("mismatch.mismatch_logprob_abs_diff_max"),
            "sampling/importance_sampling_ratio/mean": ours(f"{level}.rollout_is_mean"),
            "sampling/importance_sampling_ratio/min": ours(f"{level}.rollout_is_min"),
            "sampling/importance_sampling_ratio/max": ours(f"{level}.rollout_is_max"),
        }
        stored = json.loads(info.metadata["trainer_metrics"])
        for key, value in pairs.items():
            assert value == pytest.approx(theirs[key], rel=2e-5, abs=1e-6), key  # TRL computes in float32
            assert stored[key] == pytest.approx(theirs[key], rel=1e-6, abs=1e-9)  # and the shard carries what it logged


def test_the_tokens_are_the_completions(tmp_path):
    trainer = make(documented_class(), tmp_path, "token_truncate", dump_dir=tmp_path / "dump", every=2)
    trainer.train()
    trainer.dump.close()
    shards = scan(tmp_path / "dump").shards
    assert [info.step for info in shards] == [0, 2]
    with open_shard(shards[0]) as shard:
        tokens = shard.read("token_ids", 0, shards[0].positions)
        mask = shard.read("mask", 0, shards[0].positions) != 0
    assert 0 not in tokens[mask].tolist()  # no padding token is valid
    assert shards[0].metadata["trainer"] == "trl"
