"""A process that starts worlds of ranks for the tests, see rank_program.py."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ENVIRON = os.environ | {"OMP_NUM_THREADS": "1"}


class Ended(NamedTuple):
    """How a world ended."""

    result: Any  # what rank 0 made of its job; None if nothing
    statuses: dict[int, int | str]  # rank -> its exit status, or "hangs"
    seconds: dict[int, float]  # rank -> when it ended, after the first ended or was stopped
    errors: str  # what all ranks wrote to stderr


class Worlds:
    """Starts worlds. `folder` is for their files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_program"],
            cwd=ROOT,
            env=ENVIRON,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def out(self) -> Path:
        """A path for the result of a job."""
        self.count += 1
        return self.folder / f"{self.count}.json"

    def run(self, *jobs: dict[str, Any]) -> list[Ended]:
        """How the worlds of some jobs ended that ran at the same time."""
        outs = [self.out() for _ in jobs]
        line = json.dumps([job | {"out": str(out)} for job, out in zip(jobs, outs, strict=True)])
        print(line, file=self.process.stdin, flush=True)
        worlds = json.loads(self.process.stdout.readline())
        return [self._ended(out, world) for out, world in zip(outs, worlds, strict=True)]

    def _ended(self, out: Path, world: dict[str, Any]) -> Ended:
        return Ended(
            result=json.loads(out.read_text()) if out.exists() else None,
            statuses={int(rank): status for rank, (status, _) in world.items()},
            seconds={int(rank): seconds for rank, (_, seconds) in world.items()},
            errors="".join(Path(f"{out}.{rank}").read_text() for rank in world),
        )

    def result(self, **job: Any) -> Any:
        """What rank 0 made of a job in which all goes well."""
        (ended,) = self.run(job)
        assert set(ended.statuses.values()) == {0}, ended.errors
        return ended.result

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()
