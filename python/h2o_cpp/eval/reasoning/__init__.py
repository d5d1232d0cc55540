"""Problems whose solution is a long written trace, and how well a model solves them."""
