"""Models: loading them, their sessions, and chat templates."""
