"""Exercise 11. Mend it: answers stand still while prompts come.

Source: sgl-project/sglang issue #32549: 2,863 batches of prefill beside 37 of decodes in 15
minutes, and a hole of 5 min 19 s; FreeToken #483: 77 s, 13 s when it was mended.

**Complaint.** "My answer stops in the middle of a word whenever others send prompts."

**Find.** The policy below runs, and breaks no rule. `python -m exercises 11` prints the figures and
a line for each request. In which iteration does it first decide what hurts the two that decode?
Say it with `--iteration N`.

**Mend.** Change `schedule`, or another method. No request may pay too much for it: on other loads
no figure may be much worse than under the reference, which you are not shown.
"""

from scheduler import Batch, SarathiServe


class StarvedDecodes(SarathiServe):
    """Prefill first: a batch is of prompts, cut to the budget, or of decodes."""

    def schedule(self) -> Batch:
        batch = Batch(self.chunk)
        for request in self.prefilling():
            batch.add(request)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)
        if not batch:
            batch.add_decodes(self.grow_decodes())
        return batch
