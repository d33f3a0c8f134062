"""The rendezvous store of all ranks, in a process of its own: no rank's death takes it along.

``python -m agents.store`` prints ``HOST:PORT`` on one line and serves until its standard input
closes, that is until whoever started it has ended, however it ended.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta


def main() -> None:
    """Serve a TCPStore on a free port."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True, help="address under which ranks reach this store")
    host = parser.parse_args().host
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch has no __all__

    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    sys.stdout.write(f"{host}:{store.port}\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
