"""`python -m kvp PROGRAM ...`, as launchers start it: `torchrun -m kvp collect ...`."""

import sys

from kvp.program.table import main

if __name__ == "__main__":
    sys.argv[0] = "kvp"  # what manifests record
    raise SystemExit(main())
