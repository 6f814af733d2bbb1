"""Exercise 15. Mend it: an answer that is nearly done is thrown out, again and again.

Source: PagedAttention (Kwon et al. 2023), §4.5: who came first is served first, who came last is
preempted first; sgl-project/sglang schedule_batch.py, `retract_decode`: who has the fewest outputs.

**Complaint.** "My answer was at its last sentence, three times. Each time it stopped for a second."

**Find.** Memory is tight, and somebody has to pay. One victim with many pages is enough, where
several with few would be needed: is that cheap? In which iteration does the wrong one pay first?
Say it with `--iteration N`.

**Mend.** `rank(request)` is asked when memory runs out: the running request of the highest rank is
preempted. A tuple of numbers is compared number by number.
"""

from scheduler import Request, SarathiServe


class LongestPays(SarathiServe):
    """Algorithm 3, in which the request with the most pages is preempted."""

    def rank(self, request: Request) -> tuple[float, ...]:
        return (len(request.pages),)
