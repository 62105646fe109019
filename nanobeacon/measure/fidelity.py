"""What `bench.py fidelity` measures: how close a policy stays to the full cache on text of
the model's own.

The full cache writes the text; it and every policy then read it token by token, and from the first
eviction on their distributions are compared. Knows distributions; nothing of how a policy chooses.
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nanobeacon import LLM, SamplingParams
from nanobeacon.policies import settle

from . import plots
from .common import BUDGET_AXIS, bootstrap, chart_note, columns, names, numbers, read_lines, show

POLICIES = "beacon,recent,rpc,snapkv,rkv,initial,random,streaming"
PROMPT = "an object with prompt, a text or a list of token ids,"
# Field of a row -> what it is called; kl in nats, all of them means over positions
MEASURES = {"kl": "KL(full || policy)", "agreement": "top-1 agreement", "lost": "log-probability lost"}
UNITS = {"kl": "nats a token", "agreement": "share of tokens", "lost": "nats a token"}
Text = tuple[list[int], list[int]]  # token ids of a prompt, and of what the model went on with
# of each position: log-probabilities, half precision; likeliest token
Seen = list[tuple[Tensor, Tensor]]


def add_arguments(p: ArgumentParser) -> None:
    prompts = Path(__file__).with_name("prompts.jsonl")
    p.add_argument("--model", required=True, help="folder or hub id")
    p.add_argument("--policies", type=names, default=names(POLICIES), metavar="A,B", help=POLICIES)
    p.add_argument(
        "--budgets", type=numbers, default=[64, 128, 256, 512], metavar="N,N", help="64,128,256,512"
    )
    p.add_argument("--tokens", type=int, default=1024, help="length of each text (default: %(default)s)")
    p.add_argument("--prompts", type=Path, default=prompts, metavar="FILE", help="JSON lines with prompt")
    p.add_argument("--limit", type=int, help="only the first prompts")
    p.add_argument("--group", type=int, default=4, help="prompts at once, whose distributions are held")
    p.add_argument("--temperature", type=float, default=0.6, help="of the text; 0: greedy (default: 0.6)")
    p.add_argument("--top-p", type=float, default=0.95, help="default: %(default)s")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    p.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")


def run(options: Namespace) -> dict[str, Any]:
    """One row a policy and budget: means over prompts with 95 % intervals.

    `kl_beyond_first` is the difference of the KL to the first policy's, prompt by prompt: its interval
    says whether the two differ. ValueError for what is impossible, before anything runs.
    """
    # 1. What is to be compared
    limit = 1 if options.limit is None else options.limit
    if min(options.group, limit) < 1:
        raise ValueError(f"group={options.group}, limit={options.limit}: at least 1 is possible")
    cells = [(policy, budget) for budget in options.budgets for policy in options.policies]
    for policy, budget in cells:
        settle(policy, budget)
        if budget + 1 >= options.tokens:
            tokens = options.tokens
            raise ValueError(f"budget={budget}: of {tokens} tokens none follows its first eviction")

    # 2. The texts, which the model writes itself
    prompts = [line["prompt"] for line in read_lines(options.prompts, _is_prompt, PROMPT)]
    texts, ended = _write(options, prompts[: options.limit])

    # 3. Read again, a group at a time: by the full cache, whose distributions are held, then by
    #    each policy
    # [3] of each text: MEASURES
    means: dict[tuple[str, int], list[Tensor]] = {cell: [] for cell in cells}
    groups = [texts[first : first + options.group] for first in range(0, len(texts), options.group)]
    with tqdm(total=len(groups) * len(cells), unit="replay", leave=False, disable=None) as bar:
        for group in groups:
            own, full = _read_in_full(options, group)
            for policy, budget in cells:
                bar.set_description(f"{policy} {budget}")
                means[policy, budget] += _compare(options, group, own, full, policy, budget)
                bar.update()

    # 4. The rows
    rows = []
    for policy, budget in cells:
        values = torch.stack(means[policy, budget])  # [texts, 3]
        first = torch.stack(means[options.policies[0], budget])
        positions = len(texts) * (options.tokens - budget - 1)
        row = {"policy": policy, "budget": budget, "positions": positions}
        for i, name in enumerate(MEASURES):
            row[name] = bootstrap(values[:, i].tolist())
        row["kl_beyond_first"] = bootstrap((values - first)[:, 0].tolist())
        rows.append(row)
    said = {name: getattr(options, name) for name in ("tokens", "temperature", "top_p", "seed", "group")}
    return {"n": len(texts), **said, "after_own_end": ended, "rows": rows}


def _is_prompt(line: dict[str, Any]) -> bool:
    """Whether a line of --prompts is what PROMPT says."""
    prompt = line.get("prompt")
    if isinstance(prompt, list):
        return all(type(token) is int for token in prompt)
    return isinstance(prompt, str)


def _open(options: Namespace, **named: Any) -> LLM:
    """An LLM for one group of texts. Half of the GPU is left to the distributions that
    are compared."""
    torch.cuda.empty_cache()  # what the LLM before has left would count as taken
    return LLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        gpu_memory=0.5,
        max_num_seqs=options.group,
        **named,
    )


def _write(options: Namespace, prompts: list[str | list[int]]) -> tuple[list[Text], float]:
    """The texts, and the share of their tokens that come after the model would have ended."""
    llm = _open(options, progress=sys.stderr.isatty())  # the one part without a bar of its own

    # 1. The prompts: texts as a chat where the model has a template, token ids as they are
    if llm.tokenizer is not None and llm.tokenizer.chat_template is not None:
        given = prompts
        prompts = []
        for prompt in given:
            if isinstance(prompt, str):
                prompt = llm.chat_prompt([{"role": "user", "content": prompt}])
            prompts.append(prompt)

    # 2. Texts of equal length, each with draws of its own
    drawn = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": options.tokens,
        "ignore_eos": True,
    }
    params = [SamplingParams(seed=options.seed + i, **drawn) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params)

    # 3. How much of them the model would not have written
    eos = llm.engine.eos_token_ids
    after = 0
    for output in outputs:
        if output.error:
            raise ValueError(output.error)
        ends = (i for i, token in enumerate(output.token_ids) if token in eos)
        end = next(ends, options.tokens - 1)
        after += options.tokens - 1 - end
    texts = [(output.prompt_token_ids, output.token_ids) for output in outputs]
    return texts, after / (options.tokens * len(outputs))


def _read_in_full(options: Namespace, texts: list[Text]) -> tuple[list[Tensor], list[Seen]]:
    """Each token's log-probability with the full cache, and the distributions after the
    smallest budget."""
    full: list[Seen] = [[] for _ in texts]
    prompts, outputs = zip(*texts, strict=True)

    def keep(text: int, index: int, logits: Tensor) -> None:
        if index > min(options.budgets):
            full[text].append((logits.log_softmax(-1).half().cpu(), logits.argmax()))

    own = _open(options).score(prompts, outputs, on_logits=keep)
    return own, full


def _compare(
    options: Namespace, texts: list[Text], own: list[Tensor], full: list[Seen], policy: str, budget: int
) -> list[Tensor]:
    """float64 [3] for each text: the means of MEASURES over what follows the first eviction.

    own, full: what `_read_in_full` returns. The first eviction runs when `budget` output tokens are
    cached; the same step's logits, for token `budget`, come before it.
    """
    prompts, outputs = zip(*texts, strict=True)
    sums = torch.zeros(len(texts), 2, dtype=torch.float64)  # of the divergence, and of agreements
    skipped = min(options.budgets) + 1  # tokens of which `full` holds nothing

    def compare(text: int, index: int, logits: Tensor) -> None:
        if index <= budget:
            return
        kept, best = full[text][index - skipped]
        # sums to 1 again after half precision
        expected = kept.to(logits.device).float().log_softmax(-1)
        got = logits.log_softmax(-1)
        divergence = (expected.exp() * (expected - got)).sum()
        agrees = (logits.argmax() == best).float()
        sums[text] += torch.stack((divergence, agrees)).cpu()

    llm = _open(options, policy=policy, budget=budget)
    scores = llm.score(prompts, outputs, on_logits=compare)
    lost = []
    for with_all, with_budget in zip(own, scores, strict=True):
        lost.append((with_all - with_budget)[budget + 1 :].double().mean())
    means = sums / (options.tokens - budget - 1)
    return list(torch.cat((means, torch.stack(lost)[:, None]), 1))


def table(result: dict[str, Any]) -> str:
    """A line for each policy and budget, and how much was measured."""
    fields = (*MEASURES, "kl_beyond_first")
    lines = []
    for row in result["rows"]:
        values = [show(row[name], ".4f") for name in fields]
        lines.append([row["policy"], row["budget"], *values])
    first_policy = result["rows"][0]["policy"]
    head = ["policy", "budget", *MEASURES.values(), f"KL beyond {first_policy}'s"]
    notes = (
        f"{result['n']} prompts x {result['tokens']} tokens",
        "nats",
        "95 % bootstrap intervals over prompts",
        f"{result['after_own_end']:.0%} of the tokens come after the model would have ended.",
    )
    return f"{columns(head, lines)}\n\n{'; '.join(notes)}"


def charts(result: dict[str, Any]) -> list[plots.Chart]:
    """A chart for each measure: over the budget, a line for each policy."""
    found = []
    note = chart_note(result, f"n = {result['n']} prompts of {result['tokens']:,} output tokens")
    for name, called in MEASURES.items():
        series: dict[str, list[tuple]] = {}
        for row in result["rows"]:
            value = row[name]
            point = (row["budget"], value["mean"], value["low"], value["high"])
            series.setdefault(row["policy"], []).append(point)
        title = f"{called}, beside the full cache"
        axis = f"{called}, {UNITS[name]}"
        in_powers = name == "kl"  # from a hundredth to several nats
        found.append(plots.lines(title, BUDGET_AXIS, axis, series, log_x=True, log_y=in_powers, note=note))
    return found
