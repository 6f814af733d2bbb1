"""Sizes and tables that are padded, where each new shape would cost a compilation."""

from collections.abc import Sequence

from request import Chunk

SMALL_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
STEP = 32  # between larger ones: beyond 128 rows of the products no longer ride for nothing


def padded_size(decodes: int) -> int:
    """The least of the sizes that holds so many decodes."""
    for size in SMALL_SIZES:
        if decodes <= size:
            return size
    return -(-decodes // STEP) * STEP


def padded_sizes(max_decodes: int) -> list[int]:
    """All sizes that numbers of decodes up to max_decodes are rounded up to."""
    return sorted({padded_size(decodes) for decodes in range(1, max_decodes + 1)})


def padded_tables(chunks: Sequence[Chunk], page_size: int, max_len: int) -> list[list[int]]:
    """The block tables of some chunks, padded with 0 to the pages of max_len tokens: the same width
    in every iteration."""
    width = -(-max_len // page_size)
    tables = []
    for chunk in chunks:
        pages = chunk.used_pages(page_size)
        padding = [0] * (width - len(pages))
        tables.append(pages + padding)
    return tables
