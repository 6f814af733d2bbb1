"""What an exercise prints: the problem of a solution as text, and both schedules as a page.

Read first: catalog.py. Read next: __main__.py."""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cli.tables import align
from exercises.catalog import Exercise
from exercises.guards import MODULE_PREFIX, PolicyError
from exercises.loads import MAX_PAGES, Load
from exercises.lockstep import (
    Decision,
    Difference,
    Moment,
    Seconds,
    State,
    Trial,
    one_second,
    serve,
)
from exercises.mending import Figures, figures_table
from exercises.problems import Problem
from exercises.rules import amount, tokens
from page.html import page
from page.records import Recorder
from policies import find_policy
from scheduler import Scheduler

MAX_HISTORY = 6  # iterations before the one that differs


def describe_problem(
    exercise: Exercise, policy: type[Scheduler] | None, problem: Problem, command: str
) -> str:
    """The problem as text: one line, or a load, an iteration, a table and the rule.

    `command` is the one that was run, without --html."""
    moment = problem.moment
    if moment is None and not problem.details:
        line = f"{place_of(exercise, policy, problem)}: {problem.sentence}"
        is_written = problem.sentence != "not written yet"
        hint = f". For a hint: `python -m exercises {exercise.number} --hint`"
        return line + hint if is_written and " line " in line else line
    see = f"To see it: `{command} --html difference.html`"
    parts = [f"Exercise {exercise.number}, {exercise.title}: not yet."]
    parts.append(describe_details(policy, problem))
    if moment is not None:
        see += f", iteration {moment.iteration}"
    parts.append(problem.sentence)
    if exercise.complaint:
        parts.append(f"Where does it first go wrong? `{command} --iteration N`.")
    hint = f"For a hint: `python -m exercises {exercise.number} --hint`."
    has_page = moment is None or moment.history or moment.yours.chunks
    parts.append(f"{see}.\n{hint}" if has_page else hint)
    return "\n\n".join(parts)


def describe_details(policy: type[Scheduler] | None, problem: Problem) -> str:
    """The tables of a problem: the load, the iteration, and what was done in it."""
    moment = problem.moment
    if moment is None:
        return problem.details
    parts = [describe_load(moment.load, policy is None or policy.cuts_prompts)]
    if moment.history:
        parts.append(describe_history(moment.history))
    parts.append(f"Iteration {moment.iteration}:")
    parts.append(describe_decisions(moment))
    return "\n\n".join(parts)


def place_of(exercise: Exercise, policy: type[Scheduler] | None, problem: Problem) -> str:
    """File and line of a problem: where the error came from, or else where the method begins."""
    place = problem.place
    if (place is None or " line " not in place) and policy is not None:
        place = _definition_of(exercise, policy) or policy.__module__.removeprefix(MODULE_PREFIX)
    return shorten_path(place or str(exercise.file))


def shorten_path(path: str) -> str:
    """A path, with a line perhaps, from the current folder if it lies there."""
    return path.removeprefix(f"{Path.cwd()}/")


def _definition_of(exercise: Exercise, policy: type[Scheduler]) -> str | None:
    """File and line of the method of an exercise; None if the policy does not define it."""
    owner: object = policy
    *_, name = exercise.method.split(".")
    if "." in exercise.method:
        owner = vars(policy).get("batch_class")
    method = getattr(owner, name, None)
    if not inspect.isfunction(method) or not method.__module__.startswith(MODULE_PREFIX):
        return None
    return f"{method.__code__.co_filename} line {method.__code__.co_firstlineno}"


def describe_load(load: Load, cuts_prompts: bool) -> str:
    """The sizes of a load in a sentence, and a table of its requests.

    C is among the sizes only for a policy that cuts prompts."""
    memory = f"{amount(load.pages, 'page')} of {amount(load.page_size, 'token')}"
    if load.pages == MAX_PAGES:
        memory += ": enough for all"
    caching = ", prefix caching" if load.prefix_caching else ""
    chunk = f"C = {load.chunk}, " if cuts_prompts else ""
    head = (
        f"The load: {chunk}at most {load.max_batch} run, max_len = {load.max_len}{caching}, "
        f"{memory}."
    )
    columns = ["request", "arrives", "prompt", "output"]
    rows = [
        [str(i), f"{r.arrival:g} s", str(r.prompt_len), str(r.output_len)]
        for i, r in enumerate(load.requests)
    ]
    if load.prefix_caching:
        columns.append("shared")
        for row, request in zip(rows, load.requests, strict=True):
            row.append(str(request.shared))
    return f"{head}\n\n{align([columns, *rows])}"


def describe_history(history: Sequence[Decision]) -> str:
    """A line for each of the last decisions before the one that differs."""
    lines = []
    skipped = max(0, len(history) - MAX_HISTORY)
    for number, decision in enumerate(history[skipped:], start=skipped + 1):
        chunks = [f"{i}: {describe_chunk(decision, i)}" for i in decision.chunks]
        lost = [f"{i}: preempted" for i in sorted(decision.preempted - decision.chunks.keys())]
        lines.append(f"  {number}.  {'; '.join(chunks + lost)}")
    head = "So far all is well:"
    if skipped:
        head = f"So far all is well, after {amount(skipped, 'other')}:"
    return "\n".join([head, *lines])


def describe_decisions(moment: Moment) -> str:
    """A table of what is done with each request, by you and by the reference, if there is one."""
    columns = ["request", "before", "yours"]
    decisions = [moment.yours]
    if isinstance(moment, Difference):
        columns.append("reference")
        decisions.append(moment.reference)
    rows = []
    for i, state in moment.states.items():
        cells = [describe_chunk(decision, i) for decision in decisions]
        mark = " <" if len(set(cells)) > 1 else ""
        rows.append([f"{i}{mark}", describe_state(state), *cells])
    totals = [amount(decision.num_tokens, "token") for decision in decisions]
    rows.append(["all", f"{amount(moment.free_pages, 'page')} free", *totals])
    return align([columns, *rows], numbers=False)


def describe_state(state: State) -> str:
    """A request before an iteration: "prompt of 9, 4 computed", "decodes, 12 computed"."""
    if not state.is_running:
        output = state.num_tokens - state.prompt_len
        kept = f" and {output} of output" if output else ""
        return f"waits, prompt of {state.prompt_len}{kept}"
    if state.is_decoding:
        return f"decodes, {state.num_computed} computed"
    return f"prompt of {state.num_tokens}, {state.num_computed} computed"


def describe_chunk(decision: Decision, i: int) -> str:
    """What a decision does with request i: "tokens 0 to 3", "decode", "waits"."""
    chunk = decision.chunks.get(i)
    parts = []
    if i in decision.preempted:
        parts.append("preempted")
    if i in decision.admitted:
        parts.append("admitted")
    if chunk is None:
        parts.append("nothing" if i in decision.capacity else "waits")
    elif chunk.is_decode:
        parts.append("decode")
    else:
        parts.append(tokens(chunk))
    return ", ".join(parts)


# The page.


def draw_page(exercise: Exercise, policy: type[Scheduler], problem: Problem | None) -> str | None:
    """The page of two schedules: yours and the reference's, on the load where they differ.

    Without such a load it is yours and another policy's, on the load of the question. Returns
    None if yours makes no batch."""
    moment = problem.moment if problem else None
    reference = problem.reference if problem else None
    load = moment.load if moment else exercise.question.load
    load_beside = moment.load if moment else exercise.question.load_beside or load
    name = "reference" if reference else exercise.beside
    other = reference or find_policy(name)
    seconds = one_second if reference else exercise.seconds
    runs = {"yours": record(policy, load, seconds), name: record(other, load_beside, seconds)}
    if not runs["yours"].records:
        return None
    title = f"Exercise {exercise.number}: {exercise.title}"
    return page(
        title,
        problem.sentence if problem and moment else f"your schedule beside {name}, simulated",
        runs,
        slo_s=1.5 if reference else exercise.slo_s,
        iteration=moment.iteration if moment else None,
    )


def record(policy: type[Scheduler], load: Load, seconds: Seconds) -> Recorder:
    """The records of a run, as far as the policy goes."""
    recorder = Recorder()
    with suppress(PolicyError):
        trial = Trial(policy, load, seconds, recorder)
        for moment in trial.play():
            if not moment.yours.chunks:
                break
    return recorder


def answer_question(exercise: Exercise, policy: type[Scheduler]) -> str:
    """The answer to the question of the docstring, and what a solution gains and costs there."""
    question = exercise.question
    trial = serve(policy, question.load, exercise.seconds)
    load_beside = question.load_beside or question.load
    other = serve(find_policy(exercise.beside), load_beside, exercise.seconds)
    table = figures_table({"yours": Figures.of(trial), exercise.beside: Figures.of(other)})
    return f"{question.answer(trial)}\n\nWhat it gains and what it costs there:\n\n{table}"
