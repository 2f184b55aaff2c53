"""Environments of other projects, each run by an interpreter of its own."""
