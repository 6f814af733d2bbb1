"""What exercises 4 and 9 give: the policy around the method that is to be written.

Plain Python. Read next: 04_cut_a_prompt.py, 09_budget_for_an_slo.py."""

from policies.iteration_time import BatchShape
from scheduler import Batch, Request, SarathiServe, Scheduler

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
    decodes = sum(chunk.request.is_decoding for chunk in batch)
    prefill_tokens = sum(chunk.length for chunk in batch) - decodes
    return BASE_S + PREFILL_TOKEN_S * prefill_tokens + DECODE_S * decodes


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
            self.add_chunk(batch, request)
        return batch

    def add_chunk(self, batch: Batch, request: Request) -> None:
        """Call batch.add(). Raises ValueError if it returns another length than it adds."""
        returned = batch.add(request)
        added = sum(chunk.length for chunk in batch if chunk.request is request)
        if returned != added:
            problem = f"add() returned {returned!r}, and the batch got {added} tokens"
            if returned is None:
                problem += ": did you forget return?"
            if returned and added == request.num_computed + returned:
                problem += ": a Chunk is (request, start, length), not end"
            raise ValueError(problem)


class Predicts(SarathiServe):
    """Algorithm 3 on a machine whose times are known. `token_budget` is yours."""

    tbt_slo = TBT_SLO_S

    def predict(self, shape: BatchShape) -> float:
        """The seconds that a batch of this shape takes."""
        return predict(shape)
