"""Draw what was searched for under an SLO: the capacity of each policy, and the token budget.

`plot_capacity` follows Sarathi-Serve's Figures 10 to 12, `plot_budget` the profile of its §4.3.
Read first: style.py. Read next: pipelines.py.
"""

from matplotlib import colormaps
from matplotlib.markers import CARETRIGHTBASE
from matplotlib.ticker import NullLocator

from experiments.metrics import MAX_DELAY_S
from views import style
from views.style import POLICY_COLORS, STYLES


def plot_capacity(results, machine, file, slo_s):
    """Draw what the search for the capacity found, and write the picture to `file`.

    `results` is {name: what run.found_so_far says}; of points, what is None is not drawn. At the
    top the capacities, "at least" as an arrow, "below" as an empty bar; below, both latencies
    against the rate, and their limits.
    """
    colors, height = style.policy_colors(results), 1.1 + 0.3 * len(results)
    figure = style.new_figure(height + 3.1)
    top, bottom = figure.subfigures(2, 1, height_ratios=[height, 3.1])
    bars = top.subplots()
    for name, result in results.items():
        qps, color, text = result["capacity_qps"], colors[name], style.label(name)
        text += " (busy)" * result["busy"]
        look = {"fill": False, "ls": "--"} if qps.bound == "below" else {"facecolor": color}
        bar = bars.barh(text, qps, 0.7, edgecolor=color, **look)
        if qps.bound == "at least":
            bars.plot([qps], [text], marker=CARETRIGHTBASE, ms=18, color=color)
        padding = 18 if qps.bound == "at least" else 4
        bars.bar_label(bar, [style.three_digits(qps)], padding=padding)
    bars.margins(x=0.2)
    bars.set(ylim=(len(results) - 0.4, -0.6), xlabel="capacity in requests/s", xlim=(0, None))
    bars.spines[["top", "right"]].set_visible(False)
    curves = [("p99_tbt_s", "P99 time between tokens in s", slo_s, "SLO")]
    curves += [("p50_delay_s", "median scheduling delay in s", MAX_DELAY_S, "limit")]
    for axis, (key, title, limit, word) in zip(bottom.subplots(1, 2), curves):
        rates, drawn = [], [limit]
        for name, result in results.items():
            last = {point["qps"]: point for point in result["points"]}  # its last run is a rate's
            for met, look in ((True, {"ls": "-"}), (False, {"ls": "", "mfc": "white"})):
                its = sorted((q, p[key]) for q, p in last.items() if p["met"] == met)
                x, y = ([pair[i] for pair in its if pair[1] is not None] for i in (0, 1))
                axis.plot(x, y, marker="o", ms=5, lw=1.4, color=colors[name], **look)
                rates, drawn = rates + x, drawn + y
        style.mark_limit(axis, limit, word)
        style.log_scale(axis, "y", drawn)
        style.log_scale(axis, "x", rates)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("load in requests/s (hollow: not met)")
        axis.grid(alpha=0.25)
    title = "The highest rate that meets the SLO, and the latencies against the load\n"
    return style.finish(figure, title + style.machine_line(machine), file)


def plot_budget(rows, machine, file, slo_s, chosen):
    """Draw the time of an iteration against its token budget, and write the picture to `file`.

    `rows` is a list of (budget in tokens, context in tokens, decodes, seconds), with the same
    decodes in all. There is a line for each context, and at the left a mark: the decodes alone.
    `slo_s` is the SLO of TBT in seconds, `chosen` the budget that was taken, maybe None.
    """
    decodes, contexts = rows[0][2], sorted({row[1] for row in rows})
    budgets = sorted({row[0] for row in rows if row[0] > decodes})
    decode_only = budgets[0] / 2  # where the decode-only times are on the axis
    figure = style.new_figure(4.8)
    axis = figure.subplots()
    for i, context in enumerate(contexts):
        (_, alone), *times = sorted((row[0], row[3]) for row in rows if row[1] == context)
        color = colormaps["viridis"](0.85 * i / max(1, len(contexts) - 1))
        dashes, marker = STYLES[i % len(STYLES)]
        look = {"marker": marker, "color": color}
        label = f"{decodes} decodes, context {context:,}"
        axis.plot(*zip(*times), dashes, ms=5, label=label, **look)
        axis.plot([decode_only], [alone], ms=7, ls="", **look)
    style.mark_limit(axis, slo_s, "SLO")
    style.log_scale(axis, "y", [*(row[3] for row in rows), slo_s])
    axis.set_xscale("log", base=2)
    shown, apart = [], (budgets[-1] / decode_only) ** 0.05  # or labels collide
    for budget in [chosen, *budgets] if chosen in budgets else budgets:
        if all(max(budget, other) >= apart * min(budget, other) for other in shown):
            shown.append(budget)
    names = [budget if budget in shown else "" for budget in budgets]
    axis.set_xticks([decode_only, *budgets], ["decode\nonly", *names])
    axis.xaxis.set_minor_locator(NullLocator())
    color = POLICY_COLORS["sarathi-serve"]
    style.mark_column(axis, chosen, f"chosen: {chosen} tokens", color, lw=6, alpha=0.25)
    axis.set_xlabel("token budget of a hybrid batch in tokens, decodes included")
    axis.set_ylabel("time of an iteration in s")
    axis.grid(alpha=0.25)
    axis.legend(loc="upper left", **style.BARE)
    title = "One-time profile for the token budget\n"
    return style.finish(figure, title + style.machine_line(machine), file)
