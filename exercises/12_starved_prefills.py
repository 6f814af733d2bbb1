"""Exercise 12. Mend it: nobody gets a first token while answers are long.

Source: InternLM/lmdeploy issue #4532: prefill starved by decodes; omlx #3726: a first token after
8.86 s, 0.73 s when it was mended.

**Complaint.** "I wait for the first word until somebody else's long answer is complete."

**Find.** Here decodes are protected, and well: no answer ever stands still. In which iteration does
that first cost somebody else something? Say it with `--iteration N`.

**Mend.** The first tokens must come soon, and the answers must still not stand still.
"""

from scheduler import Batch, SarathiServe


class StarvedPrefills(SarathiServe):
    """Decodes first: prompts are computed in an iteration in which nobody decodes."""

    def schedule(self) -> Batch:
        batch = Batch(self.chunk)
        batch.add_decodes(self.grow_decodes())
        if batch:
            return batch
        for request in self.prefilling():
            batch.add(request)
        while batch.left > 0 and (request := self.admit()):
            batch.add(request)
        return batch
