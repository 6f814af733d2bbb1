"""The page as a site, held against the files that it fetches and the runs of explore. Slow."""

import re

import pytest

from exercises.catalog import EXERCISES
from tests.exercise_solutions import SOLUTIONS
from tests.pages import (
    MINE,
    choose,
    enter,
    needs_pyodide,
    opened,
    run_source,
    shown_runs,
)

pytestmark = pytest.mark.slow  # the site takes twenty seconds to make

BUDGET = "    def token_budget(self, decodes, prefills):\n        return "
IMPORTS = "from scheduler import Batch, SarathiServe, Scheduler\n"


@pytest.fixture
def tab(browser, site_address):
    with opened(browser, site_address) as tab:
        yield tab


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
def test_an_exercise_is_solved_in_the_page_which_remembers_it(tab, site_address):
    exercise = EXERCISES[5]
    tab.select_option("#startwith", "6")
    tab.wait_for_function("$('source').value.includes('Exercise 6')")
    assert tab.evaluate("$('source').value") == exercise.file.read_text("utf-8")
    assert "NotImplementedError" in run_source(tab)
    wrong = SOLUTIONS[6].replace("batch.add_decodes(", "len(")
    assert "A running decode never waits" in run_source(tab, IMPORTS + wrong)
    assert "| reference" in tab.text_content("#resultdetails")
    position = "$('exercisepage').contentDocument.querySelector('#position').textContent"
    tab.wait_for_function(f"{position}.startsWith('iteration 1 of')")
    line = run_source(tab, IMPORTS + SOLUTIONS[6])
    assert line == f"Exercise 6, {exercise.title}: it holds."
    assert "The answer to the question: 2 iterations" in tab.text_content("#resultdetails")
    assert tab.evaluate("$('hints').children.length") == 2
    tab.goto(site_address)
    enter(tab)
    assert tab.text_content("#progress") == "1 of 16 exercises solved"
    assert tab.text_content("#startwith").count("✓ solved") == 1
