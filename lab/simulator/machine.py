"""The commands serve and capacity, here or on a simulated machine: a clock that counts.

    python bench.py serve --simulate a100-80gb --model yi-34b --tp 2 --cpu-ms 5
    python bench.py capacity --simulate this        seconds, in the place of real time
    python bench.py serve --simulate this           the engine, and its simulation beside it

Read first: simulation.py, and lab/commands/serving.py, whose RealMachine has the same face."""

from dataclasses import asdict, replace
from functools import partial
from itertools import product

from cli import options
from lab.commands import serving
from lab.measure import metrics, workload
from lab.measure import timing as measure
from lab.measure.capacity import Base
from lab.simulator.cost_model import CostModel, FittedCost
from lab.simulator.devices import DEVICES, GEOMETRIES, LINKS
from lab.simulator.simulation import simulate
from policies.token_budget import BASE_BATCH, base_context, time_iterations
from pretrained.presets import PRESETS

THIS = "this"  # the name of the machine that is here
SIMULATED = ("replicas", "tp_link", "pp_link", "cpu_ms")  # options of one that is not
REAL = ("init_from", "device", "dtype", "attention", "compile", "threads")  # and of one that is


def add_options(parser):
    """Those of serving, and the options that put a simulated machine in the place of this one."""
    serving.add_options(parser, parser.get_default("command"))
    more = ", ".join(name for name in GEOMETRIES if name not in PRESETS)
    devices, links = ", ".join(DEVICES), ", ".join(LINKS)
    parser.add_table("simulated", devices=devices, this=THIS, geometries=more, links=links)


def check(parser, args):
    """serving.check, with what goes only with --simulate, or without; kv_tokens is, where it was
    left open, all that fits. Raises ValueError as CostModel does."""
    here = args.simulate in (None, THIS)
    for option in SIMULATED if here else REAL:
        if getattr(args, option) != parser.get_default(option):
            goes = f"{'goes only' if here else 'does not go'} with --simulate DEVICE"
            parser.error(f"--{option.replace('_', '-')}: {goes}")
    if args.simulate == THIS and args.tp * args.pp > 1:
        parser.error(f"--tp, --pp: do not go with --simulate {THIS}; see bench.py pipeline")
    if not here:
        cost, longest = SimulatedMachine(args).cost, args.max_len
        config, most, least = cost.config, cost.kv_tokens(), args.pp * longest
        if config.family != "llama" and longest > config.max_positions:
            parser.error(f"--max-len {longest}: this model is limited to {config.max_positions}")
        args.kv_tokens = args.kv_tokens or most
        if not least <= args.kv_tokens <= most:
            limits = f"at least {least}, --max-len per micro-batch, and at most {most}, what fits"
            parser.error(f"--kv-tokens {args.kv_tokens}: must be {limits} beside the weights")
    serving.check(parser, args)


def base_of(cost, max_len=8192, chunk=2048):
    """The Base of a simulated machine, as run.measure_base measures that of a real one."""
    context, chunk = base_context(max_len), min(chunk, max_len)
    decode_s = cost.seconds([(0, context - 1, 1)] * BASE_BATCH)
    return Base(decode_s, cost.seconds([(0, 0, chunk)]) / chunk, BASE_BATCH, context)


class SimulatedMachine:
    """What serving.RealMachine is for this machine. Raises ValueError for options of no sense."""

    drift = 0.0  # nobody else uses it

    def __init__(self, args):
        more = args.tp_link, args.pp_link, args.cpu_ms / 1e3
        self.cost = CostModel.named(args.model, args.simulate, args.tp, args.pp, *more)
        self.args, self.base = args, base_of(self.cost, args.max_len, args.chunk)
        device, count = self.cost.device, args.pp * args.replicas
        replicas = f", {args.replicas} replicas" if args.replicas > 1 else ""
        name = f"{args.tp * count} x {device.name}, TP {args.tp} x PP {args.pp}{replicas}"
        name = f"simulated: {name}, {args.cpu_ms:g} ms of CPU per iteration and stage"
        self.machine = {"device": name, "model": args.model, "dtype": "16 bits"}
        self.machine["constants"] = asdict(device)
        self.micro_batches, self.lines = count, f"constants: {device.source}\n"
        if count > 1:
            each = f"the batch of each of {count} micro-batches"
            self.lines += f"{each}, the memory of each of {args.replicas} replicas\n"

    def serve(self, config, arrivals, **more):
        """A simulated Run."""
        args, prompts = self.args, None  # only lengths matter
        if config.prefix_caching:
            prompts = workload.prompts(arrivals, 256, args.seed, args.shared_prefix)
        run = simulate(self.cost, config, arrivals, prompts, replicas=args.replicas, **more).run
        return replace(run, drift=self.drift)


def profile_cases(max_len):
    """Batches as time_iterations takes them, whose chunks and contexts are of at most `max_len`
    tokens: those that a FittedCost is fitted to, and others."""
    most, contexts = 3 * max_len // 4, (max_len // 32, max_len // 2, max_len)
    fitted = [*product((0, 32, 256), (max_len // 8, most), (0, 4, 16)), (512, max_len, 0)]
    others = product((0, min(48, most), min(300, most)), contexts, (0, 6, 12))
    case = lambda n, context, decodes: (min(n, max_len) + decodes, max(1, context), decodes)
    return [[case(*its) for its in cases if its[0] or its[2]] for cases in (fitted, others)]


class FittedMachine(SimulatedMachine):
    """A serving.RealMachine, simulated with what a profile of it tells; batches that are not in it
    tell how well. `serve` has two `sides`, {what follows the name of a policy: who serves}."""

    micro_batches = 1

    def __init__(self, real, args):
        fitted, others = profile_cases(args.max_len)
        cases, size, model = fitted + others, min(64, args.max_len), real.model
        pages = max(-(-c // size) * n + -(-max(budget - n, c) // size) for budget, c, n in cases)
        runner = options.runner_for(model)(model, pages, size, args.max_len, args.attention)
        rows, self.drift = measure.steadily(partial(time_iterations, runner, cases), model.device)
        timed, busy = [(row.shape, row.seconds) for row in rows], self.drift > measure.BUSY
        self.cost, self.base, self.args = FittedCost([timed[: len(fitted)]]), real.base, args
        (law,), rest = self.cost.laws, timed[len(fitted) :]
        off = metrics.percentiles(abs(law.predict(shape) / seconds - 1) for shape, seconds in rest)
        found = "off by {p50:.1%} in the median, {p90:.1%} at P90, {max:.1%} at most"
        found = measure.TOO_BUSY if busy else found.format_map(asdict(off))
        self.lines = f"{real.lines}fitted to {len(fitted)} batches\n"
        self.lines += f"predictions of {len(others)} others: {found}\n"
        more = {"law": law.law, "prediction_error": asdict(off), "profile_busy": busy}
        self.machine, self.sides = real.machine | more, {"": real, ", simulated": self}
        if args.command != "serve":
            self.machine["device"] = f"simulated: {real.machine['device']}"
            self.sides = {"": self}


def make_machine(args, config, model=None):
    """The machine of --simulate, or this one, maybe with a model that is there. ValueError for
    options of no sense."""
    if args.simulate not in (None, THIS):
        return SimulatedMachine(args)
    real = serving.RealMachine(args, config, model)
    return FittedMachine(real, args) if args.simulate else real


def main(args, known=None):
    """The command args.command, on the machine of --simulate: see serving.main. Who knows machines
    has a function known(args, config, make_machine) that says which."""
    return serving.main(args, partial(known, make=make_machine) if known else make_machine)
