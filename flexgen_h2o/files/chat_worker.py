"""The process that renders chat templates: requests as lines of JSON in, answers out.

The kernel ends it when a chat takes too long, whatever it is doing then, and refuses it memory. A
template that broke out of the sandbox could open no file but Python's own code.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

_START = 120.0  # seconds to load transformers, on a machine that is busy
_MEMORY = 512 << 20  # beside what it has when it is ready
_CHARACTERS = 16 << 20  # of a prompt: millions of tokens
_CODE = (".py", ".pyc", ".so")  # jinja loads parts of itself late
_FORBIDDEN = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.")


def serve() -> None:
    """Answer each line of stdin with one on stdout, until stdin ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends the process
    signal.setitimer(signal.ITIMER_REAL, _START)
    from transformers.utils.chat_template_utils import render_jinja_template as render

    _hold()
    signal.setitimer(signal.ITIMER_REAL, 0)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        print(json.dumps(_answer(render, request)), flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _hold() -> None:
    """Allow no more than `_MEMORY`, and nothing that Python audits but the loading of code."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY,) * 2)
    sys.dont_write_bytecode = True
    sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple) -> None:
    if event == "open":
        path, mode, flags = arguments
        reads = mode in ("r", "rb") or mode is None and not flags & (os.O_WRONLY | os.O_RDWR)
        if reads and str(path).endswith(_CODE):
            return
    elif not event.startswith(_FORBIDDEN) or event in ("os.listdir", "os.scandir"):
        return
    raise PermissionError(f"a chat template may not do this: {event}")


def _answer(render, request: dict) -> dict[str, str]:
    try:
        # As `apply_chat_template` does: a key whose value is null is a key that is not there.
        messages = [{key: value for key, value in each.items() if value is not None}
                    for each in request["messages"]]
        variables = {"add_generation_prompt": True, **request["variables"]}
        (text,), _ = render([messages], chat_template=request["template"], **variables)
        if len(text) > _CHARACTERS:
            return {"error": f"the prompt has {len(text)} characters"}
        return {"text": text}
    except Exception as error:  # a template is a program, and raises anything
        reason = " ".join(str(error).split())[:200]
        return {"error": f"{type(error).__name__}: {reason}"}
