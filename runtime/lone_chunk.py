"""A chunk of no scheduler's request: to warm up, to measure or to test a model with."""

from collections.abc import Sequence

from request import Chunk, Request


def lone_chunk(
    pages: list[int], start: int, tokens: Sequence[int], yields_token: bool = True
) -> Chunk:
    """Tokens of a request that lies in these pages. What comes before `start` is computed."""
    all_tokens = [0] * start + list(tokens)
    if not yields_token:
        all_tokens.append(0)
    request = Request(0, all_tokens, prompt_len=len(all_tokens), max_new_tokens=1, pages=pages)
    return Chunk(request, start, len(tokens))
