"""Exercise 16. Mend it: short answers stop when one long prompt is left.

Source: vllm-project/vllm issue #57413: a cap on the chunks of long prompts leaves budget empty, so
it is lifted when nobody else waits. Then the long one takes all.

**Complaint.** "It answers me at once, since the cap. But then it stops for a second or two."

**Find.** While two prompts or more compete, each gets a quarter of the budget. In which iteration
does somebody first not get what is theirs? Say it with `--iteration N`.

**Mend.** Change `schedule`. Short prompts must still pass the long one, and the long one must have
what is left.
"""

from scheduler import Batch, SarathiServe


class LongPromptEats(SarathiServe):
    """One pass over all that run, as in vLLM, with a cap while prompts compete."""

    def schedule(self) -> Batch:
        self.grow_decodes()  # a page for each decode
        batch = Batch(self.chunk)
        competing = len(self.prefilling()) + len(self.waiting)
        limit = self.chunk if competing < 2 else max(1, self.chunk // 4)
        for request in self.running:
            batch.add(request, limit)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request, limit)
        return batch
