"""SARATHI's experiments on the machines of the paper, simulated, each beside what the paper says.

Every experiment, here and in sarathi_serve.py, is a generator of Tables, from (run, requests,
cpu_s). `run(function, jobs)` calls the function with each tuple of arguments, maybe in parallel.
The experiments of Sarathi-Serve have `requests` in each run, and `cpu_s` of CPU in each iteration.

Read first: simulation.py. Read next: sarathi_serve.py, and report.py, which prints the tables.
"""

from collections import namedtuple
from statistics import median

from experiments.tables import Table
from experiments.workload import Arrival, zipf_lengths
from policies.config import EngineConfig
from simulator.cost_model import System
from simulator.simulation import bubble_kinds, simulate

NANOGPT_CPU_S = 4e-3  # of SARATHI's code beside its operations: what S-F7 leaves on average
CPU = f"{1e3 * NANOGPT_CPU_S:g} ms for what is not in the operations of S-T2"
LONGEST = 4096  # tokens of a request of S-F12
A6000_13B, A100_33B = System("llama-13b", "a6000"), System("llama-33b")
PIPELINE, TP_ONLY = System("gpt3-175b", tp=8, pp=8), System("gpt3-175b", tp=8)


def compared(what, spec=".2f", paper="paper"):
    """The columns of a table whose rows are a name and `beside`."""
    return {what: "", paper: spec, "simulated": spec, "error": "+.0%"}


def beside(paper, simulated):
    """Three cells: the paper's number, words or None; ours; by how much it differs, if known."""
    known = isinstance(paper, int | float) and simulated and not getattr(simulated, "bound", "")
    return [paper, simulated, simulated / paper - 1 if known else None]


def decodes(count, context):
    """A batch of so many decodes, each of which reads `context` tokens, its own among them."""
    return [(0, context - 1, 1)] * count


# in seconds, but for the batch and a share; `bubble` is the median of `bubbles`, of each request
Offline = namedtuple("Offline", "batch makespan utilisation bubble bubbles ends")


def offline(system, policy, lengths, replicas=1, chunk=256, cpu_s=0.0, batch=None, longest=LONGEST):
    """Simulate requests of `lengths`, all there at time 0: an Offline. `batch` None: what fits."""
    cost = system.cost(cpu_s)
    batch = batch or cost.max_batch(longest)
    config = EngineConfig(policy, chunk, batch, longest, page_size=longest, pages=batch * cost.pp)
    arrivals = [Arrival(0.0, *pair) for pair in lengths]
    seen = simulate(cost, config, arrivals, replicas=replicas, record=False)
    ends = [completion.token_times[-1] for completion in seen.run.completions]
    its = seen.run.seconds, seen.utilisation, median(seen.bubbles)
    return Offline(batch, *its, seen.bubbles, ends)


def throughput(system, policy, batch, length, pd_ratio, chunk=256, requests=40):
    """Tokens per second, prompts and outputs, of 40 B requests that are all there at time 0."""
    output = max(1, round(length / (pd_ratio + 1)))
    lengths = [(length - output, output)] * (requests * batch)
    its = offline(system, policy, lengths, 1, chunk, NANOGPT_CPU_S, batch, length)
    return len(lengths) * length / its.makespan


def decode_speedup(cost, length, batch):
    """How many times cheaper a decode is in a batch with a chunk of 256 than without, S-§5.1.1."""
    riding, prefill = decodes(batch - 1, length), (0, length - 256, 256 - (batch - 1))
    each = (cost.seconds([prefill, *riding]) - cost.seconds([prefill])) / len(riding)
    return cost.seconds(decodes(batch, length)) / batch / each


def sarathi_iterations(run, requests, cpu_s):
    """S-T2, S-F7, S-F3 and S-F8: single iterations of LLaMA-13B on an A6000; S-§4.3.1."""
    cost = A6000_13B.cost(NANOGPT_CPU_S)
    table_2 = {  # name -> batch, ms of its linear layers, of its attention
        "prefill 1,024": ([(0, 0, 1024)], 224.8, 10),
        "4 decodes": (decodes(4, 1024), 44.28, 5.68),
        "1,021 + 3": ([(0, 0, 1021), *decodes(3, 1024)], 223.2, 15.2),
    }
    rows = [
        [f"{name}: {kind}", *beside(paper, 1e3 * cost.parts(batch)[kind])]
        for name, (batch, *papers) in table_2.items()
        for kind, paper in zip(("linear", "attention"), papers)
    ]
    title = "time of operations, LLaMA-13B on an A6000"
    note = "The first two batches are what the constants of the A6000 were set by."
    yield Table("S-T2", title, compared("ms"), rows, note)

    rows = [
        [f"prompt of {tokens}", *beside(paper, 1e3 * cost.seconds([(0, 0, tokens)]))]
        for tokens, paper in ((128, 55), (256, 69.8), (257, 92.33))
    ]
    note = f"{CPU} are what these three times leave on average;\nthe steps are predicted."
    yield Table("S-F7", "tile quantization: one iteration", compared("ms"), rows, note)

    rows = []
    for batch, paper in ((1, 200), (2, 100), (18, 16.7)):
        prefill_token_s = cost.seconds([(0, 0, 1024)] * batch) / 1024
        decode_s = cost.seconds(decodes(batch, 1024))
        rows.append([f"batch {batch}", *beside(paper, decode_s / prefill_token_s)])
    title = "what a decode costs in prefill tokens, at 1,024 tokens"
    columns = compared("decode token / prefill token", ".1f")
    yield Table("S-F3", title, columns, rows, f"With {CPU}.")

    batches, most, rows = (2, 4, 6, 10, 18), {1024: 18, 2048: 10, 3072: 6}, []
    for length, largest in most.items():
        speedups = [decode_speedup(cost, length, b) if b <= largest else None for b in batches]
        rows.append([f"context {length:,}", *speedups])
    found = [speedup for _, *speedups in rows for speedup in speedups if speedup]
    finding = f"2.8x to 10x published, {min(found):.1f}x to {max(found):.1f}x simulated"
    title = "decodes beside a chunk of 256 (paper: 2.8x to 10x, falling both ways)"
    columns = {"decode speedup": ""} | {f"B = {batch}": ".1fx" for batch in batches}
    note = f"With {CPU}. B = 2 is one decode beside\n"
    note += "the chunk; the paper does not say its smallest."
    yield Table("S-F8", title, columns, rows, note, finding=finding)

    papers, rows = {A6000_13B: most, A100_33B: {1024: 10, 2048: 5, 3072: 3}}, []
    papers |= {PIPELINE: {LONGEST: 27}, TP_ONLY: {LONGEST: 11}}
    for system, batches in papers.items():
        for length, paper in batches.items():
            name = "{}, {}, TP {} x PP {}, {}K".format(*system[:4], length // 1024)
            rows.append([name, *beside(paper, system.cost().max_batch(length))])
    title = "the batch that fits in memory, for each micro-batch in flight"
    columns = compared("requests that fit", "d")
    note = "90 % of what the data sheet calls 80 GB makes 27 and 11; with it, less of 33B fits\n"
    note += "than the paper ran (S-T4 runs the paper's batches all the same)."
    yield Table("S-§4.3.1", title, columns, rows, note)


def sarathi_end_to_end(run, requests, cpu_s):
    """S-T4, S-F9 and S-F11: throughput of SARATHI and Orca over the baseline on one GPU."""
    table_4 = {  # system, batch, length and P:D -> the paper's decode speedup and gain
        (A6000_13B, 6, 1024, 50): (5.45, 1.33),
        (A6000_13B, 6, 2048, 50): (3.26, 1.26),
        (A6000_13B, 6, 3072, 50): (2.51, 1.22),
        (A100_33B, 10, 1024, 28): (3.83, 1.25),
        (A100_33B, 5, 2048, 63): (4.25, 1.22),
        (A100_33B, 3, 3072, 127): (3.51, 1.14),
    }
    ratios = (4, 7, 14, 28, 56, 112)
    figure_9 = {c: [(A6000_13B, 18, 1024, pd, c) for pd in ratios] for c in (128, 256, 512)}
    figure_11 = {  # -> the paper's gains of SARATHI and of Orca's best case
        (A6000_13B, 18, 1024, 256 / 17): (1.27, 1.11),
        (A6000_13B, 10, 2048, 256 / 9): (1.25, "near 1"),
        (A6000_13B, 6, 3072, 256 / 5): (1.23, "near 1"),
    }
    cases = [*table_4, *sum(figure_9.values(), []), *figure_11]
    wanted = [(case, policy) for case in cases for policy in ("request-level", "sarathi")]
    wanted += [(case, "orca-best") for case in (*figure_11, *figure_9[256])]
    jobs = [(system, policy, *load) for (system, *load), policy in wanted]
    found = dict(zip(wanted, run(throughput, jobs)))

    def gain(case, policy="sarathi"):
        return found[case, policy] / found[case, "request-level"]

    rows = []
    for case, papers in table_4.items():
        system, batch, length, pd = case
        ours = decode_speedup(system.cost(NANOGPT_CPU_S), length, batch), gain(case)
        name = f"{system.model}, {length // 1024}K, B {batch}, P:D {pd}"
        rows.append([name, *sum(map(beside, papers, ours), [])])
    columns = compared("", paper="decode speedup")
    columns |= {"throughput gain": ".2f", "simulated gain": ".2f", "its error": "+.0%"}
    title = "peak gains with chunks of 256 (A6000: 13B; A100: 33B)"
    yield Table("S-T4", title, columns, rows, f"With {CPU}.")

    rows = [[f"chunk {chunk}", *map(gain, cases)] for chunk, cases in figure_9.items()]
    columns = {"gain at 1K, B = 18": ""} | {f"P:D {pd}": ".2fx" for pd in ratios}
    title = "gain over P:D (paper: 1.27x at P:D 14 with 256, 1.23x at 28 with 512, lower with 128)"
    note = f"The peak should be at P:D = C / (B - 1): 7.5, 15 and 30. With {CPU}."
    at_14, at_28 = gain(figure_9[256][2]), gain(figure_9[512][3])
    finding = "1.27x with chunks of 256 and 1.23x with 512 published, "
    finding += f"{at_14:.2f}x and {at_28:.2f}x simulated"
    yield Table("S-F9", title, columns, rows, note, finding=finding)

    rows = []
    for case, papers in figure_11.items():
        gains = map(beside, papers, (gain(case), gain(case, "orca-best")))
        rows.append([f"{case[2] // 1024}K, B {case[1]}", *sum(gains, [])])
    peak = max(figure_9[256], key=lambda case: gain(case, "orca-best"))
    name = f"1K, Orca's peak (S-F11b), P:D {peak[3]}"
    rows.append([name, None, None, None, *beside(1.11, gain(peak, "orca-best"))])
    columns = compared("gain at P:D = 256 / (B - 1)")
    columns |= {"Orca best case": ".2f", "simulated Orca": ".2f", "its error": "+.0%"}
    note = "Orca's worst case is the baseline. Prompts of 960 lose to tiles one by one, but not "
    note += f"18\nat once. With {CPU}."
    title = "SARATHI and Orca's best case over the baseline"
    yield Table("S-F11", title, columns, rows, note)


def pipeline_jobs(lengths, chunk=256, cpu_s=0.0, link=None, alone="orca-best"):
    """Arguments of `offline`: Orca's pipeline, replicas under the policy `alone`, SARATHI's."""
    pipeline = PIPELINE._replace(pp_link=link)
    runs = ((pipeline, "orca-best", 1), (TP_ONLY, alone, 8), (pipeline, "sarathi", 1))
    return [(system, policy, lengths, copies, chunk, cpu_s) for system, policy, copies in runs]


def sarathi_pipeline(run, requests, cpu_s):
    """S-F12: GPT-3 on 64 A100, a pipeline under Orca and SARATHI, and replicas without one."""
    mixed = zipf_lengths(1024, LONGEST, 0.4, 10, 10_000, 0)
    few = mixed[:1000]
    mean = sum(map(sum, few)) // 1000
    same = [(mean - mean // 11, mean // 11)] * 1000
    variants = {
        "": pipeline_jobs(mixed),
        "1,000 of them": pipeline_jobs(few),
        "all of one length": pipeline_jobs(same),
        "replicas under request-level": pipeline_jobs(few, alone="request-level"),
        "replicas under SARATHI": pipeline_jobs(few, alone="sarathi"),
        "chunk 512": pipeline_jobs(few, chunk=512),
        "Ethernet between stages": pipeline_jobs(few, link="ethernet"),
        "4 ms of CPU per stage": pipeline_jobs(few, cpu_s=4e-3),
        "10 ms of CPU per stage": pipeline_jobs(few, cpu_s=10e-3),
    }
    results = run(offline, sum(variants.values(), []))
    found = dict(zip(variants, zip(results[::3], results[1::3], results[2::3])))
    names = ("orca-best, TP 8 x PP 8", "TP 8, 8 replicas", "sarathi, TP 8 x PP 8")
    whole = dict(zip(names, found.pop("")))

    rows = [[name, *its[:4]] for name, its in whole.items()]
    columns = {"": "", "batch": "d", "makespan s": ",.0f", "stages busy": ".0%"}
    columns |= {"median bubble of a request s": ".2f"}
    lengths = "10,000 requests of 1K to 4K tokens (Zipf 0.4), P:D 10, all there at time 0"
    note = "Paper: batches of 27 (each of 8 micro-batches in flight) and 11."
    yield Table("S-F12", f"GPT-3 on 64 A100, {lengths}", columns, rows, note, (whole,))

    rows = []
    for name, (orca, alone, ours) in {"10,000 requests": whole.values(), **found}.items():
        pairs = ((alone, ours), (orca, ours), (orca, alone))
        gains = [theirs.makespan / its.makespan for theirs, its in pairs]
        rows.append([name, *gains, orca.bubble / ours.bubble if ours.bubble else None])
    heads = ("SARATHI over replicas", "SARATHI over Orca", "replicas over Orca")
    columns = {"makespan": ""} | dict.fromkeys(heads, ".2fx") | {"bubbles Orca / SARATHI": ".1fx"}
    papers = zip(columns.items(), ("", 1.48, 1.91, 1.28, 6.29), rows[0])
    gains = [[head, *beside(paper, ours)] for (head, _), paper, ours in [*papers][1:]]
    yield Table("S-F12", "gains in makespan", compared(""), gains)

    note = "All rows but the first are of 1,000 requests. With one length most of the gain over "
    note += "Orca\ngoes: it comes from batches that differ. What the CPU adds weighs on small "
    note += "chunks first,\nwhich take 10 ms in a stage."
    title = "gains, and how they move with what the paper does not say"
    yield Table("S-F12", title, columns, rows, note)


def bubble_example(run, requests, cpu_s):
    """S-F1, S-F5 and SS-F8: four requests in two stages, and the bubbles PB1, PB2 and PB3."""
    prompts, rows = {"A": 2048, "B": 1024, "C": 2040, "D": 1020}, []
    data = stage_runs, kinds = {}, {}
    arrivals = [Arrival(0.0, prompt, 20) for prompt in prompts.values()]
    for policy in ("orca-best", "sarathi-serve"):
        config = EngineConfig(policy, 256, 2, 8192, page_size=8192, pages=4)
        seen = simulate(PIPELINE._replace(pp=2).cost(), config, arrivals, timeline=True)
        sums = dict.fromkeys(("PB1", "PB2", "PB3"), 0.0)
        stage_runs[policy], kinds[policy] = seen.stage_runs, bubble_kinds(seen.stage_runs)
        for stage_run, kind in kinds[policy]:
            sums[kind] += stage_run.bubble
        times = (*sums.values(), sum(sums.values()), seen.run.seconds)
        rows.append([policy, *(1e3 * seconds for seconds in times)])
    lengths = ", ".join(f"{name} {prompt:,} + 20" for name, prompt in prompts.items())
    title = f"bubbles in two stages: GPT-3, TP 8 x PP 2; requests {lengths} tokens"
    columns = {"ms": ""} | dict.fromkeys([*sums, "all bubbles", "makespan"], ",.1f")
    note = "PB1: prefills of different length; PB2: prefill against decodes; PB3: decodes at\n"
    note += "different contexts, and what the output head adds to the last stage. Chunk 256."
    whole, chunked = (f"{bubbles:.0f} ms" for *_, bubbles, _ in rows)
    finding = f"drawn without numbers; bubbles of {whole} with whole prompts, {chunked} with chunks"
    yield Table("SS-F8", title, columns, rows, note, data, finding)
