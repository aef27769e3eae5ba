"""The program's commands: help, version, dispatch, errors and shell completion."""

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from helpers.error_cases import command_refused
from helpers.programs import ROOT

import flexgen_h2o
from flexgen_h2o.cli import commands
from flexgen_h2o.cli.commands import COMMANDS
from flexgen_h2o.cli.entry_point import exit_status
from flexgen_h2o.commands import generate, plan

VERSION = f"flexgen_h2o {flexgen_h2o.__version__}\n"


def printed(capsys, call, *argv: object) -> str:
    """Return the output of a call that exits with status 0; stderr is empty."""
    with pytest.raises(SystemExit) as ended:
        call(*argv)
    out, err = capsys.readouterr()
    assert (ended.value.code or 0, err) == (0, "")
    return out


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_and_version(name, capsys, monkeypatch):
    main = commands.command_module(name).main
    for called, usage in (("/usr/bin/flexgen-h2o", f"flexgen-h2o {name}"),
                          ("/src/flexgen_h2o/__main__.py", f"python -m flexgen_h2o {name}"),
                          ("/src/flexgen_h2o/batch.py", "python -m flexgen_h2o.batch")):
        monkeypatch.setattr(sys, "argv", [called])
        text = printed(capsys, main, ["--help"])
        assert text.startswith(f"usage: {usage} [") and "--version" in text
        assert printed(capsys, commands.main, [name, "--help"]) == text
    assert printed(capsys, main, ["--version"]) == VERSION


def test_help_all_shows_more_flags_than_help(capsys):
    few, many = (printed(capsys, generate.main, [flag]) for flag in ("--help", "--help-all"))
    for flag, is_common in (("--hh-ratio", True), ("--sep-layer", False)):
        assert (f"\n  {flag} " in few, f"\n  {flag} " in many) == (is_common, True)
    assert "--help-all" in few


def test_modules_run_as_programs_without_warnings():
    for words in (["flexgen_h2o"], ["flexgen_h2o.batch"], ["flexgen_h2o.flex_opt"]):
        done = subprocess.run([sys.executable, "-W", "error", "-m", *words, "--version"], cwd=ROOT,
                              capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, VERSION, "")


def test_the_program_lists_its_commands(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flexgen-h2o"])
    text = printed(capsys, commands.main, ["--help"])
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert printed(capsys, commands.main, []) == printed(capsys, commands.main) == text
    assert printed(capsys, commands.main, ["--version"]) == VERSION


def test_generate_is_the_default_command(monkeypatch):
    ran = []
    monkeypatch.setattr(generate, "run", ran.append)
    flags = ["--model", "summarize", "--gen-len", "3"]
    assert [commands.main(words) for words in (flags, ["generate", *flags])] == [0, 0]
    assert ran == [generate.parse_args(flags)] * 2


@pytest.mark.parametrize(("argv", "words"), [
    (["sumarize", "--gen-len", "3"], "did you mean summarize?"), (["xyz"], "see --help"),
    (["--modle", "a"], "did you mean --model?"), (["--print-completion", "fish"], "bash, zsh"),
    (["--print-completion"], "expected one argument")])
def test_unknown_command_suggests_a_name(argv, words, capsys):
    command_refused(commands.main, capsys, argv, words)


def test_plan_equals_generate_plan_only(capsys, tmp_path):
    flags = ["--model", "opt-6.7b", "--path", "_DUMMY_", "--percent", "0", "50", "100", "0",
             "--hardware", str(ROOT / "configs/hardware/t4.yaml")]
    saved = tmp_path / "run.yaml"
    plan.parse_args(flags).save(saved)
    outputs = []
    for main, argv in ((generate.main, [*flags, "--plan-only"]), (plan.main, flags),
                       (commands.main, ["plan", "--config", str(saved)])):
        assert main(argv) == 0
        outputs.append(capsys.readouterr())
    assert outputs[0] == outputs[1] == outputs[2] and "predicted" in outputs[0].out
    for flag in ("--plan-only", "--output", "--do-sample", "--warm-up"):
        command_refused(plan.main, capsys, [*flags, flag], f"unknown flag {flag}")


@pytest.mark.parametrize(("stdout", "status"), [("head", 0), ("full", 2)])
def test_failure_to_print_is_one_error_line(stdout, status, capsys, monkeypatch):
    reader, writer = os.pipe() if stdout == "head" else (None, os.open("/dev/full", os.O_WRONLY))
    if reader is not None:
        os.close(reader)
    with open(writer, "w") as target:
        monkeypatch.setattr(sys, "stdout", target)
        assert commands.main(["--print-completion", "bash"]) == status
        monkeypatch.undo()
    assert ("No space left" in capsys.readouterr().err) == bool(status)


# --- completion


def completed(script: str, *words: str, folder: Path) -> set[str]:
    """The completions that bash offers for the last of these words of a command line."""
    shell = (f"{script}\nCOMP_WORDS=({' '.join(map(repr, words))}); COMP_CWORD={len(words) - 1}\n"
             'COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE}\n'
             f"$(complete -p {words[0]} | sed 's/.*-F \\([^ ]*\\) .*/\\1/') {words[0]} "
             f"{words[-1]!r}\n" 'printf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", commands.SHELLS)
def test_completion_scripts_are_valid(shell, capsys, tmp_path):
    assert commands.main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS) and "hh-ratio" in script
    if shutil.which(shell) is not None:
        (tmp_path / "script").write_text(script)
        done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")


def test_bash_completes_commands_flags_values_and_files(capsys, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    (tmp_path / "articles.jsonl").touch()
    assert commands.main(["--print-completion", "bash"]) == 0
    script = capsys.readouterr().out
    for words, offered in ((("s",), {"serve", "stream", "summarize"}), (("",), {*COMMANDS}),
                           (("generate", "--hh-r"), {"--hh-ratio"}),
                           (("plan", "--goal", "lat"), {"latency"}),
                           (("summarize", "--input-path", "art"), {"articles.jsonl"})):
        assert completed(script, "flexgen-h2o", *words, folder=tmp_path) == offered


def test_thread_limit_is_one_error_line(capsys):
    def start():
        refusal = RuntimeError("can't start new thread")
        with mock.patch.object(threading.Thread, "start", side_effect=refusal), \
                ThreadPoolExecutor(1) as pool:
            pool.submit(print)

    command_refused(lambda argv: exit_status(start), capsys, [], "start no more threads")

    def other():
        raise RuntimeError("a bug of ours")

    with pytest.raises(RuntimeError, match="a bug of ours"):
        exit_status(other)
