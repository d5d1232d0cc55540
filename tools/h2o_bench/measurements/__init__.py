"""Measurements, a module each."""
