"""`python -m h2o_cpp` is `h2o-cpp`."""

import sys

from h2o_cpp.cli import main

sys.exit(main())
