"""A policy of your own: a class with one method. In the top folder:

    OWN=examples/my_policy.py:Eager
    python bench.py check $OWN                 names a rule that it breaks
    python bench.py serve --simulate a100-80gb --preset llama3-8b --policies sarathi-serve,$OWN

Read next: policies/template.py.
"""

from scheduler import Request, SarathiServe


class Eager(SarathiServe):
    """Cuts prompts only while some request decodes: nobody else can be stalled."""

    def token_budget(self, decodes: list[Request], prefills: list[Request]) -> int:
        """The most tokens in the next batch."""
        return self.chunk if decodes else self.max_len
