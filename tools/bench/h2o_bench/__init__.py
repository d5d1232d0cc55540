"""Measuring speed: one file (`measurement`), and engines beside each other (`comparison`)."""
