"""What the server costs: `python -m tests.server_cost` prints its tokens/s and engine.generate's.

Sixteen streams, to a client that only counts events, in turn with the same requests to an engine in
this process; each has all threads while the other waits. The client's time is in it.
"""

import json
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time

from cli.console import run
from sampling import SamplingParams
from server.__main__ import make_engine, parse_args

STREAMS, PROMPT, OUTPUT, ROUNDS = 16, 128, 128, 7
OPTIONS = "--preset llama-160m --max-len 256 --port 0".split()


def stream_all(port, bodies):
    """Send these requests and read the answers to the end. Returns how many tokens came."""
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += "content-type: application/json\r\ncontent-length: {}\r\n\r\n{}"
    count, waiting = 0, selectors.DefaultSelector()
    for body in map(json.dumps, bodies):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.format(len(body), body).encode())
        waiting.register(connection, selectors.EVENT_READ)
    while waiting.get_map():
        for key, _ in waiting.select():
            data = key.fileobj.recv(2**16)
            count += data.count(b"data: {")
            if not data:
                waiting.unregister(key.fileobj)
                key.fileobj.close()
    return count


def main():
    """The command line, which has no options."""
    words = [sys.executable, "-m", "server", *OPTIONS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        port = int(re.search(r":(\d+)/v1", server.stdout.readline()).group(1))
        engine = make_engine(parse_args(OPTIONS))
        prompts, params = [[i] * PROMPT for i in range(STREAMS)], SamplingParams(OUTPUT)
        asked = dict(model="llama-160m", max_tokens=OUTPUT, temperature=0, stream=True)
        bodies = [asked | {"prompt": prompt} for prompt in prompts]
        ways = {
            "engine.generate": lambda: engine.generate(prompts, params, progress=False),
            "server": lambda: stream_all(port, bodies),
        }
        speeds = {name: [] for name in ways}
        for _ in range(1 + ROUNDS):  # the first is for practice
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                speeds[name].append(STREAMS * OUTPUT / (time.perf_counter() - start))
        medians = {name: statistics.median(its[1:]) for name, its in speeds.items()}
        for name, speed in medians.items():
            print(f"{name}: {speed:,.0f} tokens/s")
        print(f"{1 - medians['server'] / medians['engine.generate']:.1%} less")
        server.terminate()


if __name__ == "__main__":
    run(main)
