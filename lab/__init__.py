"""What measures and simulates the engine, and is no part of it. Read lab/README.md."""
