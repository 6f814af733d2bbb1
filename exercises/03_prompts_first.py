"""Exercise 3. Prompts first and alone: vLLM's scheduler of 2023.

Source: Sarathi-Serve, §2.5 and Algorithm 2; §5.1 for the limit of max_len tokens.

**Idea.** A prompt keeps the GPU busy, a decode does not, and vLLM had an attention kernel for each.
So each batch is of one kind. If prompts can be admitted, the batch is of whole prompts, as many as
fit into `max_len` tokens together. If none can, every running request decodes. New requests get
their first token soon, while all running ones wait: that is a generation stall.

**Stays true.** A batch has no prefill or no decode.

**Predict.** One request decodes. Three prompts of 40 tokens arrive one after the other, each before
the one before is computed. How many iterations in a row does the decode wait?

**You may use**

    self.waiting[0]             the first request of the queue, which nobody passes; self.waiting
                                may be empty
    len(request.tokens)         the tokens of a request: the prompt, and the output so far
    self.admit()                as in exercise 1
    batch = Batch(self.max_len) an empty batch with a limit, the budget
    batch.left                  how many tokens still go into it
    batch.add(request)          as in exercise 1, and it takes the tokens off batch.left. If they
                                do not fit, it cuts them, which this policy must not let happen
    self.grow_decodes()         the running requests that decode, each with a page for its next
                                token. To find pages it may preempt others: call it only if you
                                decode
    batch.add_decodes(requests) adds one token of each of these
"""

from scheduler import Batch, Request, Scheduler


class PromptsFirst(Scheduler):
    def reserved(self, request: Request) -> int:
        """Given: memory for the prompt. More comes page by page, as the output grows."""
        return len(request.tokens)

    def schedule(self) -> Batch:
        """The batch of the next iteration."""
        raise NotImplementedError  # some seven lines
