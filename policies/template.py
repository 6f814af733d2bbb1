"""A custom policy: copy this file, change it, and see its gains and its price.

    cp policies/template.py my_policy.py
    python bench.py explore --policies my_policy.py:ShortestFirst   beside others, step by step
    python bench.py check --policies my_policy.py:ShortestFirst     names a rule that it breaks

Override one of these methods, which scheduler.py explains:

    admit()                  take the next request off the queue and give it pages, or return None;
                             it orders the queue only, as who has begun goes on first
    rank(request)            the running request of the highest rank is preempted when memory runs
                             out; self.preempt(request) does so before a batch has its chunk
    token_budget()           how many tokens a batch may have
    schedule()               all of it: which chunks are computed next
    observe(batch, seconds)  how long the last batch took

`self.waiting` is the queue. `self.running` are the requests that have pages. `self.prefilling()`
and `self.grow_decodes()` divide them; the latter gives each decode memory for its next token.
`request.arrival` and `self.clock()` are times in seconds, `request.service.priority` is 0 for
realtime to 3 for low (`bench.py serve --classes`)."""

from scheduler import Request, SarathiServe


class ShortestFirst(SarathiServe):
    reorders = True  # for the referee: not in order of arrival

    def admit(self) -> Request | None:
        """The request with the shortest prompt jumps the queue."""
        if self.waiting:
            shortest = min(self.waiting, key=lambda request: request.prompt_len)
            self.waiting.remove(shortest)
            self.waiting.appendleft(shortest)
        return super().admit()
