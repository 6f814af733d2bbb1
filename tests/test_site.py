"""The page as a site below a path, held against the files that it fetches and its runs. Slow."""

import pytest

from exercises.catalog import EXERCISES
from tests.exercise_solutions import IMPORTS, SOLUTIONS
from tests.pages import (
    MINE,
    choose,
    enter,
    needs_pyodide,
    opened,
    run_source,
    shown_runs,
)

pytestmark = pytest.mark.slow  # these take twenty seconds

BUDGET = "    def token_budget(self, decodes, prefills):\n        return "
METRICS = "panes.map(pane => pane.run.metrics())"


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
    fetched = tab.evaluate(files)
    assert len(fetched) == 8 == len(set(fetched))  # the first was there
    assert all(file.startswith(f"{site_address}runs/") for file in fetched)


@needs_pyodide
def test_a_policy_of_ones_own_is_shown_beside_any_other(tab):
    run_source(tab, MINE + BUDGET + "128\n")
    assert shown_runs(tab) == ["vllm | * | A to D", "Mine (yours) | 256 | A to D"]
    assert tab.evaluate("panes[1].run.iterations[0].budget") == 128
    run_source(tab, MINE + "    pass\n")
    choose(tab, "policy", "sarathi-serve")
    for load in ("pipeline bubbles", "shared prefixes", "tight memory"):
        choose(tab, "load", load)  # it is run there, too
        tab.wait_for_function(f"panes[1]?.run.name.endsWith('{load}')")
        theirs, mine = tab.evaluate(METRICS)
        assert theirs == mine


@needs_pyodide
def test_an_exercise_is_solved_in_the_page_which_remembers_it(tab, site_address):
    tab.select_option("#startwith", "6")
    tab.wait_for_function("$('source').value.includes('Exercise 6')")
    assert tab.evaluate("$('source').value") == EXERCISES[5].file.read_text("utf-8")
    assert "NotImplementedError" in run_source(tab)
    solved = "data.editor.exercises.map(e => e.number).filter(n => kept(SOLVED + n) !== null)"
    run_source(tab, IMPORTS + SOLUTIONS[6].replace("batch.add_decodes(", "len("))
    assert tab.evaluate(solved) == []
    position = "$('exercisepage').contentDocument.querySelector('#position').textContent"
    tab.wait_for_function(f"{position} !== ''")  # both schedules
    run_source(tab, IMPORTS + SOLUTIONS[6])
    tab.goto(site_address)
    enter(tab)
    assert tab.evaluate(solved) == [6]
