"""Workloads: models with their samples and losses. Nothing here communicates.

Each module holds one family of models and, for each name in `testbed.base.axes.WORKLOADS`, one
`testbed.base.parts.Part`. Initial weights come from torch's global generator
alone, which the caller has seeded; samples come from a generator of their own, so that the two
never mix.
"""
