"""Solutions of the exercises as source text: right ones, and two wrong ones of each."""

IMPORTS = """
from exercises.given import CutsPrompts, Predicts
from policies.iteration_time import BatchShape
from policies.today import VLLMV1
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
STALL_FREE = """
class StarvedDecodes(SarathiServe):
    def schedule(self):
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes())
        for request in self.prefilling():
            batch.add(request)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)
        return batch
"""
MENDED = {
    11: STALL_FREE,
    12: STALL_FREE.replace("StarvedDecodes", "StarvedPrefills"),
    13: SOLUTIONS[8].replace("SharedPages", "NothingLeft"),
    14: """
class FirstChunk(VLLMV1):
    def room_for(self, request):
        length = min(len(request.tokens), self.limit, self.batch.left)
        whole = self.pages.needed(len(request.tokens))
        if len(self.running) >= self.max_batch or whole > self.pages.num_free:
            return None
        return Admission([], self.pages.needed(length))
""",
    15: """
class LongestPays(SarathiServe):
    def rank(self, request):
        return request.arrival, request.id
""",
    16: """
class LongPromptEats(SarathiServe):
    def schedule(self):
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes())
        competing = len(self.prefilling()) + len(self.waiting)
        limit = self.chunk if competing < 2 else max(1, self.chunk // 4)
        for request in self.prefilling():
            batch.add(request, limit)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request, limit)
        return batch
""",
}
OTHERS = {  # written otherwise
    1: """
class RequestLevel(Scheduler):
    def schedule(self):
        batch = Batch()
        if self.running:
            batch.add_decodes(self.running)
            return batch
        while request := self.admit():
            batch.add(request)
        return batch
""",
    4: SOLUTIONS[4].replace("if length:", "if length > 0:"),
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
    9: SOLUTIONS[9].replace("max([request", "sum([request").replace(", default=0", ""),
    10: SOLUTIONS[10].replace("len(r.tokens) - r.num_computed", "r.prompt_len > 500"),
    11: """
class StarvedDecodes(SarathiServe):
    was_prefill = False

    def schedule(self):
        decodes = self.grow_decodes()
        batch = Batch(self.chunk)
        if not (self.was_prefill and decodes):
            for request in self.prefilling():
                batch.add(request)
            while batch.left > 0 and (request := self.admit()):
                batch.add(request)
        self.was_prefill = bool(batch)
        if not batch:
            batch.add_decodes(decodes)
        return batch
""",
    13: """
class NothingLeft(SarathiServe):
    def plan_admission(self, request):
        cached = self.pages.match_prefix(self.pages.hashes(request))
        size = self.pages.page_size
        left = min(2, 1 + len(request.output))
        while cached and len(request.tokens) - len(cached) * size < left:
            cached.pop()
        return Admission(cached, self.pages.needed(len(request.tokens)) - len(cached))
""",
    14: """
class FirstChunk(SarathiServe):
    watermark_percent = 0
""",
    15: """
class LongestPays(SarathiServe):
    def rank(self, request):
        return -len(request.output), request.arrival
""",
}
WRONG = [  # (exercise, part of the solution, what takes its place, the rule that is broken)
    (1, "if not self.running:", "if len(self.running) < 2:", "joins_a_running_batch"),
    (1, "return batch", "self.admit()\n        return batch", "joins_a_running_batch"),
    (2, "Batch()", "Batch(self.chunk)", "prompt_is_cut"),
    (
        2,
        "while self.admit()",
        "while len(self.running) < self.max_batch - 1 and self.admit()",
        "waits_without_need",
    ),
    (3, "len(self.waiting[0].tokens)", "self.waiting[0].prompt_len", "prompt_is_cut"),
    (3, "<= batch.left", "<= batch.left and len(batch) < 2", "waits_without_need"),
    (
        4,
        "max(0, min(self.left, len(request.tokens) - start))",
        "min(self.left, len(request.tokens) - start)",
        "add",
    ),
    (4, "start, length)", "start, start + length)", "rule_of_every_policy"),
    (5, "self.grow_decodes())", "self.grow_decodes()); batch.left = self.chunk", "over_budget"),
    (5, "if batch.left > 0:", "if True:", "admitted_for_nothing"),
    (6, "while batch.left > 0:", "while batch.left > 0 and not prefills:", "budget_left"),
    (
        6,
        "        decodes = self.grow_decodes()\n        prefills = self.prefilling()\n",
        "        prefills = self.prefilling()\n        decodes = self.grow_decodes()\n",
        "token_without_page",
    ),
    (7, "self.running[-1]", "max(self.running, key=lambda r: len(r.pages))", "older_one_pays"),
    (7, "self.pages.allocate(1)", "self.pages.allocate(2)", "wrong_number_of_pages"),
    (8, "[:most])", "[:most])[::-1]", "rule_of_every_policy"),
    (8, " - len(cached)", "", "wrong_number_of_pages"),
    (
        9,
        "        shape",
        "        if len(prefills) > 1:\n            return len(decodes) + 1\n        shape",
        "several",
    ),
    (9, "max([request.num_computed for request in prefills], default=0)", "0", "too_slow"),
    (
        10,
        "while self.admit():",
        "while (self.waiting and self.waiting[0].prompt_len < 999) and self.admit():",
        "rule_of_every_policy",
    ),
    (10, "len(r.tokens) - r.num_computed", "r.arrival", "median short TTFT"),
    (
        11,
        "        for request",
        "        if len(batch) > 2:\n            return batch\n        for request",
        "worse",
    ),
    (11, "Batch(self.chunk)", "Batch(2 * self.chunk)", "rule_of_every_policy"),
    (12, "Batch(self.chunk)", "Batch()", "rule_of_every_policy"),
    (
        12,
        "        for request",
        "        for request in self.running:\n"
        "            request.max_new_tokens = min(request.max_new_tokens, 20)\n"
        "        for request",
        "rule_of_every_policy",
    ),
    (13, " - len(cached)", "", "wrong_number_of_pages"),
    (
        13,
        "        return",
        "        if len(self.pages.match_prefix(self.pages.hashes(request))) > most:\n"
        "            cached = []\n"
        "        return",
        "shares_too_little",
    ),
    (
        14,
        "whole = self.pages.needed(len(request.tokens))",
        "whole = self.pages.needed(min(2 * length, len(request.tokens)))",
        "complaint",
    ),
    (14, "len(self.running) >= self.max_batch or ", "", "rule_of_every_policy"),
    (15, "request.arrival, request.id", "len(request.output), request.id", "complaint"),
    (15, "request.arrival, request.id", "-request.arrival, request.id", "complaint"),
    (
        16,
        "            batch.add(request, limit)\n        while",
        "            if request.prompt_len < 100 or not batch:\n"
        "                batch.add(request, limit)\n"
        "        while",
        "worse",
    ),
    (16, "while batch.left > 0", "self.waiting.reverse()\n        while batch.left > 0", "worse"),
]
