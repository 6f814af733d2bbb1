"""The READMEs' code runs, their commands parse, and what they say of files is so."""

import inspect
import re
import shlex
import textwrap
from pathlib import Path

import pytest

import bench
import sample
import server.__main__
from engine import Engine
from sampling import SamplingParams
from scheduler import SarathiServe
from tests import serve_remote
from tests.helpers import alone, tiny_model
from tests.test_scheduler import simulate

ROOT = Path(__file__).parents[1]
# commands in each
LEAST = {"": 5, "lab/": 5, "lab/simulator/": 2, "results/": 9, "server/": 2, "parallel/": 5}
TEXTS = {room: (ROOT / f"{room}README.md").read_text("utf-8") for room in LEAST}
MAIN = TEXTS[""]
ALGORITHM_3, *CODE = re.findall(r"```python\n(.*?)```", MAIN, flags=re.DOTALL)
USAGE = next(block for block in CODE if "Engine(" in block)
OWN = "\n".join(block for block in CODE if "(SarathiServe):" in block)
TEMPLATE = (ROOT / "policies/template.py").read_text("utf-8")
PARSERS = {"bench.py": bench.parse_args, "sample.py": sample.parse_args}
PARSERS |= {"server": server.__main__.parse_args, "tests.serve_remote": serve_remote.parse_args}
NEEDS = {"budget": ["--slo-tbt", "1"], "batches": ["64"]}  # where a sentence only names the command


def test_algorithm_3_is_quoted_as_it_stands():
    assert ALGORITHM_3 == textwrap.dedent(inspect.getsource(SarathiServe.schedule))


def test_the_usage_runs(capsys):
    assert "llama-160m" in USAGE
    exec(USAGE.replace("llama-160m", "llama-tiny"), {})
    first, *events = capsys.readouterr().out.splitlines()
    assert "length" in first and [line.split()[0] for line in events] == ["2"] * 4


def test_a_policy_can_be_added_as_described(tmp_path):
    (tmp_path / "my_policy.py").write_text(OWN + TEMPLATE)
    eager = f"{tmp_path}/my_policy.py:Eager"
    history, _ = simulate(eager, [(20, 4), (50, 1)], 8)
    assert history == [{0: 20, 1: 44}, {0: "d", 1: 6}, {0: "d"}, {0: "d"}]
    model, prompts, params = tiny_model(), [[1] * 9, [2], [3, 4, 5]], SamplingParams(5)
    expected = [alone(model, prompt, params) for prompt in prompts]
    classes = re.findall(r"(?m)^class (\w+)", OWN + TEMPLATE)
    assert {"Eager", "ShortestFirst"} <= set(classes)
    for name in classes:
        sizes = dict(policy=f"{tmp_path}/my_policy.py:{name}", chunk=4, max_batch=2, max_len=32)
        done = Engine(model, **sizes).generate(prompts, params)
        assert [c.tokens for c in done] == expected


@pytest.mark.parametrize("block", re.findall(r"(?m)^class (?:.+\n|\n(?= ))+", OWN + "\n"))
def test_a_policy_that_stands_in_the_template_too_is_the_same_there(block):
    name = block.partition("(")[0]
    assert f"{name}(" not in TEMPLATE or block.rstrip() in TEMPLATE


def commands(text):
    """The words after each bench.py and sample.py, in blocks, in sentences and in a table."""
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in re.split(r"&&|(?<!\\)\n", block)]
    text = re.sub("```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    programs = r"(?:bench\.py|sample\.py|-m server|-m tests\.serve_remote)"
    lines += re.findall(rf"`([^`]*{programs} [^`…]+)`", text)
    for table in re.findall(r"(?m)^\| claim +\| +command \|.*\n.*\n((?:\|.*\n)*)", text):
        lines += ["bench.py " + row.split(" | ")[1].strip(" `") for row in table.splitlines()]
    for words in map(shlex.split, lines):
        yield from (words[i:] for i, word in enumerate(words) if word in PARSERS)


@pytest.mark.parametrize("room", LEAST)
def test_every_command_parses(room, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_policy.py").write_text(OWN)
    Path("policies").mkdir()
    Path("policies/template.py").write_text(TEMPLATE)
    found = list(commands(TEXTS[room]))
    assert len(found) >= LEAST[room]
    for script, *words in found:
        try:
            PARSERS[script](words + NEEDS.get(*words, []) if len(words) == 1 else words)
        except SystemExit as error:
            assert error.code == 0 and "--help" in words, (script, words)


def test_what_the_template_wins_and_pays_is_what_its_command_prints(capsys):
    cells = lambda line: [cell.strip() for cell in line.strip("|\n").split("|")]
    section = MAIN.partition("## Add a policy")[2].partition("\n## ")[0]
    (words,) = (words for words in commands(section) if "--simulate" in words)
    bench.main(words[1:])
    printed = {}  # (policy, head of a column) -> the cell
    for table in capsys.readouterr().out.split("\n\n"):
        if table.startswith("| "):
            heads, _, *rows = map(cells, table.splitlines())
            for name, *its in rows:
                printed |= {(name.split(":")[-1], head): x for head, x in zip(heads[1:], its)}
    heads, _, *rows = map(cells, re.findall(r"(?m)^\|.*", section))
    assert len(rows) == 3
    for name, *its in rows:
        assert its == [printed[name, head] for head in heads[1:]]


def test_every_file_at_the_top_and_every_room_is_named():
    top = {path.name for path in ROOT.glob("*.py")} - {"conftest.py"}
    rooms = {f"{path.parent.name}/" for path in ROOT.glob("*/__init__.py")}
    assert len(top) >= 9 and len(rooms) >= 9
    assert [
        name for name in sorted(top | rooms) if f"`{name}`" not in MAIN and f"{name} " not in MAIN
    ] == []


def test_every_link_leads_to_a_file():
    assert {path.parent.relative_to(ROOT) for path in ROOT.glob("[!.]*/**/README.md")} == {
        Path(room) for room in LEAST if room
    }
    for room, text in TEXTS.items():
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (ROOT / room / link).exists(), f"{room}README.md links to {link}"
