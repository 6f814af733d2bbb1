"""Both papers' claims of whole loads, each by commands of the bench: `CLAIMS`, {claim: a function}.

Which commands, and at which sizes, is in published.toml; a function makes a Finding of [(sizes, the
report that --json would write)], in the order of the sizes there. Read first: claims.py, and
offline.py and serving.py, whose reports these are. Read next: simulator/report.py."""

import math
import shlex
from functools import partial
from itertools import combinations, product
from pathlib import Path

from experiments.claims import Finding, Panel
from experiments.tables import show
from kv_cache import Pages
from policies.config import EngineConfig
from scheduler import Request

TRACE = Path(__file__).with_name("a_to_d.csv")  # two requests, and two more in the midst of them
NOISE = 0.02  # in a ratio of throughputs


def points(sizes):
    """Each combination of sizes, {name: a number or a list}; or of several such, one by one."""
    for its in sizes if isinstance(sizes, list) else [sizes]:
        lists = [value if isinstance(value, list) else [value] for value in its.values()]
        yield from (dict(zip(its, values)) for values in product(*lists))


def measured(key, its, setup):
    """The Finding of a claim, of which published.toml has `its` command and sizes."""
    files = dict(a_to_d=shlex.quote(str(TRACE)), picture=shlex.quote(setup.picture))
    commands = [(at, its["run"].format_map(at | files)) for at in points(its[setup.size])]
    return CLAIMS[key]([(at, setup.bench(words)) for at, words in commands])


def rows_of(report):
    """{policy: row} of a report of any command."""
    return next(report[name] for name in ("end_to_end", "runs", "results") if name in report)


def is_busy(done):
    """Was the machine too busy in any of these runs?"""
    reports = [report for _, report in done]
    rows = (row for report in reports for row in rows_of(report).values())
    return any(r.get("slo_busy") for r in reports) or any(row["busy"] for row in rows)


def grid(title, x, y, values, spec, log=""):
    """A table and a Panel of {name: {x: y}}: for each name a row, and a line."""
    columns = {y: ""} | {f"{x} {show(at, ',.4g')}": spec for at in next(iter(values.values()))}
    rows = [[name, *(show(cell, spec) for cell in its.values())] for name, its in values.items()]
    return (title, columns, rows), Panel(
        title, x, y, {n: [*values[n].items()] for n in values}, log
    )


def listed(values, spec=".2fx"):
    """Numbers as text."""
    return ", ".join(show(value, spec) for value in values)


def gains(x, done, judge):
    """S-T4, S-F9 and S-F11: the Finding of throughputs over that of request-level, at each of the
    sizes named x. `judge` is a function of {policy: {x: gain}}: (shows, said)."""
    of = lambda key: {
        name: {at[x]: report["end_to_end"][name][key] for at, report in done}
        for name in done[0][1]["end_to_end"]
    }
    found, speedups = of("gain"), [report["decode_speedup"]["total"] for _, report in done]
    found.pop("request-level")
    title = ", ".join(f"{name} {value}" for name, value in done[0][0].items() if name != x)
    drawn, panel = grid(title, x, "gain", found, ".2fx", "x" * (x == "ratio"))
    promised = listed(report["promised_gain"] for _, report in done)
    said = {name.partition(":")[0]: listed(its.values()) for name, its in found.items()}
    said |= {"promised": promised, "speedups": listed(speedups, ".1fx")}
    shows, more = judge(found)
    return Finding([drawn], said | more, shows, [panel], is_busy(done))


def judge_gain(found):
    """S-T4: SARATHI gains in every context."""
    return {"gain": min(found["sarathi"].values()) > 1 + NOISE}, {}


def judge_orca(found):
    """S-F11: SARATHI > Orca's best case >= its worst, which is about the baseline."""
    worst, best, ours = (list(found[name].values()) for name in ("orca", "orca-best", "sarathi"))
    triples = list(zip(worst, best, ours))
    return {
        "worst": all(abs(a - 1) < 2 * NOISE and b > a - NOISE for a, b, _ in triples),
        "gain": all(c > b + NOISE for _, b, c in triples),
    }, {}


def judge_peaks(found):
    """S-F9: there is a gain, and its peak is at a larger P:D with larger chunks; of ratios as good
    but for noise the geometric mean is the peak."""
    peaks, best = {}, {}
    for name, its in found.items():
        best[name] = max(its.values())
        flat = [math.log(at) for at, gain in its.items() if gain > best[name] - NOISE]
        peaks[name] = math.exp(sum(flat) / len(flat))
    ours = [name for name in found if name.startswith("sarathi")]
    said = ", ".join(f"{best[n]:.2f}x at P:D {peaks[n]:.1f} ({n.partition(':')[2]})" for n in ours)
    right = all(peaks[a] < peaks[b] for a, b in zip(ours, ours[1:]))
    return {"gain": min(best[n] for n in ours) > 1 + NOISE, "right": right}, {"peaks": said}


def speedups(done):
    """S-F8 and S-T2: a decode that rides with a chunk is cheaper, the less so the larger the batch
    and the context; None is lost in the noise."""
    found = {}
    for at, report in done:
        found.setdefault(f"context {at['L']:,}", {})[at["B"]] = report["decode_speedup"]["total"]
    known = [its for its in ([*filter(None, row.values())] for row in found.values()) if its]
    cheaper = all(min(its) > 1 for its in known) if known else None
    falls = all(its[0] == max(its) for its in known) if known else None
    drawn, panel = grid("decode speedup", "B", "times", found, ".1fx")
    rows = [
        [f"{at['L']:,}, {at['B']}", name, row["prefill_token_ms"], row["decode_token_ms"]]
        for at, report in done
        for name, row in report["decode_maximal"].items()
    ]
    columns = {"context, B": "", "batch": "", "prefill token ms": ".3f", "decode token ms": ".2f"}
    said = {"speedups": listed([x for row in found.values() for x in row.values()], ".1fx")}
    shows = {"cheaper": cheaper, "falls": falls}
    tables = [drawn, ("what a token takes, Table 2", columns, rows)]
    return Finding(
        tables, said, shows, [panel], any(report["machine"]["busy"] for _, report in done)
    )


def misplaced(values, order):
    """["a < b"] for each pair of names in `order` for which that is not so in {name: number}."""
    return [f"{a} < {b}" for a, b in combinations(order, 2) if not values[a] < values[b]]


def in_order(orders, done):
    """SS-T4 and B-7: of each report a number of all policies, {its key: the policies in the order
    in which it should rise, or after a "-" in the key fall}; chunks in the order of the command."""
    rows, wrong, count = [], [], 0
    varies = [name for name in done[0][0] if len({at[name] for at, _ in done}) > 1]
    for (at, report), its in zip(done, orders):
        for which, order in its.items():
            key, sign = which.removeprefix("-"), -1 if which.startswith("-") else 1
            row = {name: run[key] for name, run in rows_of(report).items()}
            order = [name for head in order for name in row if name.partition(":")[0] == head]
            what = ", ".join([*(str(at[name]).strip() or "half of it" for name in varies), key])
            signed = {name: sign * value for name, value in row.items()}
            wrong += [f"{pair} in {what}" for pair in misplaced(signed, order)]
            count += math.comb(len(order), 2)
            rows.append([what, *row.values()])
    columns = {"": ""} | dict.fromkeys(rows_of(done[0][1]), ",.3f")
    text = "; ".join(f"{row[0]}: {listed(row[1:], ',.3f')}" for row in rows)
    said = {"order": f"{count - len(wrong)} of {count}", "rows": text, "wrong": ", ".join(wrong)}
    return Finding([("", columns, rows)], said, {"order": not wrong}, [], is_busy(done))


def capacities(done):
    """SS-F10 to SS-F12: Sarathi-Serve's capacity, with the better of two budgets, is above others',
    most under the strictest SLO."""
    loads, gains_over, shows = {}, [], {"gain": True, "strict": True}
    for at, report in done:
        servers, slo_s = loads.setdefault(at["lengths"], {}), round(report["slo_s"], 3)
        for name, row in report["results"].items():
            its = servers.setdefault(f"{name}, batch {at['batch']}", {})
            its[slo_s] = row["capacity_qps"]
    drawn = [grid(which, "SLO s", "requests/s", its, ".2f", "x") for which, its in loads.items()]
    for servers in loads.values():
        ours = [its for name, its in servers.items() if name.startswith("sarathi-serve")]
        best = {slo: max(its[slo] for its in ours) for slo in ours[0]}
        for name, its in servers.items():
            if not name.startswith("sarathi-serve"):
                times = [best[slo].over(rate) for slo, rate in its.items()]
                gains_over.append(f"{name} {listed(times)}")
                sure = None not in times
                shows["gain"] &= sure and min(times) >= 1 and times[0] > 1
                shows["strict"] &= sure and times[0] >= times[-1]
    tables, panels = map(list, zip(*drawn))
    how = {report["machine"]["device"].partition(":")[0] for _, report in done}
    said = {"gains": "; ".join(gains_over), "how": "".join(how & {"simulated"}) or "measured"}
    return Finding(tables, said, shows, panels, is_busy(done))


def timeline(done):
    """SS-F7: A and B decode when C and D come, with prompts of several chunks. vllm and orca stall
    A and B, request-level lets C and D wait, sarathi-serve does neither."""
    rows = done[0][1]["runs"]
    longest = {name: row["stalls"]["longest"] for name, row in rows.items()}
    stalls = {name: its["prefill_tokens"] if its else 0 for name, its in longest.items()}
    waits = {name: row["ttft_s"]["max"] for name, row in rows.items()}
    static, ours = stalls["request-level"], stalls["sarathi-serve"]
    columns = {"": "", "prompt tokens in the longest stall": ",d", "last first token s": ".3f"}
    table = "requests A to D", columns, [[n, stalls[n], waits[n]] for n in rows]
    shows = {
        "stall": static == 0 < 3 * ours <= min(stalls["vllm"], stalls["orca"]),
        "wait": waits["request-level"] > max(waits["vllm"], waits["orca"]),
    }
    said = {"stalls": ", ".join(f"{name} {n:,}" for name, n in stalls.items())}
    return Finding(
        [table], said | {"waits": listed(waits.values(), ".2f")}, shows, [], is_busy(done)
    )


def static_slots(_):
    """B-1: slots used under static batching, as the post counts, a step for each token, and in the
    iterations of request-level, on a scheduler without a model."""
    lengths, counts = ((128, 500), (64, 50), (256, 200), (32, 30)), []
    totals = [sum(pair) for pair in lengths]
    steps = [sum(n > step for n in totals) for step in range(max(totals))]
    config = EngineConfig("request-level", max_batch=len(lengths), max_len=len(steps))
    scheduler = config.scheduler(Pages(len(lengths), len(steps)), lambda: len(counts))
    for i, (prompt_len, output_len) in enumerate(lengths):
        scheduler.add(Request(i, [0] * prompt_len, prompt_len, output_len))
    while batch := scheduler.next_batch():
        counts.append(len(batch))
        scheduler.advance(batch, [0] * len(batch), len(counts))
    used = {"post": steps, "iterations": counts}
    means = {name: sum(its) / len(its) / len(lengths) for name, its in used.items()}
    panel = Panel("slots used", "step", "of 4", {name: [*enumerate(i)] for name, i in used.items()})
    levels = all(list(dict.fromkeys(its)) == [4, 3, 2, 1] for its in used.values())
    return Finding([], means, {"half": levels and round(means["post"], 2) == 0.5}, [panel])


ABLATION = {
    "p50_ttft_s": ["hybrid-only", "sarathi-serve", "chunked-only"],
    "p99_tbt_s": ["sarathi-serve", "chunked-only", "hybrid-only"],
}
POST = ["request-level", "sarathi", "orca"]  # and the smaller chunks first
AT_ONCE = {"tokens_per_s": POST, "p99_tbt_s": [*POST[1:], POST[0]]}
CLAIMS = {
    "S-F8": speedups,
    "S-T4": partial(gains, "L", judge=judge_gain),
    "S-F9": partial(gains, "ratio", judge=judge_peaks),
    "S-F11": partial(gains, "L", judge=judge_orca),
    "SS-F7": timeline,
    "SS-F10": capacities,
    "SS-F12": capacities,
    "SS-T4": partial(in_order, [ABLATION] * 2),
    "B-1": static_slots,
    "B-7": partial(in_order, [AT_ONCE, {"-p99_ttft_s": POST}]),
}
