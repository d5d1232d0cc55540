"""Processes that check and compile grammars, and compute masks, within limits."""
