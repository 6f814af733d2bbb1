"""What makes an engine faster on this device. Results change by rounding at most."""
