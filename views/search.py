"""Draw what was searched for under an SLO: the capacity of each policy (Sarathi-Serve, Figures 10
to 12), and the token budget (§4.3). Read first: style.py. Read next: pipelines.py.
"""

from math import nan

from matplotlib import colormaps
from matplotlib.markers import CARETRIGHTBASE

from experiments.metrics import MAX_DELAY_S
from views import style

TITLE = "The highest rate that meets the SLO, and the latencies against the load"
CONTEXTS = {"ls": ["-", "--", ":", "-."], "marker": list("os^D")}
CONTEXTS |= {"color": colormaps["viridis"]([0, 0.7, 0.35, 0.85])}


def plot_capacity(results, machine, file, slo_s):
    """Draw what the search for the capacity found, {name: what run.found_so_far says}, and write
    the picture to `file`: the capacities, "at least" as an arrow, "below" as an empty bar, and both
    latencies against the rate, with their limits."""
    colors, height = style.policy_colors(results), 1.1 + 0.3 * len(results)
    figure = style.new_figure(height + 3.1)
    top, bottom = figure.subfigures(2, 1, height_ratios=[height, 3.1])
    bars, found = top.subplots(), [its["capacity_qps"] for its in results.values()]
    names = [style.label(name) + " (busy)" * its["busy"] for name, its in results.items()]
    faces = ["none" if qps.bound == "below" else colors[name] for name, qps in zip(colors, found)]
    drawn = bars.barh(names, found, 0.7, color=faces, edgecolor=[*colors.values()])
    goes_on = [18 if qps.bound == "at least" else 0 for qps in found]  # points: the arrow's size
    sizes = [points**2 for points in goes_on]
    bars.scatter(found, names, sizes, [*colors.values()], marker=CARETRIGHTBASE)
    bars.bar_label(drawn, map(style.three_digits, found), padding=[4 + p for p in goes_on])
    bars.margins(x=0.2)
    bars.set(ylim=(len(results) - 0.4, -0.6), xlabel="capacity in requests/s", xlim=(0, None))
    bars.spines[["top", "right"]].set_visible(False)
    curves = [("p99_tbt_s", "P99 time between tokens in s", slo_s, "SLO")]
    curves += [("p50_delay_s", "median scheduling delay in s", MAX_DELAY_S, "limit")]
    for axis, (key, title, limit, word) in zip(bottom.subplots(1, 2), curves):
        for name, result in results.items():
            last = {point["qps"]: point for point in result["points"]}  # its last run is a rate's
            for met, look in ((True, {"ls": "-"}), (False, {"ls": "", "mfc": "white"})):
                its = sorted((q, p[key]) for q, p in last.items() if p["met"] == met)
                x, y = ([pair[i] for pair in its if pair[1] is not None] for i in (0, 1))
                axis.plot(x, y, marker="o", ms=5, lw=1.4, color=colors[name], **look)
        axis.axhline(limit, **style.LIMIT)
        style.log_scale("x", axis)
        style.log_scale("y", axis)
        axis.set_title(f"{title} (dashed: {word} {limit:.3g} s)", loc="left")
        axis.set_xlabel("load in requests/s (hollow: not met)")
    return style.finish(figure, TITLE, file, machine)


def plot_budget(rows, machine, file, slo_s, chosen):
    """Draw the time of an iteration against its token budget, and write the picture to `file`.
    `rows` is a list of (budget in tokens, context in tokens, decodes, seconds), with the same
    decodes in all; for each context there is a line, and at the left a mark: the decodes alone.
    `slo_s` is the SLO of TBT in seconds, `chosen` the budget that was taken, maybe None."""
    decodes = rows[0][2]
    budgets = sorted({row[0] for row in rows if row[0] > decodes})
    decode_only = budgets[0] / 2  # where the decode-only times are on the axis
    figure = style.new_figure(4.8)
    axis = figure.subplots()
    axis.set_prop_cycle(**CONTEXTS)
    for context in sorted({row[1] for row in rows}):
        (_, alone), *times = sorted((row[0], row[3]) for row in rows if row[1] == context)
        points = (decode_only, alone), (nan, nan), *times
        axis.plot(*zip(*points), ms=5, label=f"{decodes} decodes, context {context:,}")
    axis.axhline(slo_s, label=f"SLO {slo_s:.3g} s", **style.LIMIT)
    style.log_scale("y", axis)
    axis.set_xscale("log", base=2)
    named, apart = budgets[:1], (budgets[-1] / decode_only) ** 0.05  # or labels collide
    for budget in budgets:
        named += [budget] if budget >= apart * named[-1] else []
    axis.set_xticks([decode_only, *named], ["decode\nonly", *named])
    axis.set_xticks([], minor=True)
    if chosen is not None:
        look = {"color": style.POLICY_COLORS["sarathi-serve"], "lw": 6, "alpha": 0.25}
        axis.axvline(chosen, label=f"chosen: {chosen} tokens", **look)
    axis.set_xlabel("token budget of a hybrid batch in tokens, decodes included")
    axis.set_ylabel("time of an iteration in s")
    axis.legend(loc="upper left")
    return style.finish(figure, "One-time profile for the token budget", file, machine)
