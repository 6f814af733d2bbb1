"""A moving picture of answers that are being written: one terminal for each policy, on one clock.

    animate({"vllm": terminal, "sarathi-serve": terminal}, "stall.svg")

It is an SVG without scripts, which moves within an <img>, too. Each iteration has one rule of CSS
that shows its words at their time. A viewer that asks for reduced motion sees the last frame.
Read first: examples/stall.py."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from runtime.files import new_file

WIDTH = 440  # of a terminal, in pixels, as all lengths here
GAP = 12  # between terminals
PADDING = 14
LETTER = 6.85  # the width of a letter
LINE = 16  # the height of a line of text
COLUMNS = int((WIDTH - 2 * PADDING) / LETTER)
MAX_LINES = 5  # of an answer
LANE = 9  # the height of an answer's lane in the strip at the bottom
HOLD_S = 4.0  # how long the last frame stays before it begins again
COUNTER_S = 0.1  # the step of the counter of a freeze
STALL = 10  # a gap is a stall if it is longer than so many of the usual ones

STYLE = """\
text { font: 11.4px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #1c2430 }
.back { fill: #f7f8fa; stroke: #c6ccd5 } .head { font-weight: 700; font-size: 13px }
.soft { fill: #5d6878 } .ok { fill: #14775d; font-weight: 700 } .tick { fill: #2aa98a }
.stall { fill: #c9211c; font-weight: 700 } .wait { fill: #b4bcc8 } .prompt { fill: #2f5d9b }
.cover { fill: #f7f8fa; transform-box: fill-box; transform-origin: right; transform: scaleX(0) }
.on { animation: DURATIONs step-end infinite } .moment { visibility: hidden }
.cover { animation: cover DURATIONs linear infinite }
@keyframes cover { 0% { transform: scaleX(1) } END%, 100% { transform: scaleX(0) } }
@media (prefers-color-scheme: dark) {
  text { fill: #e6eaf0 } .back { fill: #161b22; stroke: #3a4452 } .cover { fill: #161b22 }
  .soft { fill: #9ca8b8 } .ok { fill: #4fd0aa } .stall { fill: #ff6a62 } .wait { fill: #5a6676 }
  .prompt { fill: #6f9fe0 } }
@media (prefers-reduced-motion: reduce) { .on, .cover { animation: none } }
"""


class Word(NamedTuple):
    """A piece of an answer, and when it was there: in seconds from the start."""

    time_s: float
    text: str


@dataclass(frozen=True)
class Answer:
    """An answer as it grew."""

    question: str
    words: Sequence[Word]


@dataclass(frozen=True)
class LatePrompt:
    """A long prompt that arrives while answers are written. Times are in seconds."""

    name: str
    arrival_s: float
    first_token_s: float


@dataclass(frozen=True)
class Terminal:
    """What one policy made of the answers and of the prompt that came late."""

    answers: Sequence[Answer]
    late: LatePrompt

    @property
    def end_s(self) -> float:
        """When the last word was there."""
        return max(answer.words[-1].time_s for answer in self.answers)

    def gaps(self) -> list[tuple[float, float]]:
        """From when to when each answer stood still between two words."""
        return [
            (before.time_s, after.time_s)
            for answer in self.answers
            for before, after in pairwise(answer.words)
        ]

    def longest_gap(self) -> tuple[float, float]:
        """From when to when an answer stood still for longest."""
        return max(self.gaps(), key=lambda gap: gap[1] - gap[0])

    def freeze(self) -> str:
        """The length of that, in words."""
        start, end = self.longest_gap()
        return f"longest freeze {end - start:.2f} s"

    def stall_limit_s(self) -> float:
        """Longer gaps are stalls: ten times the usual gap before the prompt arrived."""
        return STALL * median(
            end - start for start, end in self.gaps() if end <= self.late.arrival_s
        )


class Clock:
    """Writes the rules that show and hide parts of the picture."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds + HOLD_S
        self.end = 100 * seconds / self.seconds
        self.rules: dict[str, str] = {}  # name -> rule of CSS

    def shown(self, from_s: float, to_s: float | None = None) -> str:
        """The attributes of an element that is seen from then on, or until `to_s`."""
        start = 100 * from_s / self.seconds
        name = f"t{start * 100:.0f}"
        frames = f"0% {{ visibility: hidden }} {start:.2f}% {{ visibility: visible }}"
        classes = "on"
        if to_s is not None:
            end = 100 * to_s / self.seconds
            name += f"-{end * 100:.0f}"
            frames += f" {end:.2f}%, 100% {{ visibility: hidden }}"
            classes = "on moment"
        self.rules[name] = f"@keyframes {name} {{ {frames} }}"
        return f'class="{classes}" style="animation-name: {name}"'

    def style(self) -> str:
        """The style of the picture."""
        style = STYLE.replace("DURATION", f"{self.seconds:.2f}").replace("END", f"{self.end:.2f}")
        return style + "\n".join(self.rules.values())


def animate(terminals: Mapping[str, Terminal], file: str | Path) -> None:
    """Draw the terminals, by the names of their policies, side by side on one clock."""
    seconds = max(terminal.end_s for terminal in terminals.values())
    clock = Clock(seconds)
    parts: list[str] = []
    height = 0.0
    for number, (policy, terminal) in enumerate(terminals.items()):
        elements, height = draw_terminal(policy, terminal, clock, seconds)
        parts.append(
            f'<g transform="translate({number * (WIDTH + GAP)} 0)">{"".join(elements)}</g>'
        )
    width = len(terminals) * (WIDTH + GAP) - GAP
    freezes = [f"{policy}: {terminal.freeze()}" for policy, terminal in terminals.items()]
    label = escape("; ".join(freezes))
    size = f'viewBox="0 0 {width} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    svg = "\n".join([head, f"<style>{clock.style()}</style>", *parts, "</svg>\n"])
    with new_file(file) as path:
        path.write_text(svg, "utf-8")


def draw_terminal(
    policy: str,
    terminal: Terminal,
    clock: Clock,
    seconds: float,
) -> tuple[list[str], float]:
    """The elements of a terminal, and its height."""
    late = terminal.late
    parts = [text(PADDING, 24, f"--policy {policy}", "head")]
    parts += draw_counter(terminal, clock)
    y = 46.0
    for answer in terminal.answers:
        parts.append(text(PADDING, y, f"> {answer.question}", "soft"))
        parts += draw_words(answer, y + LINE, clock)
        y += (MAX_LINES + 1.6) * LINE
    arrives = text(PADDING, y, f"> {late.name}", "soft")
    ttft = f"its first token after {late.first_token_s - late.arrival_s:.2f} s"
    parts.append(f"<g {clock.shown(late.arrival_s)}>{arrives}</g>")
    parts.append(f"<g {clock.shown(late.first_token_s)}>{text(PADDING, y + LINE, ttft)}</g>")
    y += 1.6 * LINE
    parts += draw_strip(terminal, y, seconds)
    height = y + (len(terminal.answers) + 1) * LANE + PADDING
    frame = f'<rect class="back" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>'
    return [frame, *parts], height


def draw_counter(terminal: Terminal, clock: Clock) -> Iterator[str]:
    """The seconds of the longest gap: they count while it lasts if it is a stall, then they stay.

    The result is seen once the long prompt is computed."""
    start, end = terminal.longest_gap()
    is_stall = end - start > terminal.stall_limit_s()
    right = WIDTH - PADDING
    steps = int((end - start) / COUNTER_S) if is_stall else 0
    for step in range(1, steps + 1):
        from_s = start + step * COUNTER_S
        count = text(right, 24, f"frozen {step * COUNTER_S:.1f} s", "stall", anchor="end")
        yield f"<g {clock.shown(from_s, min(from_s + COUNTER_S, end))}>{count}</g>"
    result = text(right, 24, terminal.freeze(), "stall" if is_stall else "ok", anchor="end")
    yield f"<g {clock.shown(end if is_stall else terminal.late.first_token_s)}>{result}</g>"


def draw_words(answer: Answer, y: float, clock: Clock) -> Iterator[str]:
    """The words of an answer in their lines, each seen from its time on."""
    text_of_answer = "".join(word.text for word in answer.words)
    lines = textwrap.wrap(text_of_answer, COLUMNS, break_on_hyphens=False)[:MAX_LINES]
    line = column = 0
    for word in answer.words:
        for piece in word.text.split():
            if line < len(lines) and not lines[line].startswith(piece, column):
                column += 1  # the space before it
            if line < len(lines) and not lines[line].startswith(piece, column):
                line, column = line + 1, 0
            if line == len(lines):
                return
            x = PADDING + column * LETTER
            yield f"<g {clock.shown(word.time_s)}>{text(x, y + line * LINE, piece)}</g>"
            column += len(piece)


def draw_strip(terminal: Terminal, y: float, seconds: float) -> Iterator[str]:
    """A lane for each answer, with a tick for each word and a bar for each stall; below them the
    long prompt, from its arrival to its first token."""
    scale = (WIDTH - 2 * PADDING) / seconds
    limit_s = terminal.stall_limit_s()

    def bar(
        name: str,
        lane: int,
        from_s: float,
        to_s: float,
    ) -> str:
        x = PADDING + from_s * scale
        width = max(1.5, (to_s - from_s) * scale)
        top = y + lane * LANE
        return f'<rect class="{name}" x="{x:.1f}" y="{top:g}" width="{width:.1f}" height="6"/>'

    for lane, answer in enumerate(terminal.answers):
        for before, after in pairwise(answer.words):
            if after.time_s - before.time_s > limit_s:
                yield bar("stall", lane, before.time_s, after.time_s)
        yield from (bar("tick", lane, word.time_s, word.time_s) for word in answer.words)
    lane = len(terminal.answers)
    yield bar("prompt", lane, terminal.late.arrival_s, terminal.late.first_token_s)
    cover = f'x="{PADDING}" y="{y - 2:g}" width="{WIDTH - 2 * PADDING + 4}"'
    yield f'<rect class="cover" {cover} height="{(lane + 1) * LANE + 2}"/>'


def text(
    x: float,
    y: float,
    content: str,
    name: str = "",
    anchor: str = "start",
) -> str:
    """A text that is as wide as its letters say, in any font."""
    length = f' textLength="{len(content) * LETTER:.1f}" lengthAdjust="spacingAndGlyphs"'
    if name == "head" or anchor == "end":
        length = f' text-anchor="{anchor}"'
    kind = f' class="{name}"' if name else ""
    return f'<text x="{x:.1f}" y="{y:g}"{kind}{length}>{escape(content)}</text>'
