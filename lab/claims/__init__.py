"""What each figure or table of the papers says, beside a cost model and this machine.

Read first: claim.py, labs.py. Read next: batches.py, throughput.py, pipelines.py, latency.py."""

from lab.claims import batches, latency, pipelines, throughput  # noqa: F401  they enter CLAIMS
from lab.claims.claim import CLAIMS as CLAIMS
