"""Timed exchanges with rank 0 while a member trains or serves, from which clocks are aligned."""

from __future__ import annotations

import threading
from typing import Final, Self

from testbed.base.errors import DeadlineExceeded, RankLost
from testbed.base.recorder import Recorder, fastest
from testbed.control.protocol import Control

NUM_AT_ENDS: Final = 6
"""Bursts before what is aligned, and after it: a line through both ends has at least so many."""
EXCHANGES: Final = 12
EVERY_S: Final = 0.2
"""Between two bursts of all members together, so that rank 0 answers as often however many."""
GAP_S: Final = 0.02
MAX_BURSTS: Final = 256
ANSWER_S: Final = 5.0


class ClockBursts:
    """Bursts before, during and after what stands inside its context.

    Args:
        control: this member's end; rank 0's clock is the one that counts, so that it asks nobody.
        recorder: is given the fastest exchange of each burst.
    """

    def __init__(self, control: Control, recorder: Recorder) -> None:
        self._control = control
        self._found = recorder.bursts
        self._every_s = EVERY_S * max(1, control.size - 1)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="clock", daemon=True)

    def __enter__(self) -> Self:
        if self._control.rank != 0:
            self._at_end()
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._over.set()
        if self._control.rank != 0:
            self._thread.join()
            if error is None:
                self._at_end()

    def _at_end(self) -> None:
        """Bursts of which at least one has to be answered, now or before; a slow one tells nothing.

        Raises:
            RankLost, DeadlineExceeded: see `Control.time_exchange`.
        """
        pause = threading.Event()
        for number in range(NUM_AT_ENDS):
            try:
                self._burst()
            except DeadlineExceeded:
                if number == NUM_AT_ENDS - 1 and not self._found:
                    raise
            pause.wait(GAP_S)  # bursts at one moment would share what disturbs it

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self._burst()
            except DeadlineExceeded:
                continue  # a slow answer tells nothing
            except RankLost:
                return  # whoever trains hears of it, too
            if len(self._found) >= MAX_BURSTS:  # a long run: half as many, all over it
                del self._found[NUM_AT_ENDS::2]
                self._every_s *= 2

    def _burst(self) -> None:
        burst = [self._control.time_exchange(ANSWER_S) for _ in range(EXCHANGES)]
        self._found.append(fastest(burst))
