"""The browser and the site of the tests that look at a page, and servers that several tests ask."""

import fcntl
import gc
import os
import threading
from contextlib import ExitStack
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench import main
from tests.pages import CHROMIUM, PYODIDE_FOLDER, opened, opened_runs


@pytest.fixture(scope="module")
def browser():
    from playwright import sync_api

    if CHROMIUM is None:
        pytest.skip("the page needs a browser: Debian's chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        environ = os.environ | {"TMPDIR": "/tmp"}  # paths of its sockets must be short
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], env=environ
        )
        yield browser
        browser.close()


@pytest.fixture
def show(browser, tmp_path):
    """A function that opens the page of {name: Recorder}, and returns its tab."""
    with ExitStack() as pages:
        yield lambda *args, **more: pages.enter_context(
            opened_runs(browser, tmp_path, *args, **more)
        )


@pytest.fixture
def open_explored(browser, explored):
    """A function that opens the page of `bench.py explore`, and returns its tab."""
    with ExitStack() as pages:
        yield lambda fragment="", **more: pages.enter_context(
            opened(browser, f"file://{explored}{fragment}", **more)
        )


@pytest.fixture
def open_first(browser, first_page):
    """A function that opens the page without a policy of a file, as it is seen first."""
    with ExitStack() as pages:
        yield lambda **more: pages.enter_context(
            opened(browser, f"file://{first_page}", skip_opening=False, **more)
        )


class SiteHandler(SimpleHTTPRequestHandler):
    """Serves a folder, to pages from elsewhere, too."""

    def log_message(self, *args):
        pass

    def end_headers(self):
        self.send_header("Access-Control-Allow-Origin", "*")
        super().end_headers()


@pytest.fixture(scope="session")
def site_folder(tmp_path_factory, worker_id):
    """The folder of the page as a site, with Pyodide if it is there: made once for all workers."""
    base = tmp_path_factory.getbasetemp()
    site = base / "site" if worker_id == "master" else base.parent / "site"
    argv = ["explore", "--requests", "12", "--site", str(site)]
    if (PYODIDE_FOLDER / "pyodide.mjs").is_file():
        argv += ["--pyodide", str(PYODIDE_FOLDER)]
    with open(f"{site}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not site.exists():
            main(argv)
    return site


@pytest.fixture(scope="session")
def explored(tmp_path_factory):
    """The page of `bench.py explore` with few requests and a policy of a file."""
    file = tmp_path_factory.mktemp("explore") / "explore.html"
    policy = "policies/template.py:ShortestFirst"
    main(["explore", "--policies", policy, "--requests", "12", "--html", str(file)])
    return file


@pytest.fixture(scope="session")
def first_page(tmp_path_factory):
    """The page of `bench.py explore` with few requests."""
    file = tmp_path_factory.mktemp("explore") / "explore.html"
    main(["explore", "--requests", "12", "--html", str(file)])
    return file


@pytest.fixture(scope="session")
def site_address(site_folder):
    """The address of the site, below a path, as a repository's Pages are."""
    handler = partial(SiteHandler, directory=site_folder.parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{site_folder.name}/"
        server.shutdown()


@pytest.fixture
def little_garbage():
    """Python looks for garbage in no older thing: that would count as time of a policy."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def tiny():
    """A server of the tiny model, its tokens are letters."""
    from tests.servers import serving

    with serving(max_waiting=100) as served:
        yield served


@pytest.fixture(scope="session")
def worlds(tmp_path_factory):
    """Who starts worlds of ranks."""
    from tests.forked import Worlds

    return Worlds(tmp_path_factory.mktemp("worlds"))
