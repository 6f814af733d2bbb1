"""The loads of the questions in the docstrings, which the pages of the exercises show, too.

Their answers are in catalog.py. Read first: loads.py."""

from exercises.loads import Load, LoadRequest, ample, mixed_loads

LATE_ONE = ample(
    LoadRequest(0.0, 8, 2),
    LoadRequest(0.0, 8, 30),
    LoadRequest(0.03, 8, 4),
    chunk=16,
)
THREE_PROMPTS = ample(
    LoadRequest(0.0, 4, 8),
    *(LoadRequest(0.02 + 0.05 * i, 40, 2) for i in range(3)),
    chunk=16,
)
TWO_PROMPTS = ample(LoadRequest(0.0, 20, 1), LoadRequest(0.0, 20, 1), chunk=16)
SIX_DECODES = ample(
    *(LoadRequest(0.0, 1, 24) for _ in range(6)),
    LoadRequest(0.2, 40, 2),
    chunk=16,
)
THREE_SHORT = ample(
    *(LoadRequest(0.0, 1, 24) for _ in range(3)),
    *(LoadRequest(0.03, 5, 2) for _ in range(3)),
    LoadRequest(0.13, 100, 2),  # which would stall them under other policies
    chunk=16,
)
TWO_GROW = Load(
    (LoadRequest(0.0, 8, 16), LoadRequest(0.0, 8, 16)),
    chunk=16,
    max_batch=2,
    pages=6,
    page_size=4,
)
SAME_AGAIN = Load(
    (LoadRequest(0.0, 8, 4, shared=8), LoadRequest(0.5, 8, 4, shared=8)),
    chunk=16,
    max_batch=2,
    pages=12,
    page_size=4,
    prefix_caching=True,
)
BESIDE_FOUR = ample(
    *(LoadRequest(0.0, 8, 40) for _ in range(4)),
    LoadRequest(0.2, 200, 2),
    chunk=40,
)
ONE_LONG_PROMPT = next(mixed_loads())
