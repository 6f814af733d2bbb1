"""The options of `bench.py serve` and `bench.py capacity`, and how they depend on each other.

Read next: serve.py."""

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cli.loading import resolve_model
from cli.model import ModelOptions
from cli.options import (
    SMALL_PAGES,
    OptionParser,
    PerDevice,
    add_model_options,
    chunk_option,
    file_option,
    from_args,
    json_option,
    model_options,
    nonempty_text,
    number,
    option,
    plot_option,
    policies_option,
    whole,
)
from lab.measure.capacity import ROUNDS
from lab.measure.token_budget import MAX_DELAY_S, MULTIPLES
from lab.measure.workload import LENGTHS, TRACE_COLUMNS
from lab.simulator.cost_model import CostModel
from lab.simulator.devices import DEVICES, GEOMETRIES, LINKS
from policies.pools import Pools
from policies.priority import PRIORITIES
from pretrained.presets import PRESETS
from runtime.memory import small_page_size

DEFAULT_LENGTHS = "sharegpt4"
DEFAULT_POLICIES = "vllm,orca,sarathi-serve,dynamic"
CACHING = {"off": [False], "on": [True], "both": [False, True]}  # --prefix-caching
REQUESTS = {"serve": PerDevice(cpu=48, gpu=500), "capacity": PerDevice(cpu=128, gpu=512)}
KV_SENDS = {"layers": "layer by layer during the prefill", "end": "all layers at its end"}
ONLY_SIMULATED = (
    "replicas",
    "pools",
    "kv_link",
    "kv_send",
    "tp_link",
    "pp_link",
    "cpu_ms",
)  # go with --simulate DEVICE
ONLY_REAL = ("device", "dtype", "attention", "compile")  # do not


def shared_prefix(text: str) -> tuple[int, int]:
    """The type of --shared-prefix: (length, count)."""
    pair = re.fullmatch(r"0*([1-9]\d{0,8}):0*([1-9]\d{0,8})", text)
    if not pair:
        raise ArgumentTypeError(f"{text:.60}: must be LENGTH:COUNT, two whole numbers, as in 512:4")
    return int(pair[1]), int(pair[2])


def class_shares(text: str) -> dict[str, float]:
    """The type of --classes: {class: its requests, in relation to those of the others}."""
    parts = [part.strip().partition("=") for part in text.split(",")]
    shares = {name: share for name, _, share in parts}
    if len(shares) < len(parts) or not shares.keys() <= {*PRIORITIES}:
        raise ArgumentTypeError(f"{text}: must be some of {', '.join(PRIORITIES)}, each = a number")
    parse_share = number(above=0)
    return {name: parse_share(share) for name, share in shares.items()}


def page_sizes(text: str) -> list[int | str]:
    """The type of --page-size: numbers, or "max"."""
    parse_size = whole(minimum=1)
    parts = [part.strip() for part in text.split(",")]
    return [part if part == "max" else parse_size(part) for part in parts]


def two_pools(text: str) -> Pools:
    """The type of --pools: PREFILL:DECODE."""
    try:
        return Pools.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error).removeprefix("pools=")) from None


def slo_target(text: str) -> str | float:
    """The type of --slo: a name of a multiple, or a number of seconds."""
    try:
        return text if text in MULTIPLES else number(above=0)(text)
    except ArgumentTypeError:
        allowed = "strict, relaxed, a multiple from 1x to 100x, or a number of seconds"
        raise ArgumentTypeError(f"{text:.60}: must be {allowed}") from None


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The options of `bench.py serve`. Those of `capacity` are the same, and CapacityOptions."""

    command: str
    qps: float | None = option(
        "requests per second on average",
        type=number(minimum=1e-4),
        default_text="half of what is estimated to be possible, or the trace's own",
    )
    long_prompt: int | None = option(
        "one more request, the first, has so many prompt tokens", type=whole(minimum=1)
    )
    classes: dict[str, float] = option(  # class -> its share of the requests
        "shares of the classes of `priority`, as in realtime=1,normal=4,low=5",
        type=class_shares,
        default="normal=1",
    )
    requests: int = option("how many requests arrive", type=whole(minimum=1, maximum=1_000_000))
    lengths: str = option(
        f"of requests: {', '.join(LENGTHS)}, scaled to --max-len, or PROMPT+OUTPUT tokens; "
        "several, with commas, follow each other",
        type=nonempty_text,
        default=DEFAULT_LENGTHS,
    )
    trace: str | None = option(
        f"lengths and arrivals from a log with columns {', '.join(TRACE_COLUMNS)}",
        type=nonempty_text,
        metavar="FILE.csv",
    )
    trace_scale: float = option(
        "multiplies the lengths in it", type=number(above=0, maximum=1), default=1.0
    )
    shared_prefix: tuple[int, int] = option(  # (length, count)
        "each prompt begins with one of COUNT prefixes of LENGTH tokens, before its own",
        type=shared_prefix,
        metavar="LENGTH:COUNT",
        default=(0, 1),
        default_text="none",
    )
    max_len: int = option(
        "the longest prompt and output",
        type=whole(minimum=3),
        default=PerDevice(cpu=1024, gpu=8192),
    )
    ttft_slo: float = option(
        "goodput counts requests with a TTFT of up to so many seconds, and a P99 of their own TBTs "
        "within --slo",
        type=number(above=0),
        default=MAX_DELAY_S,
        metavar="SECONDS",
    )
    seed: int  # of lengths, arrivals and prompts
    plot: str | None = plot_option("draw latencies and timelines")
    html: str | None = file_option("write a page to step through what was decided, and why")
    json: str | None = json_option()
    prefix_caching: list[bool] = option(  # one run each
        "share pages of prompts that begin alike; both is side by side with not doing so",
        choices=tuple(CACHING),
        default_text="both if a prefix is shared, else off",
    )
    policies: list[str] = policies_option(DEFAULT_POLICIES)
    chunk: int = chunk_option(PerDevice(cpu=128, gpu=512))
    batch: int = option(
        "B, the most requests at once", type=whole(minimum=1), default=PerDevice(cpu=32, gpu=128)
    )
    page_size: list[int] = option(  # one run each
        "tokens in a page, or max for a slot per request; several, with commas: each with each",
        type=page_sizes,
        default_text=SMALL_PAGES,
    )
    kv_tokens: int = option(
        "tokens in the cache, for every policy and page size",
        type=whole(minimum=1),
        default_text="a third of --batch requests of --max-len",
    )
    max_waiting: int | None = option(
        "reject a request that finds so many in the queue",
        type=whole(minimum=1),
        default_text="no limit",
    )
    slo: str | float = option(  # a name in MULTIPLES, or seconds
        "of P99 TBT: strict or relaxed, which are 5x or 25x a decode iteration, another such "
        "multiple, as 10x, or seconds",
        type=slo_target,
        default="strict",
    )
    model: ModelOptions
    simulate: str | None = option(  # a name in DEVICES
        f"count time as a device would take it: {', '.join(DEVICES)}. Then --preset is required, "
        f"may also be {', '.join(name for name in GEOMETRIES if name not in PRESETS)}, and "
        "--kv-tokens is all that fits",
        type=nonempty_text,
        metavar="DEVICE",
    )
    replicas: int = option(
        "simulated copies of the GPUs of --tp and --pp, which share one queue",
        type=whole(minimum=1, maximum=10_000),
        default=1,
    )
    pools: Pools | None = option(
        "also serve by two pools of instances, so many that prefill and so many that decode, "
        "beside as many replicas; goes with --simulate DEVICE",
        type=two_pools,
        metavar="PREFILL:DECODE",
    )
    kv_link: str = option(
        "what joins the two pools", choices=tuple(LINKS), default="infiniband", metavar="LINK"
    )
    kv_send: str = option(
        "keys and values go layer by layer, or all at the end of the prefill",
        choices=tuple(KV_SENDS),
        default="layers",
    )
    tp_link: str | None = option(
        f"what joins the GPUs of a stage: {', '.join(LINKS)}",
        type=nonempty_text,
        default_text="the device's own",
        metavar="LINK",
    )
    pp_link: str | None = option(
        "what joins the stages", type=nonempty_text, default_text="infiniband", metavar="LINK"
    )
    cpu_ms: float = option(
        "simulated milliseconds that an iteration costs each stage on the CPU",
        type=number(minimum=0, maximum=1e6),
        default=0.0,
    )

    def cost(self) -> CostModel:
        """The cost model of the simulated GPUs. Raises ValueError for unknown names, and sizes that
        do not divide the model."""
        model = self.model
        return CostModel.named(
            str(model.preset),
            str(self.simulate),
            tp=model.tp,
            pp=model.pp,
            tp_link=self.tp_link,
            pp_link=self.pp_link,
            cpu_s=self.cpu_ms / 1e3,
        )

    @property
    def fewest_requests(self) -> int:
        """Fewer would all run at once at any rate, and no rate would be too high for them."""
        return ROUNDS * self.batch * self.model.pp * self.replicas


@dataclass(frozen=True, kw_only=True)
class CapacityOptions(ServeOptions):
    """The options of `bench.py capacity`. Those of ONLY_SERVE have their values there."""

    plot: str | None = plot_option("draw capacities, and latency against rate")
    ratio: float = option(
        "the steps of the search: a rate above the capacity by so much fails",
        type=number(above=1, maximum=2),
        default=1.05,
    )


ONLY_SERVE = {
    "qps": None,
    "long_prompt": None,
    "classes": {"normal": 1},
    "ttft_slo": MAX_DELAY_S,
    "html": None,
}


def add_options(parser: OptionParser, fixed: Mapping[str, Any] | None = None) -> None:
    """Add the options of the parser's command, "serve" or "capacity", but for those that have the
    values of `fixed`."""
    command = parser.get_default("command")
    parser.usage = f"{parser.prog} [options]"
    requests_text = str(REQUESTS[command])
    if command == "serve":
        fixed = fixed or {}
        parser.add_fields(ServeOptions, fixed, requests=requests_text)
    else:
        fixed = ONLY_SERVE
        requests_text += f", and at least {ROUNDS} times what may run at once"
        parser.add_fields(CapacityOptions, fixed, requests=requests_text)
    parser.set_defaults(**fixed)
    add_model_options(parser, "llama3-8b on a GPU with 75 GB or more, else llama-160m")


def resolve(parser: OptionParser, args: Namespace) -> ServeOptions:
    """The options, with those filled in that depend on others. Exits with a message if they make no
    sense together. Raises ValueError as CostModel does."""
    is_simulated = args.simulate is not None
    _check_machine(parser, args, is_simulated)
    model = model_options(args)
    cache_device = args.device
    if args.pools:
        args.replicas = args.pools.instances
    if is_simulated:
        cache_device = "cpu"  # simulated attention reads any pages
        args.device = "cuda"  # whose defaults hold
    kind = CapacityOptions if args.command == "capacity" else ServeOptions
    options = from_args(kind, args, model=model)
    max_len = options.max_len
    kv_tokens = _simulated_kv_tokens(parser, options) if is_simulated else args.kv_tokens
    _check_load(parser, options)
    sizes = args.page_size or [small_page_size(max_len, cache_device)]
    sizes = list(dict.fromkeys(max_len if size == "max" else size for size in sizes))
    if max(sizes) > max_len:
        parser.error(f"--page-size {max(sizes)}: must be at most --max-len {max_len}")
    caching = CACHING[args.prefix_caching or ("both" if options.shared_prefix[0] else "off")]
    if True in caching and max(sizes) == max_len:
        parser.error(f"--page-size {max_len}: must be below --max-len, or --prefix-caching off")
    request_tokens = max(-(-max_len // size) * size for size in sizes)
    kv_tokens = kv_tokens or max(args.pp, options.batch // 3) * request_tokens
    if kv_tokens < request_tokens:
        needed = f"must be at least {request_tokens}, for one request"
        parser.error(f"--kv-tokens {kv_tokens}: {needed}")
    requests = args.requests or REQUESTS[args.command].pick(args.device)
    if args.command == "capacity" and not args.requests:
        requests = max(requests, options.fewest_requests)
    if not is_simulated:
        model = resolve_model(model, gpu_preset="llama3-8b", gpu_bytes=75e9)
    return replace(
        options,
        requests=requests,
        prefix_caching=caching,
        page_size=sizes,
        kv_tokens=kv_tokens,
        model=model,
    )


def _check_machine(parser: OptionParser, args: Namespace, is_simulated: bool) -> None:
    """Exit with a message if an option goes only with a simulated device, or only without."""
    if args.model and is_simulated:
        parser.error(f"--model {args.model}: a simulated device takes --preset {args.model}")
    if args.preset is None and is_simulated:
        parser.error(f"--simulate {args.simulate}: needs --preset, from {', '.join(GEOMETRIES)}")
    for name in ONLY_REAL if is_simulated else ONLY_SIMULATED:
        if getattr(args, name) != parser.get_default(name):
            goes = "does not go" if is_simulated else "goes only"
            parser.error(f"--{name.replace('_', '-')}: {goes} with --simulate DEVICE")
    if args.pools and (args.pp > 1 or args.replicas > 1):
        parser.error("--pools: goes without --pp and --replicas: there are as many replicas")


def _simulated_kv_tokens(parser: OptionParser, options: ServeOptions) -> int:
    """The memory of a simulated machine in tokens: --kv-tokens, or all that fits."""
    cost = options.cost()
    max_len = options.max_len
    largest = cost.kv_tokens()
    if cost.config.family != "llama" and max_len > cost.config.max_positions:
        limit = f"this model is limited to {cost.config.max_positions}"
        parser.error(f"--max-len {max_len}: {limit}")
    kv_tokens = options.kv_tokens or largest
    smallest = cost.pp * max_len
    if not smallest <= kv_tokens <= largest:
        limits = f"at least {smallest}, --max-len per micro-batch, and at most {largest}, what fits"
        parser.error(f"--kv-tokens {kv_tokens}: must be {limits} beside the weights")
    return kv_tokens


def _check_load(parser: OptionParser, options: ServeOptions) -> None:
    """Exit with a message if the options of a load make no sense together."""
    prefix = options.shared_prefix[0]
    max_len = options.max_len
    if prefix > max_len - 2:
        parser.error(f"--shared-prefix {prefix}: must leave 2 of --max-len {max_len} tokens")
    longest = max_len - prefix
    if options.long_prompt and options.long_prompt >= longest:
        limit = f"below {longest}, --max-len less --shared-prefix"
        parser.error(f"--long-prompt {options.long_prompt}: must be {limit}")
    if options.trace and (options.lengths != DEFAULT_LENGTHS or options.long_prompt or prefix):
        parser.error("--trace: has its own lengths, no --lengths, --long-prompt, --shared-prefix")
    if options.trace_scale != 1 and not options.trace:
        parser.error("--trace-scale: goes with --trace")
