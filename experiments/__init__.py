"""What is measured: how to time, workloads, runs, capacities, budgets, and their tables."""
