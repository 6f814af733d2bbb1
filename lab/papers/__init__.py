"""One function for each figure or table of the papers. Read first: measured.py, simulated.py."""
