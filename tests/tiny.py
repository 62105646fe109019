"""Tiny random checkpoints of the three families, for tests that compare with transformers or with the
oracle."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
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


def text_folder(folder: Path, family: str = "llama", seed: int = 0, eos: bool = True, **changes) -> Path:
    """A checkpoint folder with a byte-level tokenizer (ids 3 + byte), a BOS and a chat template: it writes
    noise."""
    changes |= {} if eos else {"eos_token_id": None}
    tiny_folder(folder, family, seed, vocab_size=320, **changes)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *sorted(alphabet)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    settings = {"bos_token": "<bos>", "eos_token": "<eos>" if eos else None, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
