"""Generation: requests, streams and the engine."""
