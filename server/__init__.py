"""An OpenAI-compatible server over the engine."""
