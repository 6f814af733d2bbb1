"""What users of today's engines ask for: short prompts behind a long one, memory, fairness.

Each is a small change of a policy in scheduler.py or today.py, and names where it was proposed.
`python bench.py today` shows what it gains and what it costs. Read first: today.py."""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, cast

from kv_cache import Pages
from policies.cards import card
from policies.pages import CachedPages
from policies.parts import add_prefills, move_to_front, output_left, quarter_by_default
from policies.today import VLLMV1
from scheduler import Admission, Batch, Request, SarathiServe

WINDOW = 64  # so many waiting requests are looked at: a queue may be long, a decision may not


@card(
    "threshold-under-contention",
    "#40871d",
    note="like sarathi-serve, with at most a quarter of the budget for a prompt while another one "
    "waits",
    engine="proposed",
    version="vLLM #57413",
)
class ThresholdUnderContention(SarathiServe):
    """Algorithm 3 that caps a prefill only while another one waits or runs.

    The cap is a quarter of the budget by default, and costs nothing to a prompt that has the engine
    to itself. vLLM 0.33.0 spares a lonely prompt, too, but cuts one that only decodes are beside.
    Here it has all that the decodes leave.
    Source: vllm-project/vllm issue #57413, a comment there: 4,096 tokens of 16,384."""

    def __init__(
        self, pages: Pages, *, long_prefill_token_threshold: int | None = None, **sizes: Any
    ) -> None:
        super().__init__(pages, **sizes)
        self.threshold = quarter_by_default(long_prefill_token_threshold, self)

    def schedule(self) -> Batch:
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes())
        contended = len(self.prefilling()) + len(self.waiting) >= 2
        add_prefills(self, batch, self.threshold if contended else sys.maxsize)
        return batch


@card(
    "ppas",
    "#1d3787",
    note="like sarathi-serve, with a quarter of the budget while prompts press on decodes",
    engine="proposed",
    version="vLLM #52906",
)
class PPAS(VLLMV1):
    """P-PAS: vLLM V1 with a smaller budget while two prefills or more press on some decodes.

    Under pressure the budget is `pressed_budget`, a quarter of `chunk` by default; else it is
    `chunk`. It trades first tokens for shorter gaps only when there is somebody to stall. More
    decodes than the pressed budget do not fit, and the newest wait.
    Source: vllm-project/vllm RFC #52906, arXiv 2608.15171; TimoSaemann/ppas-vllm
    scheduler/ppas_vllm_0.27.1.patch @3e4bf10b."""

    drops_decodes = True

    def __init__(self, pages: Pages, *, pressed_budget: int | None = None, **sizes: Any) -> None:
        super().__init__(pages, **sizes)
        self.pressed_budget = quarter_by_default(pressed_budget, self)

    def token_budget(self) -> int:
        num_prefills = sum([request.num_computed < request.prompt_len for request in self.running])
        num_decodes = len(self.running) - num_prefills
        if num_decodes > 0 and num_prefills + len(self.waiting) >= 2:
            return min(self.pressed_budget, self.chunk)
        return self.chunk


@card(
    "small-chunks-wait",
    "#3cfde6",
    note="like sarathi-serve, but a chunk of a few tokens waits until more of the budget is left",
    engine="proposed",
    version="vLLM #54145",
)
class SmallChunksWait(SarathiServe):
    """Algorithm 3 in which a small chunk waits until it is worth its iteration.

    If the decodes leave fewer than `least_chunk` tokens of the budget, a quarter of it by default,
    there is no prefill, but at most `max_delay` times in a row. A chunk of a few tokens reads all
    that came before it in its prompt, and makes all answers wait for that.
    Source: vllm-project/vllm PR #54145."""

    delay = 0  # batches since the last with prefill, while one waits

    def __init__(
        self, pages: Pages, *, least_chunk: int | None = None, max_delay: int = 8, **sizes: Any
    ) -> None:
        super().__init__(pages, **sizes)
        self.least_chunk = quarter_by_default(least_chunk, self)
        self.max_delay = max_delay

    def token_budget(self, decodes: list[Request], prefills: list[Request]) -> int:
        too_small = self.chunk - len(decodes) < self.least_chunk
        has_prefill = bool(prefills or self.waiting)
        waits = bool(decodes) and has_prefill and too_small and self.delay < self.max_delay
        self.delay = self.delay + 1 if waits else 0
        return len(decodes) if waits else self.chunk


@card(
    "equal-progress",
    "#ed77f8",
    note="like sarathi-serve, with up to 4 prompts in equal shares of the budget",
    engine="proposed",
    version="TensorRT-LLM 02a10fed",
)
class EqualProgress(SarathiServe):
    """Algorithm 3 with up to `max_prefills` prefills at once, in equal shares of the budget.

    What a short prompt leaves of its share goes to the others. A short one is done early, and the
    long one takes longer; two long ones both end late.
    Source: TensorRT-LLM's EQUAL_PROGRESS, cpp/tensorrt_llm/batch_manager/microBatchScheduler.cpp;
    vLLM's concurrent partial prefills, pull requests #10235 and #41399."""

    def __init__(self, pages: Pages, *, max_prefills: int = 4, **sizes: Any) -> None:
        super().__init__(pages, **sizes)
        self.max_prefills = max_prefills

    def schedule(self) -> Batch:
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes())
        most_prefills = min(self.max_prefills, batch.left)
        while len(self.prefilling()) < most_prefills and self.admit():
            pass
        prefills = sorted(self.prefilling(), key=uncomputed)
        for i, request in enumerate(prefills):
            batch.add(request, max(1, batch.left // (len(prefills) - i)))
        return batch


def uncomputed(request: Request) -> int:
    """How many tokens of a running request are left to compute."""
    return len(request.tokens) - request.num_computed


@card(
    "shortest-uncached",
    "#9b089b",
    note="like sarathi-serve, the prompt with the fewest tokens left first",
    engine="proposed",
    version="SGLang #40024",
)
class ShortestUncached(SarathiServe):
    """Algorithm 3 in which the request with the fewest uncached tokens goes first.

    A prompt that has begun leaves budget to shorter ones that wait, but gets at least a page a
    batch. Short prompts, and long ones whose beginning is cached, do not wait behind a long one;
    under overload a long one waits long. Looks at the first WINDOW of the queue. The budget is left
    to all shorter ones, in SGLang to those that fit whole: with `chunk=4 page_size=1`, 10+1 and
    later 2+1 2+1 give `0:4 | 0:1 1:2 2:1`, theirs `0:4 | 0:2 1:2`. Neither asks if there is memory.
    Source: SGLang's --schedule-policy shortest-prefill-first (sgl-project/sglang PR #40024),
    python/sglang/srt/managers/schedule_policy.py @00550cd1, `shortest_prefill_chunk_limit`."""

    reorders = True

    def schedule(self) -> Batch:
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes())
        uncached: dict[Request, int] = {}  # tokens of those that wait
        if len(self.running) < self.max_batch:
            for request in islice(self.waiting, WINDOW):
                cached_pages = len(self.plan_admission(request).cached_pages)
                uncached[request] = len(request.tokens) - cached_pages * self.pages.page_size
        for request in sorted(self.prefilling(), key=uncomputed):
            shorter = [tokens for tokens in uncached.values() if tokens < uncomputed(request)]
            batch.add(request, max(self.pages.page_size, batch.left - sum(shorter)))
        for request in sorted(uncached, key=uncached.__getitem__):
            if batch.left <= 0:
                break
            move_to_front(self, request)
            if self.admit() is None:
                break
            batch.add(request)
        return batch


@card(
    "peak",
    "#9b085e",
    engine="proposed",
    version="LightLLM 05936590",
)
class Peak(SarathiServe):
    """Algorithm 3 that admits a request if the largest memory ever needed still fits.

    Memory is largest at a moment when some request ends. So the requests are sorted by the output
    they may still have, the longest first: when the i-th ends, the first i hold what they hold now
    and as many tokens more as it generates. That admits more than prompt + output for each, and
    preempts seldom: only a slow prefill makes others meet later than was reckoned.
    Source: ModelTC/lightllm lightllm/server/router/req_queue/chunked_prefill/impl.py @05936590,
    `_can_add_new_req`.
    Differs from theirs: it estimates the outputs, and this takes max_new_tokens; it lengthens each
    by the chunks that are left of the prompt, and by 6 tokens. See today.py for how to read this:
    `page_size=1 pages=6 max_len=2, 1+1 1+1` gives `0:1 1:1`, theirs `0:1 | 1:1`."""

    watermark_percent = 0

    def room_for(self, request: Request) -> Admission | None:
        """As in Scheduler, if the peak with this request fits, too."""
        admission = super().room_for(request)
        if admission is None or not self.running:
            return admission
        peak = self.peak_tokens([*self.running, request])
        return admission if peak < self.pages.total * self.pages.page_size else None

    def peak_tokens(self, requests: Sequence[Request]) -> int:
        """The most tokens of memory that they ever hold together, each with a page not full."""
        held = 0  # tokens of those that have as much output left, or more
        peak = 0
        for count, request in enumerate(sorted(requests, key=output_left, reverse=True), 1):
            held += len(request.tokens) + self.pages.page_size - 1
            peak = max(peak, held + count * output_left(request))
        return peak


@card(
    "wait-for-prefix",
    "#1f3051",
    engine="proposed",
    version="TensorRT-LLM 02a10fed",
)
class WaitForPrefix(SarathiServe):
    """Algorithm 3 in which a prompt waits while another one computes the beginning they share.

    It then finds these pages in the cache, where both would compute them. Others pass it meanwhile.
    It trades the order of arrival for tokens that are computed once. Looks at the first WINDOW.
    Source: TensorRT-LLM cpp/tensorrt_llm/batch_manager/capacityScheduler.cpp @02a10fed,
    `beneficialToSkip`; SGLang's in-batch prefix caching is alike."""

    reorders = True

    def admit(self) -> Request | None:
        pages = self.pages
        if not isinstance(pages, CachedPages) or len(self.running) >= self.max_batch:
            return super().admit()
        computing: set[bytes] = set()  # hashes of the pages that running prefills will fill
        for request in self.prefilling():
            computed_pages = request.num_computed // pages.page_size
            computing.update(pages.hashes(request)[computed_pages:])
        for request in islice(self.waiting, WINDOW):
            usable_pages = (len(request.tokens) - 1) // pages.page_size
            if computing.isdisjoint(pages.hashes(request)[:usable_pages]):
                move_to_front(self, request)
                return super().admit()
        return None


class UserQueue:
    """A queue with a counter of each user. First is the first request of the user with the least.

    It has the methods of a deque that a scheduler uses. Counters belong to it, as all schedulers of
    a pipeline share one queue."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}  # the counter of each user
        self._turns: dict[str, int] = {}  # of equals, the user who is known longest is served first
        self._waiting: dict[str, deque[Request]] = {}  # of users with any

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._waiting.values())

    def __getitem__(self, index: int) -> Request:
        """queue[0] is the first request. No other is asked for."""
        user = min(self._waiting, key=lambda user: (self.served[user], self._turns[user]))
        return self._waiting[user][0]

    def append(self, request: Request) -> None:
        """Let a request join. Its user, if none of his waits, is lifted to the least of others."""
        user = request.service.user
        served = self.served.get(user, 0.0)
        if self._waiting and user not in self._waiting:
            served = max(served, min([self.served[other] for other in self._waiting]))
        self.served[user] = served
        self._turns.setdefault(user, len(self._turns))
        self._waiting.setdefault(user, deque()).append(request)

    def appendleft(self, request: Request) -> None:
        """Let a request join before the others of its user."""
        self._waiting.setdefault(request.service.user, deque()).appendleft(request)

    def remove(self, request: Request) -> None:
        """Take a request out of the queue."""
        user = request.service.user
        self._waiting[user].remove(request)
        if not self._waiting[user]:
            del self._waiting[user]

    def clear(self) -> None:
        """Take all requests out of the queue."""
        self._waiting.clear()


@card(
    "vtc",
    "#a297d8",
    engine="proposed",
    version="VTC-artifact 14c19b70",
)
class VTC(SarathiServe):
    """Virtual token counter: Algorithm 3 that is fair between users, not between requests.

    A user's counter grows by the tokens of a prompt at its admission, and by 2 for each token of
    output; the first request of the user with the least goes next. Who comes back after a pause is
    lifted to the least of those that wait, so that a pause saves nothing up. A user with many
    requests waits, others do not.
    Source: arXiv 2401.00588; Ying1123/VTC-artifact slora/server/router/vtc_req_queue.py @14c19b70,
    with equal weights. A prompt that is computed again after a preemption is not counted again."""

    reorders = True
    PROMPT_PRICE = 1
    OUTPUT_PRICE = 2

    def __init__(self, pages: Pages, **sizes: Any) -> None:
        super().__init__(pages, **sizes)
        self.waiting = cast("deque[Request]", UserQueue())  # what is used of one

    def count(self, request: Request, price: float) -> None:
        """Let the counter of a request's user grow."""
        cast("UserQueue", self.waiting).served[request.service.user] += price

    def admit(self) -> Request | None:
        request = super().admit()
        if request and not request.preemptions:
            self.count(request, self.PROMPT_PRICE * request.prompt_len)
        return request

    def advance(
        self, batch: Batch, tokens: Sequence[int | None], now: float
    ) -> list[tuple[Request, int]]:
        moved = super().advance(batch, tokens, now)
        for request, _ in moved:
            self.count(request, self.OUTPUT_PRICE)
        return moved
