"""What exercises 4 and 9 give: the policy around the method that is to be written.

Plain Python. Read next: 04_cut_a_prompt.py, 09_budget_for_an_slo.py."""

from policies.iteration_time import BatchShape
from scheduler import Batch, SarathiServe, Scheduler

# The machine of the exercises, in seconds: of an iteration, and of each token or pair in it.
BASE_S = 0.010
PREFILL_TOKEN_S = 0.001
DECODE_S = 0.0005
CONTEXT_TOKEN_S = 0.00005  # a key that a decode reads
PAIR_S = 0.00001  # a token of a chunk with one that it attends to
TBT_SLO_S = 0.050


def predict(shape: BatchShape) -> float:
    """The seconds that a batch of this shape takes."""
    seconds = BASE_S + PREFILL_TOKEN_S * shape.prefill_tokens + DECODE_S * shape.decodes
    return seconds + CONTEXT_TOKEN_S * shape.context_tokens + PAIR_S * shape.prefill_pairs


def batch_seconds(batch: Batch) -> float:
    """The seconds that a batch takes."""
    return predict(BatchShape.of(batch))


def seconds_without_attention(batch: Batch) -> float:
    """The seconds that a batch takes where contexts are short: its tokens count, no pairs."""
    return predict(BatchShape.of(batch)._replace(context_tokens=0, prefill_pairs=0))


class CutsPrompts(Scheduler):
    """All decodes, and chunks of all prompts that fit, in batches of the class `batch_class`."""

    cuts_prompts = True
    batch_class: type[Batch] = Batch

    def schedule(self) -> Batch:
        batch = self.batch_class(self.chunk)
        batch.add_decodes(self.grow_decodes())
        while self.admit():
            pass
        for request in self.prefilling():
            batch.add(request)
        return batch


class Predicts(SarathiServe):
    """Algorithm 3 on a machine whose times are known. `token_budget` is yours."""

    tbt_slo = TBT_SLO_S

    def predict(self, shape: BatchShape) -> float:
        """The seconds that a batch of this shape takes."""
        return predict(shape)
