"""Exercise 14. Mend it: the more come, the less is done.

Source: vllm-project/vllm issue #37307: a fifth prompt of 100,000 tokens was admitted because its
first chunk fitted, and from then on requests preempted each other: 100 tokens/s fell to 1.5.

**Complaint.** "With four of us it was fast. With six of us the GPU is busy, and nothing comes out."

**Find.** Memory is given chunk by chunk, and who finds none is preempted. In which iteration is
somebody admitted for whom there will be no room? Say it with `--iteration N`.

**Mend.** Change `room_for`. It returns the Admission of a waiting request, the pages that it gets
now, or None if it has to wait. `self.limit` and `self.batch.left` limit its first chunk.
"""

from policies.today import VLLMV1
from scheduler import Admission, Request


class FirstChunk(VLLMV1):
    """vLLM V1, in which a request is admitted if there are pages for its first chunk."""

    def room_for(self, request: Request) -> Admission | None:
        if len(self.running) >= self.max_batch:
            return None
        length = min(len(request.tokens), self.limit, self.batch.left)
        new_pages = self.pages.needed(length)
        return Admission([], new_pages) if new_pages <= self.pages.num_free else None
