"""A command of `selfcal` as a process that kills itself: argv[1] is the number of the write step, the rest the command.

Write steps are calls of `os.fsync` and of `os.replace`, whichever thread makes them.
"""

import sys

from support.kill_worker import die_at

from selfcal_lightning.cli import run

if __name__ == "__main__":
    die_at(int(sys.argv[1]))
    raise SystemExit(run(sys.argv[2:]))
