"""What serving over HTTP costs beside the model's work: `python -m examples.server_overhead`.

Prints tokens/s of the server, and of engine.generate. The server streams to sixteen clients that
only count events. It takes turns with the same requests to an engine in this process; each has all
threads while the other waits. The clients' time is in the server's. Read next: server/README.md.
"""

import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.console import run
from sampling import SamplingParams
from server.__main__ import make_engine, parse_args

ROOT = Path(__file__).resolve().parents[1]
STREAMS = 16
PROMPT_LEN = 128
OUTPUT_LEN = 128
ROUNDS = 7
SERVER_OPTIONS = ("--preset", "llama-160m", "--max-len", "256", "--port", "0")


@dataclass(frozen=True)
class ServerCost:
    """Output tokens per second of the same requests, medians of ROUNDS."""

    engine_tokens_per_s: float
    server_tokens_per_s: float

    @property
    def loss(self) -> float:
        """The share of the engine's rate that the server loses."""
        return 1 - self.server_tokens_per_s / self.engine_tokens_per_s


def main() -> None:
    """Measure the cost and print it."""
    ArgumentParser(description=__doc__).parse_args()  # --help prints the text above
    print_server_cost(measure_server_cost())


def print_server_cost(cost: ServerCost) -> None:
    """Print what `measure_server_cost` returned."""
    print(f"engine.generate: {cost.engine_tokens_per_s:,.0f} tokens/s")
    print(f"server: {cost.server_tokens_per_s:,.0f} tokens/s")
    print(f"{cost.loss:.1%} less")


def measure_server_cost() -> ServerCost:
    """Serve the same requests by an engine in this process and by a server, in turns."""
    import server.app  # noqa: F401  a package that is missing is named here, not by the process

    command = [sys.executable, "-m", "server", *SERVER_OPTIONS]
    env = os.environ | {"PYTHONSAFEPATH": ""}  # the server is found in ROOT
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env) as process:
        try:
            port = port_of(process)
            engine = make_engine(parse_args(SERVER_OPTIONS))
            prompts = [[i] * PROMPT_LEN for i in range(STREAMS)]
            params = SamplingParams(OUTPUT_LEN)
            bodies = [request_body(prompt) for prompt in prompts]

            def generate() -> None:
                engine.generate(prompts, params, progress=False)

            def stream() -> None:
                stream_all(port, bodies)

            engine_rates = []
            server_rates = []
            for _ in range(1 + ROUNDS):
                engine_rates.append(tokens_per_s(generate))
                server_rates.append(tokens_per_s(stream))
        finally:
            process.terminate()
    return ServerCost(  # the first round warms up
        engine_tokens_per_s=statistics.median(engine_rates[1:]),
        server_tokens_per_s=statistics.median(server_rates[1:]),
    )


def port_of(server: subprocess.Popen[str]) -> int:
    """The port in the first line of a server. Raises ChildProcessError if it did not start."""
    line = server.stdout.readline() if server.stdout else ""
    address = re.search(r":(\d+)/v1", line)
    if address is None:
        raise ChildProcessError(f"the server did not start: {line.strip() or 'it printed nothing'}")
    return int(address.group(1))


def request_body(prompt: Sequence[int]) -> dict[str, object]:
    """A streamed completion of this prompt, as OpenAI's API has it."""
    return {
        "model": "llama-160m",
        "prompt": prompt,
        "max_tokens": OUTPUT_LEN,
        "temperature": 0,
        "stream": True,
    }


def tokens_per_s(serve: Callable[[], None]) -> float:
    """Output tokens of all streams over the seconds of one call."""
    start = time.perf_counter()
    serve()
    return STREAMS * OUTPUT_LEN / (time.perf_counter() - start)


def stream_all(port: int, bodies: Sequence[dict[str, object]]) -> int:
    """Send these requests at once and read all answers to the end. Returns the number of events."""
    connections = selectors.DefaultSelector()
    for body in bodies:
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(http_request(json.dumps(body)))
        connections.register(connection, selectors.EVENT_READ, data=connection)
    events = 0
    while connections.get_map():
        for key, _ in connections.select():
            connection: socket.socket = key.data
            data = connection.recv(2**16)
            events += data.count(b"data: {")
            if not data:
                connections.unregister(connection)
                connection.close()
    return events


def http_request(body: str) -> bytes:
    """A POST to the endpoint of completions."""
    lines = [
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "connection: close",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "",
        body,
    ]
    return "\r\n".join(lines).encode()


if __name__ == "__main__":
    run(main)
