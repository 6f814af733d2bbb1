"""READMEs, held against the repository: code runs, commands parse, files and sizes are so."""

import inspect
import json
import re
import shlex
import textwrap

import pytest

import exercises.__main__
import sample
import server.__main__
from engine import Engine
from examples import ladder
from sampling import SamplingParams
from scheduler import SarathiServe
from tests.helpers import ROOT, alone, parse, repository, tiny_model

READMES = {str(path).removesuffix("README.md"): path for path in repository("*README.md")}
TEXTS = {room: (ROOT / path).read_text("utf-8") for room, path in READMES.items()}
MAIN = TEXTS[""]
QUOTED, USAGE, POLICIES = re.findall(r"```python\n(.*?)```", MAIN, flags=re.DOTALL)
TEMPLATE = (ROOT / "policies/template.py").read_text("utf-8")
# how a command in a sentence begins
IN_PROSE = r"!?(?:\.venv/bin/)?(?:python3? |bench\.py |sample\.py |pytest |pip |npm |git )"
PARSERS = {
    "bench.py": parse,
    "sample.py": sample.app.parse_args,
    "server": server.__main__.app.parse_args,
    "exercises": exercises.__main__.parse_args,
    "examples.ladder": ladder.app.parse_args,
}


def test_algorithm_3_is_quoted_as_it_stands():
    assert textwrap.dedent(inspect.getsource(SarathiServe.schedule)) == QUOTED


def test_the_core_is_as_large_as_the_readme_says():
    files = re.findall(r"\[`([\w/]+\.py)`\]", MAIN)
    nano, *core = [len((ROOT / file).read_text("utf-8").splitlines()) for file in files]
    stated = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) lines", MAIN)]
    assert len(core) == 10
    assert stated == [nano, pytest.approx(sum(core), rel=0.03)]


def test_the_simulator_counts_what_is_off_as_its_results_do():
    results = json.loads((ROOT / "results/simulated/simulated.json").read_text("utf-8"))
    errors = {"text": [], "data": [], "reading": [], "fitted": []}
    for claim in results["claims"].values():
        for found in claim["cost model"].values():
            for number in found["published"].values():
                if not isinstance(number["paper"], str):  # a bound
                    errors[number["source"]].append(abs(number["ours"] / number["paper"] - 1))
    lines = re.findall(r"(?m)^- of (\d+.*) within 25 %", TEXTS["lab/simulator/"])
    for line, of_source in zip(lines, errors.values(), strict=True):
        count, within_10, _, within_25 = map(int, re.findall(r"\d+", line))
        assert count == len(of_source)
        assert within_10 == sum(error <= 0.1 for error in of_source)
        assert within_25 == sum(error <= 0.25 for error in of_source)


def test_the_usage_runs(capsys):
    exec(USAGE.replace("wide-160m", "llama-tiny"), {})
    printed = capsys.readouterr().out.splitlines()
    outputs = [json.loads(line.partition("]")[0] + "]") for line in printed]
    assert [len(output) for output in outputs] == [8, 8]


@pytest.mark.parametrize("name", ["Eager", "ShortestFirst"])
def test_a_policy_of_ones_own_changes_no_token(name, tmp_path):
    file = tmp_path / "my_policy.py"
    file.write_text(POLICIES + TEMPLATE, "utf-8")
    model = tiny_model()
    engine = Engine(
        model,
        policy=f"{file}:{name}",
        chunk=4,
        max_batch=2,
        max_len=32,
    )
    params = SamplingParams(5)
    for request in engine.generate([[1] * 9, [2], [3, 4, 5]], params):
        assert request.output == alone(model, request.prompt, params)


def commands(text):
    """The commands in the blocks, the sentences and the tables of a README."""
    lines = []
    for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
        lines += re.split(r"&&|\n", block.replace("\\\n", " ").strip())
    prose = re.sub("```.*?```", "", text, flags=re.DOTALL)
    spans = re.findall(r"`([^`]+)`", prose)
    lines += [span for span in spans if re.match(IN_PROSE, span) and "…" not in span]
    for table in re.findall(r"(?m)^\| claim +\| +command \|.*\n.*\n((?:\|.*\n)*)", prose):
        lines += ["bench.py " + row.split(" | ")[1].strip(" `") for row in table.splitlines()]
    return [re.sub(r"^(\.venv/bin/)?(python )?", "", " ".join(line.split())) for line in lines]


PROGRAM_LINES = [  # (program, arguments)
    (word, words[index + 1 :])
    for text in TEXTS.values()
    for words in map(shlex.split, commands(text))
    for index, word in enumerate(words)
    if word in PARSERS
]


@pytest.mark.parametrize("program, argv", PROGRAM_LINES)
def test_every_command_parses(program, argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_policy.py").write_text(POLICIES, "utf-8")
    (tmp_path / "policies").mkdir()
    try:
        PARSERS[program](argv)
    except ValueError as error:  # torchrun has to start it
        assert "torchrun" in str(error)


def test_every_file_at_the_top_and_every_room_is_named():
    named = set(re.findall(r"(?:`| )([\w/]+/|\w+\.py)", MAIN))
    for path in repository("*.py"):
        if len(path.parts) == 1:
            assert path.name in {*named, "conftest.py"}
        elif path.parts[1:] == ("__init__.py",):
            assert f"{path.parts[0]}/" in {*named, "attention/"}


def test_every_link_leads_to_a_file():
    for room, text in TEXTS.items():
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (ROOT / room / link).exists(), link


RESULTS = [path.read_text("utf-8") for path in (ROOT / "results").rglob("*.txt")]


def test_what_a_readme_quotes_is_printed_in_the_results():
    printed, *_ = re.findall(r"```text\n(.*?)```", MAIN, flags=re.DOTALL)
    tables = re.findall(r"(?m)^\| (?:policy|ms of a decode) .*\n(?:\|.*\n)+", TEXTS["lab/"])
    assert len(tables) == 2
    lines = [line.split() for text in RESULTS for line in text.splitlines()]
    for quoted in (printed, *tables):
        for line in quoted.splitlines():
            assert line.split() in lines


@pytest.mark.parametrize("room", ["results/", "lab/"])
def test_each_decimal_of_a_measurement_is_in_the_results(room):
    known = set(re.findall(r"\d+\.\d+", "".join(RESULTS)))
    prose = re.sub("(?s)```.*?```|`[^`]+`", "", TEXTS[room])
    stated = re.findall(r"(?<![\w.§-])\d+\.\d+(?!\.?\d)", prose)
    assert len(stated) > 20
    assert known.issuperset(stated)


@pytest.mark.parametrize("room, between", [("", "\n"), ("parallel/", "\n##")])
def test_the_decimals_of_a_row_are_those_of_one_simulated_run(room, between):
    file = f"results/simulated/{room.strip('/') or 'ladder'}.txt"
    text = (ROOT / file).read_text("utf-8")
    runs = [re.findall(r"\d+\.\d+", run) for run in text.split(between)]
    tables = re.sub("(?s)```.*?```", "", TEXTS[room])
    rows = [re.findall(r"\d+\.\d+", row) for row in re.findall(r"(?m)^\|.*", tables)]
    assert sum(map(bool, rows)) > 4
    for row in rows:
        assert any({*row}.issubset(run) for run in runs), row
