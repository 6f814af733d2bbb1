"""What the core stands on: files, memory, and what makes an engine fast."""
