"""Sarathi-Serve without one of its two ideas, for the ablation of §5.4.2.

Read first: scheduler.py."""

from policies.cards import card
from policies.parts import add_prefills
from scheduler import Batch, Request, SarathiServe


@card(
    "chunked-only",
    "#cc79a7",
    note="ablation: chunks, in turn with decodes and never beside them",
)
class ChunkedOnly(SarathiServe):
    """Chunks alone: prefill and decode batches alternate.

    Three choices are others than in the authors' simple_chunking scheduler: new requests fill the
    rest of a chunk, decodes take their next pages in the turn of a prefill, too, and the last token
    of a victim is a decode."""

    prefilled_last = False

    def schedule(self) -> Batch:
        decodes = self.grow_decodes()
        batch = Batch(self.chunk)
        if not (self.prefilled_last and decodes):
            add_prefills(self, batch)
        self.prefilled_last = bool(batch)
        if not batch:
            batch.add_decodes(decodes)
        return batch


@card(
    "hybrid-only",
    "#009e73",
    note="ablation: sarathi-serve with a budget of max_len: prompts stay nearly whole",
)
class HybridOnly(SarathiServe):
    """Hybrid batches alone: with a budget of max_len, only prompts that share a batch are cut."""

    cuts_prompts = False

    def token_budget(self, decodes: list[Request], prefills: list[Request]) -> int:
        return self.max_len
