"""A chunk of no scheduler's request: to warm up, to measure or to test a model with."""

from collections.abc import Sequence

from request import Chunk, Request


def lone_chunk(
    pages: list[int], start: int, tokens: Sequence[int], yields_token: bool = True
) -> Chunk:
    """Tokens of a request that lies in these pages. What comes before `start` is computed."""
    known = [0] * start + list(tokens)
    if not yields_token:
        known.append(0)
    request = Request(0, known, prompt_len=len(known), max_new_tokens=1, pages=pages)
    return Chunk(request, start, len(tokens))
