"""The browser of the tests that look at a page, and the servers that several tests ask."""

import pytest

from tests.pages import CHROMIUM


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="the page needs playwright")
    if CHROMIUM is None:
        pytest.skip("the page needs a browser: Debian's chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def tiny():
    """A server of the tiny model, its tokens are letters."""
    from tests.servers import serving

    with serving(max_waiting=100) as served:
        yield served


@pytest.fixture(scope="module")
def turning():
    """A server of servers.circle."""
    from pretrained.tokenizers import byte_tokenizer
    from tests.servers import circle, serving

    with serving(circle(), byte_tokenizer()) as served:
        yield served


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    """Who starts worlds of ranks."""
    from tests.worlds import Worlds

    worlds = Worlds(tmp_path_factory.mktemp("worlds"))
    yield worlds
    worlds.close()
