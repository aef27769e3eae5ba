"""Serve OpenAI's Files, Batch and completion endpoints: ``flexgen-h2o serve --model NAME``.

Flags and the data directory are checked before torch is imported and the model is loaded.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flexgen_h2o.cli.entry_point import StopRequest, entry_point
from flexgen_h2o.cli.launch import open_llm
from flexgen_h2o.cli.parser import Parser, build_parser, check_flags, check_no_effect, parse
from flexgen_h2o.cli.plan_text import plan_sentences
from flexgen_h2o.cli.request_flags import UNSUPPORTED, RequestOptions, request_flags
from flexgen_h2o.cli.run_config import RunConfig
from flexgen_h2o.cli.values import flag
from flexgen_h2o.config.limits import MAX_MODEL_LEN
from flexgen_h2o.config.policy import Workload
from flexgen_h2o.config.weight_layout import AUTO
from flexgen_h2o.errors import UserError
from flexgen_h2o.files.terminal import print_stdout
from flexgen_h2o.requests.tokenizing import RequestTokenizer

if TYPE_CHECKING:
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.planning.hardware import Hardware
    from flexgen_h2o.serving.api import Server

KEY_VARIABLE = "FLEXGEN_H2O_API_KEY"
"""Environment variable with the key, which other users cannot see in the list of processes."""

EXCLUDED_FLAGS = ("plan_only", "hardware", "pipeline_parallel", "rank_timeout")
"""Flags of `generate` in shared groups that have no effect here."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(RequestOptions):
    """The checked flags of `serve`.

    Raises `UserError` for a value out of range and for flags that contradict each other.
    """

    host: str = flag(
        "text", "127.0.0.1", group="server",
        help="address to listen on; addresses that other machines reach need --api-key",
    )
    port: int = flag(
        "int", 8000, ge=0, group="server", help="port to listen on; 0: a free one",
    )
    data_dir: str = flag(
        "path", "~/flexgen_h2o_data", group="server", metavar="DIR",
        help="folder of uploads, batches and results, which a restarted server goes on with",
    )
    api_key: str | None = flag(
        "text", None, group="server", shown=f"{KEY_VARIABLE} in the environment, or none",
        metavar="KEY", help="key that requests must send",
    )
    cors_origin: tuple[str, ...] | None = flag(
        "words", None, group="server", shown="none", metavar="URL",
        help="origins of web pages that may use the server, such as https://example.org",
    )
    max_model_len: int | None = flag(
        "int", None, ge=2, group="server",
        shown=f"the model's positions, at most {MAX_MODEL_LEN}",
        help="maximum number of tokens of a prompt and its answer; memory is planned for it",
    )
    max_block_seconds: float = flag(
        "float", 30.0, gt=0, group="server",
        help="maximum time of a block, after which waiting requests join",
    )
    max_queue: int = flag(
        "int", 256, ge=1, group="server",
        help="maximum number of sequences that clients wait for; more are refused with status 429",
    )
    max_file_size: int = flag(
        "size", 100_000_000, group="server", metavar="SIZE", shown="100MB",
        help="maximum size of an uploaded file",
    )

    def __post_init__(self) -> None:
        check_flags(self)
        if self.run.percent == AUTO and self.max_model_len is None:
            raise UserError("--percent auto plans for requests of --max-model-len tokens: give it")
        if self.port > 65535:
            raise UserError(f"--port must be at most 65535, got {self.port}")
        for origin in self.cors_origin or ():
            if not re.fullmatch(r"https?://[\w.:\[\]-]+", origin):
                raise UserError("--cors-origin must be the origin of a page, such as "
                                f"https://example.org, got {origin!r}")
        if self.key is not None and not re.fullmatch(r"[!-~]+", self.key):
            raise UserError("--api-key must be letters, digits and signs of ASCII without spaces")
        if self.key is None and not _is_loopback(self.host):
            raise UserError(f"--host {self.host} is reached from other machines: add --api-key, or "
                            f"set {KEY_VARIABLE}")
        _ = self.template, self.request_fields  # read the files now, to report errors early

    @property
    def name(self) -> str:
        """Name of the model in answers."""
        return (self.served_model_name or (self.run.model,))[0]

    @property
    def key(self) -> str | None:
        """The key that requests must send; None if they need none."""
        return self.api_key or os.environ.get(KEY_VARIABLE) or None


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def run(options: ServeOptions) -> None:
    """Serve until a signal comes."""
    with open_server(options) as server, StopRequest(server.end):
        print_stdout(f"serving {options.name} at {server.url}/v1")
        server.run()


@contextmanager
def open_server(options: ServeOptions) -> Iterator[Server]:
    """Open the data directory and the model, and begin with batches that are left.

    The server listens and computes when it runs: run it in this thread, whose OpenMP threads exist.

    Raises `UserError` if a package is missing, the data directory or the address cannot be used, or
    the model cannot be loaded.
    """
    try:
        from flexgen_h2o.planning.roofline import DecodeRoofline
        from flexgen_h2o.serving.api import Api, Server
        from flexgen_h2o.serving.dashboard import Dashboard
        from flexgen_h2o.serving.metrics import Metrics
        from flexgen_h2o.serving.scheduler import Scheduler
        from flexgen_h2o.serving.store import Store
    except ImportError as error:
        raise UserError(f"serve needs {error.name}: pip install 'flexgen_h2o[serve]'") from None

    defaults = options.defaults()
    with (closing(Store(options.data_dir)) as store, _bind(options) as listener,
          _spooled_in(options.data_dir), _open_planned(options) as llm):
        max_len = options.max_model_len or llm.max_model_len(MAX_MODEL_LEN)
        if llm.max_model_len(max_len) < max_len:
            raise UserError(f"--max-model-len {max_len} is more than the model's positions: give "
                            f"at most {llm.max_model_len(max_len)}")
        plan, limits = llm.memory_plan(max_len)
        sentences, hardware = plan_sentences(plan, limits), _hardware(options.run, llm)
        if isinstance(hardware, str):
            sentences.append(f"Roofline: {hardware}.")
        with RequestTokenizer(llm, defaults, options.template, max_model_len=max_len) as tokenizer:
            roofline = None if isinstance(hardware, str) else DecodeRoofline(hardware, plan.run)
            scheduler = Scheduler(
                llm, store, tokenizer, Metrics(options.name, roofline), max_model_len=max_len,
                block_seconds=options.max_block_seconds, max_queue=options.max_queue)
            api = Api(store, scheduler, tokenizer, defaults, model=options.name,
                      max_model_len=max_len, max_file=options.max_file_size)
            dashboard = Dashboard(store, scheduler, model=options.name, plan=sentences,
                                  memory=plan.held())
            app = api.app(key=options.key, host=options.host, origins=options.cors_origin or (),
                          pages=dashboard.routes())
            try:
                tokenizer.start()
                scheduler.start()
                yield Server(app, scheduler, listener)
            finally:
                scheduler.close()


def _hardware(config: RunConfig, llm: LLM) -> Hardware | str:
    """Return the measured figures of this machine, or why they are not known."""
    from flexgen_h2o.planning.calibrate import measured_hardware  # imports torch
    from flexgen_h2o.storage.device import open_device

    return measured_hardware(open_device(config.device), config.offload_dir,
                             str(llm.dtype).removeprefix("torch."))


@contextmanager
def _spooled_in(folder: str) -> Iterator[None]:
    """Let uploads come into this folder: the system's may be in memory."""
    before = tempfile.tempdir
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def _open_planned(options: ServeOptions) -> LLM:
    """Open the model, with ``--percent auto`` by the plan for the longest requests."""
    config, length = options.run, options.max_model_len
    if config.percent != AUTO:
        return open_llm(config)
    from flexgen_h2o.cli import planner  # imports scipy, which is slow

    assert length is not None
    new = min(config.gen_len, length - 1)
    load = Workload(length - new, new, config.resolved_gpu_batch_size,
                    config.resolved_num_gpu_batches)
    plan = planner.plan(replace(config, prompt_len=load.prompt_len), load, None)
    plan.show()
    return open_llm(plan.config, implementations=plan.implementations)


def _bind(options: ServeOptions) -> socket.socket:
    """Return a socket on the address to listen on. Raises `UserError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
        return listener
    except OSError as error:
        raise UserError(f"cannot listen on --host {options.host} --port {options.port} "
                        f"({error.strerror}): choose others") from None


def parser() -> Parser:
    """Return the parser of the flags."""
    return build_parser(
        request_flags(ServeOptions, without=EXCLUDED_FLAGS), command="serve",
        usage="%(prog)s [--model NAME] [--percent P ...] [--host HOST] [--port N] [flags]",
        description="Serve OpenAI's Files, Batch, completion and chat endpoints. Batches survive "
        "restarts.")


def parse_args(argv: Sequence[str] | None = None) -> ServeOptions:
    """Parse flags into checked `ServeOptions`. Raises `UserError`."""
    options, shared = parse(argv, parser(), ServeOptions)
    check_no_effect(shared, (*UNSUPPORTED, *EXCLUDED_FLAGS, "csv", "output"), "serve")
    return ServeOptions(run=RunConfig.from_mapping(shared), **options)


main = entry_point(parse_args, run)
