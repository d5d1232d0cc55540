"""How Hypothesis searches: the same examples in every run, or with H2O_RANDOM_SEARCH=1 new ones."""

import os

import hypothesis

NEW_EXAMPLES = os.environ.get("H2O_RANDOM_SEARCH") == "1"


def examples(count: int) -> int:
    """How many to try where `count` are tried by default."""
    return 20 * count if NEW_EXAMPLES else count


def load_profile() -> None:
    """For every test that says no other; called before the tests are imported."""
    hypothesis.settings.register_profile(
        "h2o",
        deadline=None,
        max_examples=examples(100),
        derandomize=not NEW_EXAMPLES,
        database=None,
        print_blob=True,
    )
    hypothesis.settings.load_profile("h2o")
