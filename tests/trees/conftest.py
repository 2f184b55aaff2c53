"""The tiny model of the trainer's tests, and learners that share their compiled programs."""

from tests.trainer.conftest import learner, model, params  # noqa: F401 # fixtures
