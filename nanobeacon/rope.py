"""Rotary position embedding: inverse frequencies of every kind, cos and sin of positions, rotation.

It knows nothing about checkpoints, caches or batches. All in float32, whatever the model's dtype,
in the order of operations models are trained with: at position 30,000 the last bits of a frequency
are visible."""

import math

import torch
from torch import Tensor

from .config import RopeConfig


class Rope:
    """RoPE of one model. `max_position_embeddings`: the context before scaling, if
    `config` has none."""

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        max_position_embeddings: int,
        device: torch.device,
    ) -> None:
        self.config = config
        self.context = config.original_max_position_embeddings or max_position_embeddings
        self.attention_factor = 1.0
        if config.kind == "yarn":
            self.attention_factor = _yarn_attention_factor(config)
        # Pair i of a head turns by theta ** -(2i / D) a position: the first fastest.
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.exponents = exponents.to(device)
        self.inv_freq = _inverse_frequencies(config, exponents, self.context).to(device)  # [D/2]

    def cos_sin(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [.., D/2], of integer positions [..]. lengths [..] (kind dynamic
        only): what decides a token's base, max(prompt length, position + 1)."""
        inv_freq = self.inv_freq
        if self.config.kind == "dynamic":
            inv_freq = self._dynamic(lengths)
        angles = positions[..., None].float() * inv_freq
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def _dynamic(self, lengths: Tensor | None) -> Tensor:
        """Inverse frequencies [.., D/2] at these lengths: beyond the context the base grows
        (dynamic NTK)."""
        assert lengths is not None, "dynamic RoPE needs lengths"
        head_dim = 2 * len(self.exponents)
        factor = self.config.factor
        growth = factor * lengths.clamp(min=self.context) / self.context - (factor - 1)
        base = self.config.theta * growth ** (head_dim / (head_dim - 2))
        return 1.0 / base[..., None] ** self.exponents

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [.., D] by the rotate-half convention, rounded once; cos and sin broadcast to
        [.., D/2]."""
        first, second = x.float().chunk(2, dim=-1)
        turned_first = first * cos - second * sin
        turned_second = second * cos + first * sin
        return torch.cat((turned_first, turned_second), dim=-1).to(x.dtype)


def _inverse_frequencies(config: RopeConfig, exponents: Tensor, context: int) -> Tensor:
    """float32 [D/2] of `exponents` [D/2]; `context` is the one before scaling, in tokens.

    ValueError for a kind that is not known. Scaling divides frequencies by the factor, so that a
    longer context turns slow pairs no further than training did."""
    inv_freq = 1.0 / config.theta**exponents
    match config.kind:
        case "default" | "dynamic":  # dynamic begins like this
            return inv_freq
        case "linear":
            return inv_freq / config.factor
        case "llama3":
            # Frequencies that turn often within the original context are kept, slow ones divided
            turns = context / (2 * math.pi / inv_freq)
            low = config.low_freq_factor
            high = config.high_freq_factor
            kept = ((turns - low) / (high - low)).clamp(0, 1)
        case "yarn":
            # The same, as a ramp over the index from the frequency of beta_fast turns to that
            # of beta_slow
            low = _index_of_turns(config, exponents, context, config.beta_fast)
            high = _index_of_turns(config, exponents, context, config.beta_slow)
            if config.truncate:
                low = math.floor(low)
                high = math.ceil(high)
            head_dim = 2 * len(exponents)
            low = max(low, 0)
            high = min(high, head_dim - 1)
            width = high - low or 0.001  # a ramp of no width is a step
            kept = 1 - ((torch.arange(head_dim // 2) - low) / width).clamp(0, 1)
        case _:
            raise ValueError(f"RoPE kind {config.kind!r} is not supported")
    # `kept` in [0, 1]: how much of a frequency stays as it is
    return (1 - kept) * inv_freq / config.factor + kept * inv_freq


def _index_of_turns(config: RopeConfig, exponents: Tensor, context: int, turns: float) -> float:
    """Where, counted in pairs of a head, the frequency lies that turns so often within the context.

    Pair i turns once in 2 pi theta ** (2i / D) positions; that is context / turns, solved for i."""
    head_dim = 2 * len(exponents)
    inverse_frequency = context / (turns * 2 * math.pi)
    return head_dim * (math.log(inverse_frequency) / (2 * math.log(config.theta)))


def _yarn_attention_factor(config: RopeConfig) -> float:
    """What cos and sin are multiplied by: the file's number, else what factor and mscales give."""
    if config.attention_factor is not None:
        return config.attention_factor
    growth = 0.1 * math.log(max(config.factor, 1.0))
    if config.mscale and config.mscale_all_dim:
        return (config.mscale * growth + 1.0) / (config.mscale_all_dim * growth + 1.0)
    return growth + 1.0
