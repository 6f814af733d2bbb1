"""Attention over a hybrid batch: the one place where the batch is taken apart.

The linear layers of a hybrid batch see one matrix. Attention cannot: every request has its own keys
and values. A chunk [start, start + length) attends to its request's past, keys 0 … start - 1, and
causally to itself (SARATHI §4.2, Figure 6); a decode is a chunk of length 1.

A *backend* is made once for a cache. It makes a *plan* once per iteration: masks and index tensors
depend on the batch only, so they are not built again for each layer. Here is the plain backend;
fast/ has others.

Read next: plan.py and sdpa.py; then model.py, which calls the plan."""
