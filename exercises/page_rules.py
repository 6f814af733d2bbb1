"""The rules of memory: who gets pages, who loses them, and which ones are shared.

Read first: rules.py. Read next: catalog.py."""

from exercises.lockstep import Difference
from exercises.rules import amount, names, tokens

# Memory that ends.


def token_without_page(difference: Difference) -> str | None:
    """A token is computed only if there is a page for it."""
    page_size = difference.load.page_size
    for i, chunk in difference.yours.chunks.items():
        if i in difference.yours.preempted and i not in difference.yours.admitted:
            return (
                f"No token without a page: request {i} has just been preempted, and your list "
                "of decodes still has it."
            )
        capacity = difference.yours.capacity.get(i, 0)
        if chunk.start + chunk.length > capacity:
            pages = capacity // page_size
            return (
                f"No token without a page: request {i} has {amount(pages, 'page')} for "
                f"{amount(capacity, 'token')}, and {tokens(chunk)} is in the batch. Allocate one "
                "page more."
            )
    return None


def older_one_pays(difference: Difference) -> str | None:
    """The newest running request is preempted."""
    yours = difference.yours
    for i in sorted(yours.preempted):
        newer = [
            other
            for other in difference.running
            if other not in yours.preempted
            and difference.states[other].arrival > difference.states[i].arrival
        ]
        if newer:
            return (
                f"The newest pays: you preempt request {i}, and request {newer[-1]}, which "
                "arrived later, keeps its pages."
            )
    return None


def preempts_without_need(difference: Difference) -> str | None:
    """Nobody is preempted while a page is free."""
    victims = sorted(difference.yours.preempted - difference.reference.preempted)
    if not victims:
        return None
    if not difference.reference.preempted:
        return (
            f"Nobody is preempted while a page is free: {difference.free_pages} were free, "
            f"and you preempt {names(victims)}."
        )
    return (
        f"No more are preempted than needed: the pages of "
        f"{names(sorted(difference.reference.preempted))} are enough, and you preempt "
        f"{names(victims)}, too. Try to allocate again after each preemption."
    )


def nobody_pays(difference: Difference) -> str | None:
    """If no page is free, the newest is preempted."""
    spared = sorted(difference.reference.preempted - difference.yours.preempted)
    if not spared:
        return None
    return (
        f"If no page is free, the newest is preempted: {names(spared)} should lose its pages, "
        "so that those who arrived before can go on."
    )


def too_many_pages(difference: Difference) -> str | None:
    """A request gets the pages that it needs."""
    page_size = difference.load.page_size
    for i, expected in difference.reference.capacity.items():
        capacity = difference.yours.capacity.get(i, expected)
        if capacity != expected:
            return (
                f"A request gets the pages that it needs: request {i} needs "
                f"{expected // page_size}, and has {capacity // page_size} with you."
            )
    return None


# Shared pages.


def last_token_is_cached(difference: Difference) -> str | None:
    """The last token is always computed."""
    for i in sorted(difference.yours.admitted):
        if i not in difference.yours.chunks and i in difference.reference.chunks:
            return (
                f"The last token is always computed: the cached pages hold all "
                f"{difference.states[i].num_tokens} tokens of request {i}, nothing is computed, "
                "and so there are no logits for its next token."
            )
    return None


def counts_as_decode(difference: Difference) -> str | None:
    """After a preemption with some output, two tokens are computed."""
    for i in sorted(difference.yours.admitted):
        chunk = difference.yours.chunks.get(i)
        if chunk and chunk.is_decode:
            return (
                f"A request that was preempted with some output computes two tokens at least: "
                f"request {i} computes one, which counts as a decode, and this batch has its "
                "decodes already."
            )
    return None


def shares_too_little(difference: Difference) -> str | None:
    """All cached pages that can be reused are reused."""
    page_size = difference.load.page_size
    for i in sorted(difference.yours.admitted):
        chunk = difference.yours.chunks.get(i)
        expected = difference.reference.chunks.get(i)
        if chunk and expected and chunk.start < expected.start:
            return (
                f"All pages that can be reused are reused: the first {expected.start} tokens of "
                f"request {i} lie in {expected.start // page_size} cached pages, and you reuse "
                f"{chunk.start // page_size} of them."
            )
    return None


def wrong_number_of_new_pages(difference: Difference) -> str | None:
    """Cached pages need not be allocated again."""
    sentence = too_many_pages(difference)
    if sentence:
        return sentence + " Those that are cached need not be allocated again."
    late = sorted(difference.reference.admitted - difference.yours.admitted)
    if late:
        return (
            f"Cached pages need not be allocated again: {names(late[:1])} waits, because your "
            "Admission asks for more new pages than are free."
        )
    return None
