"""One function for each figure or table of the papers. Read first: claim.py, labs.py."""
