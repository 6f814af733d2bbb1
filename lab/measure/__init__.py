"""Libraries that measure: timing, workloads, the run loop, metrics, capacity. They print nothing."""
