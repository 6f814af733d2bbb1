"""The rules of memory: who gets pages, who loses them, and which ones are shared.

Read first: rules.py. Read next: catalog.py."""

from exercises.lockstep import Difference
from exercises.rules import amount, names, num_decodes, tokens

# Memory that ends.


def token_without_page(difference: Difference) -> str | None:
    """A token is computed only if there is a page for it, which grow_decodes() finds."""
    return _without_page(
        difference, "Take the decodes from self.grow_decodes(), which finds the pages."
    )


def decode_without_page(difference: Difference) -> str | None:
    """A token is computed only if there is a page for it, which your grow_decodes() has to find."""
    return _without_page(difference, "Allocate one page more.")


def _without_page(difference: Difference, remedy: str) -> str | None:
    """A token is computed only if there is a page for it. `remedy` is for decodes."""
    page_size = difference.load.page_size
    for i, chunk in difference.yours.chunks.items():
        if i in difference.yours.preempted and i not in difference.yours.admitted:
            text = f"No token without a page: request {i} has just been preempted, and your list "
            if difference.states[i].is_decoding:
                return f"{text}of decodes still has it."
            return f"{text}of prefills still has it: call self.grow_decodes() before that."
        capacity = difference.yours.capacity.get(i, 0)
        if chunk.start + chunk.length > capacity:
            pages = capacity // page_size
            verb = "is" if chunk.length == 1 else "are"
            text = (
                f"No token without a page: request {i} has {amount(pages, 'page')} for "
                f"{amount(capacity, 'token')}, and {tokens(chunk)} {verb} in the batch."
            )
            return f"{text} {remedy}" if chunk.is_decode else text
    return None


def takes_pages_in_vain(difference: Difference) -> str | None:
    """Only a batch of decodes takes pages for them."""
    reference = difference.reference
    if num_decodes(difference) or any(chunk.is_decode for chunk in reference.chunks.values()):
        return None
    for i in difference.decodes:
        if difference.yours.capacity.get(i, 0) != reference.capacity.get(i, 0):
            change = "loses its pages" if i in difference.yours.preempted else "gets a page"
            return (
                f"Request {i} {change}, and no request decodes in this iteration. "
                "self.grow_decodes() takes pages: call it only if the batch decodes."
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
        free = f"{difference.free_pages} {'was' if difference.free_pages == 1 else 'were'}"
        return (
            f"Nobody is preempted while a page is free: {free} free, "
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
            num_tokens = difference.states[i].num_tokens
            held = "the one token" if num_tokens == 1 else f"all {num_tokens} tokens"
            return (
                "The last token is always computed: the cached pages hold "
                f"{held} of request {i}, nothing is computed, "
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
            cached = amount(expected.start // page_size, "cached page")
            shared = amount(expected.start, "token")
            return (
                f"All pages that can be reused are reused: the first {shared} of "
                f"request {i} lie in {cached}, and you reuse "
                f"{chunk.start // page_size} of them."
            )
    return None


def wrong_number_of_new_pages(difference: Difference) -> str | None:
    """Cached pages need not be allocated again."""
    sentence = too_many_pages(difference)
    if sentence:
        finds_pages = any(chunk.start for chunk in difference.reference.chunks.values())
        cure = " Those that are cached need not be allocated again."
        return sentence + cure * finds_pages
    if difference.late:
        return (
            f"Cached pages need not be allocated again: {names(difference.late[:1])} waits, "
            "because your Admission asks for more new pages than are free."
        )
    return None
