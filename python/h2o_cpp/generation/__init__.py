"""From a prompt to its text: requests, streams, the engine."""
