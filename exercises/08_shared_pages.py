"""Exercise 8. Shared pages: a prompt that begins like another one reuses its pages.

Source: lab/README.md, "Shared prefixes"; policies/pages.py.

**Idea.** Many prompts begin alike, with the same instructions. Keys and values depend on a token
and on those before it, so the pages of the common beginning can be shared. A full page has a hash,
of its tokens and of all tokens before. A new request looks its hashes up, takes the pages that are
cached, and begins behind them. But one thing cannot be found in any page: the logits after the last
token, which give the next one.

**Stays true.** The last token is always computed.

**Predict.** Pages hold 4 tokens. A prompt of 8 tokens was computed before, and comes again. How
many tokens are computed?

**You may use**

    request.tokens                 the prompt, and the output so far if it was preempted
    request.prompt_len             the length of the prompt
    self.pages.page_size
    self.pages.hashes(request)       the hashes of the full pages of request.tokens, in order
    self.pages.match_prefix(hashes)  the cached pages of these hashes, up to the first that has none
    self.pages.needed(tokens)        how many pages hold so many tokens

A request that was preempted after some output is special: of it two tokens have to be computed.
With one left it would count as a decode, and the decodes of this batch are chosen before anybody is
admitted.
"""

from scheduler import Admission, Request, SarathiServe


class SharedPages(SarathiServe):
    def plan_admission(self, request: Request) -> Admission:
        """The cached pages that hold the first tokens of a waiting request, and how many more
        pages it needs for the rest of its tokens: Admission(cached_pages, new_pages)."""
        raise NotImplementedError  # some five lines
