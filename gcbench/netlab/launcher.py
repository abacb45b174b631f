"""Start `gcbench.netlab.inside` in private namespaces, with the rights that this user has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gcbench.core.errors import GcbenchError, UsageError

INSIDE = Path(__file__).with_name("inside.py")
TOOLS = ("unshare", "nsenter", "ip", "tc", "mount")
_ISOLATE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_AS_USER = ("--user", "--map-root-user")


def isolate() -> tuple[str, ...]:
    """Return the command that starts another command in private namespaces.

    Raises:
        UsageError: this machine cannot create them; the message says why.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError(f"netlab needs Linux network namespaces; this system is {sys.platform}")
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=path) is None]:
        raise UsageError(
            f"netlab needs {', '.join(missing)}: install the packages iproute2 and util-linux"
        )
    command = _ISOLATE if os.geteuid() == 0 else (*_ISOLATE[:1], *_AS_USER, *_ISOLATE[1:])
    done = subprocess.run([*command, "true"], capture_output=True, text=True)
    if done.returncode:
        raise UsageError(
            f"netlab cannot create namespaces ({done.stderr.strip()}): run it as root, or allow "
            "unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1)"
        )
    return command


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one job in a lab of its own and return its record.

    The lab ends with this call and with this process: its standard input is a pipe whose other end
    closes with them.

    Raises:
        UsageError: this machine cannot create namespaces.
        GcbenchError: the lab could not be built, or its job failed.
    """
    environment = os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"}
    process = subprocess.Popen(
        [*isolate(), sys.executable, "-P", str(INSIDE), json.dumps(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the lab
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        text = process.stdout.read()
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()
    try:
        record: dict[str, Any] = json.loads(text)
    except ValueError:
        raise GcbenchError(f"the lab ended with code {process.returncode} and no result") from None
    if "error" in record:
        raise GcbenchError(f"netlab: {record['error']}")
    return record
