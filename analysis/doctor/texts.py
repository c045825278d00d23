"""What ``explain ID`` says about each finding of the doctor: what it is, who has met it, how to fix it. Plain data, no imports."""

from __future__ import annotations

from collections.abc import Mapping

Page = tuple[tuple[str, str], ...]

# id -> (what it is, how it is told, who has met it, fix in the trainer, fix in the engine)
_TEXTS: dict[str, tuple[str, str, str, str, str]] = {
    "alignment.lag": (
        "one column is shifted by one or more positions against the other, inside every sequence touched",
        "|train[i] - rollout[i+k]| is far smaller at a lag k other than 0; searched from -3 to +3, never across a boundary",
        "prime-rl#1525, ms-swift#8196 (fixed by #8427): a ratio near 3 was taken for routing noise",
        "decide for both columns whether position i scores token i or token i+1, and roll inside the sequence only",
        "drop or keep the log-prob of the first token as the trainer does",
    ),
    "alignment.lag_varies": (
        "each sequence has a lag of its own",
        "the best lag is clear in most sequences, but not the same",
        "eval-protocol/python-sdk#457: rows one longer after text was tokenised again",
        "check the lengths of both columns per sequence before packing, and refuse a sequence where they differ",
        "return token ids with the log-probs, and train on those ids",
    ),
    "alignment.lag_inside": (
        "sequences are aligned at their start and shifted from some token on",
        "the first stretch of the sequence fits at lag 0, later ones at another lag",
        "verl#3720, #3960, rllm#272, NeMo Gym#1416: decoding and encoding again changed the tokens",
        "keep the sampled token ids through the whole pipeline; never build them again from text",
        "return the ids of every turn",
    ),
    "alignment.growing": (
        "the offset is 0 in the first sequence of a pack, 1 in the second, 2 in the third, and so on",
        "rollout values fit when sequence j is read j positions earlier (or later)",
        "prime-rl#605 and #606: each sample carried length - 1 values, patched with zeros after packing",
        "pad each sequence's log-probs to its token count before packing, not the pack afterwards",
        "say in the response whether the first token has a log-prob",
    ),
    "alignment.first_token": (
        "the first valid token is wrong in nearly every sequence, and only that one",
        "three quarters of the first tokens are worse than the worst twentieth of all others",
        "marin#1879: the first token was always the worst",
        "check that the mask starts at the first sampled token; the log-prob there is conditioned on the last prompt token",
        "return a log-prob for the first sampled token",
    ),
    "alignment.last_token": (
        "the last valid token is wrong in nearly every sequence, and only that one",
        "three quarters of the last tokens are worse than the worst twentieth of all others",
        "labels rolled over the end of a row; stop tokens that one side appends",
        "check the mask's end and the shift of labels at the end of each sequence",
        "say whether the stop token is scored",
    ),
    "alignment.periodic": (
        "single wrong tokens come back at a fixed distance",
        "four fifths of all outliers share one residue modulo one period",
        "verl#6068, fixed in #6268: labels were rolled after the sequence-parallel split, so each slice's end wrapped round",
        "shift labels before splitting over sequence or context parallel ranks, or exchange one token at the seams",
        "look for a chunk of prefill of that width",
    ),
    "alignment.unrelated": (
        "the two columns do not correlate at any lag: they are not the same quantity",
        "correlation below 0.3 at every lag from -3 to +3; healthy engines stay above 0.87 even in fp8",
        "maxtext#2103: each token was scored by logits that had already seen it",
        "check that position i is scored by the logits of position i-1, and join both sides by sequence id",
        "check that requests and responses are paired by id, not by arrival",
    ),
    "scale.temperature": (
        "one side is the log-softmax of logits divided by a temperature, the other is not",
        "both regressions between the sides have a slope on the same side of 1; the far edge of train / rollout is the ratio",
        "trl#4159, #4163, #4873, open-instruct#1678, miles#68, AReaL#581: ratios of 2 at the first token with T = 0.6",
        "divide logits by the sampling temperature before log-softmax when old log-probs are computed",
        "ask for processed log-probs (after temperature), or sample at 1",
    ),
    "scale.divided": (
        "log-probs, not logits, were divided by a temperature: the result is not normalised",
        "train is a constant times rollout, with nothing left over",
        "a shortcut for temperature scaling; seen where only the sampled log-prob is at hand",
        "scale logits and normalise afterwards",
        "scale logits and normalise afterwards",
    ),
    "scale.log_base": (
        "one side uses another base of the logarithm",
        "train is a constant times rollout, and the constant is ln 2, ln 10 or its inverse",
        "tools that report bits; base 10 in ARPA-like formats",
        "multiply by ln(base)",
        "multiply by ln(base)",
    ),
    "scale.probabilities": (
        "one column holds probabilities",
        "values between 0 and 1 whose logarithm matches the other side",
        "exp() called once too often before the dump",
        "dump log-probs",
        "dump log-probs",
    ),
    "scale.sign": (
        "one column holds negative log-likelihoods",
        "strong negative correlation, one side positive",
        "cross-entropy with reduction none was dumped as log-prob",
        "negate it",
        "negate it",
    ),
    "scale.metadata": (
        "the dump says itself that the sides used other sampling settings",
        "metadata train_temperature against rollout_temperature, top_p and the like",
        "slime#2297, #2197, #2085, miles#1190, #1345: scoring paths hard-wired to temperature 0",
        "score with the settings of the rollout",
        "record the settings of every request",
    ),
    "support.truncated": (
        "the rollout side is normalised over the kept set of top-p, top-k or min-p, the train side over the full vocabulary",
        "the log-ratio is log S for every token: nearly never above 0, bounded below, mean ratio S clearly under 1",
        "trl#6789, #7269 (mean ratio .896 at top-p .8), verl#6240, ms-swift#8442, vllm#42259, slime#2102: sequence weights vanish",
        "apply the same kept set before log-softmax, or correct by S",
        "return log-probs before truncation, or sample without it",
    ),
    "support.top_candidate": (
        "the log-prob of the most likely candidate was recorded instead of that of the sampled token",
        "rollout is never below train; equal where the top token was sampled, far above elsewhere",
        "engines list candidates by rank; the sampled token is not always the first",
        "take the entry whose id is the sampled token's",
        "return the sampled token's log-prob in a field of its own",
    ),
    "placeholder.all": (
        "one side is one constant at every valid token while the other varies",
        "all values equal, contradicted by the other side",
        "llama.cpp#27972, vllm#17876: 0.0 everywhere with speculative decoding",
        "refuse a batch whose rollout log-probs are constant",
        "check that log-probs survive the decoding path in use",
    ),
    "placeholder.whole": (
        "whole sequences hold one constant",
        "runs of one value that span a sequence, contradicted by the other side",
        "SkyRL#1870, slime#1995: log-probs dropped on one path and filled in",
        "mark such sequences as missing and mask them",
        "return log-probs on every path, retries included",
    ),
    "placeholder.start": (
        "a block of one constant at the start of each sequence: the prompt is in the mask",
        "runs from the first valid token on, contradicted by the other side",
        "verl#2543: the attention mask was used as response mask",
        "use the response mask (and the tool mask)",
        "nothing",
    ),
    "placeholder.last": (
        "the last valid token was never scored",
        "one constant at the last valid token only, contradicted by the other side",
        "off-by-one of labels at the end of a row",
        "end the mask one token earlier, or score the last token",
        "return a log-prob for the stop token",
    ),
    "placeholder.tail": (
        "from some position on, a side holds one constant to the end of the sequence",
        "runs that touch the end, contradicted by the other side",
        "rollouts that were cut off and padded; log-prob lists shorter than the tokens",
        "mask what has no log-prob",
        "return as many log-probs as tokens",
    ),
    "placeholder.span": (
        "spans of one constant inside the response: text that the model did not write is in the mask",
        "runs of four and more tokens, contradicted by the other side",
        "SkyRL#354, miles#2476: 0.0 at tool and observation tokens, tens of nats of fake disagreement",
        "mask tool and observation tokens",
        "return null, not 0.0, for tokens that were not sampled",
    ),
    "placeholder.stray": (
        "one constant at single tokens here and there",
        "a repeated value that the other side contradicts by more than a nat; an honest 0.0 of a certain token is not contradicted",
        "missing values neutralised on the way: trl#5001, vllm#17286 (many legitimate zeros, for contrast)",
        "keep missing values as NaN or null, and mask them",
        "never write a number for a log-prob that was not computed",
    ),
    "missing.nonfinite": (
        "NaN or infinite log-probs at valid tokens",
        "counted and placed; every statistic leaves them out",
        "trl#5001, #6166, #6266, #6868; NeMo#2180: a weight update raced a forward pass; slime#2297: division by temperature 0",
        "stop or mask the whole sequence; one NaN usually means that the whole row of logits was garbage",
        "do not update weights under a running forward pass; treat temperature 0 as greedy",
    ),
    "copies.identical": (
        "both columns agree bit for bit at every valid token",
        "all sequences have differences of exactly 0",
        "verl#4070 (metrics computed in the mode where both are the same), verl#7196, Megatron-LM#76",
        "compute the trainer's own pass before comparing",
        "nothing; bitwise-consistent stacks exist, and then this is right",
    ),
    "copies.zero": (
        "both columns are 0 at every valid token",
        "all values are exactly 0",
        "safetensors#762, #764: a file rewritten under an open map reads as zeros",
        "write dumps to a new name and rename them",
        "nothing",
    ),
    "copies.some_ranks": (
        "both columns agree bit for bit on some ranks only",
        "all sequences of those ranks have differences of exactly 0",
        "verl#4070",
        "check the code path of those ranks",
        "nothing",
    ),
    "copies.some_steps": (
        "both columns agree bit for bit at some steps only",
        "all sequences of those steps have differences of exactly 0",
        "verl#4070",
        "check what skips the trainer's pass at those steps",
        "nothing",
    ),
    "copies.some_sequences": (
        "some sequences agree bit for bit while the others do not",
        "sequences with enough log-prob to differ have differences of exactly 0",
        "SkyRL#1870, #1880, slime#1995: a missing column replaced by the other one",
        "mark missing log-probs as missing",
        "return log-probs on every path",
    ),
    "copies.train_pass": (
        "the train column equals another scoring pass bit for bit",
        "all tokens equal",
        "miles#1151, slime#2114: current taken for old log-probs, or a pass modified in place",
        "check which pass each name stands for",
        "nothing",
    ),
    "copies.rollout_pass": (
        "the rollout column equals another scoring pass bit for bit",
        "all tokens equal",
        "slime#179: which log-probs are compared",
        "check which pass each name stands for",
        "nothing",
    ),
    "copies.closer_to_ref": (
        "the engine's log-probs match the reference model, not the trained one",
        "rollout to reference is less than half of rollout to train",
        "slime#1695, #2224, #2380: after a resume the engine still held the reference weights",
        "push weights to the engine after loading a checkpoint",
        "report the version of the weights with every response",
    ),
    "passes.odd_one_out": (
        "of three scoring passes two agree and one differs",
        "the distance of the two is under a fifth of that of train and rollout",
        "eval-protocol#457; NeMo#2141: decode against prefill of one engine 322x, prefill against trainer 1.03",
        "if train is the odd one: look at its packing, position ids and masks",
        "if rollout is the odd one: look at decode against prefill",
    ),
    "where.rank": (
        "some ranks are far worse than the rest",
        "three times the others in mean and median, six standard errors apart",
        "NeMo#2180, vime#66: one engine of many",
        "check that all engines got the weights",
        "restart that engine; compare its configuration (RoPE base, dtype, attention backend)",
    ),
    "where.step": (
        "the mismatch jumps at a step",
        "every step after it is worse than every step before it; or single steps stand out",
        "trl#5312 (.010 to .201 with sleep mode), slime#1695, open-instruct#1627: weights not updated",
        "compare the version of the weights on both sides at that step",
        "check that the weight update is applied, and that caches are dropped with it",
    ),
    "where.sequences": (
        "a share of the sequences is catastrophic, the rest is fine",
        "two humps in the histogram of sequence means, with little between them",
        "NeMo#2100, #2141, #4243; vllm#38711, #53488: 15 to 20 % of sequences, deterministic per prompt",
        "re-score them, and add the pass as logprobs.prefill",
        "compare decode and prefill of the same engine on the listed sequences; switch off draft heads",
    ),
    "where.length": (
        "long sequences are far worse than short ones",
        "three times in the mean of sequence means, six standard errors apart",
        "Precision-RL#10, Megatron-LM#76",
        "check position ids and RoPE scaling beyond the training length",
        "check the maximal length and its RoPE scaling",
    ),
    "where.position": (
        "the mismatch depends on the position in the response, at equal token probability too",
        "three times between early and late positions, six standard errors apart",
        "prime-rl#1650, SkyRL#1836 (prefix cache kept across updates: first tokens), Megatron-LM#76 (grows with length)",
        "record policy_version per token",
        "drop the prefix cache with each weight update",
    ),
    "where.confidence": (
        "the mismatch changes along the response because the tokens do",
        "the change is gone at equal token probability",
        "prime-rl#1835: KL divided by entropy",
        "nothing",
        "nothing",
    ),
    "where.version": (
        "the mismatch depends on the policy version that sampled the token",
        "three times between versions, six standard errors apart",
        "labs-molt#124 (1e-4 mixed against 1e-6), xtuner#2003, prime-rl#2957",
        "score each token under the version that sampled it, or mask older ones",
        "report the version per token",
    ),
    "tails.routing": (
        "most tokens agree as in a dense model, a few per cent are far off",
        "99th percentile of |d| thirty times the 75th, more than 0.5 % of tokens beyond a factor of two",
        "Megatron-LM#4168, AReaL#1207, prime-rl#2808: experts chosen differently",
        "replay the engine's routing",
        "record routing with the tokens",
    ),
    "tails.few_tokens": (
        "a handful of tokens carries the total",
        "two in a thousand tokens hold half of the sum of |d|, with an empty decade below them",
        "verl#7519: single spikes carry the mean",
        "look at them (analyze --top 20) before looking at means",
        "look for fills and seams at those places",
    ),
    "weights.mean": (
        "the mean importance weight is not 1",
        "E[w] = 1 whenever rollout is the log-prob of the distribution that was sampled, however stale the trainer; six standard errors",
        "trl#7269 (.896 at top-p .8 against .995), open-instruct#1678",
        "do not correct with these weights before the cause is found",
        "record the log-prob of the distribution that is really sampled: after temperature, truncation and penalties",
    ),
    "numerics.positive": (
        "log-probs above 0",
        "more than 1e-6 above 0",
        "maxtext#5231 (+.03 to +.125), metaseq#87: logit minus logsumexp in bf16",
        "use a fused log-softmax in float32",
        "use a fused log-softmax in float32",
    ),
    "numerics.resolution": (
        "a side is stored in 16 bits, so that small differences are rounding",
        "rounding step at the median log-prob",
        "slime#245, prime-rl#568, maxtext#5231",
        "store float32",
        "store float32",
    ),
}


def findings() -> Mapping[str, Page]:
    """Pages by finding id, for ``explain``.

    >>> findings()["alignment.lag"][0][0]
    'what'
    """
    labels = ("what", "told by", "met by", "in the trainer", "in the engine")
    pages = {key: tuple(zip(labels, text, strict=True)) for key, text in _TEXTS.items()}
    return {key: tuple((label, text) for label, text in page if text != "nothing") for key, page in pages.items()}
