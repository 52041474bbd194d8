"""`selfcal` as a process that kills itself at the write step argv[1], a call of `os.fsync` or `os.replace`."""

import sys

from support.kill_worker import die_at

from selfcal_lightning.cli import run

if __name__ == "__main__":
    die_at(int(sys.argv[1]))
    raise SystemExit(run(sys.argv[2:]))
