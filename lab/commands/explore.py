"""A page to play with: policies, chunk sizes and loads, chosen by buttons.

    python bench.py explore                           writes explore.html, which needs no network
    python bench.py explore --policies my_policy.py:Mine   with your own policy, which it opens on
    python bench.py explore --site site               the same as a web site, which loads its runs

All runs are simulated. It opens with four requests, two of them with long prompts that arrive while
the others decode. Read first: policies/template.py, lab/explore/runs.py."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter
from cyclopts.types import PositiveInt
from tqdm import tqdm

from cli.files import write_text, wrote_page
from cli.model import split_names
from lab.explore.bundle import PYODIDE_FILES, bundle, editor
from lab.explore.runs import CHUNKS, MAX_BATCH, MAX_LEN, MODEL, Load, record_run
from lab.measure import workload
from lab.measure.run_plan import goes_by_chunk
from lab.measure.workload import Arrival
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import LINKS
from lab.simulator.pools import KVLink, simulate_pools
from lab.simulator.two_pools import Pools
from page.html import Costs, Editor, RowCosts, packed_inline, page
from page.records import Recorder
from page.site import write_packed, write_runs
from runtime.files import new_file

TRACE = Path(__file__).parents[1] / "claims" / "a_to_d.csv"  # A and B, then C and D
CPU_RESULT = Path(__file__).parents[2] / "results/epyc-2-threads/chunk-256.json"
POLICIES = (
    "vllm",
    "sarathi-serve",
    "request-level",
    "orca",
    "sarathi",
    "chunked-only",
    "hybrid-only",
    "dynamic",
)
REMEDIES = (  # what users of today's engines ask for, shown under the load that they are for
    "threshold-under-contention",
    "interval",
    "ppas",
    "equal-progress",
    "shortest-uncached",
    "priority",
)
LONG_AMONG_SHORT = "one long among short"
TWO_GPUS = "two pools or replicas"
POOLS = Pools(1, 1)  # of TWO_GPUS, all other policies have two replicas there
POOLS_NAME = f"pools {POOLS}"
KV_LINK = "infiniband"
NO_CHUNK = "*"  # the chunk size of a policy that has none
STEADY = 0.7  # share of the rate that should be possible
OVERLOAD = 1.6
TIGHT = 5  # requests of the longest that fit into tight memory
SHARED = 512  # tokens of a prefix
BASE_CHUNK = 512  # of the prefill that rates are estimated from
LONG_PROMPT = 16_000  # tokens
LONG_MAX_LEN = 16_384
SHORT_QPS = 8.0  # requests of SHORT around the long one
SHORT = (200, 60)  # tokens of prompt and output


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ExploreOptions:
    """The options of `bench.py explore`. Raises ValueError for files that pyodide has not."""

    requests: PositiveInt = 60
    """How many arrive in each run."""
    html: Path = Path("explore.html")
    """The page."""
    site: Path | None = None
    """Write a web site into this folder instead: index.html, which loads runs when asked."""
    pyodide: Path | None = None
    """With --site, the folder of the npm package pyodide, Python for the page's editor; it is
    copied into the site. [default: browsers load it from the network]"""

    def __post_init__(self) -> None:
        if self.pyodide and not self.site:
            raise ValueError("--pyodide: needs --site")


def main(
    policies: str = "",
    *,
    options: ExploreOptions = ExploreOptions(),
) -> None:
    """A page to play with: what policies do with a load, and why.

    Parameters
    ----------
    policies
        Your own with commas, such as my_policy.py:ShortestFirst, beside the others.
    """
    from lab.measure.capacity import slo_seconds
    from lab.simulator.machine import base_of

    cost = CostModel.named(MODEL)
    slo_s = slo_seconds("strict", base_of(cost, MAX_LEN, BASE_CHUNK))
    loads = make_loads(cost, options.requests)
    names = {name.split(".py:")[-1]: name for name in [*split_names(policies), *POLICIES]}
    remedies = {name: name for name in REMEDIES if name not in names}
    recorders = simulate_all(names, remedies, loads, slo_s)
    html = options.html
    if options.site:
        options.site.mkdir(parents=True, exist_ok=True)
        html = options.site / "index.html"
    files, editor_info = write_beside(options, recorders, loads)
    text = page(
        "How an LLM server schedules its work",
        f"All runs are simulated: {MODEL} with 16 bits on one {cost.device.name}, two for "
        "the loads of pipeline bubbles\n"
        f"and of two pools, which have {KV_LINK} between them.\n"
        f"Loads but A to D have {options.requests} requests, most with the lengths of a chat "
        "dataset.",
        {name: recorder for group in recorders.values() for name, recorder in group.items()},
        slo_s=slo_s,
        slo_source="5 decode iterations of 32 requests",
        choices={
            "policy": [*names, *remedies, POOLS_NAME],
            "chunk": CHUNKS,
            "load": list(loads),
        },
        costs=measure_costs(cost),
        files=files,
        editor=editor_info,
    )
    write_text(html, text)
    if options.site is None:
        wrote_page(html)
    else:
        print(f"wrote {options.site}; python -m http.server -d {options.site} serves it")


def simulate_all(
    policies: dict[str, str], remedies: dict[str, str], loads: dict[str, Load], slo_s: float
) -> dict[str, dict[str, Recorder]]:
    """{load: {run: Recorder}}, as the page names them, of {what it calls a policy: its name}.

    A policy has a run of each chunk size that it goes by, under each load, a remedy only under
    LONG_AMONG_SHORT, and POOLS under TWO_GPUS."""
    recorders: dict[str, dict[str, Recorder]] = {load_name: {} for load_name in loads}
    runs = [
        (load_name, short_name, name, chunk)
        for load_name in loads
        for short_name, name in (policies | remedies).items()
        for chunk in (CHUNKS if goes_by_chunk(name) else (NO_CHUNK,))
        if short_name in policies or load_name == LONG_AMONG_SHORT
    ]
    for load_name, short_name, name, chunk in tqdm(runs, "runs", leave=False, disable=None):
        run = record_run(name, chunk, loads[load_name], slo_s)
        recorders[load_name][" | ".join([short_name, chunk, load_name])] = run
    pools = " | ".join([POOLS_NAME, NO_CHUNK, TWO_GPUS])
    recorders[TWO_GPUS][pools] = record_pools(loads[TWO_GPUS])
    return recorders


def record_pools(load: Load) -> Recorder:
    """Simulate a load on two pools, and record it: whole prompts, sent layer by layer."""
    cost = CostModel.named(MODEL)
    recorder = Recorder()
    kv_link = KVLink.of(cost, LINKS[KV_LINK])
    simulated = simulate_pools(cost, load.config, load.arrivals, POOLS, kv_link, recorder=recorder)
    recorder.add_transfers(simulated.run.transfers)
    return recorder


def write_beside(
    options: ExploreOptions, recorders: dict[str, dict[str, Recorder]], loads: dict[str, Load]
) -> tuple[dict[str, str], Editor]:
    """Write what a site loads when it is asked for: all runs but those of the first load, which it
    opens with, and what its editor needs. Returns {run: file}, and what the editor is told."""
    content = bundle(loads)
    if options.site is None:
        return {}, editor(packed_inline(content))
    site = options.site
    first_load = next(iter(loads))
    later = {load: group for load, group in recorders.items() if load != first_load}
    files = write_runs(site, later)
    packed = write_packed(site, "python.json.gz", content)
    if options.pyodide is None:
        return files, editor(packed)
    (site / "pyodide").mkdir(exist_ok=True)
    for name in PYODIDE_FILES:
        with new_file(site / "pyodide" / name) as path:
            shutil.copyfile(options.pyodide / name, path)
    return files, editor(packed, pyodide="pyodide/")


def make_loads(cost: CostModel, requests: int) -> dict[str, Load]:
    """What the page's buttons call a load, and that load, for the machine of `cost`."""
    from lab.measure.capacity import estimated_qps
    from lab.simulator.machine import VOCABULARY, base_of

    base = base_of(cost, MAX_LEN, BASE_CHUNK)
    lengths = workload.sample_lengths("sharegpt4", requests, MAX_LEN, 0)
    possible_qps = estimated_qps(base, workload.poisson(lengths, 1.0, 0))
    steady = workload.poisson(lengths, STEADY * possible_qps, 0)
    overload = workload.poisson(lengths, OVERLOAD * possible_qps, 0)
    shorter = workload.sample_lengths("sharegpt4", requests, MAX_LEN - SHARED, 0)
    prefixed = [(SHARED + prompt_len, output_len) for prompt_len, output_len in shorter]
    sharing = workload.poisson(prefixed, possible_qps, 0)
    prompts = workload.prompts(sharing, VOCABULARY, 0, shared=(SHARED, 2))
    one_long = one_long_among_short(requests)
    a_to_d, _ = workload.read_trace(TRACE, MAX_LEN)
    return {
        "A to D": Load(a_to_d, letters=True),
        "steady": Load(steady),
        "overload": Load(overload),
        "burst": Load(with_burst(steady)),
        LONG_AMONG_SHORT: Load(one_long, tokens=8 * LONG_MAX_LEN, max_len=LONG_MAX_LEN),
        "tight memory": Load(overload, tokens=TIGHT * MAX_LEN),
        "shared prefixes": Load(sharing, prompts=prompts),
        "pipeline bubbles": Load(steady, pp=2),
        TWO_GPUS: Load(workload.poisson(lengths, 2 * STEADY * possible_qps, 0), replicas=2),
    }


def with_burst(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same, but the third quarter of them arrives at once."""
    first = len(arrivals) // 2
    end = first + len(arrivals) // 4
    return [
        arrival._replace(time=arrivals[first].time) if first <= number < end else arrival
        for number, arrival in enumerate(arrivals)
    ]


def one_long_among_short(requests: int) -> list[Arrival]:
    """Short requests, and a long one when a quarter of them has arrived."""
    arrivals = workload.poisson([SHORT] * (requests - 1), SHORT_QPS, 0)
    quarter = (requests - 1) // 4
    time = arrivals[quarter - 1].time if quarter else 0.0
    arrivals.insert(quarter, Arrival(time, LONG_PROMPT, SHORT[1]))
    return arrivals


def measure_costs(cost: CostModel) -> Costs:
    """What MAX_BATCH decodes at half of MAX_LEN, a chunk, and both together take.

    Together they have as many rows as a whole number of tiles of the GPU."""
    chunk = int(CHUNKS[1]) - MAX_BATCH
    decode_spans = [(0, MAX_LEN // 2, 1)] * MAX_BATCH
    chunk_span = (0, 0, chunk)
    return {
        "decodes": MAX_BATCH,
        "chunk": chunk,
        "decodes_s": cost.seconds(decode_spans),
        "chunk_s": cost.seconds([chunk_span]),
        "both_s": cost.seconds([*decode_spans, chunk_span]),
        "machines": [gpu_rows(cost), cpu_rows()],
    }


def gpu_rows(cost: CostModel) -> RowCosts:
    """What rows cost on the machine of `cost`, by its matrix products alone."""

    def linear_s(tokens: int) -> float:
        return cost.layers * cost.layer_seconds([(0, 0, tokens)]).linear

    rows = 2 * cost.tile  # the fewest whole tiles whose computing takes longer than reading
    return {
        "name": f"{MODEL} on one {cost.device.name}, simulated",
        "read_s": linear_s(1),
        "row_s": linear_s(rows) / rows,
        "tile": cost.tile,
    }


def cpu_rows() -> RowCosts:
    """What rows cost on the CPU of results/, as it was measured there."""
    machine = json.loads(CPU_RESULT.read_text("utf-8"))["machine"]
    operations = 2 * machine["parameters"]  # of a row; and as many bytes, in bfloat16
    return {
        "name": f"{machine['model']} on {machine['threads']} cores of an {machine['device']}",
        "read_s": operations / machine["bytes_per_s"],
        "row_s": operations / machine["flops_per_s"],
        "tile": 1,
    }
