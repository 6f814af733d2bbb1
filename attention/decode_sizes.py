"""The sizes that numbers of decodes are rounded up to, where each costs a compilation."""

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
