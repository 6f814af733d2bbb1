"""Exercise 1. Request-level batching: a batch runs to its end, then the next one begins.

Source: Sarathi-Serve, §2.5 and Algorithm 1 (FasterTransformer).

**Idea.** The first servers batched requests as one batches pictures. They picked some requests,
computed all prompts together, and then decoded until the last request had ended. Only then did they
look at the queue again. So no request that runs is ever disturbed by a new one. But whoever comes
late waits for the longest of those before, and the batch shrinks as the short ones end.

**Stays true.** Nobody joins while anybody runs.

**Predict.** A request of 2 output tokens and one of 30 run together. The iteration that computes a
prompt yields its first output token. A third request arrives during the second iteration. In which
iteration is its prompt computed?

**You may use**

    self.running        the requests that have been admitted and have not ended, a list
    self.admit()        takes the first request of the queue: it gets its memory and joins
                        self.running. Returns it, or None if nobody waits or there is no room
    batch = Batch()     an empty batch without a limit
    batch.add(request)  adds all tokens of the request that are not computed yet: first the whole
                        prompt, and from then on the one token that was generated last

`python -m exercises 1` checks it. `python -m exercises 1 --hint` helps.
"""

from scheduler import Batch, Scheduler


class RequestLevel(Scheduler):
    def schedule(self) -> Batch:
        """The batch of the next iteration. It is called again and again, until all have ended."""
        raise NotImplementedError  # some six lines
