"""Exercise 13. Mend it: the same question asked again is never answered.

Source: GeeeekExplorer/nano-vllm issue #144 and its PRs 199 and 211: a prompt that is found in the
cache as a whole, and nothing is left to compute.

**Complaint.** "The first time I got an answer. The second time the server hangs."

**Find.** Prefix caching is on, and pages hold 4 tokens. In which iteration is the decision made
that leaves a request without a future? Say it with `--iteration N`.

**Mend.** Change `plan_admission`: an Admission names the cached pages that a waiting request takes,
and how many new ones it needs. What must be computed in any case, and why? All other pages that are
cached are taken, and none is allocated that is not needed: of 16 tokens 4 are computed again.
"""

from policies.pages import CachedPages
from scheduler import Admission, Request, SarathiServe


class NothingLeft(SarathiServe):
    """Algorithm 3, in which a prompt reuses every page that is cached."""

    def plan_admission(self, request: Request) -> Admission:
        pages = self.pages
        assert isinstance(pages, CachedPages)
        cached_pages = pages.match_prefix(pages.hashes(request))
        return Admission(cached_pages, pages.needed(len(request.tokens)) - len(cached_pages))
