"""Engines to measure, one module each, run as subprocesses that exchange JSON lines (`serving`)."""
