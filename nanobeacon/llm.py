"""`LLM`: a model by its folder or hub id, and what one does with it: generate, chat, stream, score.

Knows prompts, texts and options; how a step runs is the engine's business. Several LLMs live in one process.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .checkpoint import Checkpoint, generation_defaults, load_into, resolve
from .config import EngineConfig, ModelConfig, config_for_tensors, read_config
from .engine import Engine, Stats
from .eviction import EvictionEvent
from .models.decoder import Decoder
from .policies import Policy, settle
from .request import Request, SamplingParams
from .tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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


class LLM:
    """A model ready to generate.

    model: a folder or a hub id. device: "auto", "cpu", "cuda" … dtype: "auto", a name or a torch dtype. load:
    "auto", or "dummy" for random weights from a config alone. budget: evictable tokens a request may cache
    (B_max), None for all. num_pages, max_model_len: None for what fits. trace: record evictions in each
    output. Raises ValueError naming the option for whatever is not possible.
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
        budget: int | None = None,
        policy: str | Policy = "beacon",
        window: int = 32,
        beacons: int = 16,
        recents: int = 16,
        protect: str | int = "prompt",
        trace: bool = False,
        progress: bool = False,
    ) -> None:
        config = EngineConfig(
            seed,
            max_num_seqs,
            max_model_len,
            page_size,
            num_pages,
            gpu_memory,
            chunk,
            cuda_graphs,
            settle(policy, budget, window, beacons, recents, protect),
            trace,
        )
        if load not in ("auto", "dummy"):
            raise ValueError(f"load={load!r}: possible are 'auto' and 'dummy'")
        place = _device(device)
        folder = resolve(model, config_only=load == "dummy")
        shape = read_config(folder)
        config.check_length(shape.max_position_embeddings)
        self.tokenizer = Tokenizer.from_folder(folder)
        self._defaults = generation_defaults(folder)
        checkpoint = None if load == "dummy" else Checkpoint(folder)
        if checkpoint is not None:
            shape = config_for_tensors(shape, checkpoint.tensors)
        kind = _dtype(dtype, shape, checkpoint, place)
        decoder = Decoder(shape, kind, place, page_size)
        if checkpoint is not None:
            load_into(decoder.weights(), checkpoint, progress=progress)
        else:
            _fill_with_noise(decoder, seed or 0)
        eos = set(shape.eos_token_ids)
        self.bos_token_id = shape.bos_token_id
        if self.tokenizer is not None:
            eos |= {i for i in (self.tokenizer.eos_token_id,) if i is not None}
            self.bos_token_id = self.tokenizer.bos_token_id
        self.model_config = shape
        self.engine = Engine(decoder, config, self.tokenizer, frozenset(eos))

    @property
    def stats(self) -> Stats:
        """Cumulative counters of this LLM; zero at the start."""
        return self.engine.stats

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """The completions of each prompt, in order, n for each. A prompt that cannot run gives
        finish_reason "error" and the others go on."""
        requests = self.submit(prompts, params)
        for _ in self.run(requests):
            pass
        return [output_of(r) for r in requests]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        enable_thinking: bool = True,
    ) -> list[Output]:
        """Answers to one conversation (a list of messages) or several, rendered by the chat template."""
        several = messages if messages and not isinstance(messages[0], dict) else [messages]
        prompts = [self.chat_prompt(m, enable_thinking) for m in several]
        return self.generate(prompts, params)

    def chat_prompt(self, messages: Sequence[dict[str, Any]], enable_thinking: bool = True) -> list[int]:
        """Token ids of a conversation up to where the answer begins."""
        tokenizer = self._text_needs_tokenizer("chat")
        return tokenizer.encode(tokenizer.render_chat(list(messages), enable_thinking), special=False)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Iterator[str]:
        """Pieces of the text as they come; joined they are the text. Breaking out aborts the request."""
        self._text_needs_tokenizer("stream")
        if params is not None and params.n != 1:
            raise ValueError(f"n={params.n}: a stream is one completion; generate gives several")
        prompt = self._ids(prompt)

        def pieces() -> Iterator[str]:
            requests = self.submit(
                [prompt], params
            )  # here, so that a stream nobody reads leaves nothing behind
            for request, piece in self.run(requests):
                if piece:
                    yield piece
                if request.error:
                    raise ValueError(request.error)

        return pieces()

    def score(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        continuations: Sequence[str] | Sequence[Sequence[int]],
        on_logits: Callable[[int, int, Tensor], None] | None = None,
    ) -> list[Tensor]:
        """Log-probability of each given output token, fed under the budget: one float32 tensor a prompt.

        on_logits(request, index, logits) sees every distribution, float32 [vocabulary], before its token is
        fed.
        """
        if len(prompts) != len(continuations):
            raise ValueError(
                f"{len(prompts)} prompts and {len(continuations)} continuations: as many are needed"
            )
        ids, given = [self._ids(p) for p in prompts], [self._ids(c, special=False) for c in continuations]
        for i, forced in enumerate(given):
            if not forced:
                raise ValueError(f"continuations[{i}] is empty: at least one token is needed")
        requests: list[Request] = []
        for i, (prompt, forced) in enumerate(zip(ids, given, strict=True)):
            params = SamplingParams(max_tokens=len(forced), logprobs=0).with_defaults(self._defaults)
            requests += self.engine.submit(prompt, params, forced=forced)
            if on_logits is not None:
                requests[i].on_logits = lambda index, logits, i=i: on_logits(i, index, logits)
        refused = [f"prompts[{i}]: {r.error}" for i, r in enumerate(requests) if r.error]
        if refused:
            self._abort(requests)
            raise ValueError(refused[0])
        for _ in self.run(requests):
            pass
        for i, request in enumerate(requests):
            if request.error:
                raise RuntimeError(f"prompts[{i}]: {request.error}")
        return [torch.tensor([own for own, _ in r.logprobs], dtype=torch.float32) for r in requests]

    def submit(self, prompts: Any, params: Any = None) -> list[Request]:
        """Queue prompts; their requests in order, n for each. Everything is checked before anything is
        queued."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        for i, prompt in enumerate(prompts):
            if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes):
                raise ValueError(f"prompts[{i}]={prompt!r}: a text or a list of token ids is possible")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        params = list(params)
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(params)} SamplingParams for {len(prompts)} prompts: one, or one each, is possible"
            )
        for p in params:
            if not isinstance(p, SamplingParams):
                raise ValueError(f"params={p!r}: SamplingParams or a list of them is possible")
            if p.stop:
                self._text_needs_tokenizer("stop strings")
        ids = [self._ids(prompt) for prompt in prompts]
        requests = []
        for prompt, p in zip(ids, params, strict=True):
            requests += self.engine.submit(prompt, p.with_defaults(self._defaults))
        return requests

    def run(self, requests: Sequence[Request]) -> Iterator[tuple[Request, str]]:
        """Run until these requests have ended; yields each with its new text (may be "") after every step
        that gave it a token. Leaving early, by break or by an error, aborts those that have not ended."""
        waiting = list(requests)
        try:
            while waiting:
                if any(r.finish_reason is None and not r.pieces for r in waiting):
                    self.engine.step()
                for request in [r for r in waiting if r.pieces or r.finish_reason]:
                    piece, request.pieces = "".join(request.pieces), []
                    if request.finish_reason:
                        waiting.remove(request)
                    yield request, piece
        finally:
            self._abort(waiting)

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.abort(request)

    def _ids(self, prompt: str | Sequence[int], special: bool = True) -> list[int]:
        """Token ids of a prompt; an empty one is the BOS, where the model has one."""
        if isinstance(prompt, str):
            ids = self._text_needs_tokenizer("a text prompt").encode(prompt, special)
        else:
            ids = [int(t) if isinstance(t, int) and not isinstance(t, bool) else -1 for t in prompt]
        if not ids and special and self.bos_token_id is not None:
            return [self.bos_token_id]
        return ids

    def _text_needs_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and the model's folder has none; token ids work")
        return self.tokenizer


def output_of(request: Request) -> Output:
    """What a request has become."""
    return Output(
        request.stream.text if request.stream is not None else None,
        list(request.output_token_ids),
        request.finish_reason,
        request.error,
        list(request.prompt_token_ids),
        list(request.logprobs) if request.params.logprobs is not None else None,
        list(request.trace),
    )


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: 'auto', 'cpu', 'cuda' or 'cuda:N' is possible") from error
    if place.type not in ("cpu", "cuda") or (place.type == "cuda" and not torch.cuda.is_available()):
        possible = "'cpu', 'cuda'" if torch.cuda.is_available() else "'cpu'"
        raise ValueError(f"device={device!r}: on this machine 'auto' and {possible} are possible")
    return place


def _dtype(dtype: Any, shape: ModelConfig, checkpoint: Checkpoint | None, place: torch.device) -> torch.dtype:
    """The dtype to compute in; a CPU computes fp16 checkpoints in bf16."""
    if dtype == "auto":
        kind = DTYPES[shape.dtype or (checkpoint.dtype if checkpoint else None) or "bfloat16"]
    elif dtype in DTYPES or dtype in DTYPES.values():
        kind = DTYPES.get(dtype, dtype)
    else:
        raise ValueError(
            f"dtype={dtype!r}: possible are 'auto', {', '.join(map(repr, DTYPES))} or a torch dtype"
        )
    if kind == torch.float16 and place.type == "cpu":
        log.warning("float16 on a CPU: computing in bfloat16")
        kind = torch.bfloat16
    return kind


def _fill_with_noise(model: Decoder, seed: int) -> None:
    """Random weights of a plausible size, the same for the same seed: for benchmarks without a download."""
    generator = torch.Generator(device=model.embedding.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(0, 0.02, generator=generator)
