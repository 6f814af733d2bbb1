"""A process that starts worlds of ranks for the tests, see rank_program.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ENVIRON = os.environ | {"OMP_NUM_THREADS": "1"}


class Ended(NamedTuple):
    """How a world ended: what rank 0 made of its job, None if nothing; {rank: its exit status},
    {rank: seconds after the first had ended}, and what rank 0 wrote to stderr."""

    result: object
    statuses: dict
    seconds: dict
    errors: str


class Worlds:
    """Starts worlds. `folder` is for what they write."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0
        words = sys.executable, "-m", "tests.rank_program"
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen(words, cwd=ROOT, env=ENVIRON, **pipes)

    def out(self):
        """A path for what a job makes."""
        self.count += 1
        return self.folder / f"{self.count}.json"

    def run(self, *jobs):
        """How the worlds of some jobs ended, that ran at the same time."""
        outs = [self.out() for _ in jobs]
        lines = json.dumps([job | {"out": str(out)} for job, out in zip(jobs, outs)])
        print(lines, file=self.process.stdin, flush=True)
        found = json.loads(self.process.stdout.readline())
        return [self._ended(*its) for its in zip(outs, found)]

    def _ended(self, out, ranks):
        result = json.loads(out.read_text()) if out.exists() else None
        statuses, seconds = ({int(rank): its[i] for rank, its in ranks.items()} for i in (0, 1))
        return Ended(result, statuses, seconds, Path(f"{out}.0").read_text())

    def result(self, **job):
        """What rank 0 made of a job in which all goes well."""
        (its,) = self.run(job)
        assert {*its.statuses.values()} == {0}, its.errors
        return its.result

    def close(self):
        """End it."""
        self.process.stdin.close()
        self.process.wait(10)
