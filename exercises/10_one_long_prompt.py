"""Exercise 10. Open: one long prompt among short ones.

Source: none of the papers. Schedulers of today differ here.

**Idea.** Under exercise 6 a prompt of 2,000 tokens takes all the budget that the decodes leave,
until it is done. It stalls no decode. But each short prompt that arrives meanwhile waits for all of
it, although its few tokens would hardly delay the long one. Find a rule that serves both: let short
ones pass, share the budget, or what else comes to mind. There is no reference, only targets.

**Stays true.** The rules of every policy hold: no request is lost, no decode dropped, no page
leaked.

**Targets**, beside exercise 6 on the same three loads:

    median TTFT of the short ones that arrive while the long one is prefilled   at most a third
    TTFT of the long one                                                        at most 1.3 times
    P99 TBT of all                                                              at most 1.05 times

**Predict.** The budget is 64, and the long prompt has 2,000 tokens. Short ones of 20 to 40 tokens
come every 0.2 s. An iteration takes 10 ms, and 1 ms for each prompt token in it. By how much does
the long one slow down if each short one passes it?

**You may use** all that exercises 5 and 6 list, and

    self.waiting                    the queue, a deque; admit() takes its first request
    request.prompt_len, request.num_computed, request.arrival
    self.clock()                    the time in seconds

Override `schedule()`, as below, or delete it and override `admit()` or `prefilling()`. Exercise 6
admits only into the budget that its prefills leave: who only sorts them admits nobody earlier.
"""

from scheduler import Batch, SarathiServe


class OneLongPrompt(SarathiServe):
    def schedule(self) -> Batch:
        """The batch of the next iteration."""
        raise NotImplementedError
