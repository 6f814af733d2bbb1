"""Solutions of the exercises as source text: right ones and typical mistakes."""

IMPORTS = """
from exercises.given import CutsPrompts, Predicts
from policies.iteration_time import BatchShape
from scheduler import Admission, Batch, Chunk, Sarathi, SarathiServe, Scheduler
"""
SOLUTIONS = {
    1: """
class RequestLevel(Scheduler):
    def schedule(self):
        batch = Batch()
        if not self.running:
            while self.admit():
                pass
        for request in self.running:
            batch.add(request)
        return batch
""",
    2: """
class IterationLevel(Scheduler):
    def schedule(self):
        batch = Batch()
        while self.admit():
            pass
        for request in self.running:
            batch.add(request)
        return batch
""",
    3: """
class PromptsFirst(Scheduler):
    def reserved(self, request):
        return len(request.tokens)

    def schedule(self):
        batch = Batch(self.max_len)
        while self.waiting and len(self.waiting[0].tokens) <= batch.left:
            request = self.admit()
            if not request:
                break
            batch.add(request)
        if not batch:
            batch.add_decodes(self.grow_decodes())
        return batch
""",
    4: """
class CutBatch(Batch):
    def add(self, request):
        start = request.num_computed
        length = max(0, min(self.left, len(request.tokens) - start))
        if length:
            self.append(Chunk(request, start, length))
            self.left -= length
        return length


class CutAPrompt(CutsPrompts):
    batch_class = CutBatch
""",
    5: """
class DecodeMaximal(Scheduler):
    cuts_prompts = True

    def schedule(self):
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes())
        if batch.left > 0:
            prefills = self.prefilling()
            request = prefills[0] if prefills else self.admit()
            if request:
                batch.add(request)
        return batch
""",
    6: """
class StallFree(Scheduler):
    cuts_prompts = True
    def reserved(self, request):
        return len(request.tokens)

    def schedule(self):
        decodes = self.grow_decodes()
        prefills = self.prefilling()
        batch = Batch(self.chunk)
        batch.add_decodes(decodes)
        for request in prefills:
            batch.add(request)
        while batch.left > 0:
            request = self.admit()
            if not request:
                break
            batch.add(request)
        return batch
""",
    7: """
class OutOfMemory(SarathiServe):
    def grow_decodes(self):
        decodes = [request for request in self.running if request.is_decoding]
        for request in decodes:
            if request.num_computed == len(request.pages) * self.pages.page_size:
                while request.pages:
                    page = self.pages.allocate(1)
                    if page:
                        request.pages += page
                        break
                    self.preempt(self.running[-1])
        return [request for request in decodes if request.pages]
""",
    8: """
class SharedPages(SarathiServe):
    def plan_admission(self, request):
        left = 2 if len(request.tokens) > request.prompt_len else 1
        most = (len(request.tokens) - left) // self.pages.page_size
        cached = self.pages.match_prefix(self.pages.hashes(request)[:most])
        return Admission(cached, self.pages.needed(len(request.tokens)) - len(cached))
""",
    9: """
class BudgetForSLO(Predicts):
    def token_budget(self, decodes, prefills):
        if not decodes:
            return self.max_len
        shape = BatchShape.of_decodes(decodes)
        start = max([request.num_computed for request in prefills], default=0)
        length = 0
        while self.predict(shape.with_chunk(start, length + 1)) <= self.tbt_slo:
            length += 1
        return len(decodes) + length
""",
    10: """
class OneLongPrompt(SarathiServe):
    def schedule(self):
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes())
        while self.admit():
            pass
        shortest_first = sorted(self.prefilling(), key=lambda r: len(r.tokens) - r.num_computed)
        for request in shortest_first:
            batch.add(request)
        return batch
""",
}
WRONG = [  # (exercise, part of the solution, what takes its place, the message)
    (
        3,
        "        while self.waiting and len(self.waiting[0].tokens) <= batch.left:\n",
        "        for first in sorted(self.waiting, key=lambda r: -r.id):\n"
        "            self.waiting.remove(first)\n"
        "            self.waiting.appendleft(first)\n"
        "            if len(first.tokens) > batch.left:\n"
        "                break\n",
        r"request \d overtakes request \d, which arrived before it and waits",
    ),
    (
        1,
        "if not self.running:",
        "if True:",
        "Nobody joins while anybody runs: you admit request 1",
    ),
    (
        1,
        "while self.admit():\n                pass",
        "self.admit()",
        "that fits is admitted at once",
    ),
    (
        1,
        "for request in self.running:",
        "for request in [r for r in self.running if not r.is_decoding] or self.running[:1]:",
        "Each running request is in each batch: yours lacks request",
    ),
    (
        1,
        "Batch()",
        "Batch(self.chunk)",
        "The load: at most . run, max_len = .*: enough for all(.|\n)*"
        "computes prompts whole: you cut that of request 0",
    ),
    (
        2,
        "while self.admit():\n            pass",
        "self.admit()",
        "admitted at once: request 1",
    ),
    (
        2,
        "Batch()",
        "Batch(self.chunk)",
        "computes prompts whole",
    ),
    (
        2,
        "for request in self.running:",
        "for request in self.prefilling() or self.running:",
        "Each running request is in each batch: yours lacks request 0",
    ),
    (
        3,
        "if not batch:",
        "if True:",
        "no prefill or no decode: yours has the prompt of request 1",
    ),
    (
        3,
        "while self.waiting",
        "while not self.grow_decodes() and self.waiting",
        "Prompts come first: request 1 can be admitted, and your batch decodes",
    ),
    (
        3,
        "while self.waiting and len(self.waiting[0].tokens) <= batch.left:",
        "while batch.left > 0:",
        "computes prompts whole: you cut that of request",
    ),
    (
        3,
        "Batch(self.max_len)",
        "Batch()",
        r"at most max_len = \d+ tokens: yours have \d+",
    ),
    (
        3,
        "batch.add(request)",
        "batch.add(request)\n            break",
        "As many prompts as fit",
    ),
    (
        3,
        "self.grow_decodes()",
        "self.grow_decodes()[:1]",
        "A running decode never waits",
    ),
    (
        4,
        "start = request.num_computed",
        "start = 0",
        "starts at 1, not at 0",
    ),
    (
        4,
        "len(request.tokens) - start",
        "len(request.tokens) - start - 1",
        "as long as the budget and the prompt allow|are not used, and request 0 gets no token",
    ),
    (
        4,
        "self.left -= length",
        "pass",
        "share one budget, C = .* taken off what is left",
    ),
    (
        4,
        "if length:",
        "if True:",
        "A chunk has at least one token: that of request",
    ),
    (
        4,
        "min(self.left, len(request.tokens) - start)",
        "self.left",
        "A chunk ends where the tok",
    ),
    (
        4,
        "return length",
        "return",
        r"line \d+: ValueError: add.. returned None, and the batch got .*: did you forget return\?",
    ),
    (
        5,
        "batch.add_decodes(self.grow_decodes())",
        "batch.add_decodes(self.grow_decodes()); batch.left = self.chunk",
        "The load: C = .*, at most(.|\n)*"
        "The budget is spent twice: the decodes have to be taken off",
    ),
    (
        5,
        "request = prefills[0] if prefills else self.admit()",
        "request = self.admit() or (prefills[0] if prefills else None)",
        "has begun comes before a new one: request 0 has begun and gets 0 tokens",
    ),
    (
        5,
        "                batch.add(request)",
        "                batch.add(request)\n"
        "            while batch.left > 0 and (r := self.admit()):\n"
        "                batch.add(r)",
        "a chunk of one prompt at most: yours of requests 0 and 1",
    ),
    (
        5,
        "if batch.left > 0:",
        "if not batch:",
        "What is left of the budget goes to prompts",
    ),
    (
        5,
        "if batch.left > 0:",
        "if True:",
        "once the budget is used up: request",
    ),
    (
        5,
        "self.grow_decodes()",
        "self.grow_decodes()[: self.chunk - 1]",
        "A running decode never waits",
    ),
    (
        6,
        "        for request in prefills:\n"
        "            batch.add(request)\n"
        "        while batch.left > 0:\n"
        "            request = self.admit()\n"
        "            if not request:\n"
        "                break\n"
        "            batch.add(request)\n",
        "        while batch.left > 0:\n"
        "            request = self.admit()\n"
        "            if not request:\n"
        "                break\n"
        "            batch.add(request)\n"
        "        for request in prefills:\n"
        "            batch.add(request)\n",
        "has begun comes before a new one: request 0 has begun",
    ),
    (
        6,
        "batch.add_decodes(decodes)",
        "batch.extend(Chunk(r, r.num_computed, 1) for r in decodes)",
        "The budget is spent twice",
    ),
    (
        6,
        "while batch.left > 0:",
        "while True:",
        "once the budget is used up: request",
    ),
    (
        6,
        "Batch(self.chunk)",
        "Batch(self.max_len)",
        "share one budget, C = ",
    ),
    (
        6,
        "            if not request:\n                break\n            batch.add(request)\n",
        "            if not request:\n"
        "                break\n"
        "            batch.add(request)\n"
        "            break\n",
        "admitted at once|goes to prompts",
    ),
    (
        3,
        "            if not request:\n                break\n",
        "",
        r"line \d+: this request is None: admit.. returned None, nobody fits",
    ),
    (
        3,
        "<= batch.left",
        "< batch.left",
        "As many prompts as fit share a batch, up to max_len = 12 tokens: request 2 fits",
    ),
    (
        3,
        "self.grow_decodes()",
        "self.running",
        "is in the batch. Take the decodes from self.grow_decodes.., which finds the pages.",
    ),
    (
        3,
        "        batch = Batch(self.max_len)",
        "        decodes = self.grow_decodes()\n        batch = Batch(self.max_len)",
        "self.grow_decodes.. takes pages: call it only if the batch decodes.",
    ),
    (
        3,
        "            batch.add(request)\n",
        "            batch.add(request)\n        for request in self.waiting:\n"
        "            if not batch: batch.add(request)\n",
        "was not admitted: only self.admit.. gives it memory",
    ),
    (
        4,
        "        length = max(0, min(self.left, len(request.tokens) - start))",
        "        if self.left == 0:\n            return 0\n"
        "        length = min(self.left, len(request.tokens) - start)",
        r"Where left is -1, .* yours returned -1, and added chunks of \[-1\] tokens",
    ),
    (
        4,
        "            self.left -= length",
        "            self.left -= length\n            request.num_computed += length",
        r"line \d+: it changes num_computed of request 0 from 0 to \d+: the engine does that",
    ),
    (
        4,
        "Chunk(request, start, length)",
        "Chunk(request, start, start + length)",
        "a Chunk is .request, start, length., not end",
    ),
    (
        6,
        "        decodes = self.grow_decodes()\n        prefills = self.prefilling()\n",
        "        prefills = self.prefilling()\n        decodes = self.grow_decodes()\n",
        "prefills still has it: call self.grow_decodes.. before that.",
    ),
    (
        6,
        "while batch.left > 0:",
        "while self.admit():\n            pass\n        for request in self.prefilling():\n"
        "            batch.add(request)\n        while batch.left > 0:",
        "two chunks in one batch",
    ),
    (
        7,
        "request.pages += page\n",
        "request.pages.append(page)\n",
        r"line \d+: request 0 has \[\d\] among its pages: .* so use `pages \+= \.\.\.`",
    ),
    (
        7,
        "return [request for request in decodes if request.pages]",
        "pass",
        r"line 6: grow_decodes.. returned None: did you forget return\?",
    ),
    (
        7,
        "if request.is_decoding]",
        "]",
        "request 1, and it does not decode: ask request.is_decoding",
    ),
    (
        7,
        "while request.pages:",
        "while request in decodes:",
        "it does not decode|it has just been preempted",
    ),
    (
        8,
        "return Admission",
        "Admission",
        r"line 6: plan_admission.. returned None: did you forget return\?",
    ),
    (
        8,
        "Admission(cached, ",
        "Admission(len(cached), ",
        "must return Admission.list of pages, number.",
    ),
    (
        9,
        "return len(decodes) + length",
        "pass",
        r"line 6: token_budget.. returned None: did you forget return\?",
    ),
    (
        7,
        "self.running[-1]",
        "self.running[0]",
        "The newest pays: you preempt request 0, and",
    ),
    (
        7,
        "page = self.pages.allocate(1)",
        "page = None",
        "Nobody is preempted while a page is free",
    ),
    (
        7,
        "if request.pages]",
        "]",
        "has just been preempted, and your list of decodes still",
    ),
    (
        7,
        "if page:",
        "if True:",
        "TypeError: 'NoneType' object is not iterable",
    ),
    (
        7,
        "        for request in decodes:",
        "        for request in []:",
        "No token without a page",
    ),
    (
        7,
        "self.preempt(self.running[-1])",
        "return decodes[:1]",
        "newest is preempted|never waits",
    ),
    (
        7,
        "len(request.pages) * self.pages.page_size",
        "len(request.pages) * self.pages.page_size - 1",
        "gets the pages that it needs|No token without|Nobody is preempted",
    ),
    (
        8,
        " else 1",
        " else 0",
        "The last token is always computed: the cached pages hold the one token of request",
    ),
    (
        8,
        "left = 2 if",
        "left = 1 if",
        "computes two tokens at least",
    ),
    (
        8,
        "- len(cached))",
        ")",
        "cached need not be allocated again",
    ),
    (
        8,
        " else 1",
        " else self.pages.page_size",
        "All pages that can be reused are reused",
    ),
    (
        8,
        "self.pages.needed(len(request.tokens))",
        "self.pages.needed(request.prompt_len)",
        "gets the pages that it needs|can be|No token",
    ),
    (
        9,
        "return len(decodes) + length",
        "return self.chunk",
        "at most the SLO|is the largest",
    ),
    (
        9,
        "start = max([request.num_computed for request in prefills], default=0)",
        "start = 0",
        "Each of the .* tokens of request . attends to the .* before it",
    ),
    (
        9,
        "return len(decodes) + length",
        "return length",
        "the number of decodes: they are part of it, too",
    ),
    (
        9,
        "BatchShape.of_decodes(decodes)",
        "BatchShape()",
        "Its decodes take .* ms of them",
    ),
    (
        9,
        "return len(decodes) + length",
        "return len(decodes) + length + start // 2",
        "Later chunks of a prompt are smaller",
    ),
    (
        9,
        "return len(decodes) + length",
        "return self.chunk / 3",
        "TypeError: .float. object cannot be interpreted as an integer",
    ),
    (
        9,
        "start, length + 1)",
        "start, length)",
        "With a token less it would meet it",
    ),
    (
        9,
        "return len(decodes) + length",
        "return len(decodes) + max(1, length)",
        "Its decodes alone take longer: then there is no prefill",
    ),
    (
        9,
        "self.predict(shape.with_chunk(start, length + 1))",
        "0.01 + 0.001 * (length + 1) + 0.0005 * len(decodes)",
        "The keys that its tokens attend to take 11.0 ms of them",
    ),
    (
        9,
        "max([request.num_computed for request in prefills], default=0)",
        "prefills[0].num_computed if prefills else 0",
        "stay on the safe side: .* your budget is 31: too large",
    ),
    (
        9,
        "        if not decodes:\n            return self.max_len\n",
        "",
        "yours is 0 for a prompt of which 4,000 tokens are computed",
    ),
    (
        7,
        "while request.pages:",
        "while True:",
        "has just been preempted, perhaps for itself",
    ),
    (
        8,
        "self.pages.needed(len(request.tokens))",
        "self.pages.needed(len(request.tokens) + 1)",
        r"request 0 needs 1, and has 2 with you\.\n",
    ),
    (
        10,
        "self.grow_decodes()",
        "[r for r in self.running if r.is_decoding]",
        "Take the decodes from self.grow_decodes.., which finds a page for each",
    ),
    (
        10,
        "while self.admit():\n            pass",
        "while self.waiting:\n            self.running.append(self.waiting.popleft())",
        "Only self.admit.. gives a request memory",
    ),
    (
        10,
        "Batch(self.chunk)",
        "Batch(4 * self.chunk)",
        "P99 TBT is above its target",
    ),
    (
        10,
        "len(r.tokens) - r.num_computed)",
        "r.arrival)",
        "median short TTFT is above its target",
    ),
    (
        10,
        "            batch.add(request)",
        "            if request.prompt_len < 99 or not batch:\n                batch.add(request)",
        "long TTFT is above its target",
    ),
    (
        10,
        "batch.add_decodes(self.grow_decodes())",
        "batch.add_decodes(self.grow_decodes()[:1])",
        "rule that a batch has all decodes or none is broken",
    ),
]


OTHERS = {  # other solutions that are right, too
    7: """
class OutOfMemory(SarathiServe):
    def grow_decodes(self):
        size = self.pages.page_size
        for request in reversed([r for r in self.running if r.is_decoding]):  # the newest first
            while request in self.running and request.num_computed == len(request.pages) * size:
                page = self.pages.allocate(1)
                if page is None:
                    self.preempt(max(self.running, key=lambda r: (r.arrival, r.id)))
                else:
                    request.pages.append(page[0])
        return [request for request in self.running if request.is_decoding]
""",
    9: SOLUTIONS[9].replace("return self.max_len", "return self.chunk"),
    10: SOLUTIONS[10].replace("len(r.tokens) - r.num_computed", "r.prompt_len > 500"),
}
