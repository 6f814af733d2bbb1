"""The name of each policy, and what it does, in a few words, for pages. Read next: records.py."""

from policies.cards import CARDS
from scheduler import Scheduler

NOTES = {name: card.note for name, card in CARDS.items()}


def policy_name(policy: type[Scheduler]) -> str:
    """The name in ALL_POLICIES, or that of the class for a custom policy."""
    for name, card in CARDS.items():
        if card.cls is policy:
            return name
    return policy.__name__


def policy_note(policy: type[Scheduler]) -> str:
    """What the policy does in an iteration: of one without a note, the first line of its docstring,
    without the marks of code."""
    first_line = (policy.__doc__ or "").strip().partition("\n")[0].replace("`", "")
    return NOTES.get(policy_name(policy), first_line)
