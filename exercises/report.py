"""What an exercise prints: the problem of a solution as text, and both schedules as a page.

Read first: catalog.py. Read next: __main__.py."""

from contextlib import suppress

from cli.tables import align
from exercises.catalog import Exercise
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
from exercises.rules import amount
from page.html import page
from page.records import Recorder
from policies import find_policy
from scheduler import Scheduler


def describe_problem(exercise: Exercise, policy: type[Scheduler], problem: Problem) -> str:
    """The problem as text: a load, an iteration, a table and the rule."""
    command = f"python -m exercises {exercise.number}"
    parts = [f"Exercise {exercise.number}, {exercise.title}: not yet."]
    parts += [describe_details(policy, problem), problem.sentence]
    if exercise.complaint:
        parts.append(f"Where does it first go wrong? `{command} --iteration N`.")
    see = f"To see it: `{command} --html difference.html`"
    parts.append(f"{see}. For a hint: `{command} --hint`.")
    return "\n\n".join(filter(None, parts))


def describe_details(policy: type[Scheduler], problem: Problem) -> str:
    """The tables of a problem: the load, the iteration, and what was done in it."""
    moment = problem.moment
    if moment is None:
        return problem.details
    load = describe_load(moment.load, policy.cuts_prompts)
    return f"{load}\n\nIteration {moment.iteration}:\n\n{describe_decisions(moment)}"


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
    """A request before an iteration: "prefill, 4 of 9 computed", "decode, 12 of 13 computed"."""
    if not state.is_running:
        return f"waits, {amount(state.num_tokens, 'token')}"
    phase = "decode" if state.is_decoding else "prefill"
    return f"{phase}, {state.num_computed} of {state.num_tokens} computed"


def describe_chunk(decision: Decision, i: int) -> str:
    """What a decision does with request i: "4 tokens from 0", "decode", "waits"."""
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
        parts.append(f"{amount(chunk.length, 'token')} from {chunk.start}")
    return ", ".join(parts)


# The page.


def draw_page(exercise: Exercise, policy: type[Scheduler], problem: Problem | None) -> str:
    """The page of two schedules: yours and the reference's, on the load where they differ.

    Without such a load it is yours and another policy's, on the load of the question."""
    title = f"Exercise {exercise.number}: {exercise.title}"
    moment = problem.moment if problem else None
    if problem and moment and problem.reference:
        runs = {
            "yours": record(policy, moment.load, one_second),
            "reference": record(problem.reference, moment.load, one_second),
        }
        return page(title, problem.sentence, runs, slo_s=1.5, iteration=moment.iteration)
    other = find_policy(exercise.beside)
    load_beside = exercise.load_beside or exercise.load
    runs = {
        "yours": record(policy, exercise.load, exercise.seconds),
        exercise.beside: record(other, load_beside, exercise.seconds),
    }
    subtitle = f"your schedule beside {exercise.beside}, simulated"
    return page(title, subtitle, runs, slo_s=exercise.slo_s)


def record(policy: type[Scheduler], load: Load, seconds: Seconds) -> Recorder:
    """The records of a run, as far as the policy goes."""
    recorder = Recorder()
    with suppress(Exception):  # of the policy
        Trial(policy, load, seconds, recorder).run()
    return recorder


def answer_question(exercise: Exercise, policy: type[Scheduler]) -> str:
    """The answer to the question of the docstring, and what a solution gains and costs there."""
    yours = Figures.of(serve(policy, exercise.load, exercise.seconds))
    if exercise.complaint:
        table = figures_table({"before": exercise.complaint.before, "yours": yours})
        return f"The figures of the complaint, before and with yours:\n\n{table}"
    other = find_policy(exercise.beside)
    trial = serve(other, exercise.load_beside or exercise.load, exercise.seconds)
    table = figures_table({"yours": yours, exercise.beside: Figures.of(trial)})
    return (
        f"The answer to the question: {exercise.answer}\n\n"
        f"What it gains and what it costs there:\n\n{table}"
    )
