"""`Engine.step()`: the only place where scheduler, model, cache and evictor meet.

A step is `_run`: the scheduler's plan becomes a batch, the model reads it and stores what is to
be remembered, requests take their tokens (`answers.py`), at once or while the next step
computes (`flight.py`), and caches that are full evict (`eviction.py`). Around it stand what a
request must fulfil to be queued (`submit`) and what happens when a step fails
(`_run_within_memory`, `_at_work`).

Knows token ids, and nothing of text but that a request has a stream. Where weights, tokenizers and
options come from is the business of `llm.py`.
"""

import logging
import random
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count

import torch
from torch import Tensor

from .answers import Answers, Close, Read, Sampled, draw_of, flush_text, sample_tokens, take_tokens
from .batch import Batch, write_pages
from .cache import KVCache, QueryBuffer
from .clock import DeviceClock
from .config import EngineConfig
from .eviction import Evicted, Evictor
from .faults import Progress, is_out_of_memory
from .flight import Flight
from .graphs import DecodeGraphs, Recorder, buckets, can_record
from .memory import free_bytes, step_bytes
from .models.decoder import Decoder
from .observation import Observation
from .pages import PagePool
from .prefix import PrefixCache
from .processors import Processing
from .request import Listener, Request, SamplingParams
from .sampling import Uniforms, Ways, best_tokens
from .scheduler import MOST_PREFILL_TOKENS, Plan, Scheduler
from .staging import send
from .stats import Stats
from .tokenizer import TextStream, Tokenizer
from .warmup import warm_up

# rows of the query buffer kept for known prefixes, beside those of running requests
BORDER_ROWS = 16
LOGIT_ROWS = 128  # rows of logits held at once, at least: given outputs have several a request
CPU_POOL = 4 << 30  # bytes of keys and values that a CPU's pool takes at most by itself
log = logging.getLogger("nanobeacon")


class Engine:
    """Continuous batching of requests on one model: whoever waits joins at the next step.

    `submit` queues, `step` computes, `abort` ends; all three may be called by several threads."""

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        progress: bool = False,
    ) -> None:
        """Take the memory that the engine works in, and make ready what a step needs.

        tokenizer None: token ids alone, no text. eos_token_ids: any of them ends a request, unless
        its params ignore them. progress: a bar while decode steps are recorded.
        ValueError names a size that does not fit."""
        # 0. What is given, and what follows from it.
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        shape = model.config
        device = model.device
        dtype = model.dtype
        settings = config.eviction
        page_size = config.page_size
        rows = config.max_num_seqs + 1  # row 0 is the scratch row
        self.logit_rows = max(config.max_num_seqs, LOGIT_ROWS)  # held at once, at most
        self.group = model.group
        self.seed = config.seed
        if self.seed is None:  # a fresh one, the same on every member of a group
            self.seed = self.group.by_first(lambda: random.SystemRandom().getrandbits(63))
        self.max_model_len = config.max_model_len or shape.context
        self.vocabulary = shape.vocab_size
        if tokenizer is not None:  # a checkpoint may have more rows of logits than there are tokens
            self.vocabulary = min(tokenizer.size, shape.vocab_size)
        # 1. Memory: query buffers first, then as many pages as fit beside them.
        borders = range(0)
        if self._shares_queries():
            borders = range(rows, rows + BORDER_ROWS)
        self.queries = QueryBuffer(settings, shape, rows + len(borders), dtype, device)
        pages_each = -(-self.max_model_len // page_size)
        slot_bytes = 2 * shape.head_dim * dtype.itemsize + 4  # key, value and position
        self.page_bytes = shape.num_layers * shape.num_kv_heads * page_size * slot_bytes
        self.records = config.cuda_graphs and can_record(model)
        overlap = device.type == "cuda" if config.overlap is None else config.overlap
        self.overlap = overlap and self.group.size == 1
        # As many as the fullest device of a group has room for: all members come to the same plans.
        num_pages = config.num_pages
        if num_pages is None:
            num_pages = min(self.group.collect(self._pages_that_fit(pages_each)))
        most_pages = min(pages_each, num_pages)  # of one request
        self.pool = PagePool(num_pages + 1)  # page 0 is the scratch page
        self.cache = KVCache(shape, num_pages + 1, page_size, rows, most_pages, dtype, device)
        self.newest = torch.zeros(rows, dtype=torch.int64, device=device)  # each row's last token
        # 2. Who evicts, and who decides what runs.
        self.evictor = Evictor(
            settings,
            self.cache,
            self.queries,
            model.rope,
            model.kernels,
            config.trace,
            model.heads,
        )
        self.scheduler = Scheduler(
            self.pool,
            page_size,
            config.max_num_seqs,
            config.chunk,
            settings.budget if settings is not None else None,
            prefix=self._prefix_cache(borders),
        )
        # 3. Nothing is compiled while somebody waits; decode steps are recorded where they can be.
        self.graphs: DecodeGraphs | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._prepare(most_pages * page_size, progress)
        # 4. What is counted, and who is at work.
        self.stats = Stats()
        self.eviction_clock = DeviceClock(device)
        self._arrivals = count()
        self._lock = threading.RLock()  # several threads may submit, step and abort
        self._working = False  # somebody is between taking and giving back the lock
        self._torn = False  # … or was thrown out of there, and what it left is not put right yet
        self._plan: Plan | None = None  # the step on its way
        self._flight: Flight | None = None  # the step whose tokens are still to be read
        self._doubted = False  # whether the tokens read last left a doubt
        self._ways: Ways | None = None  # how the rows of the last step were sampled
        query_bytes = len(self.queries.buffer) * self.queries.row_bytes
        log.info(
            "%s on %s: %d pages of %d tokens, %.2f GB; query buffers %.1f MB",
            str(dtype).removeprefix("torch."),
            device,
            num_pages,
            page_size,
            num_pages * self.page_bytes / 1e9,
            query_bytes / 1e6,
        )

    # -------------------------------------------------------------------------------- making ready

    def _prepare(self, most_tokens: int, progress: bool) -> None:
        """Compile kernels and record decode steps, on the scratch page and the scratch row.

        most_tokens: how many one request can have cached."""
        chunk = self.config.chunk
        max_num_seqs = self.config.max_num_seqs
        warm_up(self.model, self.cache, self.queries, self.evictor, chunk, max_num_seqs)
        if not self.records:
            return
        self.graphs = DecodeGraphs(
            self.model,
            self.cache,
            self.queries,
            max_num_seqs,
            most_tokens,
            self.vocabulary,
            record=Recorder(self.model.device),
            newest=self.newest if self.overlap else None,
        )
        self.graphs.record_all(progress)

    def _shares_queries(self) -> bool:
        """Whether a policy's queries at a border are a function of the tokens before it, and worth
        keeping. A reservoir draws with the request's seed, so its rows are no other's."""
        settings = self.config.eviction
        asks = settings is not None and settings.capacity > 0
        return self.config.prefix_cache and asks and settings.policy.select != "reservoir"

    def _prefix_cache(self, borders: range) -> PrefixCache | None:
        """What is known of prompts' beginnings; borders: rows for the queries that belong to them.

        None where it is switched off, or where those queries cannot be shared."""
        settings = self.config.eviction
        asks = settings is not None and settings.capacity > 0
        if not self.config.prefix_cache or (asks and not borders):
            return None
        # Beyond a dynamic RoPE's context keys depend on how long their own sequence is.
        rope = self.model.rope
        shared_context = rope.context if rope.config.kind == "dynamic" else None
        return PrefixCache(
            self.pool,
            self.config.page_size,
            self.config.chunk,
            rows=borders if asks else None,
            shared_context=shared_context,
        )

    def _pages_that_fit(self, pages_each: int) -> int:
        """Pages for the pool: never more than `max_num_seqs` requests of `pages_each` can fill.

        GPU: `gpu_memory` of what is free now, less what a step takes; CPU: CPU_POOL at most.
        ValueError where not even one page fits."""
        device = self.model.device
        page_bytes = self.page_bytes
        most_pages = self.config.max_num_seqs * pages_each
        if device.type == "cuda":
            room = int(free_bytes(device) * self.config.gpu_memory) - self._step_bytes()
        else:
            room = min(CPU_POOL, most_pages * page_bytes)
        if room < page_bytes:
            free = f"{room} bytes are free for the cache"
            raise ValueError(f"num_pages: {free}, one page takes {page_bytes}")
        return min(room // page_bytes, most_pages)

    def _step_bytes(self) -> int:
        """What a step may take on a GPU beside what is allocated before the first one."""
        config = self.config
        recorded = len(buckets(config.max_num_seqs)) if self.records else 0
        # The longest step there is: a prefill step's prompts, or one token of each request
        longest = max(config.chunk, MOST_PREFILL_TOKENS, config.max_num_seqs)
        return step_bytes(
            self.model.config,
            self.model.dtype,
            tokens=longest,
            logit_rows=self.logit_rows,
            graphs=recorded,
            graph_tokens=config.max_num_seqs,
            unread_rows=config.max_num_seqs if self.overlap else 0,
        )

    # ------------------------------------------------------------------------ requests come and go

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        forced: list[int] | None = None,
        on_logits: Listener | None = None,
    ) -> list[Request]:
        """Queue the n completions of a prompt; one that cannot run comes back ended, with `error`.

        forced: an output that is given instead of sampled, token ids. on_logits: called for each
        output token with how many came before it and its raw logits, float32 [V]."""
        settings = self.config.eviction
        arrival = next(self._arrivals)
        seed = params.seed
        if seed is None:
            seed = self._seed_of(arrival)
        protected = len(prompt)
        if settings is not None:
            protected = settings.protected(len(prompt))
        # 1. All that can be refused or fail comes before the first one is queued.
        requests: list[Request] = []
        for completion in range(params.n):
            request = Request(
                arrival,
                prompt,
                params,
                max_tokens=params.max_tokens or 0,
                protected=protected,
                completion=completion,
                seed=seed,
                eos_token_ids=self.eos_token_ids,
                forced=forced,
                on_logits=on_logits,
                budgeted=settings is not None,
            )
            request.processing = Processing.of(request)
            request.draw = draw_of(request, self.vocabulary)
            request.uniforms = Uniforms(seed, completion)
            request.error = self._limit(request)
            if request.error:
                request.finish_reason = "error"
            elif self.tokenizer is not None and forced is None:
                min_tokens = params.min_tokens or 0
                request.stream = TextStream(self.tokenizer, prompt, params.stop, min_tokens)
            requests.append(request)
        # 2. Queued they are, or none is: whoever is interrupted here has no request to abort.
        try:
            with self._at_work():
                for request in requests:
                    if request.error is None:
                        self.scheduler.add(request)
            return requests
        except BaseException:
            for request in requests:
                self.abort(request)
            raise

    def _seed_of(self, arrival: int) -> int:
        """For a request without a seed: by the engine's seed and the arrival. Without an engine's
        seed either, that is a fresh one."""
        return random.Random(f"{self.seed} {arrival}").getrandbits(63)

    def _limit(self, request: Request) -> str | None:
        """Settle max_tokens; the reason why the request cannot run, or None.

        A reason names what was asked for and what is possible: it becomes the request's `error`."""
        prompt = request.prompt_token_ids
        vocab_size = self.model.config.vocab_size
        # 1. What was written: token ids and stop strings.
        if not prompt:
            return "the prompt is empty and the model has no BOS token to begin with"
        forced = request.forced or []
        given = list(prompt) + list(forced) + list(request.params.token_ids_named)
        wrong = [t for t in given if type(t) is not int or not 0 <= t < vocab_size]
        if wrong:
            possible = f"whole numbers from 0 to {vocab_size - 1}"
            return f"token id {_shown(wrong[0])}: possible are {possible}"
        if request.params.stop and self.tokenizer is None:
            reason = "stop strings need a tokenizer, and the model's folder has none"
            return f"{reason}; stop_token_ids work"
        # 2. The model's context.
        left = self.max_model_len - len(prompt)
        asked = request.max_tokens or 1
        if asked > left:
            possible = f"{self.max_model_len} together are possible (max_model_len)"
            return f"{len(prompt)} prompt tokens and {asked} new ones were asked for; {possible}"
        # 3. Without a max_tokens: as many as the context and the cache leave room for.
        slots = (self.pool.num_pages - 1) * self.config.page_size
        if not request.max_tokens:
            most = left
            if self.config.eviction is None:  # a budget's cache does not grow with the output
                most = min(left, max(1, slots - len(prompt)))
            request.max_tokens = min(most, self.config.usual_max_tokens or most)
        # 4. The cache, once it is alone there.
        if not self.scheduler.fits(request):
            tokens = self.scheduler.tokens_held(request)
            needed = f"the cache must hold {tokens} tokens for this request"
            return f"{needed} and has {slots} slots; fewer tokens, a budget or more num_pages help"
        return None

    def abort(self, request: Request) -> None:
        """End a request now, wherever it is; what it has is kept, what it held is free.

        Nothing happens to one that has ended. A step on its way in another thread ends first."""
        with self._at_work():
            if request.finish_reason is None:
                request.finish_reason = "abort"
                self._close(request)

    def _close(self, request: Request) -> None:
        """Release everything a finished request held, and the text that was held back."""
        request.num_unread = 0
        self.scheduler.finish(request)
        flush_text(request)

    # ------------------------------------------------------------------------------------ one step

    def step(self) -> list[Request] | None:
        """One forward pass: who got a token, None if nobody waits.

        With overlap these are the tokens of the pass before it (`flight.py`). Where memory runs out
        it is tried again in smaller parts; a request that does not fit alone ends in error. Any
        other failure ends all that are in the step, and is raised."""
        on_its_device = torch.cuda.device_of(self.cache.keys)  # Triton launches on the current GPU
        with self._at_work(), on_its_device:
            if self._plan is not None:  # the lock lets its own thread in
                callers = "on_logits and logits_processor"
                raise RuntimeError(f"{callers} cannot use the LLM that is calling them")
            # 1. What runs may depend on tokens that are still to be read.
            done: list[Request] = []
            if self._must_land_first():
                done, _ = self._land()
            plan = self.scheduler.plan(self.evictor.ahead)
            if plan is not None:
                return done + self._run_within_memory(plan)
            # 2. Nothing is left to run: what is left to read?
            landed, _ = self._land()
            return done + landed or None

    @torch.inference_mode()
    def _run(self, plan: Plan, before: Progress) -> list[Request]:
        """The step of a plan; who got a token, in order. before: where its requests stood.

        All lengths are counted on the host, and which caches evict follows from them: the device is
        waited for when tokens are read, not to learn what is due."""
        began = time.perf_counter()
        # 0. Whoever begins behind a prefix that is known takes over the queries kept there.
        self._take_over_queries()
        # 1. Run the model: keys, values and queries are stored on the way, layer by layer.
        recorded = None
        hidden = None
        if self.graphs is not None and plan.one_each:
            recorded = self.graphs(plan)
        if recorded is not None:
            observation = Observation()  # the recording has stored its queries; it has no chunk
        else:
            batch = Batch.build(plan, self.cache, self.queries)
            if self._flight is not None and plan.one_each:
                batch = batch.with_unread(self.newest)
            hidden = self.model(batch, self.cache, self.queries)
            observation = batch.observation
        # 2. Count what is there now: from here on the tokens of the step are cached.
        self.queries.advance(plan, observation)
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            request.num_computed += length
            request.cached_length += length
        # 3. The tokens of the step before, if they are still to be read. Nobody wants the rows of
        #    requests that ended with theirs, and of those that were fed a doubtful one: these are
        #    as if the step had not been.
        read_from = time.perf_counter()
        done, doubtful = self._land()
        reading = time.perf_counter() - read_from
        if doubtful:
            before.restore(doubtful)
        skipped = {r for r in plan.requests if r.finish_reason is not None}.union(doubtful)
        self._remember(plan, skipped)
        self._count_memory(plan, skipped)
        # 4. Completions that waited for a prompt take over what its leader has read. From here on
        #    they are requests as any other, and answer from their leader's row.
        takers = plan.takers()
        if skipped:
            takers = [(request, token) for request, token in takers if request not in skipped]
        ready = dict(takers)
        forks = self._fork(ready)
        for fork in forks:
            token = ready[fork.leader]
            takers.append((fork, token))
            ready[fork] = token
        # 5. A token for each row that has an answer to give. Without overlap requests take theirs
        #    now, and may end with it.
        later = self._reads_later(ready)
        if recorded is not None:
            sampled = self._sample(plan, plan.requests, recorded, skipped, later)
        else:
            sampled = self._answer(plan, takers, hidden, later)
        for fork in forks:
            fork.leader = None
        if not later:
            done += ready
        # 6. Evict, of those that go on, whose cache or query buffer is full.
        going_on = [request for request in plan.requests + forks if request.finish_reason is None]
        if later:
            going_on = [request for request in going_on if not request.is_full]
        if skipped:
            going_on = [request for request in going_on if request not in skipped]
        evicted = self._evict(going_on)
        # 7. What is left for later.
        if later and ready:
            done += self._let_fly(Flight(plan, sampled, evicted))
        else:
            self._count_evictions(evicted)
        self.stats.count_step(plan, time.perf_counter() - began - reading)
        return done

    def _take_over_queries(self) -> None:
        """Copy the queries kept at a known prefix's border to whoever was admitted behind it."""
        for request in self.scheduler.running:
            if request.found_row:
                self.queries.copy_row(request.found_row, request.row)
                request.found_row = 0
        self.stats.prefix_tokens = self.scheduler.prefix_tokens

    def _answer(
        self,
        plan: Plan,
        takers: list[tuple[Request, int]],
        hidden: Tensor,
        later: bool,
    ) -> Sampled | None:
        """Tokens for requests from the hidden states [T, hidden] of the step's tokens; as
        `_sample`.

        takers: (request, which of the T tokens it follows). Logits are held of `logit_rows` rows at
        a time: given outputs have many, and a row is as long as the vocabulary."""
        sampled = None
        every_token = range(len(hidden))
        for first in range(0, len(takers), self.logit_rows):
            some = takers[first : first + self.logit_rows]
            requests = [request for request, _ in some]
            index = [token for _, token in some]
            answering = hidden  # as it is where each token has one answer: the common decode step
            if index != list(every_token):
                answering = hidden[torch.tensor(index, device=hidden.device)]
            logits = self.model.logits(answering, self.vocabulary)
            answers = Answers(logits, best_tokens(logits))
            sampled = self._sample(plan, requests, answers, (), later)
        return sampled

    def _sample(
        self,
        plan: Plan,
        requests: list[Request],
        answers: Answers,
        skipped: Collection[Request],
        later: bool,
    ) -> Sampled:
        """A token for each row of answers, which its request takes at once or `later`: then it also
        lies where the next step finds it. skipped: whose rows mean nothing."""
        sampled = sample_tokens(
            requests,
            answers,
            self.group,
            self._close,
            skipped,
            outlives=later,
            ways=self._ways,
        )
        self._ways = sampled.ways
        if later:
            rows = answers.rows
            if rows is None:
                columns = {"rows": [request.row for request in requests]}
                rows = send(columns, self.newest.device, int32=())["rows"]
            # What stands for no token is no index either.
            self.newest.index_copy_(0, rows, sampled.tokens.clamp(min=0))
        else:
            self._hand_out(plan, sampled, sampled.read(), self._close)
        return sampled

    def _hand_out(self, plan: Plan, sampled: Sampled, read: Read, close: Close) -> list[Request]:
        """Let requests take the tokens that were read of a plan's step; who got one."""
        takers = take_tokens(sampled, read, close)
        self.stats.count_tokens(plan, len(takers))
        self._doubted = len(read.doubtful) > 0
        return takers

    # ------------------------------------------------------------------ tokens that are read later

    def _reads_later(self, requests: Collection[Request]) -> bool:
        """Whether the host may read the tokens of these requests while the next step computes."""
        return self.overlap and not self._doubted and not any(map(_waits_for_host, requests))

    def _must_land_first(self) -> bool:
        """Whether the next step cannot even be planned before the tokens in flight are read."""
        if self._flight is None:
            return False
        return any(map(_waits_for_host, self.scheduler.running)) or self.scheduler.may_preempt()

    def _let_fly(self, flight: Flight) -> list[Request]:
        """Leave a step's tokens for later; who got one nevertheless.

        Whoever has sampled its last token needs no seat any more."""
        self._flight = flight
        done: list[Request] = []
        if flight.evicted.failures:
            # Who could not be evicted may have ended with its token.
            done, _ = self._land()
        for request in flight.sampled.requests:
            if request.is_full and request.finish_reason is None:
                self.scheduler.finish(request)
        return done

    @torch.inference_mode()
    def _land(self, close: Close | None = None) -> tuple[list[Request], list[Request]]:
        """Read what is in flight: who got a token, and whose the device has wrong (DOUBT).

        close: what is done with those that end, None for all that there is to do."""
        flight = self._flight
        if flight is None:
            return [], []
        began = time.perf_counter()
        read = flight.sampled.read()  # may fail, and be tried again
        flight.landing = True
        takers = self._hand_out(flight.plan, flight.sampled, read, close or self._close)
        self._count_evictions(flight.evicted)
        self._flight = None
        self.stats.count_seconds(flight.plan, time.perf_counter() - began)
        return takers, read.doubtful

    def _remember(self, plan: Plan, skipped: Collection[Request]) -> None:
        """Make pages that a step has filled known to the prefix cache; at a border queries too."""
        prefix = self.scheduler.prefix
        if prefix is None:
            return
        page_size = self.config.page_size
        for request, length in zip(plan.requests, plan.lengths, strict=True):
            # Tokens in the page that is not full: if all of the step's are there, none was filled.
            in_last_page = request.num_computed % page_size
            if in_last_page >= length or request in skipped:
                continue
            prefix.insert(request)
            # A row of its own, where the prefix ends at a border whose queries are not known yet.
            row = prefix.row_for(request)
            if row:
                self.queries.copy_row(request.row, row)
                prefix.keep_row(request)

    def _evict(self, going_on: list[Request]) -> Evicted:
        """Reduce and evict what is due among these.

        A GPU is not waited for: its seconds are counted in a later step, when they are known."""
        began = self.eviction_clock.begin()
        evicted = self.evictor.after_step(going_on)
        if evicted.at_work:
            self.eviction_clock.end(began)
        self.stats.eviction_seconds = self.eviction_clock.seconds()
        return evicted

    def _count_evictions(self, evicted: Evicted) -> None:
        """Of those that go on: note their evictions, and end whose cache could not be evicted."""
        for request, event in evicted.events.items():
            if request.finish_reason is not None:
                continue
            self.stats.evictions += 1
            if event is not None:
                request.trace.append(event)
        for request, reason in evicted.failures.items():
            if request.finish_reason is None:
                request.finish_reason = "error"
                request.error = reason
                self._close(request)

    def _fork(self, ready: Collection[Request]) -> list[Request]:
        """Completions that waited for a prompt's prefill take over what they do not share already.

        ready: who gets tokens in this step. A leader among them has just read the prompt."""
        followers = [r for r in self.scheduler.running if r.leader is not None]
        forks = [r for r in followers if r.leader in ready]
        if forks:
            write_pages(forks, self.cache)
        for request in forks:
            leader = request.leader
            request.num_computed = leader.num_computed
            request.cached_length = leader.cached_length
            request.trace = list(leader.trace)
            request.kept_scores = leader.kept_scores
            # Full protected pages are shared already; the others are copied, as is the buffer row.
            used = -(-leader.cached_length // self.config.page_size)
            private = [i for i in range(used) if leader.pages[i] != request.pages[i]]
            theirs = [leader.pages[i] for i in private]
            own = [request.pages[i] for i in private]
            self.cache.copy_pages(theirs, own)
            self.queries.copy_row(leader.row, request.row)
            request.buffer_count = leader.buffer_count
        return forks

    def _count_memory(self, plan: Plan, skipped: Collection[Request]) -> None:
        """What is held with all that the step has stored, before anything ends or is evicted."""
        lengths = [request.cached_length for request in plan.requests if request not in skipped]
        if not lengths:
            return
        # 1. Rows of query buffers: of whoever runs, and those kept at borders of known prefixes.
        running = self.scheduler.running
        prefix = self.scheduler.prefix
        kept_rows = len(prefix.kept_rows) if prefix is not None else 0
        # 2. Pages without a budget: every token computed would still be there.
        page_size = self.config.page_size
        full_pages = sum([-(-request.num_computed // page_size) for request in running])
        self.stats.count_memory(
            cached_tokens=max(lengths),
            kv_bytes=self.pool.used_count * self.page_bytes,
            full_bytes=full_pages * self.page_bytes,
            query_bytes=(len(running) + kept_rows) * self.queries.row_bytes,
        )

    # ---------------------------------------------------------------------------- when a step fails

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """One thread at a time, and nothing is left half done.

        Whatever exception ends its work, at whatever line (Ctrl-C comes anywhere), is put right: at
        once or, if that is interrupted too, before the next work."""
        with self._lock:
            if self._working:  # a function of the user's, called by the step that is on its way
                yield
                return
            self._working = True
            try:
                if self._torn:
                    self._put_right(None)
                self._torn = True
                yield
                self._torn = False
            except BaseException as error:
                self._put_right(error)
                raise
            finally:
                self._working = False

    def _put_right(self, error: BaseException | None) -> None:
        """End whoever was in the step; who holds what follows anew from those that run.

        error: what ended the step, None where that is no longer known."""
        # 1. What the step before has sampled is not lost, if it can still be read.
        flight = self._flight
        if flight is not None and not flight.landing:
            try:
                self._land(close=flush_text)
            except Exception as broken:
                log.warning("the last tokens are lost: %r", broken)
        # 2. Who was in the step: its requests, completions that waited for their prompts, and
        #    whoever has tokens that nobody will read.
        inside = [request for request in self.scheduler.running if request.num_unread]
        if self._flight is not None:
            inside += self._flight.sampled.requests
        if self._plan is not None:
            followers = [r for r in self.scheduler.running if r.leader in self._plan.requests]
            inside += self._plan.requests + followers
        failed = isinstance(error, Exception)  # else somebody asked to stop
        for request in inside:
            if request.finish_reason is not None:
                continue
            request.finish_reason = "error" if failed else "abort"
            request.error = repr(error) if failed else None
            flush_text(request)
        # 3. Pages, rows and queues.
        self.scheduler.put_right()
        self._flight = None
        self._plan = None
        self._torn = False

    def _run_within_memory(self, plan: Plan) -> list[Request]:
        """Run a plan; who got a token.

        Until tokens are taken a step can be undone, so where memory runs out it is: a decode step
        is run again as two halves, the prompts of a prefill step go back to the queue for smaller
        steps, and a request alone in its step ends."""
        # 1. Run it, if there is room.
        self._plan = plan
        before = Progress.of(plan)
        try:
            done = self._run(plan, before)
        except Exception as error:
            if not is_out_of_memory(error) or before.answered() or self.group.size > 1:
                raise  # other members of a group have run the step and go on behind it
            tokens = sum(plan.lengths)
            reason = f"memory ran out in a step of {tokens} tokens: {error!r:.300}"
        else:
            self._plan = None
            return done
        # 2. Undo it. Only here, behind `except`, has the failed step let go of its memory. What the
        #    step before has sampled is read, if that is still to be done.
        before.restore()
        done, _ = self._land()
        for request in plan.requests:
            request.num_unread = 0
        if plan.prefill:
            self.scheduler.try_fewer(plan)
        self._plan = None
        # 3. Try less, or end the one that was alone.
        request = plan.requests[0]
        alone = len(plan.requests) == 1
        if alone and request.finish_reason is None:
            request.finish_reason = "error"
            request.error = reason
            self._close(request)
        if not alone and not plan.prefill:
            middle = len(plan.requests) // 2
            for first, end in ((0, middle), (middle, len(plan.requests))):
                half = plan.part(first, end)
                if half.requests:
                    done += self._run_within_memory(half)
        return done


def _waits_for_host(request: Request) -> bool:
    """Whether what a request's next step reads is known to the host alone, or asked of it."""
    return request.forced is not None or request.on_logits is not None


def _shown(token_id: object) -> str:
    """A wrong id for a message. Python refuses to print whole numbers of more than 4,300 digits."""
    if isinstance(token_id, int) and token_id.bit_length() > 64:
        return f"of {token_id.bit_length()} bits"
    return f"{token_id!r:.80}"
