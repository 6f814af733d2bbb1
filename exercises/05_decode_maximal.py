"""Exercise 5. Decode-maximal batches: one chunk, and all decodes ride along.

Source: SARATHI, §4.3.

**Idea.** A chunk of some hundred tokens keeps the GPU's arithmetic busy, and has read all weights
of the model for that. A decode needs the same weights for one token. So decodes beside a chunk cost
next to nothing. A batch takes every decode, and one chunk of one prompt that fills it up to C
tokens. All batches take about as long, which keeps a pipeline of GPUs free of bubbles.

**Stays true.** At most one prefill, and C tokens together.

**Predict.** C is 16. Six requests decode, and a prompt of 40 tokens arrives. After how many
iterations is it computed?

**You may use**

    self.chunk                   C, in tokens
    batch = Batch(self.chunk)    as in exercise 3; more decodes than C make batch.left negative
    self.grow_decodes()          the running requests that decode
    batch.add_decodes(requests)  adds one token of each, and takes them off batch.left
    self.prefilling()            the running requests whose prompt has begun and is not done
    self.admit()                 as in exercise 1; who is admitted is in self.running from then on
    batch.add(request)           your exercise 4: adds a chunk, cut to batch.left
"""

from scheduler import Batch, Scheduler


class DecodeMaximal(Scheduler):
    cuts_prompts = True

    def schedule(self) -> Batch:
        """The batch of the next iteration."""
        raise NotImplementedError  # some eight lines
