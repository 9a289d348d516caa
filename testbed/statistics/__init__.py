"""Pure functions from samples to the figures of a table."""
