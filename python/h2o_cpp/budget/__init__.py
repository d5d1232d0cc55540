"""Cache budgets: policies, the memory of caches, and what advise stored in a file."""
