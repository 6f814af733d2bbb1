"""What the engines of today decide: the rule of each as a policy beside the papers'.

Each rule was read in the engine's source. The docstring names the file, and the commit or version
where it is known. The code is this repository's own, and plainer than theirs: no encoders, no
adapters, no speculation, no second GPU. "Differs from theirs" says what is left out, each with an
example: sizes, then prompt + output of requests that are all there at the beginning, and from them
the chunk of each request in each batch, `d` for a decode, here and there. Prompts of letters share
pages.

`python bench.py today` shows them side by side, and `python -m tests.beside vllm-v1` holds one
beside the engine itself. Read first: scheduler.py. Read next: remedies.py, what their users
propose; README.md beside this file, the tables and pictures."""

import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from kv_cache import Pages
from policies.cards import card
from policies.pages import CachedPages
from policies.parts import add_prefills, move_to_front, output_left
from scheduler import VLLM, Admission, Batch, Request, SarathiServe, Scheduler


class Recomputing(Scheduler):
    """What engines share that count the recomputation of a victim as a prefill, to its last token.

    Its last token may come in a batch of prefills. `Request.is_decoding` calls that a decode, so
    the referee would miss the other decodes."""

    drops_decodes = True
    cuts_prompts = True
    to_recompute = 1

    def __init__(self, pages: Pages, **sizes: Any) -> None:
        super().__init__(pages, **sizes)
        self.prefill_end: dict[int, int] = {}  # by request id

    def is_prefilling(self, request: Request) -> bool:
        """Whether tokens are left that a running request had when it was admitted."""
        return request.num_computed < self.prefill_end[request.id]

    def prefilling(self) -> list[Request]:
        return [request for request in self.running if self.is_prefilling(request)]

    def admit(self) -> Request | None:
        request = super().admit()
        if request:
            self.prefill_end[request.id] = len(request.tokens)
        return request

    def finish(self, request: Request, reason: str) -> None:
        super().finish(request, reason)
        self.prefill_end.pop(request.id, None)

    def reserved(self, request: Request) -> int:
        return len(request.tokens)

    def rank(self, request: Request) -> tuple[float, ...]:
        """The one that was admitted last is preempted first."""
        return (self.running.index(request),)

    def cut(self, admission: Admission, request: Request, tokens: int) -> Admission:
        """Of an Admission for all of a request, the part for a first chunk of so many tokens."""
        cached_pages = len(admission.cached_pages)
        end = min(cached_pages * self.pages.page_size + tokens, len(request.tokens))
        return Admission(admission.cached_pages, self.pages.needed(end) - cached_pages)


@card("vllm-v1", "#1616f3", engine="vLLM V1", version="0.33.0", equal="1,192 of 1,200")
class VLLMV1(Recomputing):
    """vLLM V1: one pass over all that run, in order of admission, then the queue.

    There are no phases: a decode is a chunk of one token. A request is admitted if all its tokens
    fit, but gets memory chunk by chunk: that admits more, and preempts more. Nobody is admitted in
    a step that has preempted. No decode is ever left out: who joins takes what those before it
    leave, and they never take more later. With prefix caching, the pages that a step computes are
    found in that very step: a burst with one system prompt computes it once.

    `long_prefill_token_threshold` caps each chunk, unless a request is alone (0: no cap).
    `long_prefill_token_threshold_adaptive` caps at a fair share of the budget, if that is more.
    After a step with prefill, others wait for `prefill_schedule_interval` - 1 steps while somebody
    decodes, unless the last prefills left some in the queue. vLLM 0.22.1, of spring 2026, has
    neither of these two, and caps a lonely prompt, too.
    Source: vllm/v1/core/sched/scheduler.py of vLLM 0.33.0, `schedule`, and its kv_cache_manager.py,
    with the defaults watermark = 0 and scheduler_reserve_full_isl.
    Differs from theirs: of two pages with the same tokens only the first is found. With
    `chunk=2 max_batch=2 pages=5 page_size=1 max_len=5, aa+1 a+4 a+4` the last one, preempted, finds
    nothing: `0:2 | 1:1 2:1 | 1:d 2:d | 1:d | 1:d | 2:2`, theirs `... | 1:d | 1:d 2:d | 2:d`.
    And of a victim of whose tokens one is left, the interval does not make this one wait. With
    `prefill_schedule_interval=3 pages=5 page_size=2 max_len=10, aaaaaa+4 aa+4`, it is the second:
    `0:6 1:2 | 0:d | 0:d 1:d`, theirs `0:6 1:2 | 0:d | 0:d`."""

    shares_in_batch = True
    drops_decodes = False
    limit = sys.maxsize  # tokens of one request in the next batch
    steps = sys.maxsize  # since the last one with prefill
    left_waiting = False  # whether the last prefills left some in the queue

    def __init__(
        self,
        pages: Pages,
        *,
        long_prefill_token_threshold: int = 0,
        long_prefill_token_threshold_adaptive: bool = False,
        prefill_schedule_interval: int = 1,
        **sizes: Any,
    ) -> None:
        super().__init__(pages, **sizes)
        self.threshold = long_prefill_token_threshold
        self.adaptive = long_prefill_token_threshold_adaptive
        self.interval = prefill_schedule_interval

    def token_budget(self) -> int:
        """How many tokens the next batch may have."""
        return self.chunk

    def prefill_limit(self) -> int:
        """How many tokens of one request the next batch may have."""
        requests = len(self.running) + len(self.waiting)
        if not self.threshold or requests < 2:
            return sys.maxsize
        return max(self.threshold, self.chunk // requests) if self.adaptive else self.threshold

    def schedule(self) -> Batch:
        self.batch = batch = Batch(self.token_budget())  # room_for looks at what is left of it
        self.limit = self.prefill_limit()
        preempted_before = len(self.preempted)
        prefills = self.prefilling()
        decodes = len(self.running) > len(prefills)
        only_decodes = self.steps < self.interval and decodes and not self.left_waiting
        for request in self.running[:]:
            if batch.left == 0:
                break
            if only_decodes and request in prefills:
                continue
            length = len(request.tokens) - request.num_computed
            self.grow(request, request.num_computed + min(length, self.limit, batch.left))
            if request.pages:  # if not, it was preempted
                self.add_chunk(batch, request)
        has_prefill = any(chunk.request in prefills for chunk in batch)
        if len(self.preempted) == preempted_before and self.add_waiting(batch, only_decodes):
            has_prefill = True
        self.steps = 1 if has_prefill else self.steps + 1
        if not batch and self.waiting:
            return self.schedule()  # the one that decodes has lost its memory to the others
        return batch

    def add_waiting(self, batch: Batch, only_decodes: bool) -> bool:
        """Admit who fits. Returns whether there was more than a last token to compute."""
        has_prefill = False
        while batch.left > 0 and self.waiting:
            head = self.waiting[0]
            uncached = len(head.tokens) - self.cached_tokens_of_head()
            if only_decodes and uncached > 1 or not self.admit():
                break
            self.add_chunk(batch, head)
            has_prefill |= uncached > 1
        if not only_decodes:
            self.left_waiting = bool(self.waiting)
        return has_prefill

    def add_chunk(self, batch: Batch, request: Request) -> None:
        """Add the next chunk, and let those who are admitted behind it find its pages."""
        if batch.add(request, self.limit) and isinstance(self.pages, CachedPages):
            self.pages.publish(request, batch[-1].start, batch[-1].end)

    def room_for(self, request: Request) -> Admission | None:
        """As in Scheduler, for all of the request; but it gets the pages of its first chunk."""
        admission = super().room_for(request)
        return admission and self.cut(admission, request, min(self.limit, self.batch.left))

    def preempt(self, request: Request) -> None:
        self.withdraw(request)
        super().preempt(request)

    def finish(self, request: Request, reason: str) -> None:
        if reason == "abort":
            self.withdraw(request)
        super().finish(request, reason)

    def withdraw(self, request: Request) -> None:
        """Take back the pages of a chunk that will not be computed, as of one that is aborted.

        That matters after an iteration that failed. Who has found the pages is preempted."""
        if not isinstance(self.pages, CachedPages):
            return
        for chunk in self.batch:
            if chunk.request is request and request.num_computed == chunk.start:
                pages = self.pages.withdraw(request, chunk.start, chunk.end)
                for reader in self.running[:]:
                    if reader is not request and not pages.isdisjoint(reader.pages):
                        self.preempt(reader)


@card(
    "interval",
    "#f316a9",
    note="4 batches of decodes after each batch of prefill, never both together",
    engine="proposed",
    version="SGLang 0.5.23",
)
class Interval(SarathiServe):
    """`every` decode batches after each prefill batch: 0 is prefill first, 1 is chunked-only.

    A prefill batch has chunks of at most `chunk` tokens together, and no decode. So `every` trades
    the time of a first token for the gaps between the others.
    Source: SGLang's --prefill-decode-interval, python/sglang/srt/managers/scheduler.py,
    `_should_defer_prefill`.
    Differs from theirs: 0.5.23 has --prefill-decode-interval-min-bs, too, decodes below which
    nothing is deferred, and it is 0 by default. With `chunk=2, 2+2 2+1` and 2 of these:
    `0:2 | 0:d | 1:2`, theirs `0:2 | 1:2 | 0:d`."""

    decode_batches = sys.maxsize  # since the last prefill batch

    def __init__(self, pages: Pages, *, every: int = 4, **sizes: Any) -> None:
        super().__init__(pages, **sizes)
        self.every = every

    def schedule(self) -> Batch:
        batch = Batch(self.chunk)
        if self.decode_batches < self.every:
            batch.add_decodes(self.grow_decodes())
        if not batch:
            add_prefills(self, batch)
            if batch:
                self.decode_batches = 0
                return batch
            batch.add_decodes(self.grow_decodes())
        self.decode_batches += 1
        return batch


@card("sglang", "#0bcb0b", engine="SGLang", version="0.5.23")
class SGLang(Interval):
    """SGLang: prefill first and alone, admission by a guess of how long the outputs become.

    The running requests are expected to use `ratio` of the output they may still have. The ratio
    falls with each decode batch, from 0.7 to 0.098 in 600, and rises to what was used when one must
    be retracted: the one with the fewest outputs, of equals the longest prompt. It trades stalls
    for early first tokens, and the risk of retractions for larger batches.
    Source: sgl-project/sglang 0.5.23 python/sglang/srt/managers/schedule_policy.py,
    `PrefillAdder.add_one_req`; schedule_batch.py, `retract_decode`; environ.py.
    Differs from theirs: a request admitted in this batch counts like those that run, and so does
    one with ignore_eos, as in benchmarks. There both count with all their output:
    `page_size=2 pages=4, 1+1 2+1` gives `0:1 1:2`, theirs `0:1 | 1:2`. Without a radix cache,
    ignore_eos has another rule there: see Peak for one like it. And a retracted one waits in front:
    `max_batch=3 page_size=1 pages=56, 1+20 2+20 3+20 4+5` retracts the third, and gives
    `... | 0:d 1:d 2:d | 0:d 1:d | 0:d 1:d`, theirs `... | 0:d 1:d 2:d | 0:d 1:d | 3:4`."""

    INIT_RATIO = 0.7
    MIN_RATIO = 0.7 * 0.14
    DECAY_STEPS = 600
    RETRACT_STEPS = 20  # tokens that each request shall be able to decode after a retraction
    MAX_GUESS = 4096  # tokens of output that one request is expected to have at most

    reorders = True
    watermark_percent = 0
    ratio: float = INIT_RATIO

    def __init__(self, pages: Pages, *, every: int = 0, **sizes: Any) -> None:
        super().__init__(pages, every=every, **sizes)

    def finish(self, request: Request, reason: str) -> None:
        super().finish(request, reason)
        if not (self.running or self.waiting):
            self.ratio = self.INIT_RATIO  # it is idle

    def room_for(self, request: Request) -> Admission | None:
        """As in Scheduler, if more is free than the outputs are expected to need, and a page."""
        admission = super().room_for(request)
        if admission is None or not self.running:
            return admission
        *outputs, output = [min(self.MAX_GUESS, output_left(r)) for r in [*self.running, request]]
        expected = self.ratio * sum(outputs) + output + self.pages.page_size
        taken_pages = admission.new_pages + self.pages.count_free(admission.cached_pages)
        free_tokens = (self.pages.num_free - taken_pages) * self.pages.page_size
        return admission if expected < free_tokens else None

    def grow_decodes(self) -> list[Request]:
        """As in Scheduler, and adapts the ratio."""
        preempted_before = len(self.preempted)
        decodes = super().grow_decodes()
        if len(self.preempted) == preempted_before:
            decay = (self.INIT_RATIO - self.MIN_RATIO) / self.DECAY_STEPS
            self.ratio = max(self.MIN_RATIO, self.ratio - decay)
        else:
            outputs = sum(len(r.tokens) - r.prompt_len + self.RETRACT_STEPS for r in decodes)
            self.ratio = min(1.0, outputs / (sum(r.max_new_tokens for r in decodes) + 1))
        return decodes

    def rank(self, request: Request) -> tuple[float, ...]:
        outputs = len(request.tokens) - request.prompt_len
        return -outputs, request.prompt_len, request.arrival, request.id


@card("free-slots", "#442082", engine="SGLang, --min-free-slots", version="0.5.23")
class FreeSlots(SGLang):
    """SGLang that admits nobody while fewer than `min_free_slots` slots of max_batch are free.

    So prompts begin together, and running answers are interrupted once instead of often; who comes
    first waits for the others' places.
    Source: python/sglang/srt/managers/min_free_slots_delayer.py of sglang 0.5.23, `should_delay`.
    It is off there by default, but for one family of models."""

    delays = False  # whether nobody is admitted to the next batch

    def __init__(self, pages: Pages, *, min_free_slots: int = 4, **sizes: Any) -> None:
        super().__init__(pages, **sizes)
        self.min_free_slots = min(min_free_slots, self.max_batch)

    def schedule(self) -> Batch:
        free_slots = self.max_batch - len(self.running)
        self.delays = bool(self.running) and free_slots < self.min_free_slots
        return super().schedule()

    def admit(self) -> Request | None:
        return None if self.delays else super().admit()


@card("lmdeploy", "#f1c26b", engine="LMDeploy, PyTorch engine", version="053945e0")
class LMDeploy(SarathiServe):
    """LMDeploy: prefill and decode in turn, and a prefill only if it pays.

    It pays if the queue holds a budget of tokens, if fewer than half of max_batch run, or after
    `prefill_interval` decode batches. So prompts collect to full batches, and few answers are
    interrupted; a single short prompt waits for 16 tokens of the others.
    Source: InternLM/lmdeploy lmdeploy/pytorch/engine/inputs_maker.py @053945e0,
    `do_prefill_default`.
    Differs from theirs: a prompt longer than the budget is computed alone there, and its chunks
    take turns with decodes and with short prompts. `chunk=4 max_batch=4, 2+3 9+1` gives
    `0:2 1:2 | 1:4 | 1:3 | 0:d`, theirs `0:2 | 1:4 | 0:d | 1:4`."""

    watermark_percent = 0
    decode_batches = 0  # since the last prefill batch, or since somebody waits

    def __init__(self, pages: Pages, *, prefill_interval: int = 16, **sizes: Any) -> None:
        super().__init__(pages, **sizes)
        self.interval = prefill_interval

    def prefill_pays(self) -> bool:
        """Whether the next batch is one of prefill, if anybody decodes."""
        if self.prefilling() or self.decode_batches >= self.interval:
            return True
        if 2 * len(self.running) < self.max_batch:
            return True
        # each has a token at least: so many of them are enough to know
        first = islice(self.waiting, self.chunk)
        return sum(len(request.tokens) for request in first) >= self.chunk

    def schedule(self) -> Batch:
        batch = Batch(self.chunk)
        decodes = self.grow_decodes()
        if not decodes or self.prefill_pays():
            add_prefills(self, batch)
        self.decode_batches = 0 if batch or not self.waiting else self.decode_batches + 1
        if not batch:
            batch.add_decodes(decodes)
        return batch


@card("sglang-mixed", "#5fdd7f", engine="SGLang, mixed chunks", version="0.5.23")
class SGLangMixed(SGLang):
    """SGLang with --enable-mixed-chunk: the decodes ride along in the prefill batch.

    They count against its budget. What is left of SGLang's rule is the admission; the batches are
    those of Algorithm 3. Here the ratio falls in every batch, there in those of decodes alone: with
    `chunk=4` a prompt of 10 leaves 0.698 here, 0.7 there. And here decodes without memory are
    retracted, there they sit a mixed batch out.
    Source: as SGLang, `PrefillAdder.__init__`: the budget less mixed_with_decode_tokens."""

    def schedule(self) -> Batch:
        return SarathiServe.schedule(self)


@card(
    "no-evict",
    "#34511f",
    engine="TensorRT-LLM; mini-sglang's admission",
    version="02a10fed; 20fcd7f",
)
class NoEvict(SarathiServe):
    """TensorRT-LLM's GUARANTEED_NO_EVICT: memory for prompt and output at admission.

    So nobody is ever preempted, and a request with a huge max_new_tokens keeps others out. That is
    the default of TensorRT-LLM, and the rule of mini-sglang. Batches are those of Algorithm 3;
    mini-sglang's are prefill first and alone.
    Source: NVIDIA/TensorRT-LLM cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp @02a10fed,
    `GuaranteedNoEvictScheduler`."""

    watermark_percent = 0

    def reserved(self, request: Request) -> int:
        return request.prompt_len + request.max_new_tokens


@card("fastgen", "#bbcb0b", engine="DeepSpeed-FastGen", version="MII 40dc4476")
class FastGen(SarathiServe):
    """DeepSpeed-FastGen, Dynamic SplitFuse: Algorithm 3 in which a decode without memory waits.

    Others go on meanwhile, and may end and free some. Only if nobody can go on, the last request
    loses its memory and goes to the back of the queue. It trades an answer that stands still for
    fewer tokens that are computed twice.
    Source: microsoft/DeepSpeed-MII mii/batching/ragged_batching.py @40dc4476,
    `_do_schedule_requests` and `reset_request_status`.
    Differs from theirs: a prompt that has begun has memory for its rest here, and cannot stall.
    `chunk=4 page_size=2 pages=3 max_len=4, 2+2 3+1` gives `0:2 1:2 | 1:1 | 0:d`, theirs
    `0:2 1:2 | 0:d | 1:1`."""

    drops_decodes = True
    reorders = True
    watermark_percent = 0

    def grow_decodes(self) -> list[Request]:
        decodes: list[Request] = []
        for request in self.running:
            has_room = request.num_computed < len(request.pages) * self.pages.page_size
            if request.is_decoding and (has_room or self.pages.num_free):  # if not, it waits
                self.grow(request, request.num_computed + 1)
                decodes.append(request)
        return decodes

    def schedule(self) -> Batch:
        batch = super().schedule()
        while not batch and self.running:  # a deadlock: all wait for memory
            self.preempt(self.running[-1])
            self.waiting.rotate(-1)  # to the back
            batch = super().schedule()
        return batch


@card(
    "tgi",
    "#51341f",
    engine="Text Generation Inference, whole prompts",
    version="1d0847a9",
)
class TGI(VLLM):
    """Text Generation Inference without chunks: whole prompts interrupt only if they are many.

    A prefill batch is made if the waiting requests are at least `waiting_served_ratio` of those
    that run, or if `max_waiting_tokens` decode batches have passed; between two there is a decode
    batch, except after the first one of an idle engine. Memory is reserved for prompt and output.
    It trades first tokens for fewer interruptions.
    Source: huggingface/text-generation-inference backends/v3/src/backend.rs @1d0847a9,
    `batching_task`; queue.rs.
    Differs from theirs: it also asks whether so many fit at once. One of two does in
    `waiting_served_ratio=2 max_batch=2 page_size=1 max_len=5, 2+2 4+1 4+1`: `0:2 | 1:4 | 0:d`,
    theirs `0:2 | 0:d | 1:4`. And it reserves no page for the last token, which is never computed:
    `page_size=4 pages=3 max_len=12, 4+1 4+1` gives `0:4 | 1:4`, theirs `0:4 1:4`."""

    watermark_percent = 0
    decode_batches = 0  # since the last prefill batch
    was_idle = True  # before the last batch

    def __init__(
        self,
        pages: Pages,
        *,
        waiting_served_ratio: float = 0.3,
        max_waiting_tokens: int = 20,
        **sizes: Any,
    ) -> None:
        super().__init__(pages, **sizes)
        self.ratio = waiting_served_ratio
        self.max_waiting = max_waiting_tokens

    def reserved(self, request: Request) -> int:
        return request.prompt_len + request.max_new_tokens

    def schedule(self) -> Batch:
        batch = Batch(self.max_len)
        is_idle = not self.running
        many_wait = len(self.waiting) >= int(len(self.running) * self.ratio)
        many_wait = many_wait or self.decode_batches + 1 >= self.max_waiting
        if is_idle or (many_wait and (self.decode_batches or self.was_idle)):
            while self.head_fits(batch) and (request := self.admit()):
                batch.add(request)
        self.was_idle = is_idle
        self.decode_batches = 0 if batch else self.decode_batches + 1
        if not batch:
            batch.add_decodes(self.running)  # all memory is reserved: no decode needs a page
        return batch


@card("hf", "#7777f8", engine="Hugging Face transformers", version="5.23.0", equal="400 of 400")
class HFTransformers(Recomputing):
    """Hugging Face transformers, continuous batching: decodes, prefills, then the queue.

    Memory comes chunk by chunk. Who finds none is starved: it is left out, and the others go on.
    After the batch, starved requests lose their memory, the newest first, until the rest can go on
    in the next one. They wait at the back, and nobody begins until a request has ended. While fewer
    than `margin_percent` of the pages are free, only the first prefill of a batch without decodes
    goes on. It trades batch size for fewer preemptions.
    Source: transformers/generation/continuous_batching/ of transformers 5.23.0, `FIFOScheduler` in
    scheduler.py, `offload_requests` in offloading_manager.py, without memory on the CPU.
    Differs from theirs: `max_batch` there limits a batch, not who runs: with starved requests more
    may run. `max_batch=2 page_size=1 pages=12 max_len=9, 6+3 6+3 6+3 3+5` gives
    `0:6 1:2 | 0:d | 0:d | 2:6 3:2`, theirs `0:6 1:2 | 0:d 3:3 | 0:d 3:d`. A cached page is shared
    there only by who is admitted at once. `max_batch=1 page_size=1 pages=4 max_len=4, aa+2 aa+2`
    gives `0:2 | 0:d | 1:1`, theirs `0:2 | 0:d | 1:2`."""

    reorders = True
    queue_is_closed = False  # since a preemption, until a request ends
    left = 0  # tokens of the budget, for the one that is admitted

    def __init__(self, pages: Pages, *, margin_percent: int = 15, **sizes: Any) -> None:
        super().__init__(pages, **sizes)
        self.margin_percent = margin_percent

    def schedule(self) -> Batch:
        batch, starved = self.fill()
        while starved and self.relieve(starved) and not batch:
            batch, starved = self.fill()
        return batch

    def fill(self) -> tuple[Batch, list[tuple[Request, int]]]:
        """A batch, and the starved requests, each with the number of pages that it lacks."""
        batch = Batch(self.chunk)
        starved: list[tuple[Request, int]] = []
        prefills = self.prefilling()
        decodes = [request for request in self.running if not self.is_prefilling(request)]
        is_short = self.pages.num_free * 100 < self.pages.total * self.margin_percent
        for request in chain(decodes, prefills, self.candidates()):
            is_held = is_short and batch and request not in decodes
            if batch.left == 0 or len(batch) == self.max_batch or is_held:
                break
            self.left = batch.left
            if not request.pages:
                if self.room_for(request):
                    move_to_front(self, request)
                    self.admit()
                    batch.add(request)
                continue
            end = min(len(request.tokens), request.num_computed + batch.left)
            missing_pages = max(0, self.pages.needed(end) - len(request.pages))
            if missing_pages > self.pages.num_free:
                starved.append((request, missing_pages))
            else:
                self.grow(request, end)
                batch.add(request)
        return batch, starved

    def candidates(self) -> Iterator[Request]:
        """Those that wait, in order, while some of them are admitted and leave the queue."""
        passed = 0
        if self.queue_is_closed and self.running:
            return
        while passed < len(self.waiting) and len(self.running) < self.max_batch:
            if self.pages.num_free == 0:
                break
            request = self.waiting[passed]
            yield request
            passed += not request.pages

    def plan_admission(self, request: Request) -> Admission:
        """As in Scheduler, with memory for what is left of the budget."""
        return self.cut(super().plan_admission(request), request, self.left)

    def relieve(self, starved: list[tuple[Request, int]]) -> bool:
        """Preempt starved requests, the newest first, until the others get the pages they lack.

        Returns whether anybody was preempted."""
        preempted_before = len(self.preempted)
        while starved and len(self.running) > 1:
            if sum([missing_pages for _, missing_pages in starved]) <= self.pages.num_free:
                break
            victim, _ = starved.pop()
            self.preempt(victim)
            self.queue_is_closed = True
        victims = len(self.preempted) - preempted_before
        self.waiting.rotate(-victims)  # to the back
        return victims > 0

    def finish(self, request: Request, reason: str) -> None:
        super().finish(request, reason)
        if reason != "abort":
            self.queue_is_closed = False


@card("nano-vllm", "#35d4d4", engine="nano-vLLM", version="bb823b3", equal="777 of 800")
class NanoVLLM(Recomputing, VLLM):
    """nano-vLLM: a batch is prefill or decode, prefill first, and only its first prompt is cut.

    A prompt behind it must fit into what is left of the budget as a whole. That keeps the code
    short; short prompts wait behind a long one, and all decodes wait for both.
    Source: GeeeekExplorer/nano-vllm nanovllm/engine/scheduler.py @bb823b3, `schedule`.
    Differs from theirs: `max_batch` there limits a batch, not who runs:
    `chunk=1 max_batch=1 page_size=2 pages=2 max_len=3, 1+2 1+1` gives `0:1 | 0:d | 1:1`, theirs
    `0:1 | 1:1 | 0:d`. With prefix caching, the newest of two copies of a page is found there:
    `page_size=1 pages=4 max_len=4, aa+2 a+2 a+3` gives `0:2 1:1 2:1 | 0:d | 1:d 2:d`, theirs
    `0:2 1:1 2:1 | 0:d | 1:2 2:2`. And free pages are used in the order in which they were freed,
    cached or not: `page_size=1 pages=9 max_len=8, a+2 a+4 aabaaa+2` gives
    `0:1 1:1 2:6 | 0:d 1:d | 2:d`, theirs `0:1 1:1 2:6 | 0:d 1:d | 2:2`."""

    watermark_percent = 0

    def schedule(self) -> Batch:
        batch = Batch(self.chunk)
        for request in self.prefilling():
            batch.add(request)  # the one that was cut
        while batch.left > 0 and (not batch or self.head_fits(batch)):
            request = self.admit()
            if request is None:
                break
            batch.add(request)
        if not batch:
            batch.add_decodes(self.grow_decodes())
        return batch
