"""Small programs to begin with. Run them in the top folder: `python -m examples.offline`."""
