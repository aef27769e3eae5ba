"""How idle OpenMP threads wait: asleep while other processes want the CPUs, and only then."""

import os
import threading
import time
from pathlib import Path

import pytest
from helpers.generation import token_ids
from helpers.kernel_cases import threads
from helpers.kernel_internals import is_asleep, is_running

from flexgen_h2o import LLM
from flexgen_h2o.kernels.cpu import library as cpu_library
from flexgen_h2o.kernels.cpu import wait_policy
from flexgen_h2o.kernels.cpu.wait_policy import IdleTeam, OpenMPWaitPolicy, busy_seconds

pytestmark = pytest.mark.skipif(
    cpu_library.missing() is not None or not Path("/proc/stat").exists(),
    reason="threads are left alone without the C++ kernels or Linux's /proc")


class Machine:
    """A machine of 4 CPUs, of which others use `others` while time goes on by `pass_time`."""

    def __init__(self, patch):
        self.clock = self.busy = self.others = 0.0
        patch.setattr(wait_policy, "busy_seconds", lambda: self.busy)
        patch.setattr(wait_policy.time, "monotonic", lambda: self.clock)
        patch.setattr(wait_policy.time, "process_time", lambda: 3 * self.clock)
        patch.setattr(wait_policy.os, "sched_getaffinity", lambda pid: set(range(4)))

    def pass_time(self, seconds: float, others: float) -> None:
        self.clock += seconds
        self.busy += (3 + others) * seconds


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in wait_policy.WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.mark.parametrize(("count", "others", "asleep"), [
    (4, 0.2, False), (4, 0.3, True),
    (3, 1.2, False), (3, 1.3, True),  # one CPU is left to others
    (1, 4.0, False),
    (9, 0.2, False), (9, 0.3, True)])
def test_threads_sleep_while_other_processes_need_cpus(machine, count, others, asleep):
    policy = OpenMPWaitPolicy()
    with threads(count):
        machine.pass_time(9, others)
        with policy.applied():
            assert is_asleep(policy) == asleep
            machine.pass_time(wait_policy.WINDOW / 2, 4.2 - others)
            policy.update()
            assert is_asleep(policy) == asleep, "too soon to tell"
            machine.pass_time(wait_policy.WINDOW, 0)
            machine.busy = machine.clock * 3  # no other process since the start
            policy.update()
            assert not is_asleep(policy)
            machine.pass_time(1, 4)
            policy.update()
            assert is_asleep(policy) == (count > 1)
        assert not is_asleep(policy), "it ends with the run"


@pytest.mark.parametrize("count", [4, 1])
def test_threads_sleep_on_request(machine, count):
    policy = OpenMPWaitPolicy()
    with threads(count):
        with policy.applied(sleep=True):
            assert is_asleep(policy) == (count > 1)
            machine.pass_time(9, 0)
            policy.update()
            assert is_asleep(policy) == (count > 1)
        assert not is_asleep(policy)
        machine.pass_time(9, 0)
        with policy.applied():
            assert not is_asleep(policy)


@pytest.mark.parametrize("name", wait_policy.WAIT_VARIABLES)
def test_environment_variables_are_kept(machine, monkeypatch, name):
    monkeypatch.setenv(name, "ACTIVE")
    policy = OpenMPWaitPolicy()
    machine.pass_time(9, 4)
    with threads(4), policy.applied():
        assert not is_asleep(policy)
    assert os.environ[name] == "ACTIVE"


def test_busy_seconds_of_incomplete_proc_stat(monkeypatch, tmp_path):
    monkeypatch.setattr(wait_policy, "busy_seconds", lambda: busy_seconds(tmp_path / "stat"))
    with threads(4), OpenMPWaitPolicy().applied():
        pass
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    stat = tmp_path / "stat"
    stat.write_text("cpu 9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 4 900 900 8 16 32 64 128\n"
                    "cpu1 9 9 9 9 9 9 9 9 9 9\nintr 1 2 3\n")
    assert busy_seconds(stat) is None, "a CPU is missing"
    stat.write_text(stat.read_text() + "cpu2 100 0 0 900 900 0 0 0 0 0\n")
    assert busy_seconds(stat) == 163 / os.sysconf("SC_CLK_TCK")
    stat.write_text("cpu0 a b\n")
    assert busy_seconds(stat) is None
    assert busy_seconds() is None or busy_seconds() > 0


def test_idle_team_has_more_threads_than_cpus_and_ends():
    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    before = count()
    team = IdleTeam()
    assert count() - before == len(os.sched_getaffinity(0)) + 1
    team.close()
    end = time.monotonic() + 30
    while count() > before:  # they end by themselves, a moment later
        assert time.monotonic() < end
        time.sleep(0.001)


def test_wait_policy_does_not_change_tokens(tiny_model, monkeypatch):
    teams: list[IdleTeam] = []

    class Counted(IdleTeam):
        def __init__(self):
            super().__init__()
            teams.append(self)

    monkeypatch.setattr(wait_policy, "IdleTeam", Counted)
    prompts = [[5, 6, 7], [8, 9]]
    with threads(2), LLM(str(tiny_model("llama").folder), dtype="float32", progress=False) as llm:
        monkeypatch.setattr(wait_policy, "busy_seconds", lambda: None)
        alone = token_ids(llm.generate(prompts, max_new_tokens=4))
        assert not teams
        monkeypatch.setattr(wait_policy, "WINDOW", 0)
        monkeypatch.setattr(wait_policy, "busy_seconds", lambda: 1e3 * time.monotonic())
        assert token_ids(llm.generate(prompts, max_new_tokens=4)) == alone
        assert teams and not any(is_running(team) for team in teams)
    assert all(thread.name != "idle-team" for thread in threading.enumerate())
