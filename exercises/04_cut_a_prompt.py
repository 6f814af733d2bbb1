"""Exercise 4. Cut a prompt: a batch with a budget takes as much of a request as fits.

Source: SARATHI, §4.2; Sarathi-Serve, Algorithm 3.

**Idea.** Attention needs the keys and values of all tokens before, and these lie in the cache. So a
prompt can be computed in parts, in one iteration after the other, with the same result. Such a part
is a chunk, `(request, start, length)`: compute tokens[start : start + length]. How long it may be
depends on what is left of the token budget when its turn comes. A prompt that fits is not cut, and
the last chunk of another one is as short as its rest.

**Stays true.** The chunks of a prompt cover it once, in order.

**Predict.** Two prompts of 20 tokens wait, and the budget is 16. How many iterations does it take
until both are computed, and how long is each chunk?

**You may use**

    request.tokens         the prompt, and the output so far, a list
    request.num_computed   so many of them are computed; a chunk does not change it, the engine
                           does when the batch has been computed
    self.left              what is left of the budget: yours to keep up to date. It is below 0
                           where more requests decode than the budget allows
    self.append(Chunk(request, start, length))
"""

from exercises.given import CutsPrompts
from scheduler import Batch, Chunk, Request


class CutBatch(Batch):
    def add(self, request: Request) -> int:
        """Add the request's next chunk, as long as the budget allows.

        Returns its length. If nothing is left of the budget, it adds nothing and returns 0."""
        raise NotImplementedError  # some six lines


class CutAPrompt(CutsPrompts):  # given: a policy that fills your batches
    batch_class = CutBatch
