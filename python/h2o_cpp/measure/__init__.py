"""What a budget costs, and what a machine can do."""
