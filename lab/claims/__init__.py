"""What each figure or table of the papers says, beside a cost model and this machine.

Read first: claim.py, labs.py. Read next: batches.py, throughput.py, pipelines.py, latency.py."""
