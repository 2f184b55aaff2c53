"""The names of files and folders in a run's folder."""

from __future__ import annotations

CONFIG = "config.yaml"
"""The resolved config; a run with this file as its config repeats the run."""
JOURNAL = "journal.sqlite"
BRANCH = "branch"
"""Key of the journal's header under which a branch records the run that it comes from."""
CHECKPOINTS, EXPORTS = "checkpoints", "exports"
"""Subfolders of the run's folder, each with one folder per version."""
SECRET_FILE = "launch/secret"
"""The secret that the processes of a launched run share; file mode 0600."""
