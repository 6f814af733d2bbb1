"""Draw what was searched for under an SLO: the capacity of each policy, and the token budget.

`plot_capacity` follows Sarathi-Serve's Figures 10 to 12, `plot_budget` the one-time profile of its §4.3.

Read first: plot.py.
"""

from matplotlib.ticker import NullLocator

from plot import POLICY_COLORS, log_scale, machine_line, mark_limit, plt, policy_colors

CHOSEN = POLICY_COLORS["sarathi-serve"]
STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"))  # line and marker of each context, from the shortest


def plot_capacity(results, machine, file, slo_s=None, max_delay_s=2.0):
    """Draw what the search for the capacity found, and write the picture to `file`.

    `results` is {name: {"capacity_qps": requests/s or None, "points": [one dict for each rate that was tried]}}, a
    point has qps, p99_tbt_s, p50_delay_s and cut_short. On the left the capacities; on the right P99 TBT and the median
    scheduling delay against the rate, with the limits of both that define the capacity, `slo_s` and `max_delay_s`
    seconds. Hollow points were cut short. What is None is not drawn. `machine` is the bench's description of it.
    """
    colors = policy_colors(results)
    figure = plt.figure(figsize=(12, 6.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.5])
    axis = left.subplots()
    bars = axis.barh(list(results), [result["capacity_qps"] or 0 for result in results.values()], height=0.7,
                     color=list(colors.values()))
    axis.bar_label(bars, ["none" if result["capacity_qps"] is None else f"{result['capacity_qps']:#.3g}".rstrip(".")
                          for result in results.values()], padding=4)
    axis.set_ylim(len(results) - 0.4, -0.6)
    axis.set_xlim(0, 1.18 * max(bar.get_width() for bar in bars) or 1)
    axis.set_xlabel("capacity in requests/s")
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)

    panels = right.subplots(2, 1, sharex=True)
    curves = (("p99_tbt_s", "P99 time between tokens\n(TBT) in s", slo_s, "SLO"),
              ("p50_delay_s", "median scheduling\ndelay in s", max_delay_s, "limit"))
    for axis, (key, label, limit, word) in zip(panels, curves):
        drawn = []
        for name, result in results.items():
            x, y, cut = curve_points(result["points"], key)
            axis.plot(x, y, "-", color=colors[name], lw=1.4, alpha=0.8)
            for is_cut in (False, True):
                chosen = [i for i, c in enumerate(cut) if c == is_cut]
                axis.plot([x[i] for i in chosen], [y[i] for i in chosen], "o", ms=6, color=colors[name],
                          markerfacecolor="white" if is_cut else colors[name], label=None if is_cut else name)
            drawn += y
        mark_limit(axis, limit, word)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        log_scale(axis, "y", [*drawn, limit])
    log_scale(panels[-1], "x", [point["qps"] for result in results.values() for point in result["points"]])
    panels[-1].set_xlabel("load in requests/s (hollow: the run had failed and was cut short)")
    panels[0].legend(fontsize=9, frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    figure.suptitle("The highest rate that meets the SLO, and the latencies against the load\n" + machine_line(machine),
                    fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def curve_points(points, key):
    """(rates, values of `key`, cut short or not), three lists in the order of the rates; a None is left out."""
    seen = [point for point in points if point.get(key) is not None]
    rows = sorted((point["qps"], point[key], bool(point["cut_short"])) for point in seen)
    return tuple(map(list, zip(*rows))) or ([], [], [])


def plot_budget(rows, machine, file, slo_s=None, chosen=None):
    """Draw the time of an iteration against its token budget, and write the picture to `file`.

    `rows` is a list of (budget in tokens, context in tokens, decodes, seconds). There is a line for each (context,
    decodes). A row whose budget leaves no room beside its decodes is a decode-only iteration: its time is marked at the
    left. `slo_s` is the SLO of TBT in seconds, `chosen` the budget that was taken. `machine` is the bench's description
    of it.
    """
    lines = budget_lines(rows)
    contexts, decodes = (sorted({pair[i] for pair in lines}) for i in (0, 1))
    budgets = sorted({budget for line in lines.values() for budget, _ in line["hybrid"]})
    decode_only = min(budgets, default=1) / 2  # where the decode-only times are on the axis
    figure, axis = plt.subplots(figsize=(12, 5.6), layout="constrained")
    for (context, count), line in lines.items():
        color = plt.cm.viridis(0.85 * decodes.index(count) / max(1, len(decodes) - 1))
        style, marker = STYLES[contexts.index(context) % len(STYLES)]
        hybrid, alone = line["hybrid"], line["decode_only"]
        axis.plot([budget for budget, _ in hybrid], [seconds for _, seconds in hybrid], style, marker=marker, ms=5,
                  color=color, label=f"{count} decodes, context {context:,}")
        axis.plot([decode_only] * len(alone), alone, marker=marker, ms=7, ls="", color=color)
    mark_limit(axis, slo_s, "SLO")
    log_scale(axis, "y", [*(row[3] for row in rows), slo_s])
    axis.set_xscale("log", base=2)
    axis.set_xticks([decode_only, *budgets], ["decode\nonly", *budgets])
    axis.xaxis.set_minor_locator(NullLocator())
    if chosen is not None:
        axis.axvline(chosen, color=CHOSEN, lw=6, alpha=0.25)
        axis.text(chosen, 1.0, f"chosen: {chosen} tokens", transform=axis.get_xaxis_transform(), ha="center",
                  va="bottom", fontsize=10, color=CHOSEN)
    axis.set_xlabel("token budget of a hybrid batch in tokens, decodes included")
    axis.set_ylabel("time of an iteration in s")
    axis.grid(alpha=0.25)
    axis.legend(*axis.get_legend_handles_labels(), fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle("One-time profile for the token budget\n" + machine_line(machine), fontsize=10)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def budget_lines(rows):
    """{(context, decodes): {"hybrid": [(budget, seconds)], "decode_only": [seconds]}}, sorted; a None is left out."""
    lines = {}
    for context, decodes, budget, seconds in sorted((c, d, b, s) for b, c, d, s in rows if s is not None):
        line = lines.setdefault((context, decodes), {"hybrid": [], "decode_only": []})
        if budget > decodes:
            line["hybrid"].append((budget, seconds))
        else:
            line["decode_only"].append(seconds)
    return lines
