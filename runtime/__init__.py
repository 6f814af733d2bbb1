"""What the core stands on: files, memory, the journal, and what makes an engine fast."""
