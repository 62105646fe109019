"""`LLM`: a model by its folder or hub id, and what one does with it: generate, chat, stream, score.

Knows prompts, texts and options; how a step runs is the engine's business. Several LLMs live in one process.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .checkpoint import EMBEDDING, Checkpoint, check_fit, load_into
from .config import EngineConfig, config_for_tensors, read_config
from .engine import Engine
from .eviction import EvictionEvent
from .generation import generation_defaults
from .hub import resolve
from .kernels import choose, reference
from .memory import total_bytes
from .models.decoder import Decoder
from .models.packing import pack, packing_pays
from .parallel import Group
from .policies import Policy, check, settle
from .progress import PromptBar, RequestBar
from .request import Request, SamplingParams
from .stats import Stats
from .tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Prompts = str | Sequence[str] | Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[dict[str, Any]]
OnLogits = Callable[[int, int, Tensor], None]
log = logging.getLogger("nanobeacon")


@dataclass(frozen=True)
class Output:
    """One completion. token_ids hold all that was sampled, the ending token included, which text does not
    show."""

    text: str | None
    token_ids: list[int]
    finish_reason: str | None  # stop | length | abort | error
    error: str | None
    prompt_token_ids: list[int]
    logprobs: list[tuple[float, dict[int, float]]] | None
    trace: list[EvictionEvent]
    prompt: int = 0  # number of its prompt in the call, from 0
    completion: int = 0  # its number among the n of that prompt, from 0


class LLM:
    """A model ready to generate.

    model: a folder or a hub id. device: "auto", "cpu", "cuda" … dtype: "auto", a name or a torch dtype. load:
    "auto", or "dummy" for random weights from a config alone. budget: evictable tokens a request may cache
    (B_max), None for all. window, beacons, recents: None for the policy's own numbers. num_pages,
    max_model_len: None for what fits. trace: record evictions in each output.
    prefix_cache: keep what was computed of a prompt for those that begin alike. Raises
    ValueError naming the option for whatever is not possible.

    group: processes that compute the model together (`parallel.join`); None for this one alone. Every member
    makes the same calls in the same order and gets the same outputs. Functions of the user's run on each, and
    must do the same there; a policy's `score` sees the heads that its member holds. Counters of bytes are one
    member's.
    """

    def __init__(
        self, model: str, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto",
        seed: int | None = None, load: str = "auto", max_num_seqs: int = 16,
        max_model_len: int | None = None, page_size: int = 16, num_pages: int | None = None,
        gpu_memory: float = 0.9, chunk: int = 512, cuda_graphs: bool = True, budget: int | None = None,
        policy: str | Policy = "beacon", window: int | None = None, beacons: int | None = None,
        recents: int | None = None, protect: str | int = "prompt", trace: bool = False,
        prefix_cache: bool = True, progress: bool = False, group: Group | None = None,
    ) -> None:  # fmt: skip
        eviction = settle(policy, budget, window, beacons, recents, protect)
        sizes = dict(max_num_seqs=max_num_seqs, max_model_len=max_model_len, page_size=page_size, chunk=chunk)
        sizes |= dict(num_pages=num_pages, gpu_memory=gpu_memory)
        config = EngineConfig(
            seed, cuda_graphs=cuda_graphs, eviction=eviction, trace=trace, prefix_cache=prefix_cache, **sizes
        )
        check(load in ("auto", "dummy"), "load", load, "possible are 'auto' and 'dummy'")
        place = device_of(device)
        folder = resolve(model, config_only=load == "dummy")
        shape = read_config(folder)
        config.check_length(shape)
        self._progress = progress
        self.tokenizer = Tokenizer.from_folder(folder)
        self._defaults = generation_defaults(folder)
        config = replace(config, usual_max_tokens=self._defaults.get("max_tokens"))
        checkpoint = Checkpoint(folder) if load == "auto" else None
        if checkpoint is not None:
            if shape.tied:
                checkpoint.tie()
            shape = config_for_tensors(shape, checkpoint.tensors)
        kind = _dtype(dtype, shape.dtype or (checkpoint.dtype if checkpoint else None), place)
        held = _held(kind, place, shape.head_dim, page_size)
        if kind == torch.float16 and place.type == "cpu":
            kind = torch.bfloat16
        # Shapes first: a config may name sizes that the file does not have, or that no machine has.
        outline = Decoder(shape, kind, torch.device("meta"), page_size, held, group)
        if checkpoint is not None:
            check_fit(outline.weights(), checkpoint, outline.parts())
        _check_room(outline, place)
        decoder = Decoder(shape, kind, place, page_size, held, group)
        if checkpoint is not None:
            load_into(decoder.weights(), checkpoint, progress, decoder.parts())
            pack(decoder, checkpoint.rows(EMBEDDING, held))
        else:
            _fill_with_noise(decoder, seed or 0)
            pack(decoder)
        eos, self.bos_token_id = set(shape.eos_token_ids), shape.bos_token_id
        if self.tokenizer is not None:
            eos |= {self.tokenizer.eos_token_id} - {None}
            self.bos_token_id = self.tokenizer.bos_token_id
            _warn_without_end(eos, self.tokenizer, shape.vocab_size)
        self.model_config = shape
        self.engine = Engine(decoder, config, self.tokenizer, frozenset(eos), progress)

    @property
    def stats(self) -> Stats:
        """Cumulative counters of this LLM; zero at the start."""
        return self.engine.stats

    def generate(self, prompts: Prompts, params: Params = None) -> list[Output]:
        """The completions of each prompt, in order; one that cannot run ends in "error", the others go on."""
        requests = self.submit(prompts, params)
        with self._aborted_after(requests), RequestBar(requests, self._progress) as bar:
            for _ in self._run(requests, bar.after_step):
                pass
        arrivals = list(dict.fromkeys(request.arrival for request in requests))
        number = {arrival: i for i, arrival in enumerate(arrivals)}
        return [output_of(request, number[request.arrival]) for request in requests]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        enable_thinking: bool | None = None,
        continue_final: bool = False,
    ) -> list[Output]:
        """Answers to one conversation (a list of messages) or several, rendered by the chat template.

        enable_thinking: None leaves it to the template. continue_final: the answer goes on with the last
        message, which is the assistant's, instead of beginning a new one."""
        right = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
        check(right, "messages", messages, "a list of messages, or a list of such lists, is possible")
        several = [messages] if isinstance(messages[0], dict) else messages
        return self.generate([self.chat_prompt(m, enable_thinking, continue_final) for m in several], params)

    def chat_prompt(
        self, messages: Messages, enable_thinking: bool | None = None, continue_final: bool = False
    ) -> list[int]:
        """Token ids of a conversation up to where the answer begins, or goes on; options as in `chat`."""
        tokenizer = self._text_needs_tokenizer("chat")
        text = tokenizer.render_chat(list(messages), enable_thinking, continue_final)
        return tokenizer.encode(text, special=False)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of the text as they come; joined they are the text. Breaking out aborts the request."""
        self._text_needs_tokenizer("stream")
        check(isinstance(params, SamplingParams | None), "params", params, "SamplingParams are possible")
        n = 1 if params is None else params.n
        check(n == 1, "n", n, "a stream is one completion; generate gives several")
        _check_texts("prompts", [prompt])
        prompt = self._ids(prompt)

        def pieces() -> Iterator[str]:
            requests = self.submit([prompt], params)  # only now: a stream nobody reads leaves nothing behind
            for request, piece in self.run(requests):
                if piece:
                    yield piece
                if request.error:
                    raise ValueError(request.error)

        return pieces()

    def score(
        self, prompts: Prompts, continuations: Prompts, on_logits: OnLogits | None = None
    ) -> list[Tensor]:
        """Log-probability of each given output token, fed under the budget: one float32 tensor a prompt.

        on_logits(request, index, logits) sees every distribution, float32 [vocabulary], in the order of the
        tokens; clone what is kept, each is a view of a step's. What it raises is raised here. Policies that
        draw (random, random-query) draw anew in each call, as requests without a seed do.
        """
        alone, needed = isinstance(prompts, str), "a list of as many as there are prompts is needed"
        for name, value in (("prompts", prompts), ("continuations", continuations)):
            check(isinstance(value, Sequence), name, value, needed)
        check(alone == isinstance(continuations, str), "continuations", continuations, needed)
        if alone:
            prompts, continuations = [prompts], [continuations]
        check(on_logits is None or callable(on_logits), "on_logits", on_logits, "a function is possible")
        check(len(prompts) == len(continuations), "continuations", continuations, "one a prompt is needed")
        _check_texts("prompts", prompts)
        _check_texts("continuations", continuations)
        ids, given = [self._ids(p) for p in prompts], [self._ids(c, special=False) for c in continuations]
        for i, forced in enumerate(given):
            check(forced, f"continuations[{i}]", continuations[i], "at least one token is needed")
        requests: list[Request] = []
        failures: list[Exception] = []

        def hear(request: int, index: int, logits: Tensor) -> None:
            try:
                if not failures:
                    on_logits(request, index, logits)
            except Exception as error:  # not the step's, which others may share, or another thread may run
                failures.append(error)

        with self._aborted_after(requests):
            for i, (prompt, forced) in enumerate(zip(ids, given, strict=True)):
                params = SamplingParams(max_tokens=len(forced), logprobs=0).with_defaults(self._defaults)
                heard = partial(hear, i) if on_logits is not None else None
                requests += self.engine.submit(prompt, params, forced, heard)
            for i, request in enumerate(requests):
                if request.error:
                    raise ValueError(f"prompts[{i}], continuations[{i}]: {request.error}")
            for _ in self.run(requests):
                if failures:
                    raise failures[0]
        for i, request in enumerate(requests):
            if request.error:
                raise RuntimeError(f"prompts[{i}]: {request.error}")
        return [torch.tensor([own for own, _ in r.logprobs], dtype=torch.float32) for r in requests]

    def submit(self, prompts: Any, params: Any = None) -> list[Request]:
        """Queue prompts; their requests in order, n for each. All is checked before anything is queued."""
        check(isinstance(prompts, Sequence), "prompts", prompts, "a text or a list of prompts is possible")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        _check_texts("prompts", prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        wanted = "SamplingParams or a list of them is possible"
        check(isinstance(params, Sequence), "params", params, wanted)
        check(
            len(params) == len(prompts), "params", params, f"one, or one for each of {len(prompts)} prompts"
        )
        for p in params:
            check(isinstance(p, SamplingParams), "params", p, wanted)
            if p.stop:
                self._text_needs_tokenizer("stop strings")
        ids = [self._ids(prompt) for prompt in prompts]
        requests: list[Request] = []
        try:
            for i, p in zip(ids, params, strict=True):
                requests += self.engine.submit(i, p.with_defaults(self._defaults))
        except BaseException:  # Ctrl-C: nobody will run those that are queued already
            self._abort(requests)
            raise
        return requests

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, str]]:
        """Run until these requests have ended; yields each with its new text (maybe "") after its steps.

        Leaving early, by break or by an error, aborts those that have not ended.
        """
        with PromptBar(requests, self._progress) as bar:
            for request in self._run(requests, bar.after_step):
                yield request, request.take_text()

    def _run(self, requests: Sequence[Request], after_step: Callable[[], None]) -> Iterator[Request]:
        """Those that got tokens or ended, after each step."""
        waiting = list(requests)
        try:
            while waiting:
                if _lack(waiting) and self.engine.step() is None and _lack(waiting):
                    raise ValueError("requests: some are not of this LLM's submit")
                after_step()
                for request in [r for r in waiting if _has_news(r)]:
                    request.num_seen = len(request.output_token_ids)
                    if request.finish_reason is not None:
                        waiting.remove(request)
                    yield request
        finally:
            self._abort(waiting)

    @contextmanager
    def _aborted_after(self, requests: Sequence[Request]) -> Iterator[None]:
        """However this ends, and were it by Ctrl-C: none of these requests is left queued or running."""
        try:
            yield
        finally:
            self._abort(requests)

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request)

    def _ids(self, prompt: str | Sequence[int], special: bool = True) -> list[int]:
        """Token ids of a prompt; an empty one is the BOS, where the model has one."""
        if isinstance(prompt, str):
            ids = self._text_needs_tokenizer("a text prompt").encode(prompt, special)
        else:
            ids = list(prompt)
        if not ids and special and self.bos_token_id is not None:
            return [self.bos_token_id]
        return ids

    def _text_needs_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and the model's folder has none; token ids work")
        return self.tokenizer


def _lack(requests: Sequence[Request]) -> bool:
    """Whether one of them needs another step to have anything to show."""
    return any(not _has_news(request) for request in requests)


def _has_news(request: Request) -> bool:
    """Whether it has ended, or has got tokens that whoever runs it has not seen."""
    return request.finish_reason is not None or len(request.output_token_ids) > request.num_seen


def _warn_without_end(eos: set[int], tokenizer: Tokenizer, vocab_size: int) -> None:
    """One line where a model can end no answer by itself, or where an end is none that it can sample."""
    possible = min(tokenizer.size, vocab_size)
    beyond = sorted(token_id for token_id in eos if token_id >= possible)
    reasons = []
    text = tokenizer.special_tokens.get("eos_token")
    if text is not None and tokenizer.eos_token_id is None:
        reasons.append(f"eos_token {text!r} is no token of tokenizer.json")
    if beyond:
        ids = ", ".join(map(str, beyond))
        reasons.append(f"eos_token_id {ids} is beyond the {possible} tokens that can be sampled")
    if len(beyond) < len(eos):
        effect = "the other ends count"
    else:
        effect = (
            "the model has no known end: answers run to max_tokens, unless stop or stop_token_ids end them"
        )
    if reasons or not eos:
        log.warning("; ".join([*reasons, effect]))


def _check_texts(name: str, values: Sequence[Any]) -> None:
    for i, value in enumerate(values):
        right = isinstance(value, str | Sequence) and not isinstance(value, bytes)
        check(right, f"{name}[{i}]", value, "a text or a list of token ids is possible")


def output_of(request: Request, prompt_number: int = 0) -> Output:
    """What a request has become. prompt_number: of its prompt in the call, from 0."""
    tokens, prompt = list(request.output_token_ids), list(request.prompt_token_ids)
    logprobs = list(request.logprobs) if request.params.logprobs is not None else None
    trace = list(request.trace)
    return Output(
        request.text, tokens, request.finish_reason, request.error, prompt, logprobs, trace, prompt_number,
        request.completion,
    )  # fmt: skip


def device_of(device: str | torch.device) -> torch.device:
    """The device of a name, "auto" being a GPU where there is one. ValueError if this machine has it not."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    possible = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    known = {torch.device(name) for name in possible[1:]} | {torch.device(n[:4]) for n in possible[2:]}
    check(place in known, "device", device, f"on this machine {', '.join(possible)} are possible")
    return place


def _dtype(dtype: Any, checkpoint: str | None, place: torch.device) -> torch.dtype:
    """The dtype that is asked for, by name, by torch's own, or by the checkpoint."""
    kind = DTYPES.get(checkpoint or "bfloat16" if dtype == "auto" else dtype, dtype)
    check(
        kind in DTYPES.values(), "dtype", dtype, f"possible are 'auto' and {', '.join(DTYPES)} (or torch's)"
    )
    return kind


def _held(dtype: torch.dtype, place: torch.device, head_dim: int, page_size: int) -> torch.dtype:
    """What weights are held in. A CPU has no float16 arithmetic: it keeps such weights as they are where they
    can be packed, else rounds them to bfloat16; activations are float32 or bfloat16, the cache bfloat16."""
    if dtype != torch.float16 or place.type != "cpu":
        return dtype
    if packing_pays(dtype, place) and choose(place, head_dim, page_size) is reference:
        log.warning("float16 on a CPU: weights keep their bits, activations are float32, the cache bfloat16")
        return dtype
    log.warning("float16 on a CPU: computing in bfloat16")
    return torch.bfloat16


def _check_room(outline: Decoder, place: torch.device) -> None:
    """ValueError for a model whose weights the device could not hold if it held nothing else."""
    needed = sum(parameter.numel() * parameter.itemsize for parameter in outline.parameters())
    most = total_bytes(place)
    if most is not None and needed > most:
        raise ValueError(f"the model's weights take {needed:,} bytes, and {place} has {most:,} in all")


def _fill_with_noise(model: Decoder, seed: int) -> None:
    """Random weights of a plausible size, the same for the same seed: for benchmarks without a download.

    A member of a group draws whole tensors and keeps its parts: so it is the same model in any group."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    parts = model.parts()
    for name, view in model.weights().items():
        if "norm" in name:
            view.fill_(1)
        elif name not in parts:
            view.normal_(0, 0.02, generator=generator)
        else:
            part = parts[name]
            shape = list(view.shape)
            shape[part.dim] = part.whole
            whole = view.new_empty(shape).normal_(0, 0.02, generator=generator)
            view.copy_(whole.narrow(part.dim, part.start, view.shape[part.dim]))
