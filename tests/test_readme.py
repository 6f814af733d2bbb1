"""The code in the READMEs runs, their commands parse, and what they say of files is so."""

import ast
import inspect
import io
import json
import re
import shlex
import textwrap
import tokenize
from itertools import pairwise
from pathlib import Path

import pytest

import bench
import exercises.__main__
import sample
import server.__main__
from engine import Engine
from examples import ladder
from kv_cache import Pages
from lab.simulator.cost_model import CostModel
from sampling import SamplingParams
from scheduler import SarathiServe
from tests.helpers import ROOT, alone, repository, tiny_model
from tests.test_scheduler import simulate

READMES = {str(path).removesuffix("README.md"): path for path in repository("*README.md")}
TEXTS = {room: (ROOT / path).read_text("utf-8") for room, path in READMES.items()}
MAIN = TEXTS[""]
CODE = re.findall(r"```python\n(.*?)```", MAIN, flags=re.DOTALL)
USAGE = next(block for block in CODE if "Engine(" in block)
POLICIES = "\n".join(block for block in CODE if "(SarathiServe):" in block)
TEMPLATE = (ROOT / "policies/template.py").read_text("utf-8")
ORDER = MAIN.partition("## Where to read, in this order")[2].partition("```text\n")[2]
ORDER = ORDER.partition("```")[0].splitlines()
# how a command in a sentence begins
IN_PROSE = r"!?(?:\.venv/bin/)?(?:python3? |bench\.py |sample\.py |pytest |pip |npm |git )"
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
PARSERS = {
    "bench.py": bench.parse_args,
    "sample.py": sample.parse_args,
    "server": server.__main__.parse_args,
    "exercises": exercises.__main__.parse_args,
    "examples.ladder": ladder.parse_args,
}
REQUIRED = {  # arguments of a command, where a sentence only names the command
    "batches": ["64"],
    "check": ["policies/template.py:ShortestFirst"],
}


@pytest.mark.parametrize("method", [SarathiServe.schedule, Engine.step])
def test_code_is_quoted_as_it_stands(method):
    assert textwrap.dedent(inspect.getsource(method)) in CODE


def reading_list():
    """The files of the core in README's order, a folder's as its line names them."""
    paths = []
    for line in ORDER:
        _, name, text = line.split(maxsplit=2)
        names = re.findall(r"\w+\.py", text) if name.endswith("/") else [""]
        paths += [name + file for file in names]
    return paths


def code_size(source):
    """(tokens, lines) of code: docstrings, comments and blank lines do not count."""
    prose = set()  # lines of docstrings
    for node in ast.walk(ast.parse(source)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            prose.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = 0
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT and token.start[0] not in prose:
            tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
    return tokens, len(lines)


def test_the_core_is_as_large_as_the_readme_says():
    sizes = [code_size((ROOT / path).read_text("utf-8")) for path in reading_list()]
    tokens, lines = map(sum, zip(*sizes, strict=True))
    counted = f"{tokens:,} tokens of code in {lines:,} lines, {tokens / lines:.1f} a line"
    pattern = r"has ([\d,]+) tokens of code in ([\d,]+) lines, ([\d.]+) a line"
    said = re.search(pattern, " ".join(MAIN.split()))
    numbers = [float(number.replace(",", "")) for number in said.groups()]
    assert numbers == pytest.approx([tokens, lines, tokens / lines], rel=0.02), counted


def test_docstrings_lead_through_the_core_in_the_order_of_the_readme():
    assert [line.split()[0] for line in ORDER] == [str(i + 1) for i in range(9)]
    paths = reading_list()
    assert len(paths) == 11
    docs = {path: ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8"))) for path in paths}
    for path, following in pairwise(paths):
        named = re.search(r"[\w/]*\w(?:\.py|/)", docs[path].partition("Read next:")[2])
        name = following.removesuffix("__init__.py")
        assert named and named[0] in (name, Path(name).name), f"{path}: Read next: {name}"
    for i, path in enumerate(paths):
        before = docs[path].partition("Read first:")[2].partition("Read next:")[0]
        before = before.partition("Beside it:")[0]
        for name in re.findall(r"\w+\.py", before):
            assert name in {Path(earlier).name for earlier in paths[:i]}, f"{path}: {name}"


def test_the_simulator_counts_what_is_off_as_its_results_do():
    results = json.loads((ROOT / "results/simulated/simulated.json").read_text("utf-8"))
    numbers = [number for claim in results["claims"] for number in claim["numbers"]]
    by_fitted: dict[bool, list[float]] = {True: [], False: []}
    for number in numbers:
        if number["error"] is not None:
            by_fitted[number["fitted"]].append(abs(number["error"]))

    def within(limit, fitted):
        return sum(error <= limit for error in by_fitted[fitted])

    text = " ".join(TEXTS["lab/simulator/"].split())
    unfitted = f"Of {len(by_fitted[False])} published numbers that nothing was fitted to"
    unfitted += f" {within(0.1, False)} come out within 10 %, and {within(0.25, False)} within 25 %"
    assert unfitted in text
    fitted = f"Of {len(by_fitted[True])} that constants were fitted to {within(0.1, True)} and"
    assert f"{fitted} {within(0.25, True)} come out" in text
    short = f"Of {len(by_fitted[False])} numbers that nothing was fitted to, {within(0.1, False)}"
    assert f"{short} are within 10 %" in " ".join(MAIN.split())
    met = [number["met"] for number in numbers if number["met"] is not None]
    assert f"and {sum(met)} of {len(met)} bounds are met" in text
    table = TEXTS["lab/simulator/"].partition("| comparison | how many |")[2].partition("\n\n")[0]
    off = [int(line.split("|")[2]) for line in table.splitlines()[2:]]
    in_all = sum(map(len, by_fitted.values()))
    missed = in_all - within(0.25, True) - within(0.25, False) + met.count(False)
    assert sum(off) == missed and f"The other {missed} (" in text


def test_the_usage_runs(capsys):
    assert "llama-160m" in USAGE
    exec(USAGE.replace("llama-160m", "llama-tiny"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2 and all("] length 0." in line for line in printed)


def test_a_policy_can_be_added_as_described(tmp_path):
    file = tmp_path / "my_policy.py"
    file.write_text(POLICIES + TEMPLATE, "utf-8")
    history, _ = simulate(f"{file}:Eager", [(20, 4), (50, 1)], 8)
    assert history == [{0: 20, 1: 44}, {0: "d", 1: 6}, {0: "d"}, {0: "d"}]
    model = tiny_model()
    prompts = [[1] * 9, [2], [3, 4, 5]]
    params = SamplingParams(5)
    expected = [alone(model, prompt, params) for prompt in prompts]
    classes = re.findall(r"(?m)^class (\w+)", POLICIES + TEMPLATE)
    assert {"Eager", "ShortestFirst"} <= set(classes)
    for name in classes:
        engine = Engine(model, policy=f"{file}:{name}", chunk=4, max_batch=2, max_len=32)
        completions = engine.generate(prompts, params)
        assert [completion.output for completion in completions] == expected


def test_what_the_template_names_is_there():
    scheduler = SarathiServe(Pages(1, 8), chunk=8, max_batch=1, max_len=8)
    names = re.findall(r"`self\.(\w+)", TEMPLATE) + re.findall(r"(?m)^    (\w+)\(", TEMPLATE)
    assert len(names) >= 9 and all(hasattr(scheduler, name) for name in names)


@pytest.mark.parametrize("block", re.findall(r"(?m)^class (?:.+\n|\n(?= ))+", POLICIES + "\n"))
def test_a_policy_that_the_template_has_too_is_the_same_there(block):
    name = block.partition("(")[0]
    assert f"{name}(" not in TEMPLATE or block.rstrip() in TEMPLATE


def commands(text):
    """The commands in the blocks, the sentences and the tables of a README."""
    lines = []
    for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
        lines += re.split(r"&&|\n", block.replace("\\\n", " ").strip())
    prose = re.sub("```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    spans = re.findall(r"`([^`]+)`", prose)
    lines += [span for span in spans if re.match(IN_PROSE, span) and "…" not in span]
    for table in re.findall(r"(?m)^\| claim +\| +command \|.*\n.*\n((?:\|.*\n)*)", prose):
        lines += ["bench.py " + row.split(" | ")[1].strip(" `") for row in table.splitlines()]
    return [re.sub(r"^(\.venv/bin/)?(python )?", "", " ".join(line.split())) for line in lines]


def program_lines(text):
    """The programs of PARSERS in commands, and their arguments, [program, argument, ...]."""
    for words in map(shlex.split, commands(text)):
        for index, word in enumerate(words):
            if word in PARSERS:
                yield words[index:]


@pytest.mark.parametrize("room", TEXTS)
def test_every_command_parses(room, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_policy.py").write_text(POLICIES, "utf-8")
    Path("policies").mkdir()
    Path("policies/template.py").write_text(TEMPLATE, "utf-8")
    in_readme = list(program_lines(TEXTS[room]))
    assert in_readme or room == "tests/"
    for program, *argv in in_readme:
        if len(argv) == 1:
            argv += REQUIRED.get(argv[0], [])
        try:
            parsed = PARSERS[program](argv)
        except SystemExit as error:
            assert error.code == 0 and "--help" in argv, (program, argv)
            continue
        except ValueError as error:  # the options are right, and torchrun has to start it
            assert "processes, not 1: torchrun" in str(error), (program, argv)
            continue
        if argv[:1] == ["capacity"]:
            _, options = parsed
            assert options.requests >= options.fewest_requests, argv


def cells(line):
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.strip("|\n").split("|")]


@pytest.mark.slow
def test_the_headline_is_printed_by_its_command(capsys):
    section = MAIN.partition("## What it gains")[2].partition("\n## ")[0]
    (command,) = (command for command in program_lines(section) if "--simulate" in command)
    ladder.main(command[1:])
    printed, headline = (
        [cells(line) for line in re.findall(r"(?m)^\|.*", text)]
        for text in (capsys.readouterr().out, section)
    )
    heads = headline[0]
    columns = [printed[0].index(head) for head in heads]
    assert [rung for rung, *_ in headline[2:]] == list(ladder.LADDER)
    assert headline[2:] == [[row[column] for column in columns] for row in printed[2:]]


def test_the_roofline_is_that_of_the_cost_model():
    cost = CostModel.named("llama3-8b", "a100-80gb")
    drawing = MAIN.partition("matrix products of one iteration")[2].partition("```")[0]
    rows = re.findall(r"(?m)^ +(.+?) {2,}([\d.]+) ms  (█+)", drawing)
    names = ["1 decode", "32 decodes", "a chunk of 225", "a chunk of 225, 31 decodes"]
    assert [name for name, *_ in rows] == names
    for name, said, bar in rows:
        chunk, decodes = [re.search(text, name) for text in (r"chunk of (\d+)", r"(\d+) decode")]
        batch = [(i, 1000, 1) for i in range(int(decodes[1]) if decodes else 0)]
        if chunk:
            batch.append((99, 0, int(chunk[1])))
        milliseconds = 1e3 * cost.layers * cost.layer_seconds(batch).linear
        assert said == f"{milliseconds:.1f}" and len(bar) == round(milliseconds)


def test_every_file_at_the_top_and_every_room_is_named():
    paths = repository("*.py")
    files = {path.name for path in paths if len(path.parts) == 1} - {"conftest.py"}
    rooms = {f"{path.parts[0]}/" for path in paths if path.parts[1:] == ("__init__.py",)}
    assert len(files) >= 9 and len(rooms) >= 9
    for name in sorted(files | rooms):
        assert f"`{name}`" in MAIN or f"{name} " in MAIN, name


def test_every_link_leads_to_a_file():
    for room, text in TEXTS.items():
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (ROOT / room / link).exists(), f"{room}README.md links to {link}"
