"""Policies to write oneself, each checked against the reference: `python -m exercises`."""
