"""Gradients travel as they are; torch is loaded only where a message is really made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testbed.base.axes import CompressorFacts
from testbed.base.parts import NoOptions, Part

if TYPE_CHECKING:
    from testbed.compression.protocol import Compressor


def _dense(options: NoOptions) -> Compressor:
    from testbed.compression.casts import Dense

    return Dense()


NONE = Part(
    name="none",
    summary="values as they are",
    build=_dense,
    facts=lambda options: CompressorFacts(exact=True),
)
