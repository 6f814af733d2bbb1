"""Libraries that print nothing: timing, workloads, the run loop, metrics, capacity."""
