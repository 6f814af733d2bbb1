"""The rules behind a difference, one function each: a sentence, or None if the rule is kept.

    rule, sentence = first_broken(difference, (decode_waits, over_budget))

A sentence names the requests and the mistake. Read first: lockstep.py. Read next: page_rules.py."""

from collections.abc import Callable, Sequence

from exercises.lockstep import Difference
from policies.observers import ChunkRecord

Rule = Callable[[Difference], str | None]


def first_broken(difference: Difference, rules: Sequence[Rule]) -> tuple[str, str]:
    """The name of the first rule that is broken, and its sentence."""
    for rule in (never_admitted, *rules, overtakes):
        sentence = rule(difference)
        if sentence:
            return rule.__name__, sentence
    if difference.broken_rule:
        return "referee", difference.broken_rule
    return "other", "No rule of this exercise explains it: compare the two columns."


def names(requests: Sequence[int]) -> str:
    """ "request 1", or "requests 1 and 2"."""
    numbers = [str(i) for i in requests]
    if len(numbers) == 1:
        return f"request {numbers[0]}"
    return f"requests {', '.join(numbers[:-1])} and {numbers[-1]}"


def amount(number: int, noun: str) -> str:
    """ "1 token", "2 tokens"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def tokens(chunk: ChunkRecord) -> str:
    """ "tokens 0 to 3", "token 4", "a chunk of 0 tokens"."""
    if chunk.length < 1:
        return f"a chunk of {chunk.length} tokens"
    last = chunk.start + chunk.length - 1
    return f"token {last}" if chunk.length == 1 else f"tokens {chunk.start} to {last}"


def prompt_chunks(difference: Difference) -> list[ChunkRecord]:
    """Your chunks that are no decodes."""
    return [chunk for chunk in difference.yours.chunks.values() if not chunk.is_decode]


def num_decodes(difference: Difference) -> int:
    """How many decodes are in your batch."""
    return len(difference.yours.chunks) - len(prompt_chunks(difference))


def to_compute(difference: Difference, i: int) -> int:
    """How many tokens of a request were to be computed before this iteration."""
    state = difference.states[i]
    return state.num_tokens - state.num_computed


# Who is in the batch.


def never_admitted(difference: Difference) -> str | None:
    """Only an admitted request has memory."""
    yours = difference.yours
    for i in yours.chunks:
        if i not in yours.capacity and i not in yours.preempted:
            return f"Request {i} was not admitted: only self.admit() gives it memory."
    return None


def joins_a_running_batch(difference: Difference) -> str | None:
    """Request-level: nobody joins while anybody runs."""
    if not (difference.new and difference.running):
        return None
    return (
        f"Nobody joins while anybody runs: you admit {names(difference.new)}, "
        f"and {names(difference.running)} had not ended."
    )


def running_left_out(difference: Difference) -> str | None:
    """Each running request is in each batch."""
    left_out = [i for i in difference.running if i not in difference.yours.chunks]
    left_out = [i for i in left_out if i in difference.reference.chunks]
    if not left_out:
        return None
    return f"Each running request is in each batch: yours lacks {names(left_out)}."


def decode_waits(difference: Difference) -> str | None:
    """A running decode never waits."""
    late = [i for i in difference.decodes if i not in difference.yours.chunks]
    late = [i for i in late if i in difference.reference.chunks]
    if not late:
        return None
    return f"A running decode never waits: your batch lacks that of {names(late)}."


def waits_without_need(difference: Difference) -> str | None:
    """A request that fits is admitted at once."""
    if not difference.late:
        return None
    return (
        f"A request that fits is admitted at once: {names(difference.late[:1])} waits, "
        "and there is room. Call admit() until it returns None."
    )


def admitted_and_left_out(difference: Difference) -> str | None:
    """Whoever is admitted is computed in the same iteration."""
    idle = sorted(difference.yours.admitted - difference.yours.chunks.keys())
    if not idle:
        return None
    return (
        f"Whoever is admitted is computed in the same iteration: {names(idle)} "
        "gets pages, and no token of the prompt is in the batch."
    )


def prompt_is_cut(difference: Difference) -> str | None:
    """Prompts are computed whole."""
    for chunk in prompt_chunks(difference):
        tokens_left = difference.states[chunk.request_id].num_tokens - chunk.start - chunk.length
        if tokens_left > 0:
            return (
                "This policy computes prompts whole: you cut that of request "
                f"{chunk.request_id} after {amount(chunk.length, 'token')},"
                f" {tokens_left} before its end."
            )
    return None


# Prompts first and alone.


def hybrid_batch(difference: Difference) -> str | None:
    """A batch has no prefill or no decode."""
    prompts = [chunk.request_id for chunk in prompt_chunks(difference)]
    decodes = [i for i in difference.yours.chunks if i not in prompts]
    if not (prompts and decodes):
        return None
    return (
        f"A batch has no prefill or no decode: yours has the prompt of {names(prompts[:1])} "
        f"and the decode of {names(decodes[:1])}."
    )


def decodes_come_first(difference: Difference) -> str | None:
    """Prompts come first."""
    if not difference.late or prompt_chunks(difference):
        return None
    return (
        f"Prompts come first: {names(difference.late[:1])} can be admitted, and your batch "
        "decodes. Decode only if no prompt fits."
    )


def too_many_prompt_tokens(difference: Difference) -> str | None:
    """The prompts of a batch have at most max_len tokens together."""
    total = sum(chunk.length for chunk in prompt_chunks(difference))
    max_len = difference.load.max_len
    if total <= max_len:
        return None
    return f"The prompts of a batch have at most max_len = {max_len} tokens: yours have {total}."


def overtakes(difference: Difference) -> str | None:
    """The queue is in order of arrival, and its first request blocks the others."""
    yours = difference.yours
    queue = [i for i, state in difference.states.items() if not state.is_running]
    for i in difference.new:
        arrival = difference.states[i].arrival
        for other in queue:
            if other not in yours.admitted and difference.states[other].arrival < arrival:
                return (
                    f"Nobody passes the first of the queue: request {i} overtakes request "
                    f"{other}, which arrived before it and waits."
                )
    return None


def room_for_another_prompt(difference: Difference) -> str | None:
    """As many prompts as fit share a batch."""
    if not difference.late:
        return None
    return (
        f"As many prompts as fit share a batch, up to max_len = {difference.load.max_len} "
        f"tokens: {names(difference.late[:1])} fits, and waits."
    )


# Chunks and the budget.


def starts_elsewhere(difference: Difference) -> str | None:
    """Chunks cover the prompt once, in order."""
    for i, chunk in difference.yours.chunks.items():
        computed = difference.states[i].num_computed
        if chunk.start != computed and i not in difference.yours.admitted:
            return (
                f"Chunks cover the prompt once, in order: request {i} has "
                f"{amount(computed, 'token')} computed, so its next chunk starts at {computed}, "
                f"not at {chunk.start}."
            )
    return None


def beyond_the_end(difference: Difference) -> str | None:
    """A chunk ends where the tokens end."""
    for i, chunk in difference.yours.chunks.items():
        num_tokens = difference.states[i].num_tokens
        if chunk.start + chunk.length > num_tokens:
            text = (
                f"A chunk ends where the tokens end: request {i} has {num_tokens}, and your chunk "
                f"reaches to {chunk.start + chunk.length}."
            )
            expected = difference.reference.chunks.get(i)
            if expected and chunk.length == expected.start + expected.length != expected.length:
                text += " A Chunk is (request, start, length), not end."
            return text
    return None


def empty_chunk(difference: Difference) -> str | None:
    """A chunk has at least one token."""
    for i, chunk in difference.yours.chunks.items():
        if chunk.length < 1:
            return (
                f"A chunk has at least one token: that of request {i} has {chunk.length}. "
                "If nothing is left of the budget, add no chunk, and return 0."
            )
    return None


def over_budget(difference: Difference) -> str | None:
    """Decodes and prefills together have at most C tokens."""
    chunk_size = difference.load.chunk
    prompt_tokens = sum(chunk.length for chunk in prompt_chunks(difference))
    decodes = num_decodes(difference)
    if not prompt_tokens or decodes + prompt_tokens <= chunk_size:
        return None
    text = f"All tokens of a batch share one budget, C = {chunk_size}: yours has "
    if decodes and prompt_tokens <= chunk_size:
        return text + (
            f"{prompt_tokens} of prompts and {decodes} of decodes. The budget is spent twice: "
            "the decodes have to be taken off before the prompts."
        )
    if len(difference.yours.chunks) == 1:
        return text + f"{prompt_tokens}. A longer prompt has to be cut."
    return text + f"{decodes + prompt_tokens}. Each chunk has to be taken off what is left."


def unused_budget(difference: Difference) -> str | None:
    """A chunk is as long as the budget allows."""
    spare = difference.load.chunk - difference.yours.num_tokens
    for i, chunk in difference.yours.chunks.items():
        expected = difference.reference.chunks.get(i)
        if expected and chunk.length < expected.length and spare > 0:
            return (
                f"A chunk is as long as the budget and the prompt allow: request {i} gets "
                f"{chunk.length}, could get {expected.length}, and {amount(spare, 'token')} of the "
                "budget are not used."
            )
    return None


def prefill_left_out(difference: Difference) -> str | None:
    """What is left of the budget goes to prompts."""
    spare = difference.load.chunk - difference.yours.num_tokens
    expected = [c.request_id for c in difference.reference.chunks.values() if not c.is_decode]
    left_out = [i for i in expected if i not in difference.yours.chunks]
    if not left_out or spare <= 0:
        return None
    return (
        f"What is left of the budget goes to prompts: {spare} of C = {difference.load.chunk} "
        f"are not used, and {names(left_out[:1])} gets no token."
    )


def several_prefills(difference: Difference) -> str | None:
    """A decode-maximal batch has one prompt chunk at most."""
    prompts = [chunk.request_id for chunk in prompt_chunks(difference)]
    if len(prompts) < 2:
        return None
    return f"A decode-maximal batch has a chunk of one prompt at most: yours of {names(prompts)}."


def new_before_begun(difference: Difference) -> str | None:
    """A prompt that has begun comes before a new one."""
    new = sorted(difference.yours.admitted)
    for i in difference.prefills:
        chunk = difference.yours.chunks.get(i)
        expected = difference.reference.chunks.get(i)
        length = chunk.length if chunk else 0
        if new and expected and length < expected.length:
            return (
                f"A prompt that has begun comes before a new one: request {i} has begun and gets "
                f"{amount(length, 'token')}, could get {expected.length}, and you admit "
                f"{names(new[:1])}."
            )
    return None


def admits_beside_begun(difference: Difference) -> str | None:
    """Nobody is admitted while a prompt has begun."""
    if not (difference.new and difference.prefills):
        return None
    return (
        f"One prompt at a time: you admit {names(difference.new[:1])}, and the prompt of "
        f"{names(difference.prefills[:1])} has begun and is not done."
    )


def admits_without_budget(difference: Difference) -> str | None:
    """Nobody is admitted once the budget is used up."""
    idle = [i for i in difference.new if i not in difference.yours.chunks]
    if not idle:
        return None
    return (
        f"Nobody is admitted once the budget is used up: {names(idle[:1])} "
        "would hold pages, and nothing of it is computed."
    )
