"""The rules that every policy keeps: `python -m tests.check_policy my_policy.py:Eager`.

Serves loads of lab/commands/explore.py under a referee, with ample and tight memory, small and large
chunks, and with prefix caching. Read first: policies/template.py, to break rules with a copy of it.
"""

import sys
from argparse import Namespace
from collections import Counter
from itertools import product

from cli import console
from cli.options import OptionParser, policy_names
from config import EngineConfig
from lab.commands import explore
from lab.measure import load_run as run
from lab.measure.workload import poisson, sample_lengths
from lab.simulator.machine import SimulatedMachine
from lab.simulator.simulation import simulate
from policies import where_it_failed

REQUESTS, CHUNKS = 60, (128, 1024)
RULES = (
    "nothing lost",  # who has not ended waits or runs, once; who has ended got all output
    "at most max_batch",  # requests run
    "no page leaked",  # or shared, but by prefix caching: each is free, or in one block table
    "chunks",  # known tokens of a running request, that come next, in pages of its own
    "no decode dropped",  # a batch has all running decodes, or none, if it is of prefill alone
    "everybody ends",  # there is something to do, and a new token before twice all were computed
)


class Referee:
    """Watches a scheduler. Its ValueErrors name the rule, iteration, request, and what was seen."""

    def __init__(self, scheduler, where):
        self.scheduler, self.where, self.iterations = scheduler, where, 0
        self.live, self.in_vain, self.most = {}, 0, scheduler.max_batch
        self._next_batch, self._advance = scheduler.next_batch, scheduler.advance
        scheduler.next_batch, scheduler.advance = self.next_batch, self.advance

    def next_batch(self):
        """The scheduler's, if it breaks no rule."""
        self.iterations += 1
        self.live |= dict.fromkeys(self.scheduler.requests.values())
        try:
            batch = self._next_batch()
        except Exception as error:
            seen = f"{where_it_failed(error) or 'schedule()'}: {type(error).__name__}: {error}"
            self._must(False, "everybody ends", next(iter(self.scheduler.requests), "-"), seen)
        self._check_chunks(batch, self._check_requests())
        return batch

    def advance(self, *args):
        """The scheduler's; whoever ends then gives its pages back."""
        moved = self._advance(*args)
        self._check_requests()
        return moved

    def _must(self, holds, rule, request_id, seen):
        if not holds:
            where = f"{self.where}, iteration {self.iterations}, request {request_id}"
            raise ValueError(f"{where}: breaks the rule {rule!r}: {seen}")

    def _check_requests(self):
        running, pages = self.scheduler.running, self.scheduler.pages
        places = Counter([*running, *self.scheduler.waiting])
        for r in self.live:
            ended, lacks = r.finish_reason, r.prompt_len + r.max_new_tokens - len(r.tokens)
            seen = f"{ended or 'not ended'}, lacks {lacks} tokens, waits or runs {places[r]} times"
            right = places[r] == lacks == 0 if ended else places[r] == 1
            self._must(right, "nothing lost", r.id, seen)
        self.live = {r: None for r in self.live if not r.finish_reason}
        for r in running[self.most :]:
            self._must(False, "at most max_batch", r.id, f"is one of {len(running)} that run")
        tables = Counter(page for r in running for page in r.pages)
        most = len(running) if pages.prefix_caching else 1
        owned = Counter({page: min(n, most) for page, n in enumerate(pages._readers)})
        for page in (tables - owned) | (owned - tables):
            who = [r.id for r in running if page in r.pages]
            seen = f"page {page} is in {tables[page]} block tables, and must be in {owned[page]}"
            self._must(False, "no page leaked", who or "-", seen)
        return tables

    def _check_chunks(self, batch, tables):
        running, chunks, size = self.scheduler.running, {}, self.scheduler.pages.page_size
        for r, start, length in batch:
            done, most = r.num_computed, min(len(r.tokens), len(r.pages) * size)
            right = r in running and r not in chunks and start == done < start + length <= most
            seen = f"{length} tokens from {start}: {done} are computed, {most} can be"
            self._must(right, "chunks", r.id, seen + ", and it has another" * (r in chunks))
            for page in r.pages[start // size : -(-(start + length) // size)]:
                own = tables[page] == 1 and not self.scheduler.pages.is_cached(page)
                self._must(own, "chunks", r.id, f"page {page} is written, and others read it")
            chunks[r] = length
        decodes = [r for r in running if r.is_decoding]
        kept = sum(r in chunks for r in decodes)
        for r in decodes:
            its = f"waits while {kept} others decode"
            self._must(r in chunks or not kept, "no decode dropped", r.id, its)
        new = any(chunk.yields_token for chunk in batch)
        self.in_vain = 0 if new else self.in_vain + sum(chunks.values())
        enough = self.in_vain <= 2 * sum(len(r.tokens) for r in self.live)
        seen = f"{self.in_vain} tokens were computed since the last new one"
        self._must(enough, "everybody ends", [r.id for r in chunks], seen)


def referees(where):
    """What stands in the place of a LoadRun's recorder: a Referee of each scheduler."""
    watch = lambda schedulers: [Referee(its, where) for its in schedulers]
    return Namespace(watch=watch, add=lambda iteration: None)


def check(policy):
    """Serve the loads: how many iterations there were. Raises ValueError for a rule that is broken,
    with the load."""
    machine, count = SimulatedMachine(Namespace(**explore.GPU)), 0
    lengths = sample_lengths("sharegpt4", REQUESTS, explore.MAX_LEN, 0)
    most = run.estimated_qps(machine.base, poisson(lengths, 1.0, 0))
    arrivals = poisson(lengths, explore.LOADS["heavy"] * most, 0)
    prompts = [[i % 4] * its.prompt_len for i, its in enumerate(arrivals)]  # many begin alike
    slo_s = run.slo_seconds("strict", machine.base)
    for (memory, fit), chunk, shares in product(explore.MEMORY.items(), CHUNKS, (False, True)):
        where = f"{policy}, chunk {chunk}, {memory} memory" + ", prefix caching" * shares
        sizes = dict(max_batch=explore.BATCH, max_len=explore.MAX_LEN, page_size=explore.PAGE_SIZE)
        sizes["pages"] = fit * explore.MAX_LEN // explore.PAGE_SIZE
        its = [explore.PAGE_SIZE], EngineConfig(chunk=chunk, **sizes), slo_s, [shares]
        (config,) = run.plan([policy], *its).values()
        done = simulate(machine.cost, config, arrivals, prompts, recorder=referees(where)).run
        count += len(done.iterations)
    return count


def parse_args(words):
    """The options. Exits with a message for a policy that there is not."""
    what = "Simulate loads under a policy, and name the first rule that it breaks."
    parser = OptionParser(prog="python -m tests.check_policy", description=what)
    which = "such as my_policy.py:Eager, several with commas"
    parser.add_argument("policies", help=which, type=policy_names)
    return parser.parse_args(words)


def main(argv=None):
    """The command line, whose words are `argv`."""
    for policy in parse_args(sys.argv[1:] if argv is None else argv).policies:
        count = check(policy)
        print(f"{policy} keeps all rules: {', '.join(RULES)} ({count:,} iterations)")


if __name__ == "__main__":
    console.run(main)
