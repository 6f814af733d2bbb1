"""Exercise 7. Memory ends: a decode needs a page, and none is free.

Source: PagedAttention (Kwon et al. 2023), §4.5; Sarathi-Serve, §4.4, which builds on vLLM.

**Idea.** The cache is handed out in pages of `page_size` tokens. A request is admitted with pages
for its prompt, and gets one more whenever its output has filled them. Since nobody knows how long
an output will be, memory may end while all are still running. Then somebody loses all of its pages
and waits again; later its tokens are computed once more. The newest one pays, so the oldest always
goes on, and all end at last.

**Stays true.** No token without a page, and the newest pays.

**Predict.** There are 6 pages of 4 tokens. Two requests have prompts of 8 tokens and generate 16
each. The budget is 16 or more. How often is one preempted, and in which iteration has each of them
ended?

**You may use**

    self.running              in order of arrival: the newest is the last one
    request.is_decoding       whether the one token to compute next was generated
    request.num_computed      so many tokens of it lie in its pages: the next one has this index
    request.pages             its pages, a list; [] for one that was preempted
    self.pages.page_size      how many tokens a page holds
    self.pages.allocate(1)    a list of one free page, or None if none is free
    self.preempt(request)     frees its pages; it leaves self.running and waits at the front

A request may have to preempt itself, if it is the newest.
"""

from scheduler import Request, SarathiServe


class OutOfMemory(SarathiServe):
    def grow_decodes(self) -> list[Request]:
        """The running requests that decode, each with a page for its next token."""
        raise NotImplementedError  # some ten lines
