"""Entry point of ``selfcal`` and of ``python -m selfcal_lightning``."""

import atexit
import os
import sys

from selfcal_lightning.core.signals import INTERRUPTION


def main() -> None:
    status = 1  # that of an uncaught error

    @atexit.register  # the first one registered is called last
    def leave() -> None:
        """End the process once everything else has: threads are joined, exit handlers have run, output is flushed.

        Threads of libraries (Arrow, gloo) that outlive Python's finalisation abort the process now and then; see
        apache/arrow#34314. So the interpreter is not finalised.
        """
        nonlocal status
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # gone or closed
                status = status or 1
        os._exit(status)

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
    try:
        status = run(sys.argv[1:], owns_process=True)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    except KeyboardInterrupt:
        status = INTERRUPTION.status
        raise
    sys.exit(status)


if __name__ == "__main__":
    main()
