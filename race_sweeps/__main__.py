import sys

from race_sweeps.cli import main

if __name__ == "__main__":
    sys.exit(main())
