"""Entry point of ``selfcal`` and of ``python -m selfcal_lightning``."""

from __future__ import annotations

import os
import sys

from selfcal_lightning.core.signals import INTERRUPTION


def main() -> None:
    """Run the command line and leave with its exit status."""
    INTERRUPTION.listen()
    # OpenMP threads that spin at barriers make small models tens of times slower where cores are shared (measured:
    # 1.2 against 56 responses a second under a load of 5 on two cores). It must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Libraries show a bar for loading weights, which small models do in a blink: show bars that last. Read by tqdm
    # when it is imported.
    os.environ.setdefault("TQDM_DELAY", "3")
    from selfcal_lightning.cli import run
    from selfcal_lightning.core.imports import keep_bitsandbytes_quiet

    keep_bitsandbytes_quiet()
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
