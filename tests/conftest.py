"""The browser of those tests that look at a page."""

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
