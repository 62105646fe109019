"""The retention page: what a cache kept of a text, token by token and eviction by eviction, as one HTML file.

`record` turns an output with its trace into plain numbers, `page` puts one or two records into the template
retention.html, which draws them. Knows the public API and the trace; nothing of how a policy chooses, and
nothing of command lines.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanobeacon import LLM
from nanobeacon.eviction import EvictionEvent
from nanobeacon.llm import Output
from nanobeacon.tokenizer import UNKNOWN, Tokenizer

TEMPLATE = Path(__file__).with_name("retention.html")
PLACE = "<!-- records -->"  # where the template takes its data


def record(llm: LLM, output: Output, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All that the page shows of one run, for `page`.

    output: of an LLM with trace=True. settings: what else the run was asked for (name -> value), shown as it
    is beside the LLM's own settings.
    """
    shape = llm.model_config
    eviction = llm.engine.config.eviction
    token_ids = [*output.prompt_token_ids, *output.token_ids]
    beacons = eviction.policy.beacons if eviction is not None else 0
    return {
        "title": "full cache" if eviction is None else f"{eviction.policy.name}, budget {eviction.budget}",
        "settings": {name: str(value) for name, value in {**settings, **_in_words(llm)}.items()},
        "tokens": token_texts(llm.tokenizer, token_ids),
        "prompt": len(output.prompt_token_ids),
        "stored": len(token_ids) - bool(output.token_ids),  # the last token drawn is never fed
        "window": eviction.window if eviction is not None else 0,
        "layers": shape.num_layers,
        "kvHeads": shape.num_kv_heads,
        "heads": shape.num_heads,
        "tokenBytes": llm.engine.page_bytes // llm.engine.config.page_size,
        **encode_trace(output.trace, len(token_ids), shape.num_layers * shape.num_kv_heads, beacons),
    }


def _in_words(llm: LLM) -> dict[str, Any]:
    """The engine's settings that decide what is kept, under names that explain themselves."""
    shape = llm.model_config
    heads = f"{shape.num_layers} layers, {shape.num_kv_heads} KV heads, {shape.num_heads} query heads"
    found: dict[str, Any] = {"shape": heads, "dtype": str(llm.engine.model.dtype).removeprefix("torch.")}
    eviction = llm.engine.config.eviction
    if eviction is None:
        return found | {"budget": "none: every token is kept"}
    first_tokens = "the whole prompt"
    if eviction.protect != "prompt":
        first_tokens = f"the first {eviction.protect} tokens"
    return found | {
        "policy": eviction.policy.name,
        "budget": f"{eviction.budget} tokens a head beside the protected ones",
        "each eviction": f"drops {eviction.period} and leaves {eviction.kept}",
        "protected": first_tokens,
        "always kept": f"the newest {eviction.window} tokens",
        "beacons": eviction.policy.beacons,
        "recent queries": eviction.recents,
    }


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """The page of one run, or of several side by side, as HTML that needs nothing else.

    What a model wrote cannot become markup: it goes in as JSON without a single "<", and the page makes text
    nodes of it.
    """
    data = json.dumps(list(records), ensure_ascii=True).replace("<", "\\u003c")
    script = f'<script type="application/json" id="records">{data}</script>'
    return TEMPLATE.read_text(encoding="utf-8").replace(PLACE, script)


def encode_trace(trace: Sequence[EvictionEvent], num_tokens: int, pairs: int, beacons: int) -> dict[str, Any]:
    """A trace in little space: lists of numbers, and compressed bytes as base64 text.

    An evicted token never comes back. So one number a token and (layer, KV head) pair says everything: how
    many evictions it survived (`survived`, [T, pairs]; `width` bytes each, low byte first). A token that is
    held at the end has survived all that ran since it was written.

    `beacons` of the result: positions of the queries that each eviction left, [E, L·H, n], ascending, as
    differences (the first to -1, which stands for an empty slot); `beaconWidth` bytes each.
    """
    survived = survivals(trace, num_tokens, pairs)
    result: dict[str, Any] = {
        "positions": [event.position for event in trace],
        "kept": [event.kept.shape[-1] for event in trace],
        "width": 1 if len(trace) < 256 else 2,
    }
    result["survived"] = _packed(survived.T, result["width"])  # pair after pair: neighbours are alike
    places = [event.beacons[..., :beacons].flatten(0, -2) for event in trace]
    slots = max((event.shape[-1] for event in places), default=0)
    result["beaconSlots"] = slots
    result["beaconWidth"] = 2 if num_tokens < 65536 else 4
    if slots:
        full = [torch.nn.functional.pad(event, (0, slots - event.shape[-1]), value=-1) for event in places]
        ascending = torch.stack(full).sort(-1).values
        steps = ascending.diff(prepend=torch.full_like(ascending[..., :1], -1), dim=-1)
        result["beacons"] = _packed(steps, result["beaconWidth"])
    return result


def survivals(trace: Sequence[EvictionEvent], num_tokens: int, pairs: int) -> Tensor:
    """How many evictions each token survived in each (layer, KV head) pair: int32 [T, pairs].

    An eviction that ran before a token was written does not count for it.
    """
    survived = torch.zeros(pairs, num_tokens, dtype=torch.int32)
    for event in trace:
        kept = event.kept.flatten(0, 1).long()
        survived.scatter_add_(1, kept, torch.ones_like(kept, dtype=torch.int32))
    return survived.T


def token_texts(tokenizer: Tokenizer | None, token_ids: Sequence[int]) -> list[str]:
    """The text of each token, special tokens by their names; joined they are the text.

    A character that is spread over several tokens belongs to the last of them, those before have "". Each
    token is decoded behind the one before it, because some decoders drop the space a text begins with.
    Without a tokenizer a token's text is its number.
    """
    if tokenizer is None:
        return [f"{token_id} " for token_id in token_ids]

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.backend.decode(list(ids), skip_special_tokens=False)

    texts: list[str] = []
    whole = 0  # tokens whose text is certain
    before: list[int] = []  # the last of them that ended a character
    for i in range(len(token_ids)):
        pending = token_ids[whole : i + 1]
        text = decode([*before, *pending])[len(decode(before)) :]
        cut = text.endswith(UNKNOWN) and len(pending) < 4 and i + 1 < len(token_ids)
        texts.append("" if cut else text)
        if not cut:
            before = list(pending)
            whole = i + 1
    return texts


def _packed(values: Tensor, width: int) -> str:
    """Whole numbers of at least 0 as base64 text of deflated bytes: all low bytes, then the next ones."""
    flat = values.flatten()
    planes = [(flat >> (8 * plane)).bitwise_and(255).to(torch.uint8) for plane in range(width)]
    raw = bytearray(flat.numel() * width)  # filled through a view: numpy is no dependency
    torch.frombuffer(raw, dtype=torch.uint8).copy_(torch.cat(planes))
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")
