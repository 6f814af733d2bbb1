"""The schedule page: what a run did, iteration by iteration, as one HTML file."""
