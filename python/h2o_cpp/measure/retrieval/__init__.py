"""Retrieval tasks, whose answers are in the prompt, for any model."""
