"""Solutions of the exercises from 11 on as source text: right ones, and cures that are none."""

IMPORTS = """
from policies.today import FastGen, NoEvict, SGLang, VLLMV1
from scheduler import Admission, Batch, Request, SarathiServe, VLLM
"""

RIGHT = {  # three of each, written differently
    11: (
        """
class StarvedDecodes(SarathiServe):
    def schedule(self):
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes())
        for request in self.prefilling():
            batch.add(request)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)
        return batch
""",
        """
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
        """
class StarvedDecodes(SarathiServe):
    def schedule(self):
        batch = Batch(self.chunk)
        decodes = self.grow_decodes()
        batch.add_decodes(decodes)
        prefills = self.prefilling() or [request for request in [self.admit()] if request]
        for request in prefills:
            batch.add(request)
        while batch.left > 0:
            request = self.admit()
            if request is None:
                break
            batch.add(request)
        return batch
""",
    ),
    12: (
        """
class StarvedPrefills(SarathiServe):
    pass
""",
        """
class StarvedPrefills(SarathiServe):
    def schedule(self):
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes())
        for request in self.prefilling():
            batch.add(request)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)
        return batch
""",
        """
class StarvedPrefills(SarathiServe):
    def schedule(self):
        decodes = self.grow_decodes()
        batch = Batch(max(self.chunk, len(decodes) + 1))
        batch.add_decodes(decodes)
        waits = [*self.prefilling()]
        while sum(len(r.tokens) - r.num_computed for r in waits) < batch.left:
            request = self.admit()
            if request is None:
                break
            waits.append(request)
        for request in waits:
            batch.add(request)
        return batch
""",
    ),
    13: (
        """
class NothingLeft(SarathiServe):
    pass
""",
        """
class NothingLeft(SarathiServe):
    def plan_admission(self, request):
        left = 1 + (len(request.tokens) > request.prompt_len)
        most = (len(request.tokens) - left) // self.pages.page_size
        cached = self.pages.match_prefix(self.pages.hashes(request)[:most])
        return Admission(cached, self.pages.needed(len(request.tokens)) - len(cached))
""",
        """
class NothingLeft(SarathiServe):
    def plan_admission(self, request):
        cached = self.pages.match_prefix(self.pages.hashes(request))
        while cached and len(cached) * self.pages.page_size >= len(request.tokens) - 1:
            cached.pop()
        return Admission(cached, self.pages.needed(len(request.tokens)) - len(cached))
""",
    ),
    14: (
        """
class FirstChunk(VLLMV1):
    pass
""",
        """
class FirstChunk(VLLMV1):
    def room_for(self, request):
        whole = self.pages.needed(len(request.tokens))
        if len(self.running) >= self.max_batch or whole > self.pages.num_free:
            return None
        length = min(len(request.tokens), self.limit, self.batch.left)
        return Admission([], self.pages.needed(length))
""",
        """
class FirstChunk(SarathiServe):
    watermark_percent = 0
""",
    ),
    15: (
        """
class LongestPays(SarathiServe):
    def rank(self, request):
        return request.arrival, request.id
""",
        """
class LongestPays(SarathiServe):
    def rank(self, request):
        return (self.running.index(request),)
""",
        """
class LongestPays(SarathiServe):
    pass
""",
    ),
    16: (
        """
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
        """
class LongPromptEats(SarathiServe):
    def schedule(self):
        batch = Batch(self.chunk)
        decodes = self.grow_decodes()
        batch.add_decodes(decodes)
        while len(self.prefilling()) < 4 and self.admit():
            pass
        rest = sorted(self.prefilling(), key=lambda r: len(r.tokens) - r.num_computed)
        for request in rest:
            batch.add(request)
        return batch
""",
        """
class LongPromptEats(SarathiServe):
    def schedule(self):
        decodes = self.grow_decodes()
        batch = Batch(self.chunk)
        batch.add_decodes(decodes)
        limit = max(1, self.chunk // 4)
        if len(self.prefilling()) + len(self.waiting) == 1:
            limit = self.chunk
        for request in [r for r in self.running if r not in decodes]:
            batch.add(request, limit)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request, limit)
        return batch
""",
    ),
}

WRONG = (  # (exercise, source, what is said)
    # the complaint is silenced, and a rule is broken
    (
        11,
        """
class StarvedDecodes(SarathiServe):
    def schedule(self):
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes()[:2])
        for request in self.prefilling():
            batch.add(request)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)
        return batch
""",
        "a batch has all decodes or none is broken",
    ),
    (
        14,
        """
class FirstChunk(VLLMV1):
    def schedule(self):
        for request in self.running:
            request.recomputed_tokens = 0
        return super().schedule()

    def room_for(self, request):
        if len(self.running) >= self.max_batch:
            return None
        length = min(len(request.tokens), self.limit, self.batch.left)
        pages = min(self.pages.needed(length), self.pages.num_free)
        return Admission([], pages)
""",
        "a chunk holds the next tokens is broken",
    ),
    (
        15,
        """
class LongestPays(SarathiServe):
    def grow(self, request, tokens):
        if self.pages.num_free:
            super().grow(request, tokens)
""",
        "a chunk holds the next tokens is broken",
    ),
    # the complaint is silenced, and somebody else pays
    (
        11,
        """
class StarvedDecodes(SarathiServe):
    def schedule(self):
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes())
        if not batch:
            for request in self.prefilling():
                batch.add(request)
            while batch.left > 0 and (request := self.admit()):
                batch.add(request)
        return batch
""",
        'TTFT, s" is more than 1.5 times',
    ),
    (
        12,
        """
class StarvedPrefills(SarathiServe):
    def schedule(self):
        batch = Batch(self.chunk)
        for request in self.prefilling():
            batch.add(request)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)
        if not batch:
            batch.add_decodes(self.grow_decodes())
        return batch
""",
        '"longest gap, s" is more than 1.5 times',
    ),
    (
        13,
        """
class NothingLeft(SarathiServe):
    def plan_admission(self, request):
        return Admission([], self.pages.total if self.running else self.pages.needed(
            len(request.tokens)))
""",
        "is more than 1.5 times",
    ),
    (
        14,
        """
class FirstChunk(NoEvict):
    def admit(self):
        return None if self.running else super().admit()
""",
        "is more than 1.5 times",
    ),
    # the complaint stays
    (
        13,
        """
class NothingLeft(SarathiServe):
    def plan_admission(self, request):
        cached = self.pages.match_prefix(self.pages.hashes(request)[:4])
        return Admission(cached, self.pages.needed(len(request.tokens)) - len(cached))
""",
        "it hangs",
    ),
    (
        15,
        """
class LongestPays(SarathiServe):
    def rank(self, request):
        return (len(request.tokens),)
""",
        "A user: ",
    ),
    (
        16,
        """
class LongPromptEats(SarathiServe):
    def schedule(self):
        self.grow_decodes()
        batch = Batch(self.chunk)
        for request in self.running:
            batch.add(request)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)
        return batch
""",
        '"mean TTFT, s" is more than 1.5 times',
    ),
    (16, "class LongPromptEats(SarathiServe):\n    pass\n", "is more than 1.5 times"),
)
