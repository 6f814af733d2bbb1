"""Pictures and the schedule page, drawn from what the engine recorded."""

import os

os.environ.pop("MPLBACKEND", None)  # of windows: there are none, and an unknown one is an error
