"""One module for each command of bench.py: it parses options, calls libraries, prints and draws."""
