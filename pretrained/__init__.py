"""What is loaded from elsewhere: published geometries, checkpoints, tokenizers."""
