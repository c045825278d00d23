"""Limits for CI: read from TOML with their line, evaluated on a summary, written from a known-good one. Needs no torch."""
