"""Other engines to compare with, on the same files (extra `bench`); and models to do it on."""
