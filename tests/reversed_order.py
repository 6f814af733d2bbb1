"""A plugin of pytest: the last test runs first."""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Turn the order of the tests around."""
    items.reverse()
