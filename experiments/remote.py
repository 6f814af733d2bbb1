"""`bench.py serve --url http://127.0.0.1:8000/v1`: the same arrivals for a server that speaks
OpenAI's HTTP. Seen is what a client sees, when each event came. Read first: serving.py.
"""

import json
import os
import time
from contextlib import suppress
from http.client import HTTPException
from queue import SimpleQueue
from threading import Thread
from urllib.request import Request, urlopen

from engine import Completion
from experiments import workload
from experiments.run import Run
from policies.priority import PRIORITIES

GOES = "model qps requests lengths shared_prefix long_prompt classes trace trace_scale max_len slo "
GOES += "seed json csv"


def check_options(parser, args):
    """Exit with a message if options make no sense beside --url, before defaults are filled in."""
    for option, default in vars(parser.parse_args(["--url", args.url])).items():
        if option not in GOES.split() and getattr(args, option) != default:
            parser.error(f"--{option.replace('_', '-')}: does not go with --url")
    if isinstance(args.slo, str) or not (args.qps or args.trace):
        parser.error("--url: needs --qps, and --slo in seconds")


class RemoteMachine:
    """What RealMachine is for this machine. What goes wrong is a ConnectionError of one line."""

    def __init__(self, args, config):
        self.base = None  # how fast it is, is not known
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

    def serve(self, config, arrivals, progress=lambda: None, recorder=None):
        """Send the arrivals, each when it is due, until one fails: a Run without iterations. Who is
        answered 429 is refused. Every vocabulary has 256. `config` is the server's own affair."""
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
