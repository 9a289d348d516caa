"""`testbed comm`: the micro-benchmark."""


def comm() -> None:
    """Being written."""
