"""What the engines of today decide: the rule of each as a policy beside the papers'.

Each rule was read in the engine's source; the docstring names the file, and the commit where it is
known. The code is this repository's own, and plainer than theirs: no encoders, no adapters, no
speculation, no second GPU. Where a rule is simplified, its docstring says so.

`python bench.py today` shows them side by side. Read first: scheduler.py. Read next: remedies.py,
what their users propose; README.md beside this file, the tables and pictures."""

import sys
from typing import Any

from errors import check_number, check_whole
from scheduler import VLLM, Admission, Batch, Request, SarathiServe, Scheduler


class VLLMV1(Scheduler):
    """vLLM V1: one pass over all that run, in order of admission, then the queue.

    There are no phases: a decode is a chunk of one token. `long_prefill_token_threshold` caps each
    chunk (0: no cap). A request is admitted if all its tokens fit, but gets memory chunk by chunk:
    that admits more, and preempts more. vLLM leaves the queue alone in a step that has preempted;
    that follows, as the one preempted last is then in front, and does not fit. No decode is ever
    left out: who joins takes what those before it leave, and they never take more later.
    Source: vllm/v1/core/sched/scheduler.py of vLLM 0.22.1, as copied in TimoSaemann/ppas-vllm
    @9ec75bc4 scheduler/scheduler_org.py, `schedule`, with scheduler_reserve_full_isl. One page may
    be computed again where vLLM finds it: see Scheduler.plan_admission on the last two tokens."""

    cuts_prompts = True

    def __init__(self, *args: Any, long_prefill_token_threshold: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        threshold = long_prefill_token_threshold
        self.threshold = check_whole("long_prefill_token_threshold", threshold, minimum=0)

    def token_budget(self) -> int:
        """How many tokens the next batch may have."""
        return self.chunk

    def prefill_limit(self) -> int:
        """How many tokens of one request the next batch may have."""
        return self.threshold or sys.maxsize

    def schedule(self) -> Batch:
        self.batch = batch = Batch(self.token_budget())  # room_for looks at what is left of it
        limit = self.prefill_limit()
        page_size = self.pages.page_size
        for request in self.running[:]:
            if batch.left == 0:
                break
            end = len(request.tokens)
            if end > len(request.pages) * page_size:  # but its next chunk may end before
                self.grow(request, min(end, request.num_computed + min(limit, batch.left)))
            if request.pages:  # if not, it was preempted
                batch.add(request, limit)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request, limit)
        return batch

    def rank(self, request: Request) -> tuple[float, ...]:
        """The one that was admitted last is preempted first."""
        return (self.running.index(request),)

    def reserved(self, request: Request) -> int:
        return len(request.tokens)

    def room_for(self, request: Request) -> Admission | None:
        """As in Scheduler, for all of the request; but it gets the pages of its first chunk."""
        admission = super().room_for(request)
        if admission is None:
            return None
        cached_pages = len(admission.cached_pages)
        start = cached_pages * self.pages.page_size
        limit = max(0, min(self.prefill_limit(), self.batch.left))
        end = min(start + limit, len(request.tokens))
        return Admission(admission.cached_pages, self.pages.needed(end) - cached_pages)


class Interval(SarathiServe):
    """`every` decode batches after each prefill batch: 0 is prefill first, 1 is chunked-only.

    A prefill batch has chunks of at most `chunk` tokens together, and no decode. So `every` trades
    the time of a first token for the gaps between the others.
    Source: SGLang's --prefill-decode-interval (0 by default),
    python/sglang/srt/managers/scheduler.py, `_should_defer_prefill`."""

    def __init__(self, *args: Any, every: int = 4, **options: Any) -> None:
        super().__init__(*args, **options)
        self.every = check_whole("every", every, minimum=0)
        self.decode_batches = self.every  # since the last prefill batch

    def schedule(self) -> Batch:
        batch = Batch(self.chunk)
        if self.decode_batches < self.every:
            batch.add_decodes(self.grow_decodes())
        if not batch:
            for request in self.prefilling():
                batch.add(request)
            while batch.left > 0 and (request := self.admit()):
                batch.add(request)
            self.decode_batches = -1 if batch else self.decode_batches
        if not batch:
            batch.add_decodes(self.grow_decodes())
        self.decode_batches += 1
        return batch


class SGLang(Interval):
    """SGLang: prefill first and alone, admission by a guess of how long the outputs become.

    The running requests are expected to use `ratio` of the output they may still have. The ratio
    falls with each decode batch, from 0.7 to 0.098 in 600, and rises to what was used when one must
    be retracted: the one with the fewest outputs, of equals the longest prompt. It trades stalls
    for early first tokens, and the risk of retractions for larger batches.
    Source: sgl-project/sglang python/sglang/srt/managers/schedule_policy.py @00550cd1,
    `PrefillAdder.add_one_req`; schedule_batch.py, `retract_decode`; global_config.py. Simplified:
    a request admitted in this batch counts like those that run; a retracted one waits in front."""

    INIT_RATIO = 0.7
    MIN_RATIO = 0.7 * 0.14
    DECAY_STEPS = 600
    RETRACT_STEPS = 20  # tokens that each request shall be able to decode after a retraction
    MAX_GUESS = 4096  # tokens of output that one request is expected to have at most

    watermark_percent = 0

    def __init__(self, *args: Any, every: int = 0, **options: Any) -> None:
        super().__init__(*args, every=every, **options)
        self.ratio = self.INIT_RATIO

    def output_left(self, request: Request) -> int:
        """How many tokens it may still generate, at most MAX_GUESS."""
        return min(
            self.MAX_GUESS, request.prompt_len + request.max_new_tokens - len(request.tokens)
        )

    def room_for(self, request: Request) -> Admission | None:
        """As in Scheduler, if there is room for the outputs, too, and for a page more."""
        admission = super().room_for(request)
        if admission is None or not self.running:
            return admission
        expected = self.ratio * sum([self.output_left(running) for running in self.running])
        expected += self.output_left(request) + self.pages.page_size
        taken_pages = admission.new_pages + self.pages.count_free(admission.cached_pages)
        free_tokens = (self.pages.num_free - taken_pages) * self.pages.page_size
        return admission if expected <= free_tokens else None

    def grow_decodes(self) -> list[Request]:
        """As in Scheduler, and adapts the ratio."""
        preempted_before = len(self.preempted)
        decodes = super().grow_decodes()
        if len(self.preempted) == preempted_before:
            decay = (self.INIT_RATIO - self.MIN_RATIO) / self.DECAY_STEPS
            self.ratio = max(self.MIN_RATIO, self.ratio - decay)
        else:
            outputs = sum([len(request.tokens) - request.prompt_len for request in decodes])
            max_outputs = sum([request.max_new_tokens for request in decodes])
            used = (outputs + self.RETRACT_STEPS * len(decodes)) / (max_outputs + 1)
            self.ratio = min(1.0, used)
        return decodes

    def rank(self, request: Request) -> tuple[float, ...]:
        outputs = len(request.tokens) - request.prompt_len
        return -outputs, request.prompt_len, request.arrival, request.id


class SGLangMixed(SGLang):
    """SGLang with --enable-mixed-chunk: the decodes ride along in the prefill batch.

    They count against its budget. What is left of SGLang's rule is the admission; the batches are
    those of Algorithm 3.
    Source: as SGLang, `PrefillAdder.__init__`: the budget less mixed_with_decode_tokens."""

    def schedule(self) -> Batch:
        return SarathiServe.schedule(self)


class NoEvict(SarathiServe):
    """TensorRT-LLM's GUARANTEED_NO_EVICT: memory for prompt and output at admission.

    So nobody is ever preempted, and a request with a huge max_new_tokens keeps others out. That is
    the default of TensorRT-LLM, and the rule of mini-sglang. Batches are those of Algorithm 3.
    Source: NVIDIA/TensorRT-LLM cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp @02a10fed,
    `GuaranteedNoEvictScheduler`."""

    watermark_percent = 0

    def reserved(self, request: Request) -> int:
        return request.prompt_len + request.max_new_tokens


class FastGen(SarathiServe):
    """DeepSpeed-FastGen, Dynamic SplitFuse: Algorithm 3 in which a decode without memory waits.

    Others go on meanwhile, and may end and free some. Only if nobody can go on, the last request
    loses its memory and goes to the back of the queue. It trades an answer that stands still for
    fewer tokens that are computed twice.
    Source: microsoft/DeepSpeed-MII mii/batching/ragged_batching.py @40dc4476,
    `_do_schedule_requests` and `reset_request_status`."""

    drops_decodes = True
    watermark_percent = 0

    def grow_decodes(self) -> list[Request]:
        decodes: list[Request] = []
        for request in self.running:
            if not request.is_decoding:
                continue
            if request.num_computed == len(request.pages) * self.pages.page_size:
                page = self.pages.allocate(1, after=request.pages[-1])
                if page is None:
                    continue  # it waits
                request.pages += page
            decodes.append(request)
        return decodes

    def schedule(self) -> Batch:
        batch = super().schedule()
        while not batch and self.running:  # a deadlock: all wait for memory
            last = self.running[-1]
            self.preempt(last)
            self.waiting.remove(last)
            self.waiting.append(last)
            batch = super().schedule()
        return batch


class TGI(VLLM):
    """Text Generation Inference without chunks: whole prompts interrupt only if they are many.

    A prefill batch is made if the waiting requests are at least `waiting_served_ratio` of those
    that run, or if `max_waiting_tokens` decode batches have passed; between two there is a decode
    batch. Memory is reserved for prompt and output. It trades first tokens for fewer interruptions.
    Source: huggingface/text-generation-inference backends/v3/src/backend.rs @1d0847a9,
    `batching_task`; queue.rs. Simplified: it also asks whether so many fit at once."""

    watermark_percent = 0

    def __init__(
        self,
        *args: Any,
        waiting_served_ratio: float = 0.3,
        max_waiting_tokens: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.ratio = check_number(
            "waiting_served_ratio", waiting_served_ratio, "a number of at least 0", minimum=0
        )
        self.max_waiting = check_whole("max_waiting_tokens", max_waiting_tokens, minimum=1)
        self.decode_batches = 0  # since the last prefill batch

    def reserved(self, request: Request) -> int:
        return request.prompt_len + request.max_new_tokens

    def schedule(self) -> Batch:
        batch = Batch(self.max_len)
        many_wait = len(self.waiting) >= int(len(self.running) * self.ratio)
        many_wait = many_wait or self.decode_batches + 1 >= self.max_waiting
        if not self.running or (self.decode_batches and many_wait):
            while self.head_fits(batch) and (request := self.admit()):
                batch.add(request)
        self.decode_batches = 0 if batch else self.decode_batches + 1
        for request in [] if batch else self.running:
            batch.add(request)  # all memory is reserved: no decode needs a page
        return batch


class HFTransformers(SarathiServe):
    """Hugging Face transformers, continuous batching: Algorithm 3 with a margin of memory.

    While fewer than `margin_percent` of the pages are free, no new request begins, unless nothing
    else runs. It trades batch size for fewer preemptions.
    Source: huggingface/transformers src/transformers/generation/continuous_batching/scheduler.py
    @028fa539, `FIFOScheduler` (20 % there; 15 % in the documentation of version 5). Simplified: a
    prefill that has begun has its memory here, and goes on."""

    watermark_percent = 0

    def __init__(self, *args: Any, margin_percent: int = 15, **options: Any) -> None:
        super().__init__(*args, **options)
        self.margin_percent = check_whole("margin_percent", margin_percent, minimum=0)

    def admit(self) -> Request | None:
        if self.running and self.pages.num_free * 100 < self.pages.total * self.margin_percent:
            return None
        return super().admit()


class NanoVLLM(VLLM):
    """nano-vLLM: a batch is prefill or decode, prefill first, and only its first prompt is cut.

    A prompt behind it must fit into what is left of the budget as a whole. That keeps the code
    short; short prompts wait behind a long one, and all decodes wait for both.
    Source: GeeeekExplorer/nano-vllm nanovllm/engine/scheduler.py, `schedule`."""

    cuts_prompts = True
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
