"""`python benchmarks/gpu`: ranks find what they run by the name of the package."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from gpu.run import main

    main()
