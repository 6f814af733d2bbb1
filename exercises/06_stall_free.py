"""Exercise 6. Stall-free batches: decodes first, then prefills in the budget that is left.

Source: Sarathi-Serve, §4.2 and Algorithm 3.

**Idea.** The TBT that is allowed limits how many tokens a batch may have: the token budget. First
all decodes are packed, so none of them ever waits. Then the prompts that have begun are continued,
because they hold memory already. What is left of the budget goes to new requests, in order of
arrival, and the last one may get only a part of its prompt. Short prompts share a batch, which a
decode-maximal batch does not allow.

**Stays true.** Decodes never wait, and prefills that have begun come before new ones.

**Predict.** The budget is 16. Three requests decode, and three prompts of 5 tokens arrive together.
After how many iterations are they computed? (A decode-maximal batch needs 3.)

**You may use** what exercise 5 lists: `self.chunk`, which is the token budget here, `Batch`,
`batch.left`, `self.grow_decodes()`, `self.prefilling()`, `self.admit()`, `batch.add_decodes()` and
`batch.add()`. Call `self.grow_decodes()` first: to find pages it may preempt one whose prompt has
begun, and that one waits again.
"""

from scheduler import Batch, Request, Scheduler


class StallFree(Scheduler):
    cuts_prompts = True

    def reserved(self, request: Request) -> int:
        """Given: memory for the prompt. More comes page by page, as the output grows."""
        return len(request.tokens)

    def schedule(self) -> Batch:
        """The batch of the next iteration."""
        raise NotImplementedError  # some seven lines
