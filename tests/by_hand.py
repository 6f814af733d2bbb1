"""Loads and batches as texts: tables that were written by hand, and schedulers under a referee."""

import re
from ast import literal_eval
from collections.abc import Sequence
from itertools import groupby

from policies import make_scheduler
from policies.pages import make_pages
from policies.referee import Referee
from request import Request, Service
from tests.helpers import advance


def request_of(number, prompt, output_len=4, arrival=None, **service):
    """A request that arrives at the time of its number. A prompt is tokens, or how many zeros."""
    tokens = list(prompt) if isinstance(prompt, Sequence) else [0] * prompt
    return Request(
        number,
        tokens,
        len(tokens),
        output_len,
        arrival=float(number) if arrival is None else arrival,
        service=Service(**service),
    )


class World:
    """A scheduler that is driven by hand, with the requests of a load "prompt+output ...".

    A request "prompt+output@iteration" comes before that iteration, "prompt+output/user" is of a
    user. A prompt is a length, and of tokens of its own; or it is of letters, and pages that hold
    the same are shared. What is generated is "o". A referee looks on."""

    def __init__(self, policy, load="", page_size=4, pages=64, **options):
        sizes = dict(
            chunk=8,
            max_len=64,
            max_batch=8,
        )
        shares = any(map(str.isalpha, re.sub("/.", "", load)))
        cache = make_pages(pages, page_size, shares)
        self.scheduler = make_scheduler(policy, cache, **sizes | options)
        self.referee = Referee(self.scheduler, policy)
        self.requests = []
        self.later = []  # (iteration, Request)
        self.iterations = 0
        for text in load.split():
            self.add(text)
        self.arrive()

    def add(self, text):
        """Let a request come when its iteration has. Returns it."""
        text, _, user = text.partition("/")
        text, _, iteration = text.partition("@")
        prompt, output_len = text.split("+")
        number = len(self.requests)
        tokens = [ord(letter) for letter in prompt]
        if prompt.isdigit():
            tokens = [1000 + number] * int(prompt)
        request = request_of(number, tokens, int(output_len), user=user)
        self.requests.append(request)
        self.later.append((int(iteration or self.iterations), request))
        return request

    def arrive(self):
        """Queue the requests that come before the next iteration."""
        while self.later and self.later[0][0] <= self.iterations:
            _, request = self.later.pop(0)
            self.scheduler.add(request)

    def step(self):
        """One iteration: "0:d 1:7", the request and the length of each chunk, d for a decode."""
        self.arrive()
        batch = self.scheduler.next_batch()
        chunks = []
        for chunk in batch:
            length = "d" if chunk.request.is_decoding else chunk.length
            chunks.append(f"{chunk.request.id}:{length}")
        advance(self.scheduler, batch, token=ord("o"))
        self.iterations += 1
        return " ".join(chunks)

    def steps(self):
        """All iterations until nothing is left."""
        steps = []
        while self.scheduler.requests or self.later:
            steps.append(self.step())
        assert not self.referee.wasteful
        assert self.scheduler.pages.num_free == self.scheduler.pages.total
        return steps

    def run(self):
        """The same as a text: "0:5 | 0:d x4", four of them are alike."""
        runs = []
        for step, group in groupby(self.steps()):
            count = len(list(group))
            runs.append(step if count == 1 else f"{step} x{count}")
        return " | ".join(runs)


def rows_of(table):
    """The rows of a table "policy option=value ..., load = batches  # why"."""
    return table.replace("\\\n", "").strip().splitlines()


def check_row(row):
    """Assert that a policy makes the batches of a row; `...` stands for those that follow."""
    given, _, expected = row.partition("  #")[0].partition(" = ")
    head, load = given.split(", ")
    policy, *pairs = head.split()
    options = {}
    for pair in pairs:
        name, value = pair.split("=")
        options[name] = literal_eval(value)
    text = World(policy, load, **options).run()
    beginning, dots, _ = expected.strip().partition("...")
    assert text.startswith(beginning)
    assert dots or text == beginning
