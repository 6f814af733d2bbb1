"""Exercise 2. Iteration-level batching: requests join and leave at every iteration.

Source: SARATHI, §5.2; Sarathi-Serve, §2.5 (Orca).

**Idea.** Orca's scheduler looks at the queue before every iteration. Whoever has ended is gone, and
its memory is free. Whoever waits and fits joins at once, with the whole prompt. So prompts and
decodes share a batch, which is called a hybrid batch. Nobody waits for the longest request any
more, but a long prompt makes the iteration long, for everybody in it.

**Stays true.** Each running request is in each batch.

**Predict.** The load of exercise 1: a request of 2 output tokens and one of 30 run together, and a
third one arrives during the second iteration. In which iteration is its prompt computed now?

**You may use** what exercise 1 lists: `self.running`, `self.admit()`, `Batch()`, `batch.add()`.
"""

from scheduler import Batch, Scheduler


class IterationLevel(Scheduler):
    def schedule(self) -> Batch:
        """The batch of the next iteration."""
        raise NotImplementedError  # some five lines
