"""Other engines and ours, with the same weights and the same requests, in turns.

Each other engine runs in a process of its own, under a Python that has its packages. Read first:
lab/measure/timing.py. Read next: worker.py, the program of these processes.
"""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from config import EngineConfig
from engine import Engine
from examples.compare.worker import Job, Policy, Serve, Tokens
from lab.measure import timing, workload
from lab.measure.offline_load import OfflineLoad
from model import GPT, GPTConfig
from sampling import SamplingParams

PACKAGES = {"transformers": "transformers", "openvino": "openvino_genai"}  # of each engine
OUR_POLICIES = ("sarathi-serve", "vllm")
REPEATS = 3  # turns of each engine that count
WORKER = Path(__file__).with_name("worker.py")
FIND_PACKAGE = "import sys, importlib.util as util; sys.exit(not util.find_spec(sys.argv[1]))"


@dataclass(frozen=True)
class EngineResult:
    """What an engine made of the load under one of its policies."""

    dtype: str  # that it computes with
    tokens_per_s: float  # prompt and output
    sarathi_serve_gain: float  # how many times as many tokens per second our sarathi-serve gives
    vllm_gain: float  # and our vllm
    equal_tokens: float  # the share of the output that is that of our sarathi-serve
    busy: bool  # whether the machine was


class ComparisonInterrupted(KeyboardInterrupt):
    """A KeyboardInterrupt between the turns. `results` are those of the turns before."""

    def __init__(self, results: Mapping[str, EngineResult]) -> None:
        super().__init__()
        self.results = results


def has_package(python: str, engine: str) -> bool:
    """Whether this Python exists and has the package that the engine needs."""
    executable = shutil.which(python)
    if executable is None:
        return False
    find = [executable, "-c", FIND_PACKAGE, PACKAGES[engine]]
    return subprocess.run(find).returncode == 0


def no_report(line: str) -> None:
    """Called in the place of a line that is printed."""


def compare_engines(
    model: GPT,
    checkpoint: str | Path,
    pythons: Mapping[str, str],
    load: OfflineLoad,
    *,
    chunk: int,
    attention: str = "auto",
    report: Callable[[str], object] = no_report,
) -> dict[str, EngineResult]:
    """Serve the load with our engine and with others, in turns: {"engine, policy": result}.

    The model's weights are those of the checkpoint, which the others load. `pythons` maps an
    engine to the Python that has its packages. As many requests as fill whole batches are served,
    and before it is timed each engine serves one batch to warm up. All decode greedily, with the
    same batch, dtype and number of threads; openvino on the CPU. `report` is called with a line
    when an engine is loaded, when it is warm, and when it has served its last turn. Raises
    ChildProcessError if an engine fails, and ComparisonInterrupted for a KeyboardInterrupt, if
    each engine has served two turns.
    """
    count = requests_served(load)
    arrivals = [workload.Arrival(0.0, load.prompt_len, load.output_len)] * count
    prompts = workload.prompts(arrivals, model.config.vocab_size, load.seed)
    config = EngineConfig(
        max_batch=load.batch, max_len=load.seq_len, chunk=chunk, attention=attention
    )
    dtype = str(model.dtype).removeprefix("torch.")
    policies: dict[str, Policy] = {}
    for policy_name in OUR_POLICIES:
        serve = our_engine(model, replace(config, policy=policy_name), prompts, load)
        policies[f"ours, {policy_name}"] = Policy(serve, dtype)
    tokens: dict[str, Tokens] = {}
    samples_ms: dict[str, list[float]] = {}  # of the turns, as timing.interleaved measures them

    def serve_and_keep(name: str) -> None:
        began = time.perf_counter()
        tokens[name] = policies[name].serve(count)
        samples_ms.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
        if len(samples_ms[name]) == REPEATS:
            report(f"{name}: served {count} requests {REPEATS} times")

    def results_of(timings: Mapping[str, timing.Timing], drift: float) -> dict[str, EngineResult]:
        stall_free, prefill_first = (f"ours, {policy}" for policy in OUR_POLICIES)
        return {
            name: EngineResult(
                dtype=policies[name].dtype,
                tokens_per_s=len(prompts) * load.seq_len / timed.ms * 1e3,
                sarathi_serve_gain=timed.ms / timings[stall_free].ms,
                vllm_gain=timed.ms / timings[prefill_first].ms,
                equal_tokens=share_of_equal_tokens(tokens[name], tokens[stall_free]),
                busy=max(drift, timed.spread) > timing.BUSY,
            )
            for name, timed in timings.items()
        }

    with ExitStack() as stack:
        for engine, python in pythons.items():
            folder = stack.enter_context(TemporaryDirectory())
            job = Job(
                engine=engine,
                checkpoint=str(checkpoint),
                folder=folder,
                prompts=prompts,
                output_len=load.output_len,
                seq_len=load.seq_len,
                max_batch=load.batch,
                chunk=chunk,
                dtype=dtype,
                device=str(model.device),
                threads=torch.get_num_threads(),
            )
            process = stack.enter_context(other_engine(python, job))
            for policy_name, used_dtype in process.ask(json.dumps(asdict(job))).items():
                serve = partial(process.serve, policy_name)
                policies[f"{engine}, {policy_name}"] = Policy(serve, used_dtype)
            report(f"{engine}: loaded")
        for name, policy in policies.items():
            began = time.perf_counter()
            policy.serve(load.batch)
            report(f"{name}: warm after {time.perf_counter() - began:.0f} s")
        variants = {name: partial(serve_and_keep, name) for name in policies}
        time_all = partial(
            timing.interleaved,
            variants,
            model.device,
            repeats=REPEATS,
            title="engines",
            warmup=0,
        )
        try:
            return results_of(*timing.steadily(time_all, model.device, tries=1))
        except KeyboardInterrupt as interrupt:
            samples = samples_ms.values()
            if len(samples) < len(policies) or min(map(len, samples)) < 2:
                raise
            timings = {name: timing.summarize(values) for name, values in samples_ms.items()}
            raise ComparisonInterrupted(results_of(timings, drift=0.0)) from interrupt


def requests_served(load: OfflineLoad) -> int:
    """How many of its requests are served: as many as fill whole batches, at least one."""
    return max(load.batch, load.requests // load.batch * load.batch)


def our_engine(model: GPT, config: EngineConfig, prompts: Tokens, load: OfflineLoad) -> Serve:
    """A function that serves the prompts of the load with an engine of this config."""
    engine = Engine(model, config)
    params = SamplingParams(load.output_len)

    def serve(count: int) -> Tokens:
        completions = engine.generate(prompts[:count], params, progress=False)
        return [completion.output for completion in completions]

    return serve


def share_of_equal_tokens(outputs: Tokens, reference: Tokens) -> float:
    """The share of tokens that are those of the reference, place by place."""
    return fmean(
        token == expected
        for output, expected_output in zip(outputs, reference, strict=True)
        for token, expected in zip(output, expected_output, strict=False)
    )


class OtherEngine:
    """A process of worker.py."""

    def __init__(self, process: subprocess.Popen[str], engine: str, log: Path) -> None:
        self.process = process
        self.engine = engine
        self.log = log  # its errors

    def serve(self, policy: str, count: int) -> Tokens:
        """The tokens that the engine generates for the first `count` prompts of its job."""
        return self.ask(json.dumps([policy, count]))

    def ask(self, line: str) -> Any:
        """The answer to a line. Raises ChildProcessError, with its last error, if it has ended."""
        try:
            self.process.send_signal(signal.SIGCONT)
            print(line, file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline() if self.process.stdout else "")
            self.process.send_signal(signal.SIGSTOP)  # its idle threads would spin beside others
            return answer
        except (OSError, ValueError) as error:
            last_line = self.log.read_text("utf-8").strip().split("\n")[-1]
            raise ChildProcessError(f"--against {self.engine}: {last_line}") from error


@contextmanager
def other_engine(python: str, job: Job) -> Iterator[OtherEngine]:
    """Start the worker under this Python; it is killed at the end."""
    log = Path(job.folder, "log")
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with process:
            try:
                yield OtherEngine(process, job.engine, log)
            finally:
                process.kill()


def can_save_random(config: GPTConfig) -> bool:
    """Whether transformers' LLaMA has this geometry, so that `save_random` can save it."""
    is_llama = config.family == "llama"
    return is_llama and not (config.qkv_bias or config.qk_norm or config.rope_scaling)


def save_random(config: GPTConfig, folder: str | Path, seed: int, dtype: torch.dtype) -> None:
    """Save a LLaMA of this geometry with random weights in a folder, for all engines to load."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    geometry = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_kv_head,
        head_dim=config.head_dim,
        hidden_size=config.n_embd,
        intermediate_size=config.n_inner,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )
    torch.manual_seed(seed)
    llama: Any = transformers.LlamaForCausalLM(geometry)
    llama.to(dtype).save_pretrained(folder)
