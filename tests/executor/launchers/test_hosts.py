"""A stage over several hosts: agents on one machine stand for them, and a false srun for Slurm."""

import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from host_ops import SOON, hosts_toy, ranks
from stage_specs import stage_spec
from toy_ops import ONLY_THE_LOOP, UNTRACKED, is_alive, wait_for

from dsl.errors import StageError
from dsl.launch import Launch
from executor.launchers import host_folder, hosts
from executor.launchers.failure import cause_of
from executor.launchers.forkserver_client import Child
from executor.launchers.host_folder import Beat, HostFolder, Offer, Pulse
from executor.launchers.hosts import SeveralHosts, endpoint_of, wait_for_hosts
from executor.launchers.joining import Member, Offers, join_stage
from executor.launchers.stage_contract import RankExit
from executor.store.lease import Lease
from executor.system.jsonlines import write_json

HERE = socket.gethostname()
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
tasks = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--ntasks="))
begin = next(place for place, word in enumerate(sys.argv) if place and not word.startswith("--"))
with open(os.path.join(os.path.dirname(__file__), "asked"), "a") as asked:
    print(*sys.argv[1:begin], file=asked)
children = [subprocess.Popen(sys.argv[begin:]) for task in range(tasks)]
sys.exit(max(child.wait() for child in children))
"""
SCONTROL = f"""#!{sys.executable}
import os, sys
assert sys.argv[1:3] == ["show", "hostnames"]
print(*sys.argv[3].split(","), sep="\\n")
"""


def slurm(folder: Path, names: str, here: str) -> dict[str, str]:
    """The environment of an allocation, with false commands on PATH."""
    commands = folder / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": str(len(names.split(","))),
        "SLURM_JOB_NODELIST": names,
        "SLURMD_NODENAME": here,
        "SLURM_CPUS_ON_NODE": "2",
    }


def started(toy):
    pids = []
    wait_for(lambda: bool(pids) or bool(pids.extend(ranks(toy)) or pids), 120)
    return pids


def test_in_a_slurm_allocation_srun_starts_the_other_hosts(tmp_path):
    toy = hosts_toy(tmp_path, "add")
    toy.file.write_text(f'{toy.file.read_text()}token = "${{secret:HOSTS_TOKEN}}"\n')
    environment = slurm(tmp_path, "node-a,node-b,node-c", "node-b")
    result = toy.dflow("run", str(toy.file), HOSTS_TOKEN="open sesame", **environment)
    assert (result.returncode, toy.text("r")) == (0, "3 of 2 ranks"), result.stdout + result.stderr
    assert "r: waiting for 1 of 2 hosts, which srun starts" in result.stdout
    asked = (tmp_path / "bin" / "asked").read_text().split()
    assert {"--nodes=1", "--ntasks-per-node=1", "--exclude=node-b", "--cpus-per-task=2"} <= set(asked)
    record = next(toy.store.glob("records/*"))
    assert f"joined {HERE} as host 1 of 2" in (record / "r.log").read_text()  # what srun prints
    assert "rank 1 got ***\n" in (record / "r.host-1.log").read_text()


def test_a_rank_that_fails_on_another_host_ends_the_stage_and_its_traceback_comes_first(tmp_path):
    toy = hosts_toy(tmp_path, "add")
    agent = toy.start("agent", "--once", program=SOON)
    result = toy.dflow("run", str(toy.file), "-s", "r.how=fail")
    out, errors = agent.communicate(timeout=300)
    assert result.returncode == 1
    told = (
        f"r failed: ValueError (rank 1 on {HERE}): a bug at 2 (rank 0 ended after it)\n    Traceback (most recent call"
    )
    assert result.stderr.startswith(told), result.stderr
    assert "in broken\n" in result.stderr
    assert "gloo" not in result.stderr  # the other rank's lost connection is for the log
    log = next(toy.store.glob("records/*/r.host-1.log"))
    assert f"    log of that host: {log}\n" in result.stderr
    assert f"r: waiting for 1 of 2 hosts: run `dflow agent --store {toy.store}` there" in result.stdout
    assert "as host 1 of 2" in out
    assert (agent.returncode, errors) == (1, "")


def test_all_hosts_end_with_a_stop_with_an_agent_and_with_the_executor_and_a_resume_goes_on(tmp_path):
    toy = hosts_toy(tmp_path, "wait")
    agent = toy.start("agent", program=SOON)
    run = toy.start("run", str(toy.file), "-s", "r.how=wait", program=SOON)
    started(toy)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=300)
    assert run.returncode == 143
    saved = [path.name for path in toy.store.glob("work/*/state/*")]
    assert sorted(saved) == ["saved-0", "saved-1"]

    run = toy.start("resume", program=SOON)
    pids = started(toy)
    agent.kill()
    agent.communicate()
    _, errors = run.communicate(timeout=300)
    assert f"r failed: HostLost: host 1 ({HERE}): its agent has been silent for 10 s" in errors
    assert "what to do: check that host" in errors
    wait_for(lambda: not any(map(is_alive, pids)))

    agent = toy.start("agent", program=SOON)
    run = toy.start("resume", program=SOON)
    pids = started(toy)
    run.kill()
    run.communicate()
    wait_for(lambda: not any(map(is_alive, pids)))

    result = toy.dflow("resume", "-s", "r.how=go")
    assert (result.returncode, toy.text("r")) == (0, "2 ranks ['saved-0', 'saved-1']"), result.stderr
    agent.send_signal(signal.SIGINT)
    out, _ = agent.communicate(timeout=300)
    assert agent.returncode == 0
    assert f"ended: the executor on {HERE} has been silent for 10 s" in out
    assert out.endswith("ended: done\n")


def test_a_stage_whose_hosts_do_not_come_says_what_to_do_and_ends_in_time(tmp_path):
    toy = hosts_toy(tmp_path, "wait")
    settings = ("-s", "r.launch.timeout=2", "-s", "r.launch.nnodes=3")
    process = toy.start("run", str(toy.file), *settings, program=ONLY_THE_LOOP + UNTRACKED)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert f"r: waiting for 2 of 3 hosts: run `dflow agent --store {toy.store}` there" in out
    assert "r failed: TimeoutError: the attempt took longer than launch.timeout = 2 s" in errors
    assert "    info: waiting for 2 of 3 hosts" in errors


def test_more_hosts_than_the_allocation_has_are_refused_before_anything_runs(tmp_path):
    toy = hosts_toy(tmp_path, "wait")
    result = toy.dflow("run", str(toy.file), **slurm(tmp_path, "node-a", "node-a"))
    assert result.returncode == 2
    told = "node.r.launch.nnodes: needs 2 hosts, but the Slurm allocation 7 has 1 host"
    assert told in result.stderr
    assert not list(toy.store.glob("records/*"))


def test_a_machine_outside_the_allocation_cannot_be_host_0(tmp_path):
    toy = hosts_toy(tmp_path, "wait")
    result = toy.dflow("run", str(toy.file), **slurm(tmp_path, "node-a,node-b", "login"))
    assert result.returncode == 1
    assert "this machine, login, is not part of the Slurm allocation 7 (node-a, node-b)" in result.stderr


def test_a_srun_that_fails_ends_the_wait_for_hosts(tmp_path):
    toy = hosts_toy(tmp_path, "wait")
    environment = slurm(tmp_path, "node-a,node-b", "node-a")
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\necho 'srun: error: no such partition' >&2\nexit 3\n")
    result = toy.dflow("run", str(toy.file), **environment)
    assert "r failed: StageError: srun ended with exit code 3 before all hosts had joined" in result.stderr
    assert "    srun: error: no such partition" in result.stderr


def test_a_group_of_ranks_that_share_sequences_lies_on_one_host():
    assert Launch(kind="torchrun", nproc=4, nnodes=3, sp_degree=2).world_size == 12
    with pytest.raises(ValueError, match="nproc = 2, sp_degree = 4"):  # though 2 * 2 ranks would do
        Launch(kind="torchrun", nproc=2, nnodes=2, sp_degree=4)


@pytest.fixture
def folder(tmp_path):
    lease = Lease(tmp_path / "work" / "key", "run")
    assert lease.try_acquire()
    lease.empty(keep_state=False)
    meeting = HostFolder(lease.path("hosts"))
    meeting.path.mkdir()
    stage_spec(tmp_path, folder=lease.folder, token=lease.token, lease_id=lease.id).write(tmp_path / "job.json")
    yield meeting
    lease.release()


@pytest.fixture
def offer(folder, tmp_path):
    return Offer(
        node="r", run="run", executor="a", hosts=2, nproc=1, threads=1, gpus=None,
        job=str(tmp_path / "job.json"), results=str(tmp_path), log=str(tmp_path / "r.log"), directory=str(tmp_path),
    )  # fmt: skip


def test_each_place_is_taken_by_one_host(folder):
    taken = []
    agents = [threading.Thread(target=lambda n=n: folder.join(1, str(n)) and taken.append(str(n))) for n in range(8)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    assert [folder.member(1)["id"]] == taken


def test_a_number_that_stays_the_same_is_silence_and_a_hung_file_system_is_none(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(host_folder.time, "monotonic", lambda: clock[0])
    beat = Beat(tmp_path / "beat")
    pulse = Pulse(tmp_path / "beat")
    assert (pulse.silence(), pulse.has_changed) == (0.0, False)
    beat.tick()
    assert (pulse.silence(), pulse.has_changed) == (0.0, True)
    for _ in range(4):
        clock[0] += 0.5
        silence = pulse.silence()
    assert silence == 2.0
    clock[0] += 3600.0  # asleep
    assert pulse.silence() == 2.0 + host_folder.BEAT_S
    beat.tick()
    assert pulse.silence() == 0.0


def test_a_stage_is_offered_while_its_executor_lives_and_places_are_left(folder, offer):
    folder.write_offer(offer)
    beat, offers = Beat(folder.beat_path(0)), Offers(folder.work_folder.parent)
    assert offers.find(()) is None  # not seen to live yet
    beat.tick()
    assert offers.find(()).path == folder.path
    assert offers.find({folder.path}) is None
    folder.join(1, "b")
    assert offers.find(()) is None


def test_an_agent_goes_on_when_a_work_folder_is_removed_while_it_looks(folder, offer, monkeypatch):
    folder.write_offer(offer)
    beat, offers = Beat(folder.beat_path(0)), Offers(folder.work_folder.parent)
    (folder.work_folder.parent / "other").mkdir()
    offers.find(())
    beat.tick()
    scandir = os.scandir

    def late(path="."):
        if Path(path).name == "other":
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    assert offers.find(()).path == folder.path


def test_a_stage_that_goes_before_its_place_is_taken_is_refused_in_words(folder, offer, monkeypatch):
    folder.write_offer(offer)
    join = HostFolder.join

    def late(self, number, own_id):
        shutil.rmtree(self.path)
        return join(self, number, own_id)

    monkeypatch.setattr(HostFolder, "join", late)
    with pytest.raises(StageError, match="the stage is gone"):
        join_stage(folder, lambda: 0)


@pytest.mark.parametrize("moment", ["_wait_for_start", "report_end"])
def test_a_stage_that_goes_at_any_moment_is_over(folder, offer, monkeypatch, moment):
    folder.write_offer(offer)
    member, _ = join_stage(folder, lambda: 0)
    there = Member if moment.startswith("_") else HostFolder
    step = getattr(there, moment)

    def late(*arguments):
        shutil.rmtree(folder.path)
        return step(*arguments)

    monkeypatch.setattr(there, moment, late)
    assert (None, "the stage is over") == member.run(lambda log: None)


def test_two_orders_to_end_at_once_are_one(folder, monkeypatch):
    replace = Path.replace

    def late(path, target):
        monkeypatch.undo()
        other = threading.Thread(target=folder.order_end, args=("kill",))
        other.start()
        other.join()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", late)
    folder.order_end("kill")
    assert "kill" == folder.ordered_end()


def test_a_store_that_lies_elsewhere_on_this_host_is_refused(folder, offer, tmp_path):
    folder.write_offer(offer)
    moved = tmp_path / "elsewhere"
    (tmp_path / "work").rename(moved)
    with pytest.raises(StageError, match="the store must have the same path on all hosts"):
        join_stage(HostFolder(moved / "key" / folder.path.name), lambda: 0)


def test_the_place_of_an_agent_that_died_before_the_start_is_free_again(folder, offer, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "SILENT_S", 3.0)
    child = Child(lambda number, group: None)
    child.end(0)
    said = []
    several = SeveralHosts(folder, offer, tmp_path, "127.0.0.1:29500", lambda endpoint: child, said.append)
    folder.join(1, "dead")
    codes = []
    executor = threading.Thread(target=lambda: codes.append(several.wait()))
    executor.start()
    wait_for(lambda: folder.member(1) is None)
    folder.join(1, "alive")
    beat = Beat(folder.beat_path(1))

    def is_started():
        beat.tick()
        return folder.started() is not None

    wait_for(is_started)
    folder.report_end(1, 0)
    executor.join(60)
    assert (["alive"], [0], "kill") == (folder.started()[0], codes, folder.ordered_end())


def test_an_agent_leaves_a_stage_whose_lease_went_on(folder, offer):
    folder.write_offer(offer)
    Beat(folder.beat_path(0)).tick()
    member, number = join_stage(folder, lambda: 0)
    write_json(folder.work_folder / "lease", {"token": 9, "id": "other"})
    assert (None, "the lease passed to another attempt") == member.run(lambda log: None)
    assert folder.reported_end(number)["why"] == "the lease passed to another attempt"


def test_a_new_attempt_waits_until_the_hosts_of_the_last_one_have_ended(folder):
    folder.join(1, "b")
    waiting = threading.Thread(target=wait_for_hosts, args=(folder.work_folder,))
    waiting.start()
    time.sleep(0.5)
    assert waiting.is_alive()
    folder.report_end(1, -9)
    waiting.join(60)
    assert not waiting.is_alive()


def test_the_address_where_the_hosts_meet_is_this_machines_and_free():
    assert endpoint_of("").startswith(f"{HERE}:")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StageError, match="Address already in use"):
            endpoint_of(address)
    assert endpoint_of(address) == address
    with pytest.raises(StageError, match="must be an address of this machine"):
        endpoint_of("192.0.2.1:29500")


def test_a_rank_is_named_with_its_host():
    cause = cause_of([None] * 4, [RankExit(3, -9, 9.0)], ["a", "a", "b", "b"])
    assert cause.text.startswith("rank 3 on b was killed (signal 9)")
    assert cause.rank == 3
