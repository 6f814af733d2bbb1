"""The exercises: what is compared, the rules that name a mistake, hints, and the answer.

Read first: problems.py. Read next: report.py, __main__.py."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from exercises import mending, questions, rules
from exercises.given import (
    TBT_SLO_S,
    CutsPrompts,
    batch_seconds,
    seconds_without_attention,
)
from exercises.loads import Load, mixed_loads, slo_loads, small_loads
from exercises.lockstep import Seconds
from exercises.mending import Complaint
from exercises.problems import Finder, LastCheck, adds_wrongly, differs_from
from exercises.targets import misses_the_slo, misses_the_slo_elsewhere, misses_the_targets
from scheduler import VLLM, Orca, RequestLevel, Sarathi, SarathiServe

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Exercise:
    """An exercise, and how it is checked."""

    number: int
    title: str
    class_name: str
    method: str  # the one to be written
    finder: Finder
    loads: Callable[[], Iterator[Load]]
    hints: tuple[str, str]
    load: Load  # of the question in the docstring, and of the page
    beside: str  # the policy that the page shows beside a solution
    read_next: str
    answer: str = ""  # to the question
    load_beside: Load | None = None  # of the other policy on the page, if it is another one
    seconds: Seconds = batch_seconds  # how long a batch takes, for the figures and the page
    slo_s: float = TBT_SLO_S  # a longer gap between tokens is a stall on the page
    last_check: LastCheck | None = None  # after the loads
    complaint: Complaint | None = None  # of a policy that is to be mended

    @cached_property
    def file(self) -> Path:
        """The file with the stub."""
        (file,) = FOLDER.glob(f"{self.number:02}_*.py")
        return file


def mend(complaint: Complaint, **fields: Any) -> Exercise:
    """An exercise of the second kind: a policy that runs is to be mended."""
    return Exercise(
        finder=complaint.find,
        loads=complaint.loads,
        load=complaint.load,
        slo_s=complaint.allowed if complaint.figure == "longest_gap" else TBT_SLO_S,
        complaint=complaint,
        **fields,
    )


WHOLE_PROMPTS = (
    rules.decode_waits,
    rules.prompt_is_cut,
    rules.waits_without_need,
    rules.admitted_for_nothing,
)
BUDGETED = (
    rules.decode_waits,
    rules.over_budget,
    rules.new_before_begun,
    rules.admitted_for_nothing,
    rules.budget_left,
)
MEMORY = (
    rules.older_one_pays,
    rules.preempts_without_need,
    rules.decode_waits,
    rules.wrong_number_of_pages,
    rules.waits_without_need,
)

EXERCISES = (
    Exercise(
        number=1,
        title="request-level batching",
        class_name="RequestLevel",
        method="schedule",
        finder=differs_from(
            RequestLevel,
            (rules.joins_a_running_batch, *WHOLE_PROMPTS),
        ),
        loads=partial(small_loads, 1),
        hints=(
            "There are two cases: somebody runs, or nobody does. What differs between them is "
            "only whether admit() is called. In both, all that run are in the batch.",
            "If self.running is empty, call self.admit() until it returns None. Then add every "
            "request of self.running to a Batch(), and return it.",
        ),
        load=questions.LATE_ONE,
        answer=(
            "in iteration 31. Request 0 ended in iteration 2, request 1 in 30; request 2 "
            "arrived in iteration 2."
        ),
        beside="orca",
        read_next="scheduler.py: RequestLevel",
    ),
    Exercise(
        number=2,
        title="iteration-level batching",
        class_name="IterationLevel",
        method="schedule",
        finder=differs_from(
            Orca,
            WHOLE_PROMPTS,
        ),
        loads=partial(small_loads, 2),
        hints=(
            "One condition of exercise 1 is gone: does it matter whether anybody runs?",
            "In every iteration call self.admit() until it returns None. Then add every request "
            "of self.running, old and new, to a Batch().",
        ),
        load=questions.LATE_ONE,
        answer=(
            "in iteration 3. Request 0 ended in iteration 2, request 1 in 30; request 2 "
            "arrived in iteration 2."
        ),
        beside="request-level",
        read_next="scheduler.py: Orca",
    ),
    Exercise(
        number=3,
        title="prompts first and alone",
        class_name="PromptsFirst",
        method="schedule",
        finder=differs_from(
            VLLM,
            (rules.hybrid_batch, rules.overtakes, *WHOLE_PROMPTS, *MEMORY),
        ),
        loads=partial(small_loads, 3),
        hints=(
            "Fill the batch with prompts first. Before you admit the first of the queue, ask "
            "whether all of its tokens fit into batch.left. After that, is the batch empty?",
            "While somebody waits, and the first one has at most batch.left tokens, and admit() "
            "returns it: add it. If the batch is still empty, add self.grow_decodes().",
        ),
        load=questions.THREE_PROMPTS,
        answer="3 iterations. More prompts would stall it for longer; there is no limit.",
        beside="orca",
        read_next="scheduler.py: VLLM",
    ),
    Exercise(
        number=4,
        title="cut a prompt",
        class_name="CutAPrompt",
        method="CutBatch.add",
        finder=differs_from(
            CutsPrompts,
            (
                rules.over_budget,
                rules.budget_left,
                rules.waits_without_need,
                rules.admitted_for_nothing,
            ),
        ),
        loads=partial(small_loads, 4),
        hints=(
            "Two numbers limit the length: how many tokens are not computed yet, and what is left "
            "of the budget, which may be 0 or less.",
            "length = the smaller of the two, and at least 0. If it is above 0: append "
            "Chunk(request, start, length) and take it off self.left. Return it in any case.",
        ),
        load=questions.TWO_PROMPTS,
        answer="3 iterations, with chunks of 16, then 4 + 12, then 8 tokens.",
        last_check=adds_wrongly,
        beside="orca",
        read_next="request.py: Batch.add",
    ),
    Exercise(
        number=5,
        title="decode-maximal batches",
        class_name="DecodeMaximal",
        method="schedule",
        finder=differs_from(
            Sarathi,
            (rules.several_prefills, *BUDGETED),
        ),
        loads=partial(small_loads, 5),
        hints=(
            "Decodes first, all of them. Then at most one request gets a chunk, and only if "
            "something is left: which one, if a prompt has begun, and which one, if none has?",
            "Add self.grow_decodes() to Batch(self.chunk). If batch.left is above 0, take the "
            "first of self.prefilling(), or what self.admit() returns if there is none. Add it.",
        ),
        load=questions.SIX_DECODES,
        answer="4 iterations, of 10, 10, 10, 10 tokens of the prompt.",
        beside="orca",
        read_next="scheduler.py: Sarathi",
    ),
    Exercise(
        number=6,
        title="stall-free batches",
        class_name="StallFree",
        method="schedule",
        finder=differs_from(
            SarathiServe,
            (*BUDGETED, *MEMORY),
        ),
        loads=partial(small_loads, 6),
        hints=(
            "Three groups in this order: those who decode, those whose prompt has begun, those "
            "who wait. The first group ignores the budget, the third needs some to be left.",
            "Take self.grow_decodes() and self.prefilling(). Add the decodes to Batch(self.chunk), "
            "then each of the prefills. While batch.left is above 0, add what admit() returns.",
        ),
        load=questions.THREE_SHORT,
        answer="2 iterations: short prompts share a batch, and the last one is cut.",
        beside="vllm",
        read_next="scheduler.py: SarathiServe",
    ),
    Exercise(
        number=7,
        title="out of memory",
        class_name="OutOfMemory",
        method="grow_decodes",
        finder=differs_from(
            SarathiServe,
            MEMORY,
        ),
        loads=partial(small_loads, 7),
        hints=(
            "A request needs a page if num_computed == len(request.pages) * page_size. Give each "
            "such request one in order of arrival: request.pages += the list. While allocate(1) "
            "returns None, preempt the last of self.running and try again.",
            "The one you preempt may be the request itself: stop as soon as request.pages is "
            "empty. Collect the decoding requests before, since self.running changes, and return "
            "only those that still have pages.",
        ),
        load=questions.TWO_GROW,
        answer=(
            "1 preemption. Request 0 ends in iteration 16, request 1 in 27, after 12 tokens "
            "were computed again."
        ),
        beside="orca",
        read_next="scheduler.py: Scheduler.grow_decodes; bookkeeping.py: grow",
    ),
    Exercise(
        number=8,
        title="shared pages",
        class_name="SharedPages",
        method="plan_admission",
        finder=differs_from(
            SarathiServe,
            (*rules.SHARING, *MEMORY),
        ),
        loads=partial(small_loads, 8, prefix_caching=True),
        hints=(
            "How many whole pages can be reused at most, if one token (or two) must be left to "
            "compute? Look up only so many of its hashes.",
            "at_most = (len(request.tokens) - left_to_compute) // page_size, where "
            "left_to_compute is 2 if the request has output already, and else 1. New pages: "
            "those that hold all of its tokens, less the cached ones.",
        ),
        load=questions.SAME_AGAIN,
        load_beside=replace(questions.SAME_AGAIN, prefix_caching=False),
        answer="4: the last token must be computed, and so must the other ones of its page.",
        beside="sarathi-serve",
        read_next="policies/pages.py: CachedPages.find",
    ),
    Exercise(
        number=9,
        title="a budget for an SLO",
        class_name="BudgetForSLO",
        method="token_budget",
        finder=misses_the_slo,
        loads=slo_loads,
        last_check=misses_the_slo_elsewhere,
        hints=(
            "Begin with the shape of the decodes alone. Where does the next chunk start? Make it "
            "longer, token by token, as long as the prediction meets the SLO.",
            "start = the largest num_computed of `prefills`, or 0 if there is none. length = the "
            "last one for which self.predict(shape.with_chunk(start, length)) is at most "
            "self.tbt_slo. The budget is that and one token for each decode.",
        ),
        load=questions.BESIDE_FOUR,
        answer=(
            "the chunks have 29, 23, 20, 18, 16, 15, 14, 13, 12, 12, 11, 11, 6 tokens; the "
            "last one is a rest."
        ),
        beside="sarathi-serve",
        read_next="policies/dynamic.py, which learns how to predict",
    ),
    Exercise(
        number=10,
        title="one long prompt among short ones",
        class_name="OneLongPrompt",
        method="schedule",
        finder=misses_the_targets,
        loads=mixed_loads,
        seconds=seconds_without_attention,
        slo_s=0.080,
        hints=(
            "The order of prefills is yours: those that have begun need not come first. How much "
            "does the long one lose if a prompt of 30 tokens passes it?",
            "Admit all that fit. Then give the budget that the decodes leave to the prefills in "
            "the order of what they still have to compute, the least first.",
        ),
        load=questions.ONE_LONG_PROMPT,
        answer=(
            "under exercise 6 its TTFT is 2.37 s; it is the longest, and yours is in the table."
        ),
        beside="sarathi-serve",
        read_next="policies/priority.py, where urgent requests pass others",
    ),
    mend(
        mending.STARVED_DECODES,
        number=11,
        title="mend it: starved decodes",
        class_name="StarvedDecodes",
        method="schedule",
        hints=(
            "Look down the column of the first P below two rows of d: what do these rows do from "
            "there on, and for how long?",
            "Let the decodes ride along in each batch, before the prefills; or let at least one "
            "batch of decodes follow each batch of prefill.",
        ),
        beside="sarathi-serve",
        read_next="policies/today.py: Interval, SGLang",
    ),
    mend(
        mending.STARVED_PREFILLS,
        number=12,
        title="mend it: starved prefills",
        class_name="StarvedPrefills",
        method="schedule",
        hints=(
            "How many tokens of the budget does a batch of two decodes leave?",
            "Do not return when there are decodes: what is left of the budget goes to prefills "
            "that have begun, and then to new ones.",
        ),
        beside="sarathi-serve",
        read_next="scheduler.py: SarathiServe",
    ),
    mend(
        mending.NOTHING_LEFT,
        number=13,
        title="mend it: nothing left to compute",
        class_name="NothingLeft",
        method="plan_admission",
        hints=(
            "A token comes from the logits of the token before it. Which page holds logits?",
            "Look up only the hashes of the pages that hold len(request.tokens) - 1 tokens; if "
            "the request has output, of - 2, or its last one would count as a decode.",
        ),
        beside="sarathi-serve",
        read_next="policies/pages.py: CachedPages.find",
    ),
    mend(
        mending.FIRST_CHUNK,
        number=14,
        title="mend it: admitted by the first chunk",
        class_name="FirstChunk",
        method="room_for",
        hints=(
            "Who is admitted needs pages for its whole prompt, sooner or later. Compare that with "
            "self.pages.num_free.",
            "Return None unless self.pages.needed(len(request.tokens)) pages are free, although "
            "the Admission takes only those of the first chunk.",
        ),
        beside="vllm-v1",
        read_next="policies/today.py: VLLMV1.room_for",
    ),
    mend(
        mending.LONGEST_PAYS,
        number=15,
        title="mend it: the longest pays",
        class_name="LongestPays",
        method="rank",
        hints=(
            "What is lost with a page is computed again. Who has the least to lose?",
            "Let the newest pay: its arrival is the first number of the tuple. Or the one with "
            "the fewest outputs: their number, negative.",
        ),
        beside="sarathi-serve",
        read_next="bookkeeping.py: rank; policies/today.py: SGLang.rank",
    ),
    mend(
        mending.LONG_PROMPT_EATS,
        number=16,
        title="mend it: a long prompt eats the budget",
        class_name="LongPromptEats",
        method="schedule",
        hints=(
            "The long one is the oldest. What is left in batch.left when the younger decodes "
            "have their turn?",
            "Add what self.grow_decodes() returns first, with batch.add_decodes(). Then the "
            "prefills, with the cap, and then new ones.",
        ),
        beside="threshold-under-contention",
        read_next="policies/remedies.py: ThresholdUnderContention",
    ),
)
