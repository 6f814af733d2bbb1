"""The name of each policy, and what it does, in a few words, for pages. Read next: records.py."""

from policies import ALL_POLICIES
from scheduler import Scheduler

NOTES = {  # as in the README's table of policies
    "request-level": "all that run; new ones only when none runs, whole prompts together",
    "orca": "every decode, and whole prompts: all that memory allows",
    "orca-best": "every decode, and whole prompts: one at a time",
    "vllm": "whole prompts alone, up to max_len tokens; without any all decodes. vLLM of 2023",
    "sarathi": "one chunk and all decodes, together C tokens: decode-maximal",
    "sarathi-serve": "all decodes, then prefills within the token budget: stall-free",
    "chunked-only": "ablation: chunks, in turn with decodes and never beside them",
    "hybrid-only": "ablation: sarathi-serve with a budget of max_len: prompts stay nearly whole",
    "dynamic": "sarathi-serve, with as much prefill as is predicted to meet an SLO",
    "priority": "dynamic with classes and targets; urgent requests first, others are preempted",
    # those of today whose docstrings say it in other terms than the page
    "threshold-under-contention": "like sarathi-serve, with at most a quarter of the budget for a "
    "prompt while another one waits",
    "interval": "4 batches of decodes after each batch of prefill, never both together",
    "ppas": "like sarathi-serve, with a quarter of the budget while prompts press on decodes",
    "equal-progress": "like sarathi-serve, with up to 4 prompts in equal shares of the budget",
    "shortest-uncached": "like sarathi-serve, the prompt with the fewest tokens left first",
}


def policy_name(policy: type[Scheduler]) -> str:
    """The name in ALL_POLICIES, or that of the class for a custom policy."""
    for name, cls in ALL_POLICIES.items():
        if cls is policy:
            return name
    return policy.__name__


def policy_note(policy: type[Scheduler]) -> str:
    """What the policy does in an iteration: of one without a note, the first line of its docstring,
    without the marks of code."""
    note = NOTES.get(policy_name(policy))
    if note is None:
        note = (policy.__doc__ or "").strip().partition("\n")[0].replace("`", "")
    return note
