"""Measures what planners need: compute time of each layer, and time of a message.

`recorder` runs training steps and returns a `Trace`, `link` runs exchanges and returns a `Link`.
Neither reads nor writes files, and neither knows the command line: a run calls both in its warm-up.
"""
