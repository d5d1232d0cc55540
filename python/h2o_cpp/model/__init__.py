"""Models: finding and opening them, their policies, budgets and chat templates."""
