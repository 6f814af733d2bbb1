"""What an engine does to compute a model faster on this device. No result depends on it."""
