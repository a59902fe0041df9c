"""The nursery without what it imports ahead for seconds: for tests that see nothing of that."""

import sys

from slipstream.controller import forking

if __name__ == "__main__":
    forking.PRELOADED = ()
    forking.main(int(sys.argv[1]))
