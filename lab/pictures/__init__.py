"""Draws pictures of what was measured, with matplotlib. Read first: style.py."""

import os

os.environ.pop("MPLBACKEND", None)  # of windows: there are none, and an unknown one is an error
