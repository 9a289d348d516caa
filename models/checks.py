"""Checks of options that several families share."""

from __future__ import annotations

from testbed.base.errors import UsageError


def check_at_least(name: str, least: int, **options: int) -> None:
    """Refuse options that are too small.

    Raises:
        UsageError: one is; the message names it.

    Example:
        >>> check_at_least("vgg16", 32, image_size=64)
    """
    for option, value in options.items():
        if value < least:
            raise UsageError(f"{name}: {option} is {value}; expected {least} or more")
