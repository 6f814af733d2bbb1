"""The page as a site, in a real browser: what it loads and when, and its editor of policies.

The editor needs Pyodide: `npm install --no-save pyodide@314.0.7`, or its folder as PYODIDE."""

import json
import re
from contextlib import contextmanager

import pytest

from exercises.catalog import EXERCISES
from lab.explore.bundle import PYODIDE
from tests.exercise_solutions import SOLUTIONS
from tests.forked import ROOT
from tests.pages import (
    MINE,
    PYODIDE_FOLDER,
    SOURCE_HAS_RUN,
    enter,
    needs_pyodide,
    run_source,
)

pytestmark = pytest.mark.slow  # the site takes twenty seconds to make


@contextmanager
def opened(browser, address, **options):
    """The page at an address, drawn, and the list of files that it loads."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, **options)
    tab = context.new_page()
    errors = []
    files = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    context.on("request", lambda request: files.append(request.url.removeprefix(address)))
    tab.goto(address)
    enter(tab)
    yield tab, files
    assert not errors
    context.close()


def names_of_panes(tab):
    return tab.evaluate("panes.map(pane => pane.run.name)")


def choose(tab, axis, label):
    tab.click(f"#choices button[data-axis='{axis}'][data-label='{label}']")
    tab.wait_for_function(f"panes.every(pane => pane.run.name.includes('{label}'))")


def test_a_site_is_small(site_folder):
    assert (site_folder / "index.html").stat().st_size <= 400e3
    presets = list(site_folder.glob("runs/*.json.gz"))
    assert len(presets) == 8  # of nine loads, one is in the page
    assert all(10e3 < file.stat().st_size <= 600e3 for file in presets)


def test_a_load_is_fetched_once_when_it_is_chosen(browser, site_address):
    with opened(browser, site_address) as (tab, files):
        assert [file for file in files if file and not file.startswith("data:")] == []
        choose(tab, "load", "steady")
        choose(tab, "load", "A to D")
        choose(tab, "load", "steady")
        assert files.count("runs/steady.json.gz") == 1
        assert tab.evaluate("focused.run.iterations.length") > 300
        tab.wait_for_function("document.querySelectorAll('#policytable tbody tr').length === 8")
    assert not [file for file in files if "python" in file or "pyodide" in file]


def test_a_load_that_is_not_there_is_one_line(browser, tmp_path, site_folder):
    page = tmp_path / "index.html"
    page.write_text((site_folder / "index.html").read_text())
    context = browser.new_context()
    tab = context.new_page()
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(f"file://{page}")
    enter(tab)
    tab.click("#choices button[data-label='steady']")
    tab.wait_for_function("document.getElementById('decision').textContent.includes('steady')")
    assert "must be served" in tab.text_content("#decision")
    assert names_of_panes(tab)[0].endswith("A to D") and not errors
    context.close()


@needs_pyodide
def test_the_version_of_python_is_that_of_the_package():
    version = json.loads((PYODIDE_FOLDER / "package.json").read_text())["version"]
    assert f"/v{version}/" in PYODIDE
    assert f"pyodide@{version}" in (ROOT / ".github/workflows/ci.yml").read_text()


def answer_404(route):
    route.fulfill(status=404, body="not here")


def answer_with_a_broken_script(route):
    route.fulfill(content_type="text/javascript", body="throw new Error('out of order')")


@pytest.mark.parametrize(
    ("handle", "reason"),
    [
        (answer_404, "file not found: "),
        (lambda route: route.abort(), "cannot be reached"),
        (answer_with_a_broken_script, "all files are there, but it does not start"),
    ],
    ids=["not found", "unreachable", "broken"],
)
def test_why_python_does_not_load_is_one_plain_sentence(browser, site_address, handle, reason):
    context = browser.new_context()
    context.route("**/pyodide/**", answer_with_a_broken_script)
    context.route("**/pyodide.mjs", handle)
    tab = context.new_page()
    tab.goto(site_address)
    enter(tab)
    line = run_source(tab)
    assert line.startswith("Python could not be loaded: ") and reason in line
    assert line.endswith("Everything else on this page works without it.")
    assert tab.text_content("#resultdetails") not in line  # what the browser says
    choose(tab, "load", "steady")
    context.close()


def test_without_a_network_python_is_not_loaded(browser, site_address):
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(site_address)
    enter(tab)
    context.set_offline(True)
    assert "could not be loaded: there is no network. Everything else" in run_source(tab)
    context.close()


def test_what_an_address_names_and_is_not_there_is_said(browser, site_address):
    fragment = "#policy=Mine+(yours)&load=steady&beside=Mine+(yours)"
    with opened(browser, site_address + fragment) as (tab, _):
        assert names_of_panes(tab) == ["vllm | * | steady"]
        line = "The address names Mine (yours), which is not there yet: run it in the editor below."
        assert tab.text_content("#notice") == line
        choose(tab, "load", "A to D")
        assert tab.text_content("#notice") == ""  # it was said once
    with opened(browser, site_address + "#policy=vllm&load=heavy&beside=nobody") as (tab, _):
        line = "The address names heavy, which this page does not have."
        assert line in tab.text_content("#notice")
        assert "names nobody" in tab.text_content("#notice")
    with opened(browser, site_address + "#policy=vllm&chunk=256&beside=sarathi-serve") as (tab, _):
        assert tab.text_content("#notice") == "" and len(names_of_panes(tab)) == 2


def test_a_policy_beside_itself_is_one_picture_and_says_so(browser, site_address):
    with opened(browser, site_address + "#policy=vllm&beside=vllm") as (tab, _):
        assert len(names_of_panes(tab)) == 1
        line = "vllm is compared with itself: one picture shows both."
        assert tab.text_content("#notice") == line and tab.is_visible("#notice")
        tab.select_option("#beside", "sarathi-serve")
        tab.wait_for_function("panes.length === 2")
        assert not tab.is_visible("#notice")


@needs_pyodide
def test_a_policy_of_ones_own_is_shown_beside_any_other(browser, site_address):
    with opened(browser, site_address) as (tab, files):
        assert "no rule is broken" in run_source(tab)  # the template
        assert names_of_panes(tab) == ["vllm | * | A to D", "ShortestFirst (yours) | 256 | A to D"]
        assert "pyodide/pyodide.asm.wasm" in files
        at_load = "At load A to D, against sarathi-serve, chunk 256:"
        line = run_source(tab, MINE + "    pass\n")
        assert f"{at_load} it changes nothing. Try one long among short or tight memory." in line
        halved = "    def token_budget(self, decodes, prefills):\n        return 128\n"
        line = run_source(tab, MINE + halved)
        later = r"request D has its first token [\d.]+ ms later; the longest gap is 12.4 ms"
        assert re.search(f"{at_load} {later} \\(20.5 ms\\); nobody stalls.", line)
        run_source(tab, MINE + "    pass\n")
        tab.click("#choices button[data-label='sarathi-serve']")
        for load in ("pipeline bubbles", "shared prefixes", "tight memory"):
            choose(tab, "load", load)  # it is run there, too
            metrics = tab.evaluate("panes.map(pane => pane.run.metrics())")
            assert len(metrics) == 2 and metrics[0] == metrics[1]
        choose(tab, "chunk", "512")
        assert names_of_panes(tab)[1] == "Mine (yours) | 512 | tight memory"
        tab.wait_for_function("document.querySelectorAll('#policytable tbody tr').length === 9")
        run_source(
            tab, MINE + "    def token_budget(self, decodes, prefills):\n        return 64\n"
        )
        assert tab.evaluate("panes[1].run.iterations[5].budget") == 64


@needs_pyodide
def test_what_is_wrong_with_a_policy_is_one_line(browser, site_address):
    with opened(browser, site_address) as (tab, _):
        line = run_source(tab, MINE + "    def schedule(self):\n        return self.nothing\n")
        assert line.startswith("my_policy.py line 4: AttributeError")
        assert tab.text_content("#linenumbers .marked") == "4"
        endless = "    def schedule(self):\n        while True:\n            pass\n"
        assert run_source(tab, MINE + endless) == "stopped after 10 s: a loop without an end?"
        assert len(names_of_panes(tab)) == 2  # what was there
        lost = "    def admit(self):\n        return self.waiting and self.waiting.popleft()\n"
        line = run_source(tab, MINE + lost)
        assert line.startswith("the rule 'nothing lost' is broken") and "\n" not in line
        assert tab.locator("#linenumbers .marked").count() == 0
        printing = (
            "    def schedule(self):\n        print('here')\n        return super().schedule()\n"
        )
        assert "no rule is broken" in run_source(tab, MINE + printing)
        assert tab.text_content("#resultdetails").startswith("printed:\nhere\nhere")


@needs_pyodide
def test_a_run_can_be_stopped(browser, site_address):
    with opened(browser, site_address) as (tab, _):
        tab.fill("#source", MINE + "    def schedule(self):\n        while True: pass\n")
        tab.click("#runsource")
        tab.wait_for_function("document.getElementById('result').textContent.startsWith('Running')")
        tab.click("#stoprun")
        tab.wait_for_function(SOURCE_HAS_RUN)
        assert tab.text_content("#result") == "stopped"


@needs_pyodide
def test_an_exercise_is_solved_in_the_page(browser, site_address):
    exercise = EXERCISES[5]
    with opened(browser, site_address) as (tab, _):
        tab.select_option("#startwith", "6")
        tab.wait_for_function("document.getElementById('source').value.includes('Exercise 6')")
        assert tab.input_value("#source") == exercise.file.read_text()
        assert "not written yet" in run_source(tab)
        imports = "from scheduler import Batch, SarathiServe, Scheduler\n"
        wrong = SOLUTIONS[6].replace("batch.add_decodes(", "len(")
        assert "A running decode never waits" in run_source(tab, imports + wrong)
        assert "| reference" in tab.text_content("#resultdetails")
        frame = tab.frame_locator("#exercisepage")
        frame.locator("#position").filter(has_text="iteration 1 of").wait_for()
        line = run_source(tab, imports + SOLUTIONS[6])
        assert line == f"Exercise 6, {exercise.title}: it holds."
        assert "The answer: 2 iterations" in tab.text_content("#resultdetails")
        assert tab.locator("#hints details").count() == 2


@needs_pyodide
def test_the_keyboard_is_enough_for_the_editor(browser, site_address):
    with opened(browser, site_address) as (tab, _):
        tab.get_by_role("button", name="write your own").focus()
        tab.keyboard.press("Enter")
        tab.keyboard.press("Control+A")
        tab.keyboard.press("Delete")
        tab.keyboard.type("from scheduler import VLLM\nclass Mine(VLLM):\npass\n")
        source = "from scheduler import VLLM\nclass Mine(VLLM):\n    pass\n    "
        assert tab.input_value("#source") == source
        tab.keyboard.press("Tab")
        assert tab.input_value("#source") == source + "    "
        tab.keyboard.press("Shift+Tab")
        assert tab.input_value("#source") == source
        assert tab.evaluate("cursor") == 10 and not tab.evaluate("playing")  # no key reached it
        tab.keyboard.press("Control+Enter")
        tab.wait_for_function("panes[1].run.name === 'Mine (yours) | * | A to D'", timeout=120_000)
        tab.focus("#source")
        tab.keyboard.press("Escape")
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.id") != "source"


@needs_pyodide
def test_what_was_written_is_there_the_next_time(browser, site_address):
    with opened(browser, site_address) as (tab, _):
        tab.fill("#source", "written = 1\n")
        tab.reload()
        tab.wait_for_function("document.getElementById('source').value === 'written = 1\\n'")
        tab.click("#startover")
        tab.wait_for_function("document.getElementById('source').value.includes('ShortestFirst')")


@needs_pyodide
def test_a_page_in_a_file_loads_python_from_elsewhere(browser, site_address, site_folder, tmp_path):
    text = (site_folder / "index.html").read_text()
    for file in ("python.json.gz", "pyodide/"):
        assert text.count(f': "{file}"') == 1
        text = text.replace(f': "{file}"', f': "{site_address}{file}"')
    (tmp_path / "page.html").write_text(text)
    with opened(browser, f"file://{tmp_path}/page.html") as (tab, _):
        assert "no rule is broken" in run_source(tab)
