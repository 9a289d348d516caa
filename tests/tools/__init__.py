"""Instruments of maintainers: this code beside an older one, and the way of a gradient."""
