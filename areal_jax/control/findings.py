"""What the audit found wrong."""

from __future__ import annotations


class Findings:
    """The violations of a journal, each with the number of the row at which it was found."""

    def __init__(self) -> None:
        self.row = 0
        self.violations: list[str] = []

    def wrong(self, what: str) -> None:
        self.violations.append(f"row {self.row}: {what}")

    def require(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.wrong(what)
