"""The page as a site, in a real browser: what it loads and when, and its editor of policies.

The editor needs Pyodide: `npm install --no-save pyodide@314.0.7`, or its folder as PYODIDE."""

import json
import re
import shutil

import pytest

from exercises.catalog import EXERCISES
from lab.explore.bundle import PYODIDE
from tests.exercise_solutions import SOLUTIONS
from tests.forked import ROOT
from tests.pages import (
    MINE,
    PYODIDE_FOLDER,
    SOURCE_HAS_RUN,
    choose,
    enter,
    needs_pyodide,
    opened,
    run_source,
    shown_runs,
    texts,
)

pytestmark = pytest.mark.slow  # the site takes twenty seconds to make
IMPORTS = "from scheduler import Batch, SarathiServe, Scheduler\n"
SCHEDULE = "    def schedule(self):\n        "
BUDGET = "    def token_budget(self, decodes, prefills):\n        return "


@pytest.fixture
def tab(any_browser, site_address):
    with opened(any_browser, site_address) as tab:
        yield tab


def test_a_site_is_small_and_the_workflow_publishes_it(site_folder):
    workflow = (ROOT / ".github/workflows/pages.yml").read_text("utf-8")
    assert "run: python bench.py explore --site site\n" in workflow and "path: site\n" in workflow
    assert (site_folder / "index.html").stat().st_size <= 400e3
    presets = list(site_folder.glob("runs/*.json.gz"))
    assert len(presets) == 8  # of nine loads, one is in the page
    assert all(10e3 < file.stat().st_size <= 600e3 for file in presets)


def test_every_load_is_fetched_once_when_it_is_chosen(tab, site_address):
    files = "performance.getEntriesByType('resource').map(({name}) => name)"
    assert tab.evaluate(files) == []
    loads = tab.evaluate("data.choices.load")
    assert len(loads) == 9
    for load in [*loads, *loads]:
        choose(tab, "load", load)
        assert tab.evaluate("focused.run.iterations.length") >= 40
    fetched = [file.removeprefix(site_address) for file in tab.evaluate(files)]
    assert len(fetched) == 8 == len(set(fetched))
    assert all(re.fullmatch(r"runs/[a-z-]+\.json\.gz", file) for file in fetched)


def test_a_site_that_was_moved_opens_from_a_file_and_says_what_it_cannot(
    browser, tmp_path, site_folder
):
    moved = tmp_path / "elsewhere" / "a site"
    shutil.copytree(site_folder, moved)
    tab = browser.new_page()
    tab.goto(f"file://{moved}/index.html")
    enter(tab)
    tab.click("#choices button[data-label='steady']")
    tab.wait_for_function("$('decision').textContent.includes('steady')")
    assert "must be served" in tab.text_content("#decision")
    assert shown_runs(tab)[0].endswith("A to D")
    tab.close()


@needs_pyodide
def test_the_version_of_python_is_that_of_the_package():
    version = json.loads((PYODIDE_FOLDER / "package.json").read_text("utf-8"))["version"]
    assert f"/v{version}/" in PYODIDE
    assert f"pyodide@{version}" in (ROOT / ".ci/run").read_text("utf-8")


def answer_404(route):
    route.fulfill(status=404, body="not here")


def answer_with_a_broken_script(route):
    route.fulfill(content_type="text/javascript", body="throw new Error('out of order')")


@pytest.mark.parametrize(
    ("handle", "reason"),
    [
        (answer_404, "file not found: "),
        (lambda route: route.abort(), r"\S+ cannot be reached"),
        (answer_with_a_broken_script, "all files are there, but it does not start"),
        (None, "there is no network"),
    ],
    ids=["not found", "unreachable", "broken", "offline"],
)
def test_why_python_does_not_load_is_one_plain_sentence(browser, site_address, handle, reason):
    tab = browser.new_page()
    tab.goto(site_address)
    enter(tab)
    if handle is None:
        tab.context.set_offline(True)
    else:
        tab.route("**/pyodide/**", answer_with_a_broken_script)
        tab.route("**/pyodide.mjs", handle)
    line = run_source(tab)
    assert re.match(f"Python could not be loaded: {reason}", line)
    assert line.endswith("Everything else on this page works without it.")
    # what the browser says, where nothing else explains it
    is_broken = handle is answer_with_a_broken_script
    assert bool(tab.text_content("#resultdetails")) == is_broken
    tab.close()


@needs_pyodide
def test_a_policy_of_ones_own_is_shown_beside_any_other(tab):
    line = run_source(tab, MINE + BUDGET + "128\n")
    assert shown_runs(tab) == ["vllm | * | A to D", "Mine (yours) | 256 | A to D"]
    later = (
        "no rule is broken. At load A to D, against sarathi-serve, chunk 256: "
        r"request D has its first token [\d.]+ ms later; "
        r"the longest gap is 12.4 ms \(20.5 ms\); nobody stalls\."
    )
    assert re.search(later, line)
    line = run_source(tab, MINE + "    pass\n")
    loads = "load A to D, at one long among short, at tight memory it changes nothing."
    assert line.endswith(f"no rule is broken. At {loads}")
    tab.click("#choices button[data-label='sarathi-serve']")
    for load in ("pipeline bubbles", "shared prefixes", "tight memory"):
        choose(tab, "load", load)  # it is run there, too
        tab.wait_for_function(f"panes[1]?.run.name.endsWith('{load}')")
        metrics = tab.evaluate("panes.map(pane => pane.run.metrics())")
        assert len(metrics) == 2 and metrics[0] == metrics[1]
    choose(tab, "chunk", "512")
    assert shown_runs(tab)[1] == "Mine (yours) | 512 | tight memory"
    tab.wait_for_function("$('policytable').rows.length === 10")
    run_source(tab, MINE + BUDGET + "64\n")
    assert tab.evaluate("panes[1].run.iterations[5].budget") == 64


@needs_pyodide
def test_a_policy_that_changes_nothing_here_is_told_where_it_does(tab):
    line = run_source(tab)  # the template
    tab.click("#seerun")
    tab.wait_for_function("panes[1]?.run.name === 'ShortestFirst (yours) | 256 | tight memory'")
    nothing = "At load A to D, at one long among short it changes nothing."
    assert f"no rule is broken. {nothing} At load tight memory, against sarathi-serve" in line


@needs_pyodide
def test_what_is_wrong_with_a_policy_is_one_line(tab):
    line = run_source(tab, MINE + SCHEDULE + "return self.nothing\n")
    assert line.startswith("my_policy.py line 4: AttributeError")
    assert texts(tab, "#linenumbers .marked") == ["4"]
    endless = MINE + SCHEDULE + "while True: pass\n"
    assert run_source(tab, endless) == "stopped after 10 s: a loop without an end?"
    assert len(shown_runs(tab)) == 2  # what was there
    tab.click("#runsource")
    tab.wait_for_function("$('result').textContent.startsWith('Running')")
    tab.click("#stoprun")
    tab.wait_for_function(SOURCE_HAS_RUN)
    assert tab.text_content("#result") == "stopped"
    lost = "    def admit(self):\n        return self.waiting and self.waiting.popleft()\n"
    line = run_source(tab, MINE + lost)
    assert line.startswith("the rule 'nothing lost' is broken") and "\n" not in line
    assert texts(tab, "#linenumbers .marked") == []
    printing = MINE + SCHEDULE + "print('here')\n        return super().schedule()\n"
    assert "no rule is broken" in run_source(tab, printing)
    assert tab.text_content("#resultdetails").startswith("printed:\nhere\nhere")


@needs_pyodide
def test_an_exercise_is_solved_in_the_page_which_remembers_it(tab, site_address):
    exercise = EXERCISES[5]
    tab.select_option("#startwith", "6")
    tab.wait_for_function("$('source').value.includes('Exercise 6')")
    assert tab.evaluate("$('source').value") == exercise.file.read_text("utf-8")
    assert "not written yet" in run_source(tab)
    wrong = SOLUTIONS[6].replace("batch.add_decodes(", "len(")
    assert "A running decode never waits" in run_source(tab, IMPORTS + wrong)
    assert "| reference" in tab.text_content("#resultdetails")
    position = "$('exercisepage').contentDocument.querySelector('#position').textContent"
    tab.wait_for_function(f"{position}.startsWith('iteration 1 of')")
    line = run_source(tab, IMPORTS + SOLUTIONS[6])
    assert line == f"Exercise 6, {exercise.title}: it holds."
    assert "The answer: 2 iterations" in tab.text_content("#resultdetails")
    assert tab.evaluate("$('hints').children.length") == 2
    tab.goto(site_address)
    enter(tab)
    assert tab.text_content("#progress") == "1 of 16 exercises solved"
    assert tab.text_content("#startwith").count("✓ solved") == 1


@needs_pyodide
def test_the_keyboard_is_enough_for_the_editor_and_what_was_written_stays(browser, site_address):
    with opened(browser, site_address) as tab:
        tab.get_by_role("button", name="write your own").focus()
        for key in ("Enter", "Control+A", "Delete"):
            tab.keyboard.press(key)
        tab.keyboard.type("from scheduler import VLLM\nclass Mine(VLLM):\npass\n")
        source = "from scheduler import VLLM\nclass Mine(VLLM):\n    pass\n    "
        for key, end in ("End", ""), ("Tab", "    "), ("Shift+Tab", ""):
            tab.keyboard.press(key)
            assert tab.input_value("#source") == source + end
        assert tab.evaluate("cursor") == 10 and not tab.evaluate("playing")  # no key reached it
        tab.keyboard.press("Control+Enter")
        tab.wait_for_function("panes[1].run.name === 'Mine (yours) | * | A to D'", timeout=120_000)
        tab.focus("#source")
        tab.keyboard.press("Escape")
        tab.keyboard.press("Tab")
        assert tab.evaluate("document.activeElement.id") != "source"
        tab.reload()
        tab.wait_for_function(f"$('source').value === {json.dumps(source)}")
        tab.click("#startover")
        tab.wait_for_function("$('source').value.includes('ShortestFirst')")


@needs_pyodide
def test_a_page_in_a_file_loads_python_from_elsewhere(browser, site_address, site_folder, tmp_path):
    text = (site_folder / "index.html").read_text("utf-8")
    for file in ("python.json.gz", "pyodide/"):
        assert text.count(f': "{file}"') == 1
        text = text.replace(f': "{file}"', f': "{site_address}{file}"')
    (tmp_path / "page.html").write_text(text, "utf-8")
    tab = browser.new_page()
    tab.goto(f"file://{tmp_path}/page.html")
    enter(tab)
    assert "no rule is broken. At load A to D it changes nothing." in run_source(tab)
    assert tab.text_content("#result").endswith("as by python -m http.server.")  # of other loads
    tab.close()
