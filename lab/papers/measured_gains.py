"""Functions that measure how SARATHI's gain depends on P:D and on the chunk size, on this device.

Each function serves requests that are all there at the start, plots the throughput over that of
request-level, checks the trend, and holds the paper's numbers against ours. A short one to begin
with: s_f13c.

S is SARATHI; F is a figure. Read first: finding.py, conditions.py, bench.py and
measured_offline.py. Read next: measured.py."""

from dataclasses import dataclass

from lab.papers.bench import Bench
from lab.papers.checks import Check, less
from lab.papers.conditions import ridge_above, riding_pays
from lab.papers.finding import Finding, Published
from lab.papers.measured_offline import RIDING, gains_over_ratios
from lab.papers.measured_phases import LLAMA_13B
from lab.papers.plot import Plot, over


@dataclass(frozen=True)
class Balance:
    """A load of requests of one length, and the P:D at which prompts and outputs run out together.

    It is served there, at a quarter of that P:D and at four times that."""

    length: int  # tokens of a request, prompt and output
    batch: int
    chunk: int
    requests: int
    paper: str  # the length and batch size of the paper's requests
    paper_gain: float

    @property
    def pd_ratio(self) -> float:
        """P:D = C / (B - 1), SARATHI §5.1.3."""
        return self.chunk / (self.batch - 1)


BALANCED = "C / (B - 1)"
PLACES = {"a quarter of it": 1 / 4, BALANCED: 1, "four times it": 4}  # P:D over the balanced one


def s_f9b(bench: Bench) -> Finding:
    """S-F9b: longer requests, too, gain most at P:D = C / (B - 1), and about 10 % around it.

    Figures 9b and 9c are of requests of 2K and 3K tokens, of which 10 and 6 fit in memory. Their
    gains at the peak are those of Figure 11a."""
    cases = bench.pick(
        gpu=[
            Balance(2048, 10, 256, 41, "2K, B = 10", 1.25),
            Balance(3072, 6, 256, 25, "3K, B = 6", 1.23),
        ],
        cpu=[
            Balance(512, 3, 64, 13, "2K, B = 10", 1.25),
            Balance(768, 2, 64, 9, "3K, B = 6", 1.23),
        ],
        quick=[
            Balance(256, 3, 64, 7, "2K, B = 10", 1.25),
            Balance(384, 2, 64, 5, "3K, B = 6", 1.23),
        ],
    )
    plots: list[Plot] = []
    checks: list[Check] = []
    published: list[Published] = []
    for case in cases:
        middle = f"sarathi:{case.chunk}"
        gains = Plot(f"{case.length:,} tokens", x="P:D", y="gain")
        for place, multiple in PLACES.items():
            rows = bench.run_policies(
                [
                    "request-level",
                    f"sarathi:{case.chunk // 2}",
                    middle,
                    f"sarathi:{2 * case.chunk}",
                ],
                seq_len=case.length,
                batch=case.batch,
                chunk=case.chunk,
                requests=case.requests,
                pd_ratio=multiple * case.pd_ratio,
            )
            for name, row in rows.items():
                gains.add(name, place, row.gain)
        line = gains[middle]
        peak = Plot(f"{case.length:,} tokens", x="P:D", y="gain at the peak over it", spec=".3fx")
        for place in PLACES:
            if place != BALANCED:
                peak.add(middle, place, over(line.at(BALANCED), line.at(place)))
        pays = riding_pays(bench, case.batch, case.chunk)
        plots += [gains, peak]
        checks += [
            less(0.98, line, because=RIDING, where=pays),
            less(
                1,
                peak[middle],
                because="With less prompt decodes are left without a chunk, with more prompt "
                "chunks without decodes.",
                where=pays,
            ),
        ]
        published += [
            Published(f"peak gain at {case.paper}", case.paper_gain, line, BALANCED, LLAMA_13B),
            Published(
                f"gain off the peak at {case.paper}: around 10 %",
                1.10,
                line,
                "four times it",
                LLAMA_13B,
            ),
        ]
    return Finding(plots=plots, checks=checks, published=published)


def s_f11b(bench: Bench) -> Finding:
    """S-F11b: Orca at its best is SARATHI with a chunk as long as a request: it peaks later, lower.

    The runs are those of S-F9."""
    load = gains_over_ratios(bench)
    gains = load.gains
    orca = gains["orca-best"]
    half, middle, double = [gains[name] for name in load.names]
    best = gains.best("sarathi", load.names)
    peaks = Plot("peak", x="", y="P:D of the largest gain", spec=".3g")
    for line in (half, middle, double, orca):
        peaks.add(line.name, "P:D", float(line.x_of_largest()))
    pays = load.pays(bench)
    return Finding(
        plots=[gains, peaks],
        checks=[
            less(
                orca,
                best.times(1.02),
                because="A prompt that is computed whole carries decodes in one iteration only.",
                where=pays,
            ),
            less(
                peaks[half.name],
                peaks["orca-best"],
                because="A chunk of C = L tokens carries all decodes from P:D = L / (B - 1) on.",
                where=pays,
            ),
        ],
        published=[
            Published("peak gain of Orca at its best", 1.11, orca, orca.x_of_largest(), LLAMA_13B),
            Published("peak gain, C = 256", 1.27, middle, middle.x_of_largest(), LLAMA_13B),
            Published("peak gain, C = 512", 1.23, double, double.x_of_largest(), LLAMA_13B),
        ],
    )


def s_f13c(bench: Bench) -> Finding:
    """S-F13c: the best chunk lies in between: small ones carry more decodes but read weights often.

    Chunks of 64 almost match the baseline, though their prefill takes five times as long, and of
    128 gain up to 1.16x, with a prefill that takes more than twice as long. There 256 beats 320, as
    products compute whole tiles of 128 rows. This cannot be seen here: our scheduler rounds a batch
    down to whole tiles, so that chunks of 320 are of 256 on a GPU."""
    length = bench.pick(gpu=1024, cpu=256, quick=256)
    batch = bench.pick(gpu=18, cpu=6, quick=6)
    unit = bench.pick(gpu=64, cpu=16, quick=16)  # the smallest chunk
    chunk_sizes = [unit, 2 * unit, 4 * unit, 5 * unit, 8 * unit]
    rows = bench.run_policies(
        ["request-level", *(f"sarathi:{chunk}" for chunk in chunk_sizes)],
        seq_len=length,
        batch=batch,
        chunk=4 * unit,
        requests=bench.pick(gpu=73, cpu=25, quick=13),
        pd_ratio=4 * unit / (batch - 1),
    )
    gains = Plot("", x="chunk", y="gain", log="x")
    for chunk in chunk_sizes:
        gains.add("sarathi", chunk, rows[f"sarathi:{chunk}"].gain)
    gain = gains["sarathi"]
    smallest, second, middle, *_ = chunk_sizes
    ratios = Plot("of chunks", x="", y="gain over gain", spec=".3fx")
    ratios.add_row(
        "gain",
        {
            "256 over the baseline": gain.at(middle),
            "256 over 64": over(gain.at(middle), gain.at(smallest)),
        },
    )
    return Finding(
        plots=[gains, ratios],
        checks=[
            less(
                1.02,
                ratios["256 over the baseline"],
                because=RIDING,
                where=riding_pays(bench, batch, middle),
            ),
            less(
                1,
                ratios["256 over 64"],
                because="Four small chunks read the weights four times, where one does once.",
                where=ridge_above(bench, smallest),
            ),
        ],
        published=[
            Published("gain with chunks of 128, up to", 1.16, gain, second, LLAMA_13B),
            Published("gain with chunks of 256", 1.27, gain, middle, LLAMA_13B),
            Published("chunks of 64 almost match", 1.0, gain, smallest, LLAMA_13B, within=None),
        ],
    )
