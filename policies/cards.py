"""What is said of each policy beside its class: name, colour, a note, and whose rule it is.

A policy is entered where its class is defined, by the decorator `card`. Names, tables, pages and
pictures are made from CARDS, in the order of definition. Read next: __init__.py."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import scheduler
from scheduler import Scheduler


@dataclass(frozen=True)
class Card:
    """A policy as commands, tables and pictures show it."""

    cls: type[Scheduler]
    name: str
    color: str  # of its lines, one that no other policy has
    note: str  # what it does in an iteration, in a few words
    engine: str  # whose rule it is; "proposed" by users; "" for the papers' and what follows them
    version: str  # of the engine that it was held beside or read in
    equal: str  # how many loads were equal beside the engine's own scheduler; "" if it was not held


Policy = TypeVar("Policy", bound=type[Scheduler])

CARDS: dict[str, Card] = {}


def card(
    name: str,
    color: str,
    note: str = "",
    engine: str = "",
    version: str = "",
    equal: str = "",
) -> Callable[[Policy], Policy]:
    """Enter the decorated class. Without a note, the first line of its docstring is the note."""

    def enter(cls: Policy) -> Policy:
        text = note or (cls.__doc__ or "").partition("\n")[0].replace("`", "")
        CARDS[name] = Card(cls, name, color, text, engine, version, equal)
        return cls

    return enter


# The papers' policies are entered here: scheduler.py, which is read first, knows no colours.
card(
    "request-level",
    "#7a7a7a",
    note="all that run; new ones only when none runs, whole prompts together",
)(scheduler.RequestLevel)
card(
    "orca",
    "#e69f00",
    note="every decode, and whole prompts: all that memory allows",
)(scheduler.Orca)
card(
    "orca-best",
    "#8c5109",
    note="every decode, and whole prompts: one at a time",
)(scheduler.OrcaBest)
card(
    "vllm",
    "#d55e00",
    note="whole prompts alone, up to max_len tokens; without any all decodes. vLLM of 2023",
)(scheduler.VLLM)
card(
    "sarathi",
    "#56b4e9",
    note="one chunk and all decodes, together C tokens: decode-maximal",
)(scheduler.Sarathi)
card(
    "sarathi-serve",
    "#0072b2",
    note="all decodes, then prefills within the token budget: stall-free",
)(scheduler.SarathiServe)
