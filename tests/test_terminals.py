"""The moving picture of examples/stall.py, held against its answers: what its SVG shows when."""

import re
from xml.etree import ElementTree

import pytest

from examples.terminals import HOLD_S, Answer, LatePrompt, Terminal, Word, animate

SVG = "{http://www.w3.org/2000/svg}"
GAPS_S = {"vllm": 1.9, "sarathi-serve": 0.2}


def about(time_s):
    return pytest.approx(time_s, abs=1e-3)


def terminal(gap_s):
    """Two answers of ten words each 0.1 s, with a gap after the fifth."""
    times = []
    for i in range(10):
        times.append(0.1 * i + (gap_s if i > 4 else 0))
    words = [Word(time, f" word{i}") for i, time in enumerate(times)]
    answers = [Answer(f"Question {number} <?>", words) for number in range(2)]
    return Terminal(answers, LatePrompt("a long prompt", times[4], times[5]))


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """The terminals of the picture, and {animation: when it shows something, in s}."""
    file = tmp_path_factory.mktemp("picture") / "a.svg"
    animate({policy: terminal(gap_s) for policy, gap_s in GAPS_S.items()}, file)
    tree = ElementTree.parse(file)
    style = tree.find(f"{SVG}style").text
    seconds = 2.8 + HOLD_S  # the last word of vllm is there after 2.8 s
    percents = re.findall(r"@keyframes (t[\d-]+) .*? ([\d.]+)% \{ visibility: visible", style)
    starts = {name: float(percent) / 100 * seconds for name, percent in percents}
    return tree.findall(f"{SVG}g"), starts


def shown(picture, number):
    """[(text, when it is shown first)] of a terminal."""
    groups, starts = picture
    texts = []
    for part in groups[number].findall(f"{SVG}g"):
        animation = part.get("style").removeprefix("animation-name: ")
        for text in part.iter(f"{SVG}text"):
            texts.append((text.text, starts[animation]))
    return texts


def test_each_word_is_shown_when_it_was_written(picture):
    for number, gap_s in enumerate(GAPS_S.values()):
        words = [item for item in shown(picture, number) if item[0].startswith("word")]
        expected = []
        for answer in terminal(gap_s).answers:
            expected += [(word.text.strip(), about(word.time_s)) for word in answer.words]
        assert words == expected


def test_the_seconds_count_while_answers_are_frozen(picture):
    counts = [item for item in shown(picture, 0) if "fr" in item[0]]
    assert counts[0] == ("frozen 0.1 s", about(0.5))
    assert counts[-1] == ("longest freeze 2.00 s", about(2.4))


def test_only_stalls_are_red(picture):
    vllm, sarathi_serve = picture[0]
    stalls = f"{SVG}rect[@class='stall']"
    assert sarathi_serve.findall(stalls) == []
    widths = [float(bar.get("width")) for bar in vllm.findall(stalls)]
    scale = 412 / 2.8
    assert widths == pytest.approx([2 * scale] * 2, abs=0.1)  # one in each lane
