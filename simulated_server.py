"""A simulated machine for bench.py serve and bench.py capacity: the same loads and tables, on a clock that only counts.

    python bench.py serve --simulate a100-80gb --model yi-34b --tp 2 --cpu-ms 5
    python bench.py capacity --simulate this        seconds instead of the half hour that this machine would need

Read first: simulator.py and cost_model.py. Read next: bench_serve.py.
"""

from dataclasses import asdict

from cost_model import DEVICES, GEOMETRIES, LINKS, FittedCost, cost_of
from model import PRESETS
from profiling import BASE_BATCH, base_context, cost_cases, time_batches
from serving import Base
from simulator import simulate

THIS = "this"  # the name of the machine that is here
SIMULATED = ("tp", "pp", "replicas", "tp_link", "pp_link", "cpu_ms")  # options that only a simulated machine has
REAL = ("init_from", "device", "dtype", "attention", "compile", "threads")  # and those that it has not


def add_simulation_options(parser):
    """The options that put a simulated machine in the place of this one."""
    add = parser.add
    more = ", ".join(name for name in GEOMETRIES if name not in PRESETS)
    add("--simulate", f"count time as a device would take it: {', '.join(DEVICES)}; or {THIS}, fitted to a profile of "
        f"this machine. With a DEVICE --model is required, may also be {more}, and --kv-tokens is all that fits",
        shown="none", metavar="DEVICE")
    add("--tp", "simulated GPUs that share each layer", 1, type=int)
    add("--pp", "simulated stages of a pipeline", 1, type=int)
    add("--replicas", "simulated copies of all that, which take from one line", 1, type=int)
    add("--tp-link", f"what joins the GPUs of a stage: {', '.join(LINKS)}", shown="the device's own")
    add("--pp-link", "what joins the stages", shown="infiniband")
    add("--cpu-ms", "simulated milliseconds that an iteration costs each stage on the CPU", 0.0, type=float)


def check_simulation_options(parser, args):
    """Exit with a message if one of these makes no sense, or goes only without or with --simulate. Sets kv_tokens."""
    here = args.simulate in (None, THIS)
    for option in SIMULATED if here else REAL:
        if getattr(args, option) != parser.get_default(option):
            parser.error(f"--{option.replace('_', '-')}: goes {'only' if here else 'not'} with --simulate DEVICE")
    if here:
        return
    if args.simulate not in DEVICES:
        parser.error(f"--simulate {args.simulate}: must be one of {', '.join(DEVICES)}, {THIS}")
    if args.model not in GEOMETRIES:
        parser.error(f"--model {args.model}: with --simulate must be one of {', '.join(GEOMETRIES)}")
    if not 0 <= args.cpu_ms < float("inf"):
        parser.error(f"--cpu-ms {args.cpu_ms:g}: must be at least 0")
    config = GEOMETRIES[args.model]
    if config.family != "llama" and args.max_len > config.max_positions:
        parser.error(f"--max-len {args.max_len}: this model is limited to {config.max_positions}")
    try:
        most = simulated_cost(args).kv_tokens()
    except ValueError as error:
        parser.error(str(error))
    args.kv_tokens = most if args.kv_tokens is None else args.kv_tokens
    if not args.pp * args.max_len <= args.kv_tokens <= most:
        parser.error(f"--kv-tokens {args.kv_tokens}: must be at least {args.pp * args.max_len}, a request of --max-len "
                     f"per micro-batch, and at most {most}, what fits beside the weights")


def base_seconds(cost, max_len=8192):
    """Seconds of the decode iteration that SLOs are multiples of, Sarathi-Serve §5.1."""
    return cost.seconds([(0, base_context(max_len) - 1, 1)] * BASE_BATCH)


def base_of(cost, max_len, chunk):
    """The serving.Base of a simulated machine, as serving.measure_base measures that of a real one."""
    chunk = min(chunk, max_len)
    return Base(base_seconds(cost, max_len), cost.seconds([(0, 0, chunk)]) / chunk, BASE_BATCH, base_context(max_len))


def simulated_cost(args):
    """The CostModel of these options. Raises ValueError if one of them makes no sense."""
    return cost_of(args.model, args.simulate, args.tp, args.pp, args.tp_link, args.pp_link, args.cpu_ms / 1e3)


class SimulatedServer:
    """What bench_serve.Server is for this machine: the base of its SLO, its description, and a way to serve."""

    def __init__(self, args):
        self.cost, self.replicas = simulated_cost(args), args.replicas
        self.base = base_of(self.cost, args.max_len, args.chunk)
        device, gpus = self.cost.device, args.tp * args.pp * args.replicas
        replicas = f", {args.replicas} replicas" if args.replicas > 1 else ""
        self.machine = {"device": f"simulated: {gpus} x {device.name}, TP {args.tp} x PP {args.pp}{replicas}, "
                                  f"{args.cpu_ms:g} ms of CPU per iteration and stage",
                        "constants": asdict(device), "model": args.model, "dtype": "16 bits"}
        self.micro_batches = args.pp * args.replicas
        self.lines = f"constants: {device.source}\n"
        if self.micro_batches > 1:
            self.lines += (f"the batch is that of each of {self.micro_batches} micro-batches, the memory that of each "
                           f"of {args.replicas} replicas\n")

    def serve(self, spec, arrivals, settings, hopeless=None, **more):
        """A simulated serving.Run; it takes no time worth cutting short, so `hopeless` is not asked."""
        return simulate(self.cost, spec, arrivals, settings, replicas=self.replicas, **more).run


class FittedServer(SimulatedServer):
    """What a bench_serve.Server is, simulated with what a profile tells of it."""

    micro_batches = replicas = 1

    def __init__(self, server, args):
        rows = time_batches(server.model, cost_cases(args.max_len), args.max_len, args.attention)
        self.cost, self.base = FittedCost([(row.shape, row.seconds) for row in rows]), server.base
        self.machine = server.machine | {"device": f"simulated: {server.machine['device']}", "law": self.cost.law.law}
        self.lines = f"{server.lines}fitted to {len(rows)} batches: {self.cost.describe()}\n"
