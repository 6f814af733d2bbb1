"""Measure SARATHI's claims on this machine.

    python bench.py --chunk 256

prints (1) SARATHI's Table 2: what a decode costs alone and riding with a prefill chunk, each time beside its limit;
(2) the policies end to end at the balanced ratio of prefill to decode tokens, P:D = C / (B - 1); (3) what to
conclude. `--json` writes all of it, `--plot` draws what each policy did when. Requests that arrive while others run,
Sarathi-Serve's half, have command lines of their own:

    python bench.py serve           every policy on the same arrivals
    python bench.py capacity        the highest rate at which each meets the SLO
    python bench.py budget          the token budget for an SLO
    python bench.py simulate        the papers' big machines, from a cost model

Read first: experiments.py, which measures what is printed here. Read next: bench_serve.py.
"""

import argparse
import json
import sys
import time

import torch

import cli
from experiments import SPECS, advise, against_transformers, decode_maximal, describe_machine, end_to_end, output_tokens
from model import PRESETS

COMMANDS = """other experiments, each with its own --help:
  bench.py serve      requests arrive while others run: latencies of every policy on the same arrivals
  bench.py capacity   the highest rate of arrivals at which each policy meets an SLO
  bench.py budget     the largest token budget that meets an SLO, from a profile of this machine
  bench.py simulate   the papers' experiments on many GPUs, from a cost model"""


def parse_args(argv=None):
    """The options, checked. Exits with a message, like argparse, for one that makes no sense."""
    parser = cli.OptionParser(description=__doc__.split("\n\n")[0], epilog=COMMANDS,
                              formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add
    add("--chunk", "C, the chunk size and token budget, in tokens", 256, type=int)
    add("--batch", "B, the most requests at once", 6, type=int)
    add("--seq-len", "prompt and output tokens of a request, together", 1000, type=int)
    add("--pd-ratio", "prompt tokens for each output token", shown="C / (B - 1), which is balanced", type=float)
    add("--policies", f"comma-separated, from {', '.join(SPECS)}; orca-best lets one prompt into a batch",
        "request-level,orca-best,vllm,sarathi,sarathi-serve")
    add("--requests", "how many requests are served end to end", shown="2 B", type=int)
    parser.add_model_options("llama-13b on a GPU with 40 GB or more, else llama-160m")
    add("--transformers", "also serve the requests with transformers' generate", False, "off", action="store_true")
    add("--json", "write all that is printed, with these options", shown="none", metavar="FILE")
    add("--plot", "draw the iterations of each policy", shown="none", metavar="FILE")
    args = parser.parse_args(argv)
    parser.check_model_options(args)
    args.policies = [name.strip() for name in args.policies.split(",") if name.strip()]
    args.requests = 2 * args.batch if args.requests is None else args.requests
    if not args.policies:
        parser.error("--policies: give at least one")
    for name in args.policies:
        if name not in SPECS:
            parser.error(f"--policies: {name!r} is not one of {', '.join(SPECS)}")
    for option, least in (("chunk", 1), ("batch", 2), ("seq_len", 3), ("requests", 1)):
        if getattr(args, option) < least:
            parser.error(f"--{option.replace('_', '-')} {getattr(args, option)}: must be at least {least}")
    if args.chunk < args.batch:
        parser.error(f"--chunk {args.chunk}: must be at least --batch {args.batch}, or there is no room for a chunk")
    if args.chunk > args.seq_len:
        parser.error(f"--chunk {args.chunk}: must be at most --seq-len {args.seq_len}")
    if args.transformers and not args.init_from and args.model in PRESETS and PRESETS[args.model].family != "llama":
        parser.error("--transformers: with random weights only a LLaMA can be compared, use --init-from")
    if args.pd_ratio is None:
        args.pd_ratio = args.chunk / (args.batch - 1)
    parser.check_files(args, "json", "plot")
    if not 0 < args.pd_ratio < float("inf"):
        parser.error(f"--pd-ratio {args.pd_ratio}: must be a positive number")
    return args


# -----------------------------------------------------------------------------------------------------
# what is printed


def print_machine(machine):
    """The heading under which all else is printed."""
    print(f"{cli.machine_lines(machine)}"
          f"measured limits: {machine['flops_per_s'] / 1e12:,.2f} TFLOP/s in matrix products of these shapes, "
          f"{machine['bytes_per_s'] / 1e9:,.0f} GB/s of memory; ridge: {machine['ridge_tokens']:,.0f} tokens\n"
          f"schedule() takes {machine['schedule_us']:.0f} us with 128 requests running and 1,000 waiting (median, "
          "slowest policy)\n")


def print_decode_maximal(rows, speedup, args):
    """Table 2, on this machine: what `decode_maximal` returned."""
    print(f"1. What a decode costs (SARATHI, Table 2): chunk {args.chunk}, batch {args.batch}, "
          f"context {args.seq_len}, times in ms\n")
    table = [["batch", "prefill + decodes", "linear", "bare", "attention", "limit", "other", "total", "total limit",
              "spread", "per prefill token", "per decode token"]]
    for name, row in rows.items():
        table.append([name, f"{row['prefill_tokens']} + {row['decodes']}", *(f"{row[k + '_ms']:.1f}" for k in (
            "linear", "bare", "attention", "attention_limit", "other", "total", "limit")), f"{row['spread']:.0%}",
            *("-" if row[k] is None else f"{row[k]:.3f}" for k in ("prefill_token_ms", "decode_token_ms"))])
    cli.print_table(table)
    speedup = {part: "more than can be measured" if x is None else f"{x:.1f}x" for part, x in speedup.items()}
    print(f"\ndecode speedup {speedup['total']}; linear layers {speedup['linear']} (bare products {speedup['bare']})\n"
          "bare: the same matrix products alone; limit of attention: its flops over the product rate or its K and V\n"
          "over the bandwidth, the larger; limit of the total: bare products + attention alone, both measured\n")


def print_end_to_end(rows, args):
    """The table of policies."""
    output = output_tokens(args)
    prompt = args.seq_len - output
    print(f"2. End to end: {args.requests} requests of {prompt} + {output} tokens (P:D {prompt / output:.0f}; the "
          f"first {args.batch} want 1/{args.batch}, 2/{args.batch}, ...\n"
          f"   of the output), batch {args.batch}, chunk {args.chunk}, all there at time 0\n")
    table = [["policy", "tokens/s", "gain", "P50 TTFT s", "P99 TBT s", "longest stall s", "iterations",
              "tokens/iteration"]]
    for name, row in rows.items():
        gain = f"{row['gain']:.2f}x" if row["gain"] else "-"
        table.append([name, f"{row['tokens_per_s']:,.0f}", gain, f"{row['p50_ttft_s']:.2f}", f"{row['p99_tbt_s']:.3f}",
                      f"{row['longest_stall_s']:.3f}", str(row["iterations"]), f"{row['tokens_per_iteration']:.0f}"])
    cli.print_table(table)
    print("\nthroughput counts prompt and output tokens; gain is over request-level; a stall is a gap between two\n"
          "tokens in which prompt tokens were computed; each policy ran on its own clock\n")


def conclude(rows, policy_rows, advice, args):
    """One paragraph in plain words."""
    decode, hybrid = (rows[name]["decode_token_ms"] for name in ("decode-only", "decode-maximal"))
    riding = f"{hybrid:.2f} ms riding with a chunk, {decode / hybrid:.1f}x less" if hybrid > 0 else "nothing riding"
    text = f"3. A decode costs {decode:.2f} ms in a batch of its own and {riding}."
    gain = policy_rows.get("sarathi", {}).get("gain")
    if gain:
        text += f" Served by sarathi, this load runs at {gain:.2f}x request-level's throughput."
    text += ("\n   Matrix products alone, in ms per token: "
             + ", ".join(f"{ms / c:.2f} at {c}" for c, ms in advice["product_ms"].items()) + " tokens.\n  ")
    best, gains = advice["favoured_chunk"], advice["predicted_gain"]
    if best != args.chunk:
        text += (f" This machine's balance favours --chunk {best}: from its measured rates a gain of\n"
                 f"   {gains[best]:.2f}x is to be expected there, at its own P:D of {best / (args.batch - 1):.0f}, "
                 f"against {gains[args.chunk]:.2f}x at {args.chunk}.")
    else:
        text += f" Chunk {best} is what this machine's balance favours: {gains[best]:.2f}x is to be expected."
    return text


def peak_memory_bytes(device):
    """The most memory that was in use: of the GPU, or of this process (0 on Windows, which does not tell)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    scale = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def main(argv=None):
    """The command line."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("serve", "capacity"):
        import bench_serve

        return bench_serve.main(argv)
    if argv and argv[0] == "budget":
        import bench_budget

        return bench_budget.main(argv[1:])
    if argv and argv[0] == "simulate":
        import bench_simulate

        return bench_simulate.main(argv[1:])
    began = time.perf_counter()
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    model = cli.load_model(args, "seq_len")
    machine = describe_machine(model, args, args.chunk)
    print_machine(machine)

    table, speedup = decode_maximal(model, machine, args)
    print_decode_maximal(table, speedup, args)

    policy_rows, timelines = end_to_end(model, args)
    print_end_to_end(policy_rows, args)

    advice = advise(model, table, args)
    conclusion = conclude(table, policy_rows, advice, args)
    print(conclusion)
    comparison = None
    if args.transformers:
        comparison = against_transformers(model, args)
        theirs, ours = comparison["transformers_tokens_per_s"], comparison["sarathi_tokens_per_s"]
        print(f"\ntransformers' generate, same weights and requests: {theirs:,.0f} tokens/s; sarathi: {ours:,.0f}, "
              f"{ours / theirs:.2f}x ({comparison['equal_tokens']:.0%} of the tokens are equal)")
    seconds, memory = time.perf_counter() - began, peak_memory_bytes(model.device)
    print(f"\ntook {seconds:.0f} s and at most {memory / 1e9:.1f} GB of memory")

    if args.plot:
        from plot import plot_timelines

        plot_timelines(timelines, machine, args.plot)
    if args.json:
        report = {"options": vars(args), "machine": machine, "decode_maximal": table, "decode_speedup": speedup,
                  "end_to_end": policy_rows, "advice": advice, "conclusion": conclusion, "transformers": comparison,
                  "seconds": seconds, "peak_memory_bytes": memory}
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    cli.run(main)
