"""Exercise 9. A budget from an SLO: as much prefill beside the decodes as the time allows.

Source: Sarathi-Serve, §4.3.

**Idea.** The SLO limits the time between two tokens, so it limits the time of an iteration in which
anybody decodes. A fixed token budget has to be right for the worst case. But the time depends on
the batch: on its prompt tokens, its decodes and their contexts, and on the pairs of a token with
all those that it attends to. The later a chunk lies in its prompt, the more pairs each of its
tokens has. So the prefill that fits is found anew for each batch, from a prediction.

**Stays true.** The predicted time is at most the SLO, and later chunks of a prompt are smaller.

**Predict.** A prompt of 200 tokens arrives beside 4 decodes. The first chunk has 29 tokens. Has the
fifth one a little more than half as many, a third less, or nearly as many? The times of the machine
are in `exercises/given.py`.

**You may use**

    self.tbt_slo                     the SLO, in seconds
    BatchShape.of_decodes(decodes)   the shape of a batch in which these requests decode
    shape.with_chunk(start, length)  this shape and a chunk after `start` tokens of its prompt
    self.predict(shape)              the seconds that such a batch takes
    request.num_computed             where the next chunk of a request starts
    self.max_len                     no chunk is longer

The first of `prefills` is continued first, and whoever is admitted starts at 0. Where several
prompts have begun, stay on the safe side. If the decodes alone miss the SLO, there is no prefill.
Where nobody decodes, nobody stalls: any budget above 0 will do.
"""

from exercises.given import Predicts
from policies.iteration_time import BatchShape
from scheduler import Request


class BudgetForSLO(Predicts):
    def token_budget(self, decodes: list[Request], prefills: list[Request]) -> int:
        """How many tokens the next batch may have, decodes and prefill together.

        These are the requests that decode in it, and those whose prompt has begun before."""
        raise NotImplementedError  # some eight lines
