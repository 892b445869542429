"""Three members of a cluster: one is killed, one is paused, and the third notices.

The first process is this one. It starts the other two, and they find it by its address.

    python examples/members.py
"""

# ruff: noqa: T201 - it prints what it does

from __future__ import annotations

import signal
import subprocess
import sys
from queue import SimpleQueue

from seawall.members import Cluster, local


def be_member(name: str, seed: str) -> None:
    """Run one of the other members, until the first process ends and closes stdin."""
    with Cluster("shop", member=name, bind="127.0.0.1:0", seeds=[seed], preset=local()):
        sys.stdin.read()


def start(name: str, seed: str) -> subprocess.Popen[bytes]:
    """Start another process of this program."""
    command = [sys.executable, __file__, name, seed]
    return subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603 - this very program


class Watch:
    """Waits until a member goes into a state."""

    def __init__(self, cluster: Cluster) -> None:
        """Keep the changes of each member in their order."""
        self._states: dict[str, SimpleQueue[str]] = {"bert": SimpleQueue(), "cleo": SimpleQueue()}
        cluster.subscribe(lambda change: self._states[change.member].put(change.after))

    def until(self, name: str, state: str) -> None:
        """Wait for that change, and print it."""
        while self._states[name].get(timeout=120) != state:
            pass
        print(f"{name} is {state}")


def main() -> None:
    """Run the first process."""
    with Cluster("shop", member="anna", bind="127.0.0.1:0", preset=local()) as cluster:
        watch = Watch(cluster)
        bert, cleo = start("bert", cluster.address), start("cleo", cluster.address)
        try:
            watch.until("bert", "alive")
            watch.until("cleo", "alive")

            print("bert is paused")
            bert.send_signal(signal.SIGSTOP)
            watch.until("bert", "suspected")
            print("bert goes on")
            bert.send_signal(signal.SIGCONT)
            watch.until("bert", "alive")

            print("cleo is killed")
            cleo.kill()
            watch.until("cleo", "suspected")
            watch.until("cleo", "confirmed")
        finally:
            for process in (bert, cleo):
                process.kill()
                process.communicate()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_member(*sys.argv[1:])
    else:
        main()

# It prints:
#
# > bert is alive
# > cleo is alive
# > bert is paused
# > bert is suspected
# > bert goes on
# > bert is alive
# > cleo is killed
# > cleo is suspected
# > cleo is confirmed
