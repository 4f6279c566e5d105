import sys

from launchers.cli import main

if __name__ == "__main__":
    sys.exit(main())
