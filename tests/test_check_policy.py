"""The referee, held against policies broken on purpose; and every policy here keeps all rules."""

import re
from functools import cache

import pytest

import bench
from config import EngineConfig
from lab.measure import load_run
from lab.measure.workload import Arrival, prompts
from lab.simulator.cost_model import CostModel
from lab.simulator.random_loads import random_load
from lab.simulator.referee import Referees, check_policy, check_random_loads
from lab.simulator.simulation import simulate
from policies import ALL_POLICIES
from policies.pages import make_pages
from policies.referee import BrokenRuleError, Referee
from scheduler import Request, SarathiServe
from tests.helpers import tiny_model

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
        LEAKS + "in 0 block tables, and must be in 1",
    ),
    (f"{BATCH}self.finish(batch[0][0], 'length'){RETURN}", LOST + "length, lacks 12 tokens"),
    (f"schedule(self): self.max_batch += 1; {UNCHANGED}", "'at most max_batch' is broken.* of 4"),
    (
        f"{BATCH}batch[0][0].is_decoding and batch[0][0].pages.pop(){RETURN}",
        LEAKS + "in 0 block tables, and must be in 1",
    ),
    (f"{BATCH}self.running[-1].pages = self.running[0].pages{RETURN}", LEAKS + "in 2"),
    (
        f"{BATCH}batch[0] = Chunk(batch[0][0], 1, 2){RETURN}",
        rf"{CHUNKS}2 tokens from 1.*\(request 0,",
    ),
    (f"{BATCH}batch.append(batch[0]){RETURN}", CHUNKS + r".*one of 2 chunks.*\(request 0,"),
    (
        DROPS,
        r"'no decode dropped' is broken: .* 1 of 2 decodes \(request 0,",
    ),
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
        run = serve(config, Referees(f"a load, {pages} pages"))
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
    with pytest.raises(BrokenRuleError) as broken:
        check(write_policy(tmp_path, method))
    assert re.match(f"the rule {message}", str(broken.value))
    violation = broken.value.violation
    assert violation.iteration > 0
    assert bool(violation.request) != message.endswith("in 0 block tables, and must be in 1")


@pytest.mark.parametrize("method, sharing, message", SHARED)
def test_only_prefix_caching_shares_pages_and_nobody_writes_there(
    method, sharing, message, tmp_path
):
    policy = write_policy(tmp_path, method)
    with pytest.raises(BrokenRuleError, match=f"^the rule {message}"):
        check(policy, serve_alike, prefix_caching=sharing)
    check("sarathi-serve", serve_alike, prefix_caching=sharing)


@pytest.mark.parametrize("name", [*ALL_POLICIES, TEMPLATE])
def test_every_policy_keeps_the_rules_and_does_not_change_the_text(name):
    check(name)
    assert check(name, serve_by_engine) == reference_tokens()


def test_what_a_policy_raises_is_no_broken_rule_but_passes_through(tmp_path):
    with pytest.raises(KeyError) as raised:
        check_policy(write_policy(tmp_path, "schedule(self): return {}['none']"))
    assert raised.traceback[-1].path.name == "own.py"


QUEUES_AT_THE_BACK = """preempt(self, r):
    super().preempt(r)
    self.waiting.remove(r)
    self.waiting.append(r)
"""


@pytest.mark.parametrize(
    "method, rule", [(LOSES_PREEMPTED, "nothing lost"), (QUEUES_AT_THE_BACK, "in order")]
)
def test_the_loads_find_what_few_requests_do_not_show(method, rule, tmp_path):
    policy = write_policy(tmp_path, method)
    assert check_random_loads(policy, range(60)).violation.rule == rule
    assert check_policy(policy).violation.rule == rule


def test_the_random_loads_preempt_and_share():
    loads = [random_load("sarathi-serve", seed) for seed in range(60)]
    runs = [simulate(COST, load.config, load.arrivals, load.prompts).run for load in loads]
    requests = [request for run in runs for request in run.completions]
    assert any(request.preemptions for request in requests)
    assert any(request.cached_tokens for request in requests)


def test_the_referee_knows_stop_tokens_and_a_batch_that_is_decided_twice():
    scheduler = SarathiServe(make_pages(8, 4), chunk=8, max_batch=2, max_len=16)
    Referee(scheduler, "a policy")
    scheduler.add(Request(0, [1] * 5, 5, 9, stop=frozenset([7])))
    batch = scheduler.next_batch()
    assert scheduler.next_batch() is batch
    ((request, token),) = scheduler.advance(batch, [7], 0.0)
    assert (request.finish_reason, token) == ("stop", 7)


STARVES = """admit(self):
    for request in self.waiting:
      if request.id % 10:
        self.waiting.remove(request)
        self.waiting.appendleft(request)
        break
    return super().admit()
  reorders = True
"""


def test_a_policy_that_starves_one_request_in_ten_is_named(tmp_path):
    beside = check_policy("sarathi-serve")
    assert len(beside.ttfts_s) == 480 and not beside.starves(beside)
    assert not check_policy(TEMPLATE).starves(beside)
    starving = check_policy(write_policy(tmp_path, STARVES))
    assert starving.violation is None and starving.starves(beside)


def test_the_command_names_the_policy_that_breaks_a_rule(tmp_path):
    policy = write_policy(tmp_path, LOSES_PREEMPTED)
    with pytest.raises(ValueError, match="the rule 'nothing lost' is broken: .*own.py:Own"):
        bench.main(["check", f"{TEMPLATE},{policy}"])


def test_who_is_admitted_for_nothing_is_said(tmp_path):
    method = f"{BATCH}self.admit(){RETURN}"
    assert "holds memory for nothing" in check_policy(write_policy(tmp_path, method)).wasteful
