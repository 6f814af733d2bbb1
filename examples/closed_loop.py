"""What a closed loop of clients hides: `python -m examples.closed_loop`, in the top folder.

Some load generators keep so many clients, each of which asks again when it has its answer: from a
slow server they ask for less. Users do not wait for each other. The server is a simulated A100 with
llama3-8b, and 48 requests run at once."""

from argparse import ArgumentParser
from collections.abc import Sequence
from statistics import median

from config import EngineConfig
from lab.measure.workload import Arrival, make_lengths, poisson
from lab.simulator.cost_model import CostModel
from lab.simulator.simulation import simulate

ArgumentParser(description=__doc__).parse_args()  # --help prints the text above
cost = CostModel.named("llama3-8b", "a100-80gb")
config = EngineConfig(policy="sarathi-serve", max_batch=48, max_len=4096, page_size=16, pages=8192)
lengths = make_lengths("sharegpt4", count=600, max_len=4096, seed=0)


def serve(title: str, arrivals: Sequence[Arrival]) -> None:
    """Print how many requests a second are served, and how long they wait for a first token."""
    run = simulate(cost, config, arrivals).run
    waits = sorted(completion.ttft or 0.0 for completion in run.completions)
    rate = len(waits) / run.seconds
    longest = waits[-len(waits) // 100]
    print(
        f"{title}: {rate:.1f} a second served, TTFT P50 {median(waits):.2f} s, P99 {longest:.2f} s"
    )


for clients in (12, 24, 48):
    loop = [Arrival(0.2 * i, *lengths[i]) for i in range(clients)]
    for i in range(clients, len(lengths)):
        loop.append(Arrival(0.0, *lengths[i], follows=i - clients))
    serve(f"{clients} clients, each after its answer", loop)
for rate in (4, 6, 8, 10):
    serve(f"users, {rate} a second", poisson(lengths, rate, seed=0))
