"""The moving picture of examples/stall.py: what it shows when, read from its SVG."""

import re
from xml.etree import ElementTree

import pytest

from examples.terminals import HOLD_S, Answer, LatePrompt, Terminal, Word, animate

SVG = "{http://www.w3.org/2000/svg}"


def terminal(gap_s):
    """Two answers of ten words each 0.1 s, with a gap after the fifth."""
    times = [0.1 * i + (gap_s if i > 4 else 0) for i in range(10)]
    answers = [
        Answer(f"Question {number} <?>", [Word(time, f" word{i}") for i, time in enumerate(times)])
        for number in range(2)
    ]
    return Terminal(answers, LatePrompt("a long prompt", times[4], times[5]))


@pytest.fixture
def picture(tmp_path):
    """The elements of the picture, and {animation: when it shows something, in s}."""
    animate({"vllm": terminal(1.9), "sarathi-serve": terminal(0.2)}, tmp_path / "a.svg")
    tree = ElementTree.parse(tmp_path / "a.svg")
    style = tree.find(f"{SVG}style").text
    seconds = float(re.search(r"\.on \{ animation: ([\d.]+)s", style)[1])
    assert seconds == pytest.approx(2.8 + HOLD_S)
    percents = re.findall(r"@keyframes (t[\d-]+) .*? ([\d.]+)% \{ visibility: visible", style)
    return tree, {name: float(percent) / 100 * seconds for name, percent in percents}


def shown(picture, number):
    """[(text, when it is shown first, or None: always)] of a terminal."""
    tree, starts = picture
    group = tree.findall(f"{SVG}g")[number]
    texts = [(element.text, None) for element in group.findall(f"{SVG}text")]
    for part in group.findall(f"{SVG}g"):
        start = starts[part.get("style").removeprefix("animation-name: ")]
        texts += [(element.text, start) for element in part.iter(f"{SVG}text")]
    return texts


def test_each_word_is_shown_when_it_was_written(picture):
    for number, gap_s in enumerate([1.9, 0.2]):
        words = [item for item in shown(picture, number) if item[0].startswith("word")]
        times = [word.time_s for word in terminal(gap_s).answers[0].words]
        expected = [(f"word{i}", time) for i, time in enumerate(times)] * 2
        assert [text for text, _ in words] == [text for text, _ in expected]
        assert [time for _, time in words] == pytest.approx([t for _, t in expected], abs=1e-3)


def test_the_seconds_count_while_answers_are_frozen(picture):
    counts = [item for item in shown(picture, 0) if "frozen" in item[0] or "freeze" in item[0]]
    assert [text for text, _ in counts[:2]] == ["frozen 0.1 s", "frozen 0.2 s"]
    assert counts[-1][0] == "longest freeze 2.00 s"
    times = [time for _, time in counts]
    assert times == sorted(times) and times[0] == pytest.approx(0.5, abs=1e-3)
    assert times[-1] == pytest.approx(2.4, abs=1e-3)
    (freeze,) = [text for text, _ in shown(picture, 1) if "freeze" in text or "frozen" in text]
    assert freeze == "longest freeze 0.30 s"


def test_only_stalls_are_red(picture):
    groups = picture[0].findall(f"{SVG}g")
    stalls = [
        [r for r in group if r.get("class") == "stall" and "width" in r.attrib] for group in groups
    ]
    assert list(map(len, stalls)) == [2, 0]  # one in each lane
    tick = 412 / 2.8
    assert [float(rect.get("width")) for rect in stalls[0]] == pytest.approx(
        [2 * tick] * 2, abs=0.1
    )


def test_it_moves_in_an_image_and_stands_where_that_is_asked_for(picture, tmp_path):
    text = (tmp_path / "a.svg").read_text("utf-8")
    assert "<script" not in text and "http" not in text.replace('"http://www.w3.org/2000/svg"', "")
    assert "@media (prefers-reduced-motion: reduce) { .on, .cover { animation: none } }" in text
    assert re.search(r"\.moment \{ visibility: hidden \}", text)  # what is not in the last frame
    assert picture[0].getroot().get("aria-label").startswith("vllm: longest freeze 2.00 s; ")
    assert len(text) < 300e3
