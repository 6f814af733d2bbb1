"""The page in Firefox: what it draws, counts and runs, and that it logs no error."""

import pytest

from tests.exercise_solutions import SOLUTIONS
from tests.firefox import FIREFOX, running
from tests.pages import (
    MINE,
    PIXELS,
    RED,
    SLO_S,
    a_stall,
    enter,
    expected_metrics,
    needs_pyodide,
    run_source,
    simulated,
    write_runs,
)

SIZES = [(1400, 900), (800, 1200), (390, 844)]
DARK_RED = "255 90 82"


@pytest.fixture(scope="module", params=["light", "dark"])
def scheme(request):
    return request.param


@pytest.fixture(scope="module")
def tab(scheme, tmp_path_factory):
    if FIREFOX is None:
        pytest.skip("needs Firefox: Debian's firefox-esr is not installed")
    with running(tmp_path_factory.mktemp("firefox"), scheme) as tab:
        yield tab


@pytest.fixture(autouse=True)
def no_errors(tab):
    """Nothing is logged as an error, and the next page is loaded anew: a fragment loads nothing."""
    yield
    assert tab.errors == []
    tab.goto("about:blank")


def open_page(tab, address, size=SIZES[0]):
    """Open the page at an address, and wait until it is drawn."""
    tab.set_viewport(*size)
    tab.goto(address)
    enter(tab)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_page_fits_and_is_toured(tab, scheme, site_address, size):
    open_page(tab, site_address, size)
    dark = tab.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert dark == (scheme == "dark")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate("panes.length") == 2
    tab.keyboard.press("t")
    for stop in range(1, 30):
        tab.wait_for_function(f"document.getElementById('stop').textContent.startsWith('{stop} ')")
        assert len(tab.text_content("#stoptext")) > 40
        last = tab.text_content("#stop").startswith(f"{stop} of {stop}:")
        tab.keyboard.press("Enter")  # the button "next" has the focus
        if last:
            break
    assert stop > 5 and tab.is_hidden("#tour")
    before = tab.evaluate("cursor")
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate("cursor") == before - 1


@pytest.mark.slow
def test_every_load_is_drawn(tab, site_address):
    open_page(tab, site_address)
    loads = "[...document.querySelectorAll(`#choices button[data-axis='load']`)]"
    labels = tab.evaluate(f"{loads}.map(button => button.dataset.label)")
    assert len(labels) == 9
    for label in labels:
        tab.click(f"#choices button[data-axis='load'][data-label='{label}']")
        tab.wait_for_function(f"panes.every(pane => pane.run.name.includes('{label}')) && !dirty")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 390])
def test_a_stall_is_red_at_every_zoom(tab, scheme, tmp_path, width):
    address = write_runs(tmp_path, {"vllm": a_stall()})
    open_page(tab, address, (width, 900))
    red = RED if scheme == "light" else DARK_RED
    for span in (1000, 20, 1, 0.01):
        tab.evaluate(f"set_view(4.1 - {span} / 2, 4.1 + {span} / 2)")
        tab.wait_for_function("!dirty")
        lane = tab.evaluate("[LEFT, 0, LEFT + panes[0].width, panes[0].lane_height - 1]")
        assert tab.evaluate(PIXELS, lane).get(red, 0) >= 10, span


def test_the_numbers_are_those_of_the_library(tab, tmp_path):
    ended, recorder = simulated("sarathi-serve")
    open_page(tab, write_runs(tmp_path, {"sarathi-serve": recorder}))
    shown = tab.evaluate("focused.run.metrics()")
    expected = expected_metrics(ended, recorder)
    assert {key: shown[key] for key in expected} == pytest.approx(expected, rel=1e-4)
    assert tab.evaluate("data.slo_s") == SLO_S


@needs_pyodide
def test_a_policy_of_ones_own_runs_and_what_is_wrong_with_one_is_a_line(tab, site_address):
    open_page(tab, site_address)
    assert "no rule is broken" in run_source(tab)  # the template
    assert tab.evaluate("panes[1].run.name") == "ShortestFirst (yours) | 256 | A to D"
    line = run_source(tab, MINE + "    def schedule(self):\n        return self.nothing\n")
    assert line.startswith("my_policy.py line 4: AttributeError")
    endless = "    def schedule(self):\n        while True:\n            pass\n"
    assert run_source(tab, MINE + endless) == "stopped after 10 s: a loop without an end?"
    lost = "    def admit(self):\n        return self.waiting and self.waiting.popleft()\n"
    assert run_source(tab, MINE + lost).startswith("the rule 'nothing lost' is broken")


@needs_pyodide
def test_an_exercise_is_solved_in_the_page(tab, site_address):
    open_page(tab, site_address)
    tab.evaluate("$('startwith').value = '6'")
    tab.evaluate("$('startwith').dispatchEvent(new Event('input', {bubbles: true}))")
    tab.wait_for_function("document.getElementById('source').value.includes('Exercise 6')")
    source = "from scheduler import Batch, SarathiServe, Scheduler\n" + SOLUTIONS[6]
    assert run_source(tab, source).endswith(": it holds.")
