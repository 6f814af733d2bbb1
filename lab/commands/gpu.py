"""All that a GPU can show, in one folder: tests, benches, and the papers' claims.

    python bench.py gpu --out results/h100     about an hour; the same command goes on after a cut

Each step is a process of its own, with a limit, and the most useful ones come first. What a step
prints is NAME.part.txt until it has ended well, then NAME.txt: a step whose NAME.txt is there is
done. NAME.log has its errors. README.md in the folder names the machine and all steps. Read first:
offline.py, serve.py, paper.py, whose commands the steps are."""

import importlib.metadata
import json
import platform
import shlex
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from cli.loading import SMALL_PRESET, find_device
from cli.options import OptionParser, nonempty_text, write_text
from kv_cache import kv_bytes_per_token
from lab.commands.paper import folder_of
from lab.measure import timing
from lab.papers import report
from lab.papers.measured import CLAIMS, Claim
from model import GPT, GPTConfig
from pretrained.presets import PRESETS
from speedups.packed_linear import count_parameters
from views.tables import Column, format_table

ROOT = Path(__file__).parents[2]
LARGEST_PRESET = "llama-13b"  # of SARATHI's measurements on one GPU
CACHE_TOKENS = 8192  # that must fit beside the weights
MAX_LEN = 4096  # of requests in serve, capacity and paper
LIMIT_S = 540  # of a step: some machines end a command after ten minutes
GRACE_S = 20  # for a step to keep what it has, when it is interrupted
TESTS = ("tests/cuda", "tests/test_xformers.py", "test_equivalence.py")
FILES = {"json": "json", "plot": "png", "csv": "csv"}  # an option, and how names of its files end
DONE = "done"


@dataclass(frozen=True)
class Step:
    """A process of this Python: `argv` are its arguments, `limit_s` is the time that it has."""

    name: str
    argv: Sequence[str]
    limit_s: float = LIMIT_S


@dataclass(frozen=True)
class Outcome:
    """How a step ended: DONE, or why not."""

    status: str
    seconds: float
    command: str


@dataclass(frozen=True)
class GpuOptions:
    """The options of `bench.py gpu`."""

    out: str | None
    device: str
    preset: str | None  # None: the largest that fits
    only: list[str] | None  # names of steps
    fresh: bool


def add_options(parser: OptionParser) -> None:
    """Add the options of the command."""
    parser.add_option(
        "--out",
        help="where results are kept",
        type=nonempty_text,
        default_text="results/<gpu>",
        metavar="DIRECTORY",
    )
    parser.add_option(
        "--device", help="where to run: cuda, cuda:1, ...", type=nonempty_text, default="cuda"
    )
    parser.add_option(
        "--preset",
        help="a geometry with random weights",
        choices=tuple(PRESETS),
        default_text=f"{LARGEST_PRESET}, or the largest that fits",
        metavar="NAME",
    )
    parser.add_option(
        "--only", help="some steps, as in chunk-256,serve", type=step_names, default_text="all"
    )
    parser.add_option("--fresh", help="run again what is done already", action="store_true")


def step_names(text: str) -> list[str]:
    """The type of --only: names with commas, not checked."""
    return [name.strip() for name in nonempty_text(text).split(",")]


def resolve(parser: OptionParser, args: Namespace) -> GpuOptions:
    """The options. Exits with a message for a CPU."""
    if not args.device.startswith("cuda"):
        parser.error(f"--device {args.device}: must be cuda, cuda:1, ...")
    return GpuOptions(args.out, args.device, args.preset, args.only, args.fresh)


def main(options: GpuOptions) -> None:
    """The command. Exits with status 1 if a step failed.

    Raises ValueError without such a device, for a step that does not exist, and for a folder with
    the results of another device or preset."""
    device = find_device(options.device)
    name = timing.device_name(device)
    out = Path(options.out) if options.out else report.RESULTS / folder_of(name, threads=0)
    memory_bytes = torch.cuda.get_device_properties(device).total_memory
    preset = options.preset or largest_preset(memory_bytes)
    steps = all_steps(preset, options.device, out, options.fresh)
    if options.only:
        unknown = set(options.only) - {step.name for step in steps}
        if unknown:
            names = ", ".join(step.name for step in steps)
            raise ValueError(f"--only {', '.join(sorted(unknown))}: the steps are {names}")
        steps = [step for step in steps if step.name in options.only]

    machine = {"preset": preset, **describe(device)}
    out.mkdir(parents=True, exist_ok=True)
    outcomes = read_outcomes(out, machine, options.fresh)
    if options.fresh:
        for step in steps:
            (out / f"{step.name}.txt").unlink(missing_ok=True)
            outcomes.pop(step.name, None)
    print(f"{name}, {preset}, {len(steps)} steps, results in {out}")
    try:
        run_steps(steps, out, machine, outcomes)
    except KeyboardInterrupt:
        print(f"\ninterrupted: {out}/README.md names what is there; the same command goes on")
        raise
    failed = [step.name for step in steps if outcomes[step.name].status != DONE]
    unfinished = f"; not done: {', '.join(failed)}" if failed else ""
    print(f"look at {out}/README.md, first at chunk-256.txt and table-2.txt{unfinished}")
    if failed:
        raise SystemExit(1)


def run_steps(
    steps: Sequence[Step],
    out: Path,
    machine: Mapping[str, object],
    outcomes: dict[str, Outcome],
    run: Callable[[Step, Path], str] | None = None,
) -> None:
    """Run the steps that are not done in the folder `out`, one after another, by `run_step` or
    another `run`. Puts the outcome of each into `outcomes`, and keeps all of them."""
    write_outcomes(out, machine, outcomes)
    for step in steps:
        if (out / f"{step.name}.txt").exists():
            outcomes.setdefault(step.name, Outcome(DONE, 0.0, command_of(step)))
            print(f"{step.name}: is done")
            continue
        print(f"{step.name}, at most {step.limit_s / 60:.0f} min: ", end="", flush=True)
        began = time.monotonic()
        status = "interrupted"
        try:
            status = (run or run_step)(step, out)
        finally:
            seconds = time.monotonic() - began
            outcomes[step.name] = Outcome(status, seconds, command_of(step))
            write_outcomes(out, machine, outcomes)
        print(f"{status}, {seconds:.0f} s")


def run_step(step: Step, out: Path) -> str:
    """Run a step in the folder `out`: DONE, or why it is not. A step that takes too long, or is
    interrupted with this process, may keep what it has."""
    part = out / f"{step.name}.part.txt"
    log = out / f"{step.name}.log"
    with part.open("w") as output, log.open("w") as errors:
        print(f"{time.strftime('%Y-%m-%d %H:%M')} {command_of(step)}", file=errors, flush=True)
        process = subprocess.Popen(
            [sys.executable, *step.argv],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        try:
            status = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            return f"timed out after {step.limit_s:.0f} s"
        finally:
            end_process(process)
    if status == 0:
        part.replace(out / f"{step.name}.txt")
        return DONE
    lines = [*part.read_text("utf-8").splitlines(), *log.read_text("utf-8").splitlines()[1:]]
    reason = next((line for line in reversed(lines) if line.strip()), "it says nothing")
    return f"failed with status {status}: {reason.strip()[:200]}"


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """Let a process end that still runs; kill it if it has not ended after GRACE_S.

    SIGTERM, as one that was started in the background of a shell ignores SIGINT."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()


def command_of(step: Step) -> str:
    """The command line of a step."""
    return f"python {shlex.join(step.argv)}".replace(f"{ROOT}/", "")


def all_steps(preset: str, device: str, out: Path, fresh: bool = False) -> list[Step]:
    """All steps with this preset, in the order of their use: is it right, what do a decode and a
    chunk cost, what do policies make of a load, and then every claim. `fresh`: claims are measured
    again."""
    out = out.resolve()  # steps run in ROOT
    max_len = min(MAX_LEN, longest_request(preset))
    sizes = f"--batch 32 --max-len {max_len}"
    model = ["--preset", preset, "--device", device]

    def bench(name: str, words: str, files: Sequence[str] = ("json",)) -> Step:
        kept = [word for kind in files for word in (f"--{kind}", f"{out / name}.{FILES[kind]}")]
        return Step(name, ["bench.py", *shlex.split(words), *model, *kept])

    paper = ["bench.py", "paper", *model, "--max-len", str(max_len), "--out", str(out)]
    paper += ["--fresh"] if fresh else []
    tests = [path for path in TESTS if (ROOT / path).exists()]
    batches = "batches 1024 1024/256 6x1@1024 '250@1024 + 6x1@1024'"
    capacity = f"capacity --requests 128 {sizes} --ratio 1.2 --policies vllm,sarathi-serve"
    return [
        Step("tests", ["-m", "pytest", "-q", "-rs", *tests]),
        bench("chunk-256", "offline --chunk 256", ("json", "plot")),
        bench(
            "table-2",
            "offline --chunk 1024 --batch 4 --seq-len 1024 --requests 9 "
            "--policies request-level,sarathi",
        ),
        bench("serve", f"serve --requests 160 {sizes}", ("json", "plot", "csv")),
        bench("capacity", capacity, ("json", "plot")),
        bench("batches", batches),
        bench("batches-compiled", f"{batches} --compile"),
        *(
            Step(
                f"paper-{number}",
                [*paper, "--only", ",".join(claim.id for claim in claims)],
                limit_s=max(LIMIT_S, 2 * sum(claim.seconds_of(quick=False) for claim in claims)),
            )
            for number, claims in enumerate(pieces_of(CLAIMS), start=1)
        ),
    ]


def pieces_of(claims: Sequence[Claim]) -> list[list[Claim]]:
    """The claims in pieces that take half of LIMIT_S as they are estimated, or have one claim."""
    pieces: list[list[Claim]] = []
    left_s = 0
    for claim in claims:
        seconds = claim.seconds_of(quick=False)
        if seconds > left_s:
            pieces.append([])
            left_s = LIMIT_S // 2
        pieces[-1].append(claim)
        left_s -= seconds
    return pieces


def longest_request(preset: str) -> int:
    """The longest request of a geometry: GPT-2 has learned positions, a LLaMA takes any length."""
    config = GPTConfig.preset(preset)
    return config.max_positions if config.family == "gpt2" else MAX_LEN


def largest_preset(memory_bytes: int) -> str:
    """The geometry with the most parameters, up to LARGEST_PRESET, whose weights and CACHE_TOKENS
    take nine tenths of this memory or less, in 16 bits."""
    parameters = {name: parameters_of(name) for name in PRESETS}
    sizes = sorted(PRESETS, key=lambda name: parameters[name], reverse=True)
    for name in sizes[sizes.index(LARGEST_PRESET) : sizes.index(SMALL_PRESET)]:
        token_bytes = kv_bytes_per_token(GPTConfig.preset(name), torch.bfloat16)
        if 2 * parameters[name] + CACHE_TOKENS * token_bytes <= 0.9 * memory_bytes:
            return name
    return SMALL_PRESET


def parameters_of(preset: str) -> int:
    """The number of parameters of a geometry."""
    return count_parameters(GPT(GPTConfig.preset(preset), "meta", seed=None))


def describe(device: torch.device) -> dict[str, object]:
    """The machine and its software, as machine.json has them. No memory of a GPU is taken."""
    versions: list[str] = []
    for package in ("torch", "triton", "xformers"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": timing.device_name(device),
        "cpu": timing.device_name(torch.device("cpu")),
        "processors": timing.available_processors(),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": ", ".join(versions),
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "capability": f"sm{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
    }


def driver_version() -> str | None:
    """The version of NVIDIA's driver, as nvidia-smi tells it; None if it does not."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        return done.stdout.split("\n")[0].strip()
    return None


def read_outcomes(out: Path, machine: Mapping[str, object], fresh: bool) -> dict[str, Outcome]:
    """The outcomes of earlier steps in a folder, by their names. If they are of another device or
    preset they count as none if `fresh`; else raises ValueError."""
    file = out / "machine.json"
    if not file.exists():
        return {}
    content = json.loads(file.read_text("utf-8"))
    for key in ("device", "preset"):
        before = content["machine"][key]
        if before != machine[key]:
            if fresh:
                return {}
            raise ValueError(f"--out {out}: is of {key} {before}, not {machine[key]}; or --fresh")
    return {name: Outcome(**outcome) for name, outcome in content["steps"].items()}


def write_outcomes(
    out: Path, machine: Mapping[str, object], outcomes: Mapping[str, Outcome]
) -> None:
    """Write machine.json and README.md."""
    steps = {name: asdict(outcome) for name, outcome in outcomes.items()}
    write_text(out / "machine.json", json.dumps({"machine": machine, "steps": steps}, indent=1))
    columns: list[Column[Outcome]] = [
        Column("s", lambda outcome: outcome.seconds, ",.0f"),
        Column("ended", lambda outcome: outcome.status.replace("|", "/")),
        Column("command", lambda outcome: f"`{outcome.command}`"),
    ]
    rows = {}
    for name, outcome in outcomes.items():
        suffix = "txt" if outcome.status == DONE else "part.txt"
        rows[f"[{name}]({name}.{suffix})"] = outcome
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    parts = [f"# {machine['device']}, measured by `bench.py gpu`", facts]
    parts.append(format_table("step", columns, rows))
    parts.append("The claims of `paper` are in paper.md. Errors of a step are in its .log.")
    write_text(out / "README.md", "\n\n".join(parts) + "\n")
