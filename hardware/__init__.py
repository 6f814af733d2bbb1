"""What this machine has for a model: how much memory, and how many processes share it."""
