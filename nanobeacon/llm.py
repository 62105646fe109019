"""`LLM`: a model by its folder or hub id, and what one does with it: generate, chat, stream, score.

Knows prompts, texts and options; how a step runs is the engine's business. Several LLMs live
in one process.
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
from .config import EngineConfig, ModelConfig, config_for_tensors, read_config
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
NOISE = 0.02  # standard deviation of random weights, about that of models before training
Prompts = str | Sequence[str] | Sequence[Sequence[int]]
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[dict[str, Any]]
# Sees (request, index, logits float32 [V]) of every scored token
OnLogits = Callable[[int, int, Tensor], None]
log = logging.getLogger("nanobeacon")


@dataclass(frozen=True)
class Output:
    """One completion. token_ids hold all that was sampled, also the ending token, which
    text lacks."""

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

    What runs, and where:
    - model: a folder or a hub id. load: "auto", or "dummy" for random weights from a config alone.
    - device: "auto" (a GPU where there is one), "cpu", "cuda", "cuda:N" or a torch device.
    - dtype: "auto" (the checkpoint's), "float32", "bfloat16", "float16" or a torch dtype.
    - seed: of requests that have none, and of random weights. None: fresh draws each time.

    How much at once:
    - max_num_seqs: requests that run together; more wait.
    - max_model_len: tokens of prompt and output together; None: what the model's positions allow.
    - page_size: slots of a page. num_pages: pages of the cache; None: what fits, on a CPU
      what is needed.
    - gpu_memory: the share of a GPU's memory that the cache may have of what the weights leave.
    - chunk: tokens of a prompt that one step computes.
    - cuda_graphs: whether a GPU's decode steps are recorded and replayed.
    - overlap: whether a step's tokens are read while the next one runs; None: on a GPU they are.

    What the cache keeps (METHOD.md):
    - budget: evictable tokens that a request may cache (B_max); None: all.
    - policy: a name, "module:name" or a `Policy`: by what the tokens are chosen that stay.
    - window, beacons, recents: None for the policy's own numbers.
    - protect: "prompt", or a number of first tokens that no eviction touches.
    - prefix_cache: keep what was computed of a prompt for those that begin alike.

    trace: record evictions in each output. progress: bars on stderr, where it is a terminal.
    ValueError naming the option for whatever is not possible.

    group: processes that compute the model together (`parallel.join`); None for this one alone.
    Every member makes the same calls in the same order and gets the same outputs. Functions of the
    user's run on each, and must do the same there; a policy's `score` sees the heads that its
    member holds. Counters of bytes are one member's.
    """

    def __init__(
        self,
        model: str,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        seed: int | None = None,
        load: str = "auto",
        max_num_seqs: int = 16,
        max_model_len: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        gpu_memory: float = 0.9,
        chunk: int = 512,
        cuda_graphs: bool = True,
        overlap: bool | None = None,
        budget: int | None = None,
        policy: str | Policy = "beacon",
        window: int | None = None,
        beacons: int | None = None,
        recents: int | None = None,
        protect: str | int = "prompt",
        trace: bool = False,
        prefix_cache: bool = True,
        progress: bool = False,
        group: Group | None = None,
    ) -> None:
        # 1. Options: all that can be wrong with them alone is said before a file is opened.
        eviction = settle(policy, budget, window, beacons, recents, protect)
        config = EngineConfig(
            seed=seed,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=num_pages,
            gpu_memory=gpu_memory,
            chunk=chunk,
            cuda_graphs=cuda_graphs,
            overlap=overlap,
            eviction=eviction,
            trace=trace,
            prefix_cache=prefix_cache,
        )
        check(load in ("auto", "dummy"), "load", load, "possible are 'auto' and 'dummy'")
        place = device_of(device)
        # 2. The folder's small files: the model's shape, its tokenizer, how it is usually sampled.
        folder = resolve(model, config_only=load == "dummy")
        shape = read_config(folder)
        config.check_length(shape)
        self._progress = progress
        self.tokenizer = Tokenizer.from_folder(folder)
        self._defaults = generation_defaults(folder)
        config = replace(config, usual_max_tokens=self._defaults.get("max_tokens"))
        # 3. The headers of its weights, which know better than config.json what the model has.
        checkpoint = None
        if load == "auto":
            checkpoint = Checkpoint(folder)
            if shape.tied:
                checkpoint.tie()
            shape = config_for_tensors(shape, checkpoint.tensors)
        # 4. The model, filled from the checkpoint or with noise.
        named_dtype = shape.dtype
        if named_dtype is None and checkpoint is not None:
            named_dtype = checkpoint.dtype
        compute_dtype = _dtype(dtype, named_dtype)
        decoder = _filled_decoder(
            shape, compute_dtype, place, page_size, group, checkpoint, seed or 0, progress
        )
        # 5. What ends an answer: the ids of the config files and the tokenizer's.
        self.bos_token_id = shape.bos_token_id
        eos_token_ids = set(shape.eos_token_ids)
        if self.tokenizer is not None:
            self.bos_token_id = self.tokenizer.bos_token_id
            if self.tokenizer.eos_token_id is not None:
                eos_token_ids.add(self.tokenizer.eos_token_id)
            _warn_without_end(eos_token_ids, self.tokenizer, shape.vocab_size)
        # 6. The engine that runs it.
        self.model_config = shape
        self.engine = Engine(decoder, config, self.tokenizer, frozenset(eos_token_ids), progress)

    @property
    def stats(self) -> Stats:
        """Cumulative counters of this LLM; zero at the start."""
        return self.engine.stats

    def generate(self, prompts: Prompts, params: Params = None) -> list[Output]:
        """The completions of each prompt, in order, n for each.

        prompts: a text, a list of texts or a list of lists of token ids. params: for all prompts,
        or one for each. A prompt that cannot run ends in "error"; the others go on.
        """
        requests = self.submit(prompts, params)
        with self._aborted_after(requests), RequestBar(requests, self._progress) as bar:
            for _ in self._run(requests, bar.after_step):
                pass
        # Arrivals count over the LLM's life; outputs say the prompt's number in this call.
        number: dict[int, int] = {}
        for request in requests:
            number.setdefault(request.arrival, len(number))
        return [output_of(request, number[request.arrival]) for request in requests]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params = None,
        enable_thinking: bool | None = None,
        continue_final: bool = False,
    ) -> list[Output]:
        """Answers to one conversation (a list of messages) or several, rendered by the
        chat template.

        enable_thinking: None leaves it to the template. continue_final: the answer goes on with the
        last message, which is the assistant's, instead of beginning a new one.
        """
        listed = isinstance(messages, Sequence) and not isinstance(messages, str)
        right = listed and len(messages) > 0
        check(right, "messages", messages, "a list of messages, or a list of such lists, is possible")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        prompts = [self.chat_prompt(one, enable_thinking, continue_final) for one in conversations]
        return self.generate(prompts, params)

    def chat_prompt(
        self, messages: Messages, enable_thinking: bool | None = None, continue_final: bool = False
    ) -> list[int]:
        """Token ids of a conversation up to where the answer begins, or goes on; options
        as in `chat`."""
        tokenizer = self._text_needs_tokenizer("chat")
        text = tokenizer.render_chat(list(messages), enable_thinking, continue_final)
        return tokenizer.encode(text, special=False)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of the text as they come; joined they are the text. Breaking out aborts
        the request.

        What is wrong with the arguments is a ValueError of this call, not of the first piece.
        """
        self._text_needs_tokenizer("stream")
        check(isinstance(params, SamplingParams | None), "params", params, "SamplingParams are possible")
        n = 1 if params is None else params.n
        check(n == 1, "n", n, "a stream is one completion; generate gives several")
        _check_texts("prompts", [prompt])
        prompt = self._ids(prompt)

        def pieces() -> Iterator[str]:
            """The generator; it submits when it is read: a stream nobody reads leaves
            nothing behind."""
            requests = self.submit([prompt], params)
            for request, piece in self.run(requests):
                if piece:
                    yield piece
                if request.error:
                    raise ValueError(request.error)

        return pieces()

    def score(
        self, prompts: Prompts, continuations: Prompts, on_logits: OnLogits | None = None
    ) -> list[Tensor]:
        """Log-probability of each given output token, fed under the budget: one float32
        tensor a prompt.

        on_logits(request, index, logits) sees every distribution, float32 [vocabulary], in the
        order of the tokens; clone what is kept, each is a view of a step's. What it raises is
        raised here. Policies that draw (random, random-query) draw anew in each call, as requests
        without a seed do.

        ValueError for arguments that do not go together or a request that cannot run; RuntimeError
        for one that fails on its way.
        """
        # 1. As many prompts as continuations. A continuation goes on where its prompt ends, so that
        #    no special tokens are put before it.
        prompts, continuations = _pairs(prompts, continuations)
        check(on_logits is None or callable(on_logits), "on_logits", on_logits, "a function is possible")
        check(len(prompts) == len(continuations), "continuations", continuations, "one a prompt is needed")
        _check_texts("prompts", prompts)
        _check_texts("continuations", continuations)
        prompt_ids = [self._ids(prompt) for prompt in prompts]
        forced_ids = [self._ids(continuation, special=False) for continuation in continuations]
        for i, forced in enumerate(forced_ids):
            check(forced, f"continuations[{i}]", continuations[i], "at least one token is needed")
        # 2. What the user's function raises waits until the step is over: others may share that
        #    step, or another thread may run it.
        failures: list[Exception] = []

        def hear(request: int, index: int, logits: Tensor) -> None:
            """`on_logits` of one token, unless it has failed before."""
            try:
                if not failures:
                    on_logits(request, index, logits)
            except Exception as error:
                failures.append(error)

        # 3. All requests, run together.
        requests: list[Request] = []
        with self._aborted_after(requests):
            for i, (prompt, forced) in enumerate(zip(prompt_ids, forced_ids, strict=True)):
                params = SamplingParams(max_tokens=len(forced), logprobs=0).with_defaults(self._defaults)
                listener = partial(hear, i) if on_logits is not None else None
                requests += self.engine.submit(prompt, params, forced, listener)
            for i, request in enumerate(requests):
                if request.error:
                    raise ValueError(f"prompts[{i}], continuations[{i}]: {request.error}")
            for _ in self.run(requests):
                if failures:
                    raise failures[0]
        # 4. Of each token its own log-probability, without those of the best.
        for i, request in enumerate(requests):
            if request.error:
                raise RuntimeError(f"prompts[{i}]: {request.error}")
        own = [[logprob for logprob, _ in request.logprobs] for request in requests]
        return [torch.tensor(logprobs, dtype=torch.float32) for logprobs in own]

    def submit(self, prompts: Any, params: Any = None) -> list[Request]:
        """Queue prompts; their requests in order, n for each. All is checked before
        anything is queued.

        prompts, params: as for `generate`, checked here whatever they are. ValueError names
        the argument that is wrong; a prompt that is right and cannot run becomes a request
        with an error.
        """
        # 1. A list of prompts, and SamplingParams for each.
        check(isinstance(prompts, Sequence), "prompts", prompts, "a text or a list of prompts is possible")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        _check_texts("prompts", prompts)
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        wanted = "SamplingParams or a list of them is possible"
        check(isinstance(params, Sequence), "params", params, wanted)
        one_each = f"one, or one for each of {len(prompts)} prompts"
        check(len(params) == len(prompts), "params", params, one_each)
        for one in params:
            check(isinstance(one, SamplingParams), "params", one, wanted)
            if one.stop:
                self._text_needs_tokenizer("stop strings")
        # 2. Ids of all of them: a text may still be wrong.
        prompt_ids = [self._ids(prompt) for prompt in prompts]
        # 3. The queue.
        requests: list[Request] = []
        try:
            for ids, one in zip(prompt_ids, params, strict=True):
                requests += self.engine.submit(ids, one.with_defaults(self._defaults))
        except BaseException:  # Ctrl-C: nobody will run those that are queued already
            self._abort(requests)
            raise
        return requests

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, str]]:
        """Run until these requests have ended; yields each with its new text (maybe "")
        after its steps.

        Leaving early, by break or by an error, aborts those that have not ended.
        """
        with PromptBar(requests, self._progress) as bar:
            for request in self._run(requests, bar.after_step):
                yield request, request.take_text()

    def _run(self, requests: Sequence[Request], after_step: Callable[[], None]) -> Iterator[Request]:
        """Those that got tokens or ended, after each step.

        A step serves all that is queued, whoever submitted it. So another thread's step may have
        brought what these requests wait for.
        """
        waiting = list(requests)
        try:
            while waiting:
                # Who lacks news once a step has found nothing to do will never get any.
                if _lack(waiting) and self.engine.step() is None and _lack(waiting):
                    raise ValueError("requests: some are not of this LLM's submit")
                after_step()
                news = [request for request in waiting if _has_news(request)]
                for request in news:
                    request.num_seen = len(request.output_token_ids)
                    if request.finish_reason is not None:
                        waiting.remove(request)
                    yield request
        finally:
            self._abort(waiting)

    @contextmanager
    def _aborted_after(self, requests: Sequence[Request]) -> Iterator[None]:
        """However this ends, and were it by Ctrl-C: none of these requests is left queued
        or running."""
        try:
            yield
        finally:
            self._abort(requests)

    def _abort(self, requests: Sequence[Request]) -> None:
        """End those that have not ended."""
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
        """The tokenizer. ValueError where there is none, naming what needs it."""
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
    """One line where a model can end no answer by itself, or where an end is none that it
    can sample."""
    # 1. What is wrong with the ends that are named.
    possible = min(tokenizer.size, vocab_size)
    beyond = sorted(token_id for token_id in eos if token_id >= possible)
    reasons = []
    text = tokenizer.special_tokens.get("eos_token")
    if text is not None and tokenizer.eos_token_id is None:
        reasons.append(f"eos_token {text!r} is no token of tokenizer.json")
    if beyond:
        ids = ", ".join(map(str, beyond))
        reasons.append(f"eos_token_id {ids} is beyond the {possible} tokens that can be sampled")
    # 2. What follows from it.
    if len(beyond) < len(eos):
        effect = "the other ends count"
    else:
        effect = (
            "the model has no known end: answers run to max_tokens, unless stop or stop_token_ids end them"
        )
    if reasons or not eos:
        log.warning("; ".join([*reasons, effect]))


def _check_texts(name: str, values: Sequence[Any]) -> None:
    """ValueError for the first value that is no text and no list; the ids in a list are
    the engine's."""
    for i, value in enumerate(values):
        right = isinstance(value, str | Sequence) and not isinstance(value, bytes)
        check(right, f"{name}[{i}]", value, "a text or a list of token ids is possible")


def _pairs(prompts: Prompts, continuations: Prompts) -> tuple[Sequence[Any], Sequence[Any]]:
    """Prompts and continuations as lists: two single texts are a list of one each."""
    needed = "a list of as many as there are prompts is needed"
    check(isinstance(prompts, Sequence), "prompts", prompts, needed)
    check(isinstance(continuations, Sequence), "continuations", continuations, needed)
    alone = isinstance(prompts, str)
    check(alone == isinstance(continuations, str), "continuations", continuations, needed)
    if alone:
        return [prompts], [continuations]
    return prompts, continuations


def output_of(request: Request, prompt_number: int = 0) -> Output:
    """What a request has become, in lists of its own. prompt_number: of its prompt in the
    call, from 0."""
    return Output(
        text=request.text,
        token_ids=list(request.output_token_ids),
        finish_reason=request.finish_reason,
        error=request.error,
        prompt_token_ids=list(request.prompt_token_ids),
        logprobs=list(request.logprobs) if request.params.logprobs is not None else None,
        trace=list(request.trace),
        prompt=prompt_number,
        completion=request.completion,
    )


def device_of(device: str | torch.device) -> torch.device:
    """The device of a name, "auto" being a GPU where there is one. ValueError if this machine
    has it not."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    known = {torch.device(name) for name in ["cpu", *gpus]}
    if gpus:
        known.add(torch.device("cuda"))  # the current one
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):  # no device of any machine
        place = None
    possible = ", ".join(["auto", "cpu", *gpus])
    check(place in known, "device", device, f"on this machine {possible} are possible")
    return place


def _dtype(dtype: Any, checkpoint: str | None) -> torch.dtype:
    """The dtype that is asked for, by name or as torch's own; "auto" is the checkpoint's,
    else bfloat16."""
    wanted = dtype
    if dtype == "auto":
        wanted = checkpoint or "bfloat16"
    found = DTYPES.get(wanted, dtype)
    possible = f"possible are 'auto' and {', '.join(DTYPES)} (or torch's)"
    check(found in DTYPES.values(), "dtype", dtype, possible)
    return found


def _filled_decoder(
    shape: ModelConfig,
    dtype: torch.dtype,
    place: torch.device,
    page_size: int,
    group: Group | None,
    checkpoint: Checkpoint | None,
    seed: int,
    progress: bool,
) -> Decoder:
    """The model on its device, filled from a checkpoint, or with noise where there is none.

    ValueError for weights that do not fit the model or the machine, before their memory
    is asked for.
    """
    # 1. What the weights are held in, and what is computed in.
    held = _held(dtype, place, shape.head_dim, page_size)
    if dtype == torch.float16 and place.type == "cpu":
        dtype = torch.bfloat16
    # 2. Shapes alone: a config may name sizes that the file does not have, or that no machine has.
    outline = Decoder(shape, dtype, torch.device("meta"), page_size, held, group)
    if checkpoint is not None:
        check_fit(outline.weights(), checkpoint, outline.parts())
    _check_room(outline, place)
    # 3. The model and its weights, packed where that pays.
    decoder = Decoder(shape, dtype, place, page_size, held, group)
    if checkpoint is None:
        _fill_with_noise(decoder, seed)
        pack(decoder)
    else:
        load_into(decoder.weights(), checkpoint, progress, decoder.parts())
        pack(decoder, checkpoint.rows(EMBEDDING, held))
    return decoder


def _held(dtype: torch.dtype, place: torch.device, head_dim: int, page_size: int) -> torch.dtype:
    """What weights are held in. A CPU has no float16 arithmetic: it keeps such weights as they are
    where they can be packed, else rounds them to bfloat16; activations are float32 or bfloat16, the
    cache bfloat16."""
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
    """Random weights of a plausible size, the same for the same seed: for benchmarks
    without a download.

    A member of a group draws whole tensors and keeps its parts: so it is the same model
    in any group."""
    generator = torch.Generator(device=model.device).manual_seed(seed)
    parts = model.parts()
    for name, view in model.weights().items():
        if "norm" in name:
            view.fill_(1)
        elif name not in parts:
            view.normal_(0, NOISE, generator=generator)
        else:
            part = parts[name]
            shape = list(view.shape)
            shape[part.dim] = part.whole
            whole = view.new_empty(shape).normal_(0, NOISE, generator=generator)
            view.copy_(whole.narrow(part.dim, part.start, view.shape[part.dim]))
