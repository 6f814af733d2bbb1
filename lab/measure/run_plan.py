"""Which engines a command compares: a labelled EngineConfig for each policy and page size.

Read first: config.py. Read next: run_loop.py."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

from config import EngineConfig
from policies import find_policy


def goes_by_chunk(name: str) -> bool:
    """Whether the policy of that name has a chunk size. `dynamic` finds its budget itself."""
    return find_policy(name).cuts_prompts and name != "dynamic"


def run_plan(
    labels: Iterable[str],
    page_sizes: Sequence[int],
    config: EngineConfig,
    tbt_slo_s: float | None = None,
    caching: Sequence[bool] = (False,),
) -> dict[str, EngineConfig]:
    """{label: EngineConfig} of all runs: each policy with each page size, without or with prefix
    caching, or both, as `caching` says.

    A label is a name for find_policy, and may end in a chunk size: "sarathi:128". All runs have the
    memory of `config`: pages * page_size tokens. `tbt_slo_s` is the SLO that `dynamic` follows.
    Raises ValueError for an unknown policy, and for a chunk size where the policy has none."""
    if config.pages is None or config.page_size is None:
        raise ValueError("config: needs pages and page_size, which say how much memory there is")
    tokens = config.pages * config.page_size
    configs = {}
    for label in labels:
        policy_config = _config_of(label, config, tbt_slo_s)
        for page_size, shares_prefixes in product(page_sizes, caching):
            run_label = label
            if len(page_sizes) > 1:
                run_label += f", pages of {page_size}"
            if shares_prefixes and len(caching) > 1:
                run_label += ", shared"
            configs[run_label] = replace(
                policy_config,
                page_size=page_size,
                pages=tokens // page_size,
                prefix_caching=shares_prefixes,
            )
    return configs


def _config_of(label: str, config: EngineConfig, tbt_slo_s: float | None) -> EngineConfig:
    """`config` with the policy of a label, and its chunk size if it names one."""
    name, _, chunk = label.rpartition(":")
    if not chunk.isdecimal():
        name = label
        chunk = ""
    has_chunk = goes_by_chunk(name)  # raises for an unknown policy, with a chunk size or without
    if chunk and not has_chunk:
        raise ValueError(f"{label!r}: {name} does not go by a chunk size")
    config = replace(config, policy=name, chunk=int(chunk or config.chunk))
    if name == "dynamic":
        config = replace(config, policy_options={**config.policy_options, "tbt_slo": tbt_slo_s})
    return config
