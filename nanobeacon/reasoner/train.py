"""Trains the reasoner: python -m nanobeacon.reasoner.train --out FOLDER [--seed S] [--init FOLDER]

Writes an ordinary Hugging Face folder. Everything is counted in steps, never in seconds, so a seed names
one run (up to the last bits, which the number of threads and the build of torch move). About forty minutes
on one core. Needs transformers (the test extra); knows nothing about the engine, which only reads what this
wrote.

The weights are stored in bf16 to be small; the config asks for float32 arithmetic. The shipped checkpoint is
seed 1.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanobeacon.reasoner import task

LOOK_BACK_WEIGHT = 5.0  # a look-back is one token in thirty, and the hard one
LEARNING_RATE = 2e-3
WARM_UP = 100
COOL_DOWN = 0.3  # share of the steps over which the learning rate falls to nothing


@dataclass(frozen=True)
class Stage:
    """`steps` updates on `batch` problems of `length` tokens, with or without writes."""

    steps: int
    length: int
    batch: int
    writes: bool = True


# Looking back is learnt suddenly, and sooner on short problems whose registers never change.
CURRICULUM = (
    Stage(350, 160, 24, writes=False),
    Stage(500, 384, 12),
    Stage(600, 768, 6),
    Stage(200, 1536, 3),
)
# Then once more with half the learning rate, from what was stored. Also what `--init` runs, alone.
FINE_TUNING = (
    Stage(300, 384, 12),
    Stage(400, 768, 6),
    Stage(150, 1536, 3),
)


def new_model(seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 0.6 M parameters with random weights, float32."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(task.WORDS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=task.BOS,
        eos_token_id=task.EOS,
        pad_token_id=task.EOS,
        dtype="float32",
    )
    model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.4)  # what a layer adds to the residual stream starts small
    return model


def make_batch(problems: Sequence[task.Problem], recitation: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Problems of one length -> (token ids int64 [B, S], weights float32 [B, S]: 0 for the prompt)."""
    tokens = torch.tensor([problem.prompt + problem.trace for problem in problems])
    weights = torch.ones(tokens.shape)
    weights[:, : task.PROMPT_LENGTH] = 0.0
    recited = range(1, task.RECITATION_LENGTH, 3) if recitation else ()  # these look back as well
    for row, problem in zip(weights, problems, strict=True):
        for place in (*recited, *problem.look_backs):
            row[task.PROMPT_LENGTH + place] = LOOK_BACK_WEIGHT
    return tokens, weights


def learning_rate(step: int, steps: int, peak: float) -> float:
    warm = min(1.0, (step + 1) / WARM_UP)
    cool = min(1.0, max(0.01, (1 - step / steps) / COOL_DOWN))
    return peak * warm * cool


def update(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    problems: Sequence[task.Problem],
    recitation: bool,
) -> tuple[float, float, float]:
    """One step on these problems. Returns, as before it: loss, share of look-backs right, of other tokens."""
    tokens, weights = make_batch(problems, recitation)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    target, weights = tokens[:, 1:], weights[:, 1:]
    losses = functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    loss = (losses * weights).sum() / weights.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    right = logits.argmax(-1) == target
    return loss.item(), right[weights > 1].float().mean().item(), right[weights == 1].float().mean().item()


def train(model: Qwen3ForCausalLM, stages: Sequence[Stage], seed: int, recitation: bool, peak: float) -> int:
    """Runs the stages, in place. Returns the number of tokens seen."""
    generator = random.Random(f"reasoner training {seed}")  # no integer seed: held-out problems use those
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), foreach=True)
    plan = [stage for stage in stages for _ in range(stage.steps)]
    means = {"loss": 4.0, "look-backs": 0.0, "other": 0.0}
    progress = tqdm(plan, unit="step", mininterval=5, disable=None)
    for step, stage in enumerate(progress):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(plan), peak)
        batch = [task.problem(generator, stage.length, recitation, stage.writes) for _ in range(stage.batch)]
        for name, value in zip(means, update(model, optimizer, batch, recitation), strict=True):
            means[name] += 0.05 * (value - means[name])
        shown = {name: f"{value:.4f}" for name, value in means.items()}
        progress.set_postfix(length=stage.length, **shown, refresh=False)
        if (step + 1) % 100 == 0 or step + 1 == len(plan):
            print(json.dumps({"step": step + 1, "length": stage.length, **shown}), flush=True)
    return sum(stage.length * stage.batch for stage in plan)


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """The Hugging Face folder: bf16 weights, config, a tokenizer of one token a word, greedy generation."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().to(torch.bfloat16) for name, weight in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(folder)
    ids = {"bos_token_id": task.BOS, "eos_token_id": task.EOS, "pad_token_id": task.EOS}
    words = {key.removesuffix("_id"): task.WORDS[token] for key, token in ids.items()}
    contents = {
        "tokenizer": tokenizer(),
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **words},
        "generation_config": {"do_sample": False, **ids},
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def load(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Weights that `save` wrote, in place. The tied head is not in the file."""
    with torch.no_grad():
        weights = dict(model.named_parameters())
        for name, stored in load_file(folder / "model.safetensors").items():
            weights[name].copy_(stored)


def tokenizer() -> dict:
    """tokenizer.json: words between spaces, joined with spaces again. It adds no BOS: a prompt says it."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    vocabulary = {word: token for token, word in enumerate(task.WORDS)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": task.WORDS[token], **flags} for token in (task.BOS, task.EOS)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--init", type=Path, help="folder to start from: fine-tuning only")
    parser.add_argument(
        "--no-recitation",
        action="store_true",
        help="the variant that does not start by reading out every fact",
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = new_model(options.seed)
    recitation, start, seen = not options.no_recitation, options.init, 0
    if start is None:
        seen = train(model, CURRICULUM, options.seed, recitation, LEARNING_RATE)
        start = options.out
        save(model, start)
    load(model, start)
    seen += train(model, FINE_TUNING, options.seed, recitation, LEARNING_RATE / 2)
    save(model, options.out)
    print(json.dumps({"out": str(options.out), "seed": options.seed, "tokens": seen}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
