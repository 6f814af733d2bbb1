"""READMEs, held against the repository: code runs, commands parse, files and sizes are so."""

import ast
import inspect
import io
import json
import re
import shlex
import textwrap
import tokenize
from pathlib import Path

import pytest

import exercises.__main__
import sample
import server.__main__
from engine import Engine
from examples import ladder
from sampling import SamplingParams
from scheduler import SarathiServe
from tests.helpers import ROOT, alone, parse, repository, tiny_model
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
    "bench.py": parse,
    "sample.py": sample.app.parse_args,
    "server": server.__main__.app.parse_args,
    "exercises": exercises.__main__.parse_args,
    "examples.ladder": ladder.app.parse_args,
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


def test_the_simulator_counts_what_is_off_as_its_results_do():
    results = json.loads((ROOT / "results/simulated/simulated.json").read_text("utf-8"))
    errors: dict[str, list[float]] = {"text": [], "data": [], "reading": [], "fitted": []}
    for claim in results["claims"].values():
        for found in claim["cost model"].values():
            for number in found["published"].values():
                if not isinstance(number["paper"], str):  # a bound
                    errors[number["source"]].append(abs(number["ours"] / number["paper"] - 1))
    counts = []
    for of_source in errors.values():
        close = [sum(error <= limit for error in of_source) for limit in (0.1, 0.25)]
        counts.append((len(of_source), *close))
    text = TEXTS["lab/simulator/"]
    said = re.findall(r"^- of (\d+) .* (\d+) within 10 %, (\d+) within 25 %$", text, re.MULTILINE)
    assert [tuple(map(int, each)) for each in said] == counts
    of_text, within_10, _ = counts[0]
    short = f"Of {of_text} numbers in the papers' text that nothing was fitted to, {within_10} are"
    assert short in " ".join(MAIN.split())


def test_the_usage_runs(capsys):
    assert "wide-160m" in USAGE
    exec(USAGE.replace("wide-160m", "llama-tiny"), {})
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
            PARSERS[program](argv)
        except SystemExit as error:
            assert error.code == 0 and "--help" in argv, (program, argv)
            continue
        except ValueError as error:  # the options are right, and torchrun has to start it
            assert "processes: torchrun" in str(error), (program, argv)
            continue


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


def test_what_the_first_line_prints_is_its_result():
    printed = MAIN.partition("```text\n")[2].partition("```")[0]
    result = (ROOT / "results/epyc-2-threads/chunk-256.txt").read_text("utf-8")
    lines = [" ".join(line.split()) for line in result.splitlines()]
    assert all(" ".join(line.split()) in lines for line in printed.splitlines())
