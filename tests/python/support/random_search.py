"""Hypothesis profiles: the same examples in every run, or new ones with H2O_RANDOM_SEARCH=1."""

import os

import hypothesis

NEW_EXAMPLES = os.environ.get("H2O_RANDOM_SEARCH") == "1"


def examples(count: int) -> int:
    """The number of examples, by default `count`."""
    return 20 * count if NEW_EXAMPLES else count


def load_profile() -> None:
    """Set the default profile; called before tests are imported."""
    hypothesis.settings.register_profile(
        "h2o",
        deadline=None,
        max_examples=examples(100),
        derandomize=not NEW_EXAMPLES,
        database=None,
        print_blob=True,
    )
    hypothesis.settings.load_profile("h2o")
