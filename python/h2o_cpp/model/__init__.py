"""Models: finding and loading them, policies, budgets and chat templates."""
