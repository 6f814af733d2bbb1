"""A policy of one's own: copy this file, change it, and see what it wins and what it pays.

    cp policies/template.py my_policy.py
    python bench.py explore my_policy.py:ShortestFirst              beside others, step by step
    python bench.py check my_policy.py:ShortestFirst                names a rule that it breaks

Change one of these; what each promises stands in scheduler.py:

    admit()          take the next request off the queue and give it pages, or return None
    rank(request)    of those that run the highest is preempted when memory runs out
    token_budget()   the most tokens in a batch
    schedule()       all of it: which chunks are computed next

`self.waiting` is the queue, `self.running` has the pages, `self.clock()` is the time in seconds."""

from scheduler import SarathiServe


class ShortestFirst(SarathiServe):
    def admit(self):
        """The request with the shortest prompt jumps the queue."""
        if self.waiting:
            shortest = min(self.waiting, key=lambda request: request.prompt_len)
            self.waiting.remove(shortest)
            self.waiting.appendleft(shortest)
        return super().admit()
