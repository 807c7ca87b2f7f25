"""What ``planted_faults`` plants."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """An edit that breaks the program. file: edited file. old: text that occurs in it once; new: its replacement. test:
    id of the cheapest test known to fail."""

    name: str
    file: str
    old: str
    new: str
    test: str
