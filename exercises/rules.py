"""The rules behind a difference, one function each: a sentence, or None if the rule is kept.

    rule, sentence = first_broken(difference, (decode_waits, over_budget))

A sentence says what no column of the two decisions shows: why. Read first: lockstep.py. Read next:
problems.py."""

from collections.abc import Callable, Sequence

from exercises.lockstep import Difference
from policies.observers import ChunkRecord

Rule = Callable[[Difference], str | None]


def first_broken(difference: Difference, rules: Sequence[Rule]) -> tuple[str, str]:
    """The name of the first rule that is broken, and its sentence."""
    for rule in (has_two_chunks, token_without_page, rule_of_every_policy, *rules, overtakes):
        sentence = rule(difference)
        if sentence:
            return rule.__name__, sentence
    return "other", "Compare the two columns."


def rule_of_every_policy(difference: Difference) -> str | None:
    """The rules of every policy, see Trial.broken_rule."""
    return difference.broken_rule


def names(requests: Sequence[int]) -> str:
    """ "request 1", or "request 1 and 2"."""
    return f"request {' and '.join(str(i) for i in requests)}"


def amount(number: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def prompt_chunks(difference: Difference) -> list[ChunkRecord]:
    """Your chunks that are no decodes."""
    return [chunk for chunk in difference.yours.chunks.values() if not chunk.is_decode]


# Who is in the batch.


def has_two_chunks(difference: Difference) -> str | None:
    """A request has one chunk at most."""
    for i in difference.yours.twice:
        text = f"Request {i} has two chunks in one batch"
        if i in difference.yours.admitted:
            text += ": one that was admitted is in self.running (and in prefilling()) already"
        return f"{text}."
    return None


def joins_a_running_batch(difference: Difference) -> str | None:
    """Request-level: nobody joins while anybody runs."""
    if not (difference.new and difference.running):
        return None
    return (
        f"Nobody joins while anybody runs: you admit {names(difference.new)}, "
        f"and {names(difference.running)} had not ended."
    )


def decode_waits(difference: Difference) -> str | None:
    """A running decode never waits."""
    for i in difference.decodes:
        if i in difference.reference.chunks and i not in difference.yours.chunks:
            return f"A running decode never waits: your batch lacks that of request {i}."
    return None


def waits_without_need(difference: Difference) -> str | None:
    """A request that fits is admitted at once."""
    if not difference.late:
        return None
    return f"Who fits is admitted at once: {names(difference.late[:1])} waits, and there is room."


def admitted_for_nothing(difference: Difference) -> str | None:
    """Whoever is admitted is computed in the same iteration."""
    idle = [i for i in difference.new if i not in difference.yours.chunks]
    if not idle:
        return None
    return (
        f"Whoever is admitted is computed in the same iteration: {names(idle[:1])} would hold "
        "pages, and nothing of it is computed."
    )


def overtakes(difference: Difference) -> str | None:
    """The queue is in order of arrival, and its first request blocks the others."""
    states = difference.states
    waiting = states.keys() - set(difference.running) - difference.yours.admitted
    for i in difference.new:
        for other in sorted(waiting):
            if states[other].arrival < states[i].arrival:
                return (
                    f"Nobody passes the first of the queue: request {i} overtakes request "
                    f"{other}, which arrived before it and waits."
                )
    return None


# Whole prompts.


def prompt_is_cut(difference: Difference) -> str | None:
    """Prompts are computed whole."""
    for chunk in prompt_chunks(difference):
        state = difference.states[chunk.request_id]
        if chunk.start + chunk.length < state.num_tokens:
            return f"Prompts are computed whole: you cut that of request {chunk.request_id}."
    return None


def hybrid_batch(difference: Difference) -> str | None:
    """A batch has no prefill or no decode."""
    prefills = len(prompt_chunks(difference))
    if prefills in (0, len(difference.yours.chunks)):
        return None
    return "A batch has no prefill or no decode: yours has both."


# Chunks and the budget.


def over_budget(difference: Difference) -> str | None:
    """Decodes and prefills together have at most C tokens."""
    chunk_size = difference.load.chunk
    prompt_tokens = sum(chunk.length for chunk in prompt_chunks(difference))
    num_tokens = difference.yours.num_tokens
    if not prompt_tokens or num_tokens <= chunk_size:
        return None
    if prompt_tokens <= chunk_size:
        cure = "It is spent twice: the decodes have to be taken off before the prompts."
    else:
        cure = "Each chunk has to be taken off what is left."
    return f"All tokens of a batch share one budget, C = {chunk_size}: you use {num_tokens}. {cure}"


def budget_left(difference: Difference) -> str | None:
    """What is left of the budget goes to prompts."""
    spare = difference.load.chunk - difference.yours.num_tokens
    for i, expected in difference.reference.chunks.items():
        chunk = difference.yours.chunks.get(i)
        length = chunk.length if chunk else 0
        if length < expected.length and spare > 0:
            return (
                f"What is left of the budget goes to prompts: {amount(spare, 'token')} of it "
                f"would be left, and request {i} gets {length} and could get {expected.length}."
            )
    return None


def several_prefills(difference: Difference) -> str | None:
    """A decode-maximal batch has one prompt chunk at most."""
    prompts = [chunk.request_id for chunk in prompt_chunks(difference)]
    if len(prompts) < 2:
        return None
    return f"A decode-maximal batch has a chunk of one prompt at most: yours of {names(prompts)}."


def new_before_begun(difference: Difference) -> str | None:
    """A prompt that has begun comes before a new one."""
    if not (difference.new and difference.prefills):
        return None
    return (
        f"A prompt that has begun comes before a new one: {names(difference.prefills)} has begun, "
        f"and you admit {names(difference.new[:1])}."
    )


# Memory that ends.


def token_without_page(difference: Difference) -> str | None:
    """A token is computed only if there is a page for it."""
    yours = difference.yours
    page_size = difference.load.page_size
    for i, chunk in yours.chunks.items():
        capacity = yours.capacity.get(i, 0)
        end = chunk.start + chunk.length
        if end <= capacity:
            continue
        if i in yours.preempted - yours.admitted:
            return (
                f"No token without a page: request {i} has just been preempted, and your list "
                "still has it. Preempt first, and then look who runs."
            )
        return (
            f"No token without a page: request {i} has {amount(capacity // page_size, 'page')} "
            f"for {amount(capacity, 'token')}, and the batch has its token {end - 1}. Only "
            "self.admit() and grow_decodes() give a request memory."
        )
    return None


def older_one_pays(difference: Difference) -> str | None:
    """The newest running request is preempted."""
    preempted = difference.yours.preempted
    states = difference.states
    for i in sorted(preempted):
        for other in difference.running:
            if other not in preempted and states[other].arrival > states[i].arrival:
                return (
                    f"The newest pays: you preempt request {i}, and request {other}, which "
                    "arrived later, keeps its pages."
                )
    return None


def preempts_without_need(difference: Difference) -> str | None:
    """No more are preempted than needed."""
    victims = sorted(difference.yours.preempted - difference.reference.preempted)
    if not victims:
        return None
    return (
        f"Nobody is preempted while a page is free: you preempt {names(victims)} without need. "
        "Try to allocate before each preemption."
    )


def wrong_number_of_pages(difference: Difference) -> str | None:
    """A request gets the pages that it needs."""
    page_size = difference.load.page_size
    for i, expected in difference.reference.capacity.items():
        capacity = difference.yours.capacity.get(i, expected)
        if capacity != expected:
            return (
                f"A request gets the pages that it needs, those that are cached among them: "
                f"request {i} needs {expected // page_size}, and has {capacity // page_size}."
            )
    return None


# Shared pages.


def last_token_is_cached(difference: Difference) -> str | None:
    """The last token is always computed."""
    for i in difference.yours.admitted:
        if i not in difference.yours.chunks and i in difference.reference.chunks:
            return (
                "The last token is always computed: the cached pages hold all of request "
                f"{i}, nothing is computed, and so there are no logits for its next token."
            )
    return None


def counts_as_decode(difference: Difference) -> str | None:
    """After a preemption with some output, two tokens are computed."""
    for i in difference.yours.admitted:
        chunk = difference.yours.chunks.get(i)
        if chunk and chunk.is_decode:
            return (
                "A request that was preempted with some output computes two tokens at least: "
                f"request {i} computes one, which counts as a decode, and this batch has its "
                "decodes already."
            )
    return None


def shares_too_little(difference: Difference) -> str | None:
    """All cached pages that can be reused are reused."""
    page_size = difference.load.page_size
    for i in difference.yours.admitted:
        chunk = difference.yours.chunks.get(i)
        expected = difference.reference.chunks.get(i)
        if chunk and expected and chunk.start < expected.start:
            return (
                f"All pages that can be reused are reused: request {i} could begin behind "
                f"{amount(expected.start // page_size, 'page')}, and begins behind "
                f"{chunk.start // page_size}."
            )
    return None


SHARING = (
    last_token_is_cached,
    counts_as_decode,
    shares_too_little,
    waits_without_need,
    wrong_number_of_pages,
)
