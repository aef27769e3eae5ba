"""Chat templates: untrusted programs of a model, rendered in a sandboxed process. No torch.

transformers renders a template in jinja's sandbox, which hides Python's own attributes. This
happens in its own process (`serve`) with bounded time and memory, because only that can stop
an endless loop or a huge allocation.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexgen_h2o.errors import UserError, short_repr

SECONDS = 10.0
"""Time limit of one chat: thousands of times the duration of published templates."""

_RESERVED_PARAMETERS = (
    "chat_template", "conversation", "conversations", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
    "self", "tokenize", "tokenizer_kwargs", "truncation")
"""Parameters of transformers' `apply_chat_template` that are no arguments of a template."""

_ALWAYS_ALLOWED = ("add_generation_prompt", "continue_final_message")
"""Arguments that have an effect even if the template does not name them."""

_log = logging.getLogger(__name__)

_WORKER = ("import sys; sys.path[:] = sys.argv[1:]; "
           "from flexgen_h2o.files.chat_template import serve; serve()")


class ChatRenderer:
    """Renders chats to prompts with a tokenizer's chat template, one after the other.

    The process starts with the first chat, which takes a second, and runs until `close`.

    Raises `UserError` if there is no tokenizer or no template.

    `tokenizer`: a transformers tokenizer. `template`: a template instead of the tokenizer's.
    `seconds`: time limit of one chat.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, *, seconds: float = SECONDS):
        if tokenizer is None:
            raise UserError("a chat needs a tokenizer, and the model has none here: give prompts")
        source = template or getattr(tokenizer, "chat_template", None)
        if isinstance(source, Mapping):  # some models have several
            source = source.get("default")
        if not source:
            raise UserError("the model's tokenizer has no chat template: give one, or prompts "
                            "in place of messages")
        tokens = {name: token if isinstance(token, list) else str(token)
                  for name, token in tokenizer.special_tokens_map.items()}
        self._always: dict[str, Any] = {"template": source, "variables": tokens, "seconds": seconds}
        self._seconds = seconds
        self._warned: set[str] = set()
        self._worker: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]],
               arguments: Mapping[str, Any] | None = None) -> str:
        """Return the prompt for the answer to a chat, with the template's special tokens.

        Raises `UserError` if the template refuses the messages, is damaged, does something
        forbidden, or exceeds its time or memory.

        `messages`: OpenAI's format: `role`, `content`, and other keys that the template reads.
        `arguments`: arguments of the template, such as `enable_thinking`.
        """
        for name in {*(arguments or {})} - {*_ALWAYS_ALLOWED} - self._warned:
            if name not in self._always["template"]:
                self._warned.add(name)
                _log.warning("the chat template does not read %s, which has no effect",
                             short_repr(name))
        variables = {**self._always["variables"], **(arguments or {})}
        fields = {"messages": list(messages), "variables": variables}
        try:
            request = json.dumps(self._always | fields).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError("messages and a template's arguments must be what JSON can hold: "
                            f"{error}") from None
        with self._lock:
            reply = self._answer(request)
        if reply is None:
            raise UserError("the chat template was stopped: it took more than "
                            f"{self._seconds:g} s or too much memory; give another one")
        if "error" in reply:
            raise UserError(f"the chat template does not take these messages: {reply['error']}")
        return reply["text"]

    def render_all(self, conversations: Sequence[Sequence[Mapping[str, Any]]],
                   arguments: Any = None) -> list[str]:
        """Return the prompts for the answers to conversations.

        `arguments` is a mapping of the template's arguments, or None. Raises `UserError`, which
        names the number of the conversation.
        """
        if arguments is not None:
            check_template_arguments("arguments of a chat template", arguments)
        prompts = []
        for number, messages in enumerate(conversations):
            if (not isinstance(messages, Sequence) or not messages
                    or not all(isinstance(message, Mapping) for message in messages)):
                raise UserError(f"conversation {number} must be a list of messages, such as "
                                '{"role": "user", "content": "Hello"}')
            try:
                prompts.append(self.render(messages, arguments))
            except UserError as error:
                raise UserError(f"conversation {number}: {error}") from None
        return prompts

    def start(self) -> subprocess.Popen[bytes]:
        """Start the process if it does not run, without waiting for it, and return it."""
        if self._worker is None:
            # Its own session, so that Ctrl-C in the terminal does not end it.
            self._worker = subprocess.Popen(
                [sys.executable, "-c", _WORKER, *sys.path], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
        return self._worker

    def close(self) -> None:
        """End the process; the next chat would start a new one."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.communicate()

    def __enter__(self) -> ChatRenderer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _answer(self, request: bytes) -> dict[str, str] | None:
        """Return the answer of the process; None if it ended, for example by its time limit."""
        worker = self.start()
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(request)
            worker.stdin.flush()
            return json.loads(worker.stdout.readline())
        except (BrokenPipeError, ValueError):
            self.close()
            return None
        except BaseException:  # an interrupt: the late answer would be read as the next one
            self.close()
            raise


def check_template_arguments(name: str, arguments: object) -> None:
    """Raise `UserError`, which begins with `name`, unless `arguments` suit a template."""
    if not isinstance(arguments, Mapping):
        raise UserError(f"{name} must be a mapping of names to values, got {short_repr(arguments)}")
    for engines in _RESERVED_PARAMETERS:
        if engines in arguments:
            raise UserError(f"{name} cannot have {engines!r}, which is no argument of a template's "
                            "own: leave it out")


_START = 120.0  # seconds to import transformers on a busy machine
_MEMORY = 512 << 20  # in addition to the memory after imports
_CHARACTERS = 16 << 20  # of a prompt: millions of tokens
_CODE = (".py", ".pyc", ".so")  # jinja imports some modules late
_FORBIDDEN = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.")


def serve() -> None:
    """Run the process: answer each line of stdin with a line on stdout, until stdin ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    signal.setitimer(signal.ITIMER_REAL, _START)
    from transformers.utils.chat_template_utils import render_jinja_template as render

    _sandbox()
    signal.setitimer(signal.ITIMER_REAL, 0)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        print(json.dumps(_answer(render, request)), flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _sandbox() -> None:
    """Limit memory to `_MEMORY` more, and forbid audited events other than imports."""
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


def _answer(render: Any, request: dict) -> dict[str, str]:
    try:
        # Like `apply_chat_template`: a key with a null value is absent.
        messages = [{key: value for key, value in message.items() if value is not None}
                    for message in request["messages"]]
        variables = {"add_generation_prompt": True, **request["variables"]}
        (text,), _ = render([messages], chat_template=request["template"], **variables)
        if len(text) > _CHARACTERS:
            return {"error": f"the prompt has {len(text)} characters"}
        return {"text": text}
    except Exception as error:  # a template is a program, and raises anything
        reason = " ".join(str(error).split())[:200]
        return {"error": f"{type(error).__name__}: {reason}"}
