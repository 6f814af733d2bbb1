"""Answers the questions of the schedule page about a source text that was written in it.

    answer('{"kind": "run", "source": "class Mine(SarathiServe): ...", "load": {...}, ...}')
    answer('{"kind": "exercise", "number": 6, "source": "class StallFree(Scheduler): ..."}')

Question and answer are JSON, as a web worker sends them. The same runs under CPython, in the tests.
Read first: runs.py. Read next: page/web/worker.js, which calls this; bundle.py."""

import ast
import json
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import TypedDict

from exercises.catalog import EXERCISES
from exercises.problems import check_solution
from exercises.report import answer_question, describe_details, draw_page
from lab.explore.runs import Load, record_run
from lab.measure.run_plan import goes_by_chunk
from page.records import Record, Recorder
from policies.custom import load_policy
from policies.referee import BrokenRuleError, Referee
from scheduler import Scheduler

FILE = "my_policy.py"  # the name of the source in messages
MAX_PRINTED = 2000  # letters of the output that are kept, the last ones


class RunQuestion(TypedDict):
    """Which run is asked for."""

    source: str
    load: dict[str, object]  # see Load.to_json
    chunk: str
    slo_s: float


class RunAnswer(TypedDict):
    """A run under a policy."""

    problem: str  # in one line; "" if there is none
    policy: str  # the name of the class
    has_chunk: bool  # whether it goes by a chunk size
    settings: dict[str, object]
    records: list[Record]  # up to the problem
    printed: str


class ExerciseAnswer(TypedDict):
    """What is wrong with the solution of an exercise."""

    solved: bool
    line: str  # the problem, or that it holds
    details: str  # tables, or the answer to the question of the exercise
    page: str | None  # the page of this schedule beside the reference's
    printed: str


class RefereedRecorder(Recorder):
    """A Recorder that sets a Referee beside the scheduler."""

    referee: Referee | None = None

    def watch(self, schedulers: Sequence[Scheduler]) -> None:
        """See Recorder. The referee comes first, so that a batch with a mistake is not recorded.

        Micro-batches share their requests, which would be lost in the eyes of each referee: in a
        pipeline there is none."""
        if len(schedulers) == 1:
            self.referee = Referee(schedulers[0], FILE)
        super().watch(schedulers)


def answer(question: str) -> str:
    """The answer to a question, both as JSON: a RunAnswer or an ExerciseAnswer."""
    fields = json.loads(question)
    kind = fields.pop("kind")
    printed = StringIO()
    with source_file(fields["source"]) as file, redirect_stdout(printed):
        if kind == "exercise":
            reply = check_exercise(fields["number"], file)
        else:
            reply = run_policy(fields, file)
    reply["printed"] = printed.getvalue()[-MAX_PRINTED:]
    folder = json.dumps(f"{file.parent}/")[1:-1]
    return json.dumps(reply).replace(folder, "")


@contextmanager
def source_file(source: str) -> Iterator[Path]:
    """A file with this text, in a folder of its own: load_policy runs a file once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder).resolve() / FILE
        file.write_text(source, "utf-8")
        yield file


def run_policy(question: RunQuestion, file: Path) -> RunAnswer:
    """The run of the load under the last policy in the file, until that breaks a rule."""
    reply = RunAnswer(problem="", policy="", has_chunk=False, settings={}, records=[], printed="")
    recorder = RefereedRecorder()
    try:
        name = last_policy(file)
        reply["policy"] = name.rpartition(":")[2]
        reply["has_chunk"] = goes_by_chunk(name)
        load = Load.from_json(question["load"])
        record_run(name, question["chunk"], load, question["slo_s"], recorder)
    except BrokenRuleError as error:
        reply["problem"] = str(error)
    except Exception as error:
        reply["problem"] = describe_error(error)
    reply["settings"] = recorder.settings
    reply["records"] = recorder.records
    return reply


def last_policy(file: Path) -> str:
    """The name for find_policy of the last Scheduler subclass that a file defines.

    Raises ValueError if there is none, and what the file raises."""
    module = ast.parse(file.read_text("utf-8"), str(file))
    classes = [node.name for node in module.body if isinstance(node, ast.ClassDef)]
    for class_name in reversed(classes):
        with suppress(ValueError):
            load_policy(str(file), class_name)
            return f"{file}:{class_name}"
    raise ValueError("no policy in it: begin with `class Mine(SarathiServe):`")


def describe_error(error: Exception) -> str:
    """What the source raised, with its last line in the traceback."""
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename.endswith(FILE)
    ]
    if isinstance(error, SyntaxError) and error.lineno:
        lines = [error.lineno]
    place = f"{FILE} line {lines[-1]}" if lines else FILE
    return f"{place}: {type(error).__name__}: {error}"


def check_exercise(number: int, file: Path) -> ExerciseAnswer:
    """What the check of an exercise says about the solution in a file."""
    exercise = EXERCISES[number - 1]
    answer = ExerciseAnswer(solved=False, line="", details="", page=None, printed="")
    try:
        policy = load_policy(str(file), exercise.class_name)
        problem = check_solution(policy, exercise.finder, exercise.loads(), exercise.last_check)
    except Exception as error:  # of the solution
        answer["line"] = describe_error(error)
        return answer
    if problem is None:
        answer["solved"] = True
        answer["line"] = f"Exercise {number}, {exercise.title}: it holds."
        reading = f"Now read {exercise.read_next}."
        answer["details"] = f"{answer_question(exercise, policy)}\n\n{reading}"
    else:
        answer["line"] = problem.sentence
        answer["details"] = describe_details(policy, problem)
    answer["page"] = draw_page(exercise, policy, problem)
    return answer
