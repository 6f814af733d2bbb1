"""Pictures and traces, drawn from what the engine recorded."""
