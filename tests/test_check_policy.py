"""The rule that a policy breaks is named; custom policies are shown beside the others."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

import bench
from cli.console import explain
from config import EngineConfig
from engine import Engine
from lab.commands import explore
from lab.measure import load_run
from lab.measure.workload import Arrival, prompts
from lab.simulator.cost_model import CostModel
from lab.simulator.random_loads import random_load
from lab.simulator.referee import Referees, check_policy
from lab.simulator.simulation import simulate
from policies import ALL_POLICIES, POLICIES, custom, find_policy, make_scheduler, trial
from policies import referee as rules
from policies.custom import PolicyError
from policies.trial import broken_rules, find_violation
from sampling import SamplingParams
from tests.helpers import GROWING, alone, finish, tiny_model
from tests.pages import data_of

pytestmark = pytest.mark.usefixtures("little_garbage")
TEMPLATE = "policies/template.py:ShortestFirst"
COST = CostModel.named("llama3-8b")
MODEL = tiny_model(max_positions=64)
ARRIVALS = [Arrival(0.0, 9 + i, 12) for i in range(6)]
PROMPTS = prompts(ARRIVALS, 61, 0)
ALIKE = [[5] * arrival.prompt_len for arrival in ARRIVALS]

HEADER = "from scheduler import Chunk, SarathiServe\nclass Own(SarathiServe):\n  def "
BATCH = "schedule(self):\n    batch = super().schedule()\n    "
RETURN = "\n    return batch"
UNCHANGED = "return super().schedule()"
LOST = "'nothing lost' is broken: .*"
ENDS = "'everybody ends' is broken: .*"
LEAKS = "'no page leaked' is broken: .*"
CHUNKS = "'chunks' is broken: .*"
LOOPS = "schedule(self):\n    while True: pass"
DROPS = f"{BATCH}del batch[: len(batch) > 1]{RETURN}"
LOSES_PREEMPTED = "preempt(self, r): super().preempt(r); self.waiting.remove(r)"
BROKEN = [  # (the method of a policy, what the violation says)
    (f"schedule(self): self.waiting.pop(); {UNCHANGED}", LOST + "not ended.*runs 0 times"),
    (f"schedule(self): self.waiting += self.running; {UNCHANGED}", LOST + "runs 2 times"),
    (LOSES_PREEMPTED, LOST + "runs 0 times"),
    (  # after the last batch
        "finish(self, r, reason):\n"
        "    if len(self.requests) == 1: self.pages.allocate(1)\n"
        "    super().finish(r, reason)",
        LEAKS + "no running request has it",
    ),
    (f"{BATCH}self.finish(batch[0][0], 'length'){RETURN}", LOST + "length, lacks 12 tokens"),
    (f"schedule(self): self.max_batch += 1; {UNCHANGED}", "'at most max_batch' is broken.* of 4"),
    (
        f"{BATCH}batch[0][0].is_decoding and batch[0][0].pages.pop(){RETURN}",
        LEAKS + "no running request has it",
    ),
    (f"{BATCH}self.running[-1].pages = self.running[0].pages{RETURN}", LEAKS + "in 2"),
    (
        f"{BATCH}batch[0] = Chunk(batch[0][0], 1, 2){RETURN}",
        rf"{CHUNKS}2 tokens from 1.*\(request 0,",
    ),
    (f"{BATCH}batch.append(batch[0]){RETURN}", CHUNKS + r"another.*\(request 0,"),
    (
        DROPS,
        r"'no decode dropped' is broken: .* 1 other decodes \(request 0,",
    ),
    ("schedule(self): return {}['none']", ENDS + "KeyError: 'none', in .*own.py line 3"),
    ("token_budget(self, *_): return self.chunk / 3", ENDS + "TypeError.*own.py"),
    (
        f"schedule(self): list(map(self.preempt, self.prefilling())); {UNCHANGED}",
        ENDS + "last new one",
    ),
]

SHARES_FIRST = (
    f"{BATCH}for r in self.running[1:2]:\n"
    "      self.pages.free(r.pages)\n"
    "      self.pages.take(self.running[0].pages)\n"
    f"      r.pages = self.running[0].pages[:]{RETURN}"
)
COMPUTES_AGAIN = (
    "admit(self):\n"
    "    request = super().admit()\n"
    "    if request: request.num_computed -= request.num_computed > 0\n"
    "    return request"
)
SHARED = [  # (the method of a policy, whether pages may be shared, what the violation says)
    (SHARES_FIRST, False, LEAKS + "in 2 block tables, and must be in 1"),
    (SHARES_FIRST, True, CHUNKS + r"page \d is written, and others read it \(request 0,"),
    (COMPUTES_AGAIN, True, CHUNKS + r"page \d is written, and others read it \(request \d,"),
]


def serve_simulated(config, referees):
    return simulate(COST, config, ARRIVALS, recorder=referees).run


def serve_alike(config, referees):
    return simulate(COST, config, ARRIVALS, ALIKE, recorder=referees).run


def serve_by_engine(config, referees):
    return load_run.serve(MODEL, config, ARRIVALS, PROMPTS, recorder=referees)


def check(policy, serve=serve_simulated, prefix_caching=False):
    """Serve with much memory and with little under referees: the tokens of both runs."""
    tokens = []
    for pages in (128, 16):
        config = EngineConfig(
            policy,
            chunk=8,
            max_batch=3,
            max_len=64,
            page_size=4,
            pages=pages,
            prefix_caching=prefix_caching,
        )
        referees = Referees(f"a load, {pages} pages")
        try:
            run = serve(config, referees)
        except PolicyError as error:
            raise rules.BrokenRuleError(referees.violation_of(error)) from error
        tokens.append([completion.output for completion in run.completions])
    return tokens


@cache
def reference_tokens():
    """What an engine generates under a policy that is beyond doubt."""
    return check("request-level", serve_by_engine)


def write_policy(folder, method):
    """The name of a policy with this method in a file of its own."""
    (folder / "own.py").write_text(f"{HEADER}{method}", "utf-8")
    return f"{folder}/own.py:Own"


@pytest.mark.parametrize("method, message", BROKEN)
def test_a_broken_rule_is_named_with_iteration_and_request(method, message, tmp_path):
    policy = write_policy(tmp_path, method)
    with pytest.raises(ValueError) as broken:
        check(policy)
    assert re.match(f"the rule {message}", str(broken.value))
    is_of_none = "own.py" in message or message.endswith("no running request has it")
    request = "" if is_of_none else r"request \S.*, "
    where = rf" \({request}iteration \d+ of a load, (128|16) pages\)$"
    assert re.search(where, str(broken.value))


@pytest.mark.parametrize("method, message", BROKEN)
def test_a_trial_of_small_loads_finds_what_larger_loads_find(method, message, tmp_path):
    policy = write_policy(tmp_path, method)
    rule = find_violation(policy).rule
    assert rule in message or rule == "everybody ends"  # a lost request may be found at once


@pytest.mark.parametrize("method, sharing, message", SHARED)
def test_only_prefix_caching_shares_pages_and_nobody_writes_there(
    method, sharing, message, tmp_path
):
    policy = write_policy(tmp_path, method)
    where = r".* iteration \d+ of a load, 128 pages\)$"
    with pytest.raises(ValueError, match=f"^the rule {message}{where}"):
        check(policy, serve_alike, prefix_caching=sharing)
    check("sarathi-serve", serve_alike, prefix_caching=sharing)


@pytest.mark.parametrize("name", [*ALL_POLICIES, TEMPLATE])
def test_every_policy_keeps_the_rules_and_does_not_change_the_text(name):
    check(name)
    assert check(name, serve_by_engine) == reference_tokens()


@pytest.mark.parametrize(
    "method, load, rule",
    [
        (LOSES_PREEMPTED, "tight memory", "nothing lost"),
        (COMPUTES_AGAIN, "ample memory, prefix caching", "chunks"),
    ],
)
def test_the_command_names_policy_load_and_rule_in_one_line(method, load, rule, tmp_path, capsys):
    policy = write_policy(tmp_path, method)
    with pytest.raises(ValueError) as broken:
        bench.main(["check", f"{TEMPLATE},{policy}"])
    line = rf"error: the rule '{rule}' is broken: .* iteration \d+ of .*:Own, chunk \d+, {load}\)"
    assert re.fullmatch(line, explain(broken.value))
    line = rf"{TEMPLATE} keeps all rules: nothing lost, .*, everybody ends \([\d,]{{5,}} iter.*\n"
    assert re.fullmatch(line, capsys.readouterr().out)
    verdict = check_policy(policy)
    assert verdict.violation.rule == rule and verdict.violation.sentence in str(broken.value)
    assert verdict.iterations > 100  # of the loads before


WRONG = [  # (the method of a policy, part of the sentence about it)
    (f"{BATCH}batch.append(self.running[0]){RETURN}", "a batch holds chunks: use batch.add"),
    ("schedule(self): super().schedule()", "returned None: did you forget return?"),
    ("schedule(self): return tuple(super().schedule())", "returned a tuple, and must return a Bat"),
    ("schedule(self): yield", "returned a generator, and must return a Batch"),
    ("__init__(self, *args, **options): pass", "Own.__init__() must call super().__init__()"),
    ("schedule(self): raise SystemExit(0)", "SystemExit: 0"),
    ("add(self, request): raise SystemExit(0)", "SystemExit: 0"),
    ("advance(self, *args): raise GeneratorExit", "GeneratorExit"),
]
ENDLESS = [
    "add(self, request): __import__('time').sleep(99)",
    "observe(self, *args):\n    while True: pass",
]
HERE = {"chunk": 8, "max_batch": 2, "max_len": 32, "page_size": 4, "pages": 16}


def complaint_of_engine(folder, method):
    """What is printed of an engine that ends because of such a policy."""
    with pytest.raises(PolicyError) as failed:
        engine = Engine(MODEL, policy=write_policy(folder, method), **HERE)
        engine.generate([[1] * 9, [2] * 9, [3] * 9], SamplingParams(4), progress=False)
    line = explain(failed.value)
    assert line.startswith("error: ") and "\n" not in line
    return line


@pytest.mark.parametrize("method, message", WRONG)
def test_whatever_a_policy_does_wrong_is_one_line(method, message, tmp_path):
    assert message in complaint_of_engine(tmp_path, method)


@pytest.mark.parametrize("method", ENDLESS)
def test_whatever_does_not_end_is_one_line(method, tmp_path, monkeypatch):
    monkeypatch.setattr(custom, "CALL_LIMIT_S", 1.0)
    monkeypatch.setattr(custom, "SLEEP_LIMIT_S", 0.2)
    assert "one call took more than" in complaint_of_engine(tmp_path, method)


OUT_OF_PLACE = {  # a method of a policy, and the chunk that an engine names
    f"{BATCH}batch[0] = batch[0]._replace(length=0){RETURN}": "0 tokens of request 0 from 0",
    f"{BATCH}batch[0] = batch[0]._replace(length=99){RETURN}": "99 tokens of request 0 from 0",
    f"{BATCH}batch[0] = batch[0]._replace(start=1, length=2){RETURN}": "2 tokens of request 0 from",
    f"{BATCH}batch.add(self.waiting[0]){RETURN}": "tokens of request 2 from 0: 0 are computed",
    f"{BATCH}self.preempt(self.running[0]){RETURN}": "tokens of request 0 from 0: 0 are computed",
    "reserved(self, request): return 1": "8 tokens of request 0 from 0: 0 are computed, 4 can be",
    f"{BATCH}batch.append(batch[0]){RETURN}": "one chunk of a request, not several of request 0",
}


@pytest.mark.parametrize("method", OUT_OF_PLACE)
def test_a_chunk_out_of_place_is_named_by_an_engine(method, tmp_path):
    assert OUT_OF_PLACE[method] in complaint_of_engine(tmp_path, method)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_random_loads_preempt_and_share(policy):
    """Else not much would be checked on them."""
    loads = [random_load(policy, seed) for seed in range(25)]
    runs = [simulate(COST, load.config, load.arrivals, load.prompts).run for load in loads]
    completions = [completion for run in runs for completion in run.completions]
    assert any(completion.cached_tokens for completion in completions)
    assert any(completion.preemptions for completion in completions) == (policy in GROWING)


def test_the_referee_knows_stop_tokens_and_a_batch_that_is_decided_twice(monkeypatch):
    sizes = HERE | {"chunk": 64, "prefix_caching": True}
    engine = Engine(MODEL, policy="vllm-v1", **sizes)
    rules.Referee(engine.scheduler, "vllm-v1")
    stop = alone(MODEL, [1] * 9, SamplingParams(1))[0]
    for _ in range(2):  # the second reads pages that are computed for the first
        engine.add_request([1] * 9, SamplingParams(4, stop_token_ids=[stop]))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", lambda batch: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    reasons = [event.finish_reason for event in finish(engine)]
    assert reasons == ["stop"] * 2


def test_a_policy_that_cannot_give_a_request_up_is_one_line(tmp_path):
    policy = write_policy(tmp_path, "finish(self, request, reason): raise SystemExit(0)")
    engine = Engine(MODEL, policy=policy, **HERE)
    request_id = engine.add_request([1, 2, 3], SamplingParams(4))
    with pytest.raises(PolicyError, match="^SystemExit: 0$") as failed:
        engine.abort(request_id)
    assert failed.value.place == f"{tmp_path}/own.py line 3"


def test_who_is_admitted_for_nothing_is_said_in_a_second_line(tmp_path, capsys):
    wasteful = write_policy(tmp_path, f"{BATCH}self.admit(){RETURN}")
    bench.main(["check", wasteful])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{wasteful} keeps all rules: ")
    assert re.match(r"wasteful: request \d+ is admitted when the budget is used up, ", second)
    bench.main(["check", f"{TEMPLATE},sarathi-serve,vllm,priority,vllm-v1"])
    assert "wasteful" not in capsys.readouterr().out


def test_a_policy_that_ends_the_process_as_it_is_read_is_one_line(tmp_path):
    for file, source in (("leaves", "raise SystemExit(0)"), ("base", "from scheduler import *")):
        (tmp_path / f"{file}.py").write_text(source, "utf-8")
    with pytest.raises(PolicyError, match="^SystemExit: 0$") as left:
        find_policy(f"{tmp_path}/leaves.py:Own")
    assert left.value.place == f"{tmp_path}/leaves.py line 1"
    with pytest.raises(ValueError, match="base.py names Scheduler itself, which has no schedule"):
        find_policy(f"{tmp_path}/base.py:Scheduler")


SORTED = "sorted(self.waiting, key=lambda r: r.prompt_len)"


def test_a_policy_may_replace_its_queue(tmp_path):
    """As the most natural way to write "shortest first" does."""
    method = f"schedule(self):\n    self.waiting = deque({SORTED})\n    {UNCHANGED}"
    policy = write_policy(tmp_path, f"{method}\nfrom collections import deque")
    cost = CostModel.named("llama3-8b")
    config = EngineConfig(policy, chunk=8, max_batch=2, max_len=64, page_size=4, pages=16)
    arrivals = [Arrival(0.0, length, 4) for length in (40, 30, 20, 10, 5, 35)]
    completions = simulate(cost, config, arrivals).run.completions
    assert all(c.finish_reason == "length" for c in completions)
    first_tokens = [c.token_times[0] for c in sorted(completions, key=lambda c: c.prompt_len)]
    assert first_tokens == sorted(first_tokens)


def test_a_schedule_that_never_returns_is_stopped_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(custom, "CALL_LIMIT_S", 1.0)
    handler = signal.getsignal(signal.SIGVTALRM)
    policy = write_policy(tmp_path, LOOPS)
    violation = check_policy(policy).violation
    cause = r"a loop without an end\? one call took more than 1 s, in .*own.py line 4"
    assert re.fullmatch(cause, violation.observation) and violation.rule == "everybody ends"
    assert violation.iteration == 1
    assert signal.getsignal(signal.SIGVTALRM) is handler
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    with pytest.raises(TimeoutError):  # nothing is measured under such a policy
        broken_rules([policy])


def test_a_limit_that_a_policy_catches_comes_again(tmp_path, monkeypatch):
    monkeypatch.setattr(custom, "CALL_LIMIT_S", 1.0)
    catches = "\n".join([
        "schedule(self):",
        "    try:",
        "      while self.chunk: self.prefilling()",
        "    except TimeoutError:",
        "      while self.chunk: self.prefilling()",
    ])  # fmt: skip
    violation = check_policy(write_policy(tmp_path, catches)).violation
    assert "a loop without an end" in violation.observation and "line 7" in violation.observation


def test_outside_of_the_main_thread_there_is_no_limit(monkeypatch):
    monkeypatch.setattr(custom, "CALL_LIMIT_S", 0.001)
    thread = ThreadPoolExecutor(1)
    with thread:
        check_in_thread = thread.submit(check, TEMPLATE)
    assert check_in_thread.result()


def test_only_custom_policies_are_checked_before_they_are_measured(tmp_path, monkeypatch):
    tried = []

    def make_spy(policy, *args, **options):
        tried.append(policy)
        return make_scheduler(policy, *args, **options)

    monkeypatch.setattr(trial, "make_scheduler", make_spy)
    policy = write_policy(tmp_path, DROPS)
    violations = broken_rules(["vllm", policy, TEMPLATE, policy])
    assert tried.count(policy) == 1 and {*tried} == {policy, TEMPLATE}
    assert {name: violation.rule for name, violation in violations.items()} == {
        policy: "no decode dropped"
    }


BREAKS = "(breaks 'no decode dropped')"


def test_explore_marks_a_policy_that_breaks_a_rule(tmp_path, monkeypatch, capsys):
    policy = write_policy(tmp_path, DROPS)
    runs = explored(tmp_path, monkeypatch, policy)
    assert {run.split(" | ")[0] for run in runs} == {f"Own {BREAKS}"}
    assert "the rule 'no decode dropped' is broken: waits while" in capsys.readouterr().out


def explored(tmp_path, monkeypatch, names):
    """The names of the runs on the page of `bench.py explore`, with no other policies."""
    monkeypatch.setattr(explore, "POLICIES", ())
    monkeypatch.setattr(explore, "REMEDIES", ())
    make_loads = explore.make_loads

    def two_loads(cost, requests):
        loads = make_loads(cost, requests)
        return {name: loads[name] for name in ("overload", explore.TWO_GPUS)}

    monkeypatch.setattr(explore, "make_loads", two_loads)
    file = tmp_path / "explore.html"
    bench.main(["explore", names, f"--html={file}"])
    runs = [run["name"] for run in data_of(file)["runs"]]
    return [run for run in runs if not run.startswith(explore.POOLS_NAME)]


def test_explore_ends_with_the_line_where_a_policy_fails(tmp_path, monkeypatch):
    policy = write_policy(tmp_path, "schedule(self): return {}['none']")
    with pytest.raises(PolicyError) as failed:
        explored(tmp_path, monkeypatch, policy)
    assert explain(failed.value) == f"error: {tmp_path}/own.py line 3: KeyError: 'none'"


@pytest.mark.slow
def test_two_files_with_a_class_of_one_name_are_two_policies(tmp_path, monkeypatch):
    source = Path(TEMPLATE.partition(":")[0]).read_text("utf-8")
    for file in ("one", "two"):
        (tmp_path / f"{file}.py").write_text(source, "utf-8")
    names = [f"{tmp_path}/{file}.py:ShortestFirst" for file in ("one", "two")]
    runs = explored(tmp_path, monkeypatch, ",".join(names))
    policies = dict.fromkeys(run.split(" | ")[0] for run in runs)
    assert [*policies] == names  # "ShortestFirst" would be either
