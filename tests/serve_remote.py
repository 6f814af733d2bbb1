"""The arrivals of `bench.py serve` for a server that speaks OpenAI's HTTP, and the same tables.

    python -m tests.serve_remote --url http://127.0.0.1:8000/v1 --qps 1.5 --slo 0.3

Seen is what a client sees: when each event came. Read first: lab/commands/serving.py.
"""

import json
import os
import sys
import time
from contextlib import suppress
from http.client import HTTPException
from queue import SimpleQueue
from threading import Thread
from urllib.request import Request, urlopen

from cli import options
from cli.console import run
from engine import Completion
from lab.commands import serving
from lab.measure import workload
from lab.measure.load_run import Run
from policies.priority import PRIORITIES

OF_LOAD = "requests lengths trace trace_scale shared_prefix long_prompt classes max_len".split()
GOES = (*OF_LOAD, "seed", "json", "csv")


class LoadOptions(options.OptionParser):
    """Of the options of tables those of GOES; the others keep their defaults, of a CPU."""

    def add_argument(self, option, *names, **its):
        """Add an option, or set its default, which those of tables have."""
        name, default = option.lstrip("-").replace("-", "_"), its.get("default")
        if isinstance(default, options.ByDevice):
            its["default"] = default = default.cpu
        if name in GOES or names or "default" not in its:  # -h has another name
            return super().add_argument(option, *names, **its)
        self.set_defaults(**{name: default})


def parse_args(words):
    """The options. Exits with a message if these make no sense."""
    what = "Bring the arrivals of bench.py serve to a server, and print what a client sees."
    parser = LoadOptions(prog="python -m tests.serve_remote", description=what)
    serving.add_options(parser, "serve")
    add, number = parser.add_argument, options.number
    url = "what speaks OpenAI's HTTP, as http://127.0.0.1:8000/v1; a key is in OPENAI_API_KEY"
    add("--url", required=True, help=url)
    add("--model", help="one that it knows (default: its first)")
    rate = "requests per second on average (default: the trace's own; without one required)"
    add("--qps", help=rate, type=number(least=1e-4))
    add("--slo", required=True, help="of P99 TBT, in seconds", type=number(above=0))
    parser.set_defaults(command="serve")
    args = parser.parse_args(words)
    if not (args.qps or args.trace):
        parser.error("the following arguments are required: --qps, or --trace")
    serving.check(parser, args)
    return args


class RemoteMachine:
    """What RealMachine is for this machine. What goes wrong is a ConnectionError of one line."""

    def __init__(self, args):
        self.url, self.args = args.url.rstrip("/"), args
        try:
            self.model = args.model or json.load(self.ask("/models"))["data"][0]["id"]
        except Exception as error:  # what others answer may be anything
            raise self.failed(error) from error
        self.machine = {"device": args.url, "model": self.model, "dtype": "as it was started"}

    def ask(self, path, body=None):
        """The response to a GET, or to a POST of `body`."""
        key, data = os.environ.get("OPENAI_API_KEY", "none"), body and json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        return urlopen(Request(self.url + path, data, headers), timeout=600)

    def failed(self, error):
        """What is raised for an error, with what the server said."""
        said = ""
        with suppress(OSError, HTTPException, AttributeError):  # of its answer, if there is one
            said = error.read(300).decode(errors="replace")
        return ConnectionError(" ".join(f"--url {self.url}: {error!r} {said}".split()))

    def serve(self, arrivals, progress=lambda: None, recorder=None):
        """Send the arrivals, each when it is due, until one fails: a Run without iterations. Who is
        answered 429 is refused. Every vocabulary has 256, and nothing is for a recorder."""
        prompts = workload.prompts(arrivals, 256, self.args.seed, self.args.shared_prefix)
        done, ended, start = [], SimpleQueue(), time.perf_counter()
        for i, arrival in enumerate(arrivals):
            done.append(Completion(i, prompts[i], arrival.time, PRIORITIES.index(arrival.priority)))
            Thread(target=self.complete, args=(done[i], arrival, start, ended), daemon=True).start()
        for _ in done:
            if error := ended.get():
                raise self.failed(error)
            progress()
        refused = sum(not completion.token_times for completion in done)
        if early := sum(completion.finish_reason == "stop" for completion in done):
            print(f"{early} outputs ended early: the server does not know ignore_eos")
        return Run(done, [], time.perf_counter() - start, None, refused)

    def complete(self, completion, arrival, start, ended):
        """Stream one completion when it is due, and put what went wrong, or None. Its class and
        SLOs are sent if it has any. Tokens may share an event: usage counts."""
        body = {"model": self.model, "prompt": completion.prompt, "max_tokens": arrival.output_len}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        body |= {k: v for k, v in zip(arrival._fields[3:], arrival[3:]) if v and v != "normal"}
        times, part = completion.token_times, {}
        time.sleep(max(0.0, start + arrival.time - time.perf_counter()))
        try:
            lines = (line for line in self.ask("/completions", body) if line[:5] == b"data:")
            for part in (json.loads(line[5:]) for line in lines if b"[DONE]" not in line[:12]):
                times += [time.perf_counter() - start] if part.get("choices") else []
            if not (part.get("usage") and times):
                raise ValueError(f"no tokens, or no usage: the last event was {part}")
            count = part["usage"]["completion_tokens"]
            times[:] = times[:count] + times[-1:] * (count - len(times))
            completion.finish_reason = "stop" if count < arrival.output_len else "length"
            ended.put(None)
        except Exception as error:
            completion.finish_reason = "abort"
            ended.put(None if getattr(error, "code", None) == 429 else error)


def main(argv=None):
    """The command line, whose words are `argv`."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    arrivals_at, load = serving.make_workload(args)
    arrivals, machine = arrivals_at(args.qps), RemoteMachine(args)
    report = {"command": args.command, "machine": machine.machine, "load": load, "slo_s": args.slo}
    report |= {"slo_busy": False, "base": None, "unit": "requests/s"}  # how fast it is, who knows
    print(
        f"{options.machine_lines(machine.machine)}{serving.describe_load(args, load, arrivals)}\n"
        f"SLO: P99 TBT at most {args.slo:.3f} s (as asked for), median delay not known\n"
    )
    serving.Session(args, arrivals_at, report).run_all({args.url: machine.serve}, None)


if __name__ == "__main__":
    run(main)
