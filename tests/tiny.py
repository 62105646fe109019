"""Tiny random checkpoints of the three families, for tests that compare with transformers or with the
oracle."""

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCABULARY = 97


def tiny_model(family: str, seed: int = 0, **changes):
    """A random transformers model, float32, with weights large enough that its logits differ clearly."""
    config_class, model_class = FAMILIES[family]
    values = dict(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        tie_word_embeddings=family != "qwen2",
        bos_token_id=1,
        eos_token_id=2,
    )
    if family == "qwen2":
        values |= dict(hidden_size=64)
    torch.manual_seed(seed)
    model = model_class(config_class(**(values | changes))).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.6, 1.4)
            else:
                parameter.normal_(0, 0.35 if "embed" in name else 0.18)
    return model


def tiny_folder(folder: Path, family: str, seed: int = 0, **changes) -> Path:
    """The same as a checkpoint folder, without tokenizer files."""
    tiny_model(family, seed, **changes).save_pretrained(folder)
    return folder


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
