"""Draw what was searched for under an SLO: the capacity of each policy, and the token budget.

`plot_capacity` follows Sarathi-Serve's Figures 10 to 12, `plot_budget` the profile of its §4.3.
Read first: style.py. Read next: pipelines.py.
"""

from matplotlib import colormaps
from matplotlib.ticker import NullLocator

from experiments.metrics import MAX_DELAY_S
from views import style
from views.style import POLICY_COLORS, STYLES


def plot_capacity(results, machine, file, slo_s=None, max_delay_s=MAX_DELAY_S):
    """Draw what the search for the capacity found, and write the picture to `file`.

    `results` is {name: {"capacity_qps": requests/s or None, "points": [a dict for each rate]}}; a
    point has qps, p99_tbt_s, p50_delay_s and cut_short, and what is None is not drawn. On the left
    the capacities; on the right both latencies against the rate, with their limits in seconds.
    """
    colors, figure = style.policy_colors(results), style.new_figure(12, 6.4)
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.5])
    axis, found = left.subplots(), [result["capacity_qps"] for result in results.values()]
    bars = axis.barh(list(results), [qps or 0 for qps in found], 0.7, color=list(colors.values()))
    axis.bar_label(bars, [style.three_digits(qps) for qps in found], padding=4)
    axis.set(ylim=(len(results) - 0.4, -0.6), xlabel="capacity in requests/s")
    axis.set_xlim(0, 1.18 * max(qps or 0 for qps in found) or 1)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)

    panels = right.subplots(2, 1, sharex=True)
    curves = (
        ("p99_tbt_s", "P99 time between tokens\n(TBT) in s", slo_s, "SLO"),
        ("p50_delay_s", "median scheduling\ndelay in s", max_delay_s, "limit"),
    )
    for axis, (key, ylabel, limit, word) in zip(panels, curves):
        drawn = [limit]
        for name, result in results.items():
            x, y, cut = curve_points(result["points"], key)
            axis.plot(x, y, "-o", ms=6, color=colors[name], lw=1.4, label=name)
            hollow = [[value for value, is_cut in zip(its, cut) if is_cut] for its in (x, y)]
            axis.plot(*hollow, "o", ms=6, color=colors[name], mfc="white")
            drawn += y
        style.mark_limit(axis, limit, word)
        style.log_scale(axis, "y", drawn)
        axis.set_ylabel(ylabel)
        axis.grid(alpha=0.25)
    style.log_scale(
        axis, "x", [point["qps"] for its in results.values() for point in its["points"]]
    )
    axis.set_xlabel("load in requests/s (hollow: the run had failed and was cut short)")
    panels[0].legend(ncols=4, **style.ABOVE)
    title = "The highest rate that meets the SLO, and the latencies against the load\n"
    return style.finish(figure, title + style.machine_line(machine), file)


def curve_points(points, key):
    """(rates, values of `key`, cut short or not), three lists by rate; a None is left out."""
    seen = [point for point in points if point.get(key) is not None]
    rows = sorted((point["qps"], point[key], bool(point["cut_short"])) for point in seen)
    return tuple(map(list, zip(*rows))) or ([], [], [])


def plot_budget(rows, machine, file, slo_s=None, chosen=None):
    """Draw the time of an iteration against its token budget, and write the picture to `file`.

    `rows` is a list of (budget in tokens, context in tokens, decodes, seconds). There is a line for
    each (context, decodes); decode-only iterations, whose budget leaves no room beside the decodes,
    are marked at the left. `slo_s` is the SLO of TBT in seconds, `chosen` the budget taken.
    """
    lines, figure = budget_lines(rows), style.new_figure(12, 5.6)
    contexts, decodes = (sorted({pair[i] for pair in lines}) for i in (0, 1))
    budgets = sorted({b for (_, count), line in lines.items() for b, _ in line if b > count})
    decode_only = min(budgets, default=1) / 2  # where the decode-only times are on the axis
    axis = figure.subplots()
    for (context, count), line in lines.items():
        color = colormaps["viridis"](0.85 * decodes.index(count) / max(1, len(decodes) - 1))
        dashes, marker = STYLES[contexts.index(context) % len(STYLES)]
        alone = [seconds for budget, seconds in line if budget <= count]
        x, y = ([pair[i] for pair in line[len(alone) :]] for i in (0, 1))
        look = {"marker": marker, "color": color}
        axis.plot(x, y, dashes, ms=5, label=f"{count} decodes, context {context:,}", **look)
        axis.plot([decode_only] * len(alone), alone, ms=7, ls="", **look)
    style.mark_limit(axis, slo_s, "SLO")
    style.log_scale(axis, "y", [*(row[3] for row in rows), slo_s])
    axis.set_xscale("log", base=2)
    axis.set_xticks([decode_only, *budgets], ["decode\nonly", *budgets])
    axis.xaxis.set_minor_locator(NullLocator())
    color = POLICY_COLORS["sarathi-serve"]
    style.mark_column(axis, chosen, f"chosen: {chosen} tokens", color, lw=6, alpha=0.25)
    axis.set_xlabel("token budget of a hybrid batch in tokens, decodes included")
    axis.set_ylabel("time of an iteration in s")
    axis.grid(alpha=0.25)
    if lines:
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), **style.BARE)
    title = "One-time profile for the token budget\n"
    return style.finish(figure, title + style.machine_line(machine), file)


def budget_lines(rows):
    """{(context, decodes): [(budget, seconds)]}, sorted; a row without a time is left out."""
    lines, timed = {}, [row for row in rows if row[3] is not None]
    for budget, context, decodes, seconds in sorted(timed, key=lambda row: (row[1:3], row)):
        lines.setdefault((context, decodes), []).append((budget, seconds))
    return lines
