"""Checkpoints on one process: exact, whole or not taken, the right ones kept, written behind the steps."""

import json
import threading
import weakref

import pytest
import torch
from checkpoint_cases import IDENTITY, flip_a_bit, names, new_state, save, train
from safetensors import safe_open
from safetensors.torch import load_file

from dsl.errors import ConfigError, DataError
from ops.lib.data.files import read_json
from ops.lib.training import checkpoint
from ops.lib.training.checkpoint import Checkpoints, load_checkpoint, saved_weights
from ops.lib.training.optimizer import named_state


def everything(state):
    tensors = [*state.model.parameters(), *state.ema.weights.values(), *state.history]
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors]), state.counters, state.ema.updates


def assert_same(one, two):
    assert torch.equal(one[0], two[0])
    assert one[1:] == two[1:]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_resumed_training_ends_with_the_same_bytes(tmp_path, kind):
    whole = new_state(kind)
    train(whole, 7)
    state = new_state(kind)
    train(state, 3)
    with Checkpoints(tmp_path, IDENTITY, rank=0) as saving:
        saving.save(state)
        train(state, 2)  # while the checkpoint is written
    resumed = new_state(kind, seed=8)
    with Checkpoints(tmp_path, IDENTITY, rank=0) as saving:
        assert saving.load(resumed)
    assert resumed.step == 3
    train(resumed, 4)
    assert_same(everything(whole), everything(resumed))


def test_an_attempt_that_is_not_the_first_says_where_it_starts(tmp_path):
    said, state = [], new_state("adamw")

    def resume(started_before):
        with Checkpoints(tmp_path, IDENTITY, rank=0, info=said.append) as saving:
            saving.resume(new_state("adamw"), 70, 50, started_before=started_before)
        return said[-1:]

    assert [] == resume(False)
    assert ["no checkpoint yet (checkpoint_every = 50): starts at step 0"] == resume(True)
    train(state, 3)
    save(tmp_path, state)
    assert ["goes on from the checkpoint at step 3 of 70"] == resume(True)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_checkpoint_is_read_one_tensor_at_a_time_and_nothing_of_the_file_is_kept(tmp_path, monkeypatch, kind):
    state = new_state(kind)
    train(state, 2)
    save(tmp_path, state)
    read = []

    class Watched:
        """An open file whose tensors must be gone before the next one is read."""

        def __init__(self, *arguments, **options):
            self.file = safe_open(*arguments, **options)

        def __enter__(self):
            return self

        def __exit__(self, *_error):
            self.file.__exit__(None, None, None)

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            assert [] == [earlier for earlier, tensor in read if tensor() is not None]
            tensor = self.file.get_tensor(name)
            read.append((name, weakref.ref(tensor)))
            return tensor

    monkeypatch.setattr(checkpoint, "safe_open", Watched)
    resumed = new_state(kind, seed=2)
    assert load_checkpoint(tmp_path, resumed, IDENTITY)
    assert [] == [name for name, tensor in read if tensor() is not None]
    with safe_open(tmp_path / "checkpoint-00000002" / "state.safetensors", framework="pt") as saved:
        assert sorted(saved.keys()) == sorted(name for name, _ in read)
    assert_same(everything(state), everything(resumed))
    for tensor in named_state(resumed.optimizer, resumed.model).values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_there_is_nothing_to_resume_in_an_empty_folder(tmp_path):
    state = new_state()
    assert not load_checkpoint(tmp_path, state, IDENTITY)
    assert state.step == 0


@pytest.mark.parametrize("decay", [0.9, None])
def test_the_weights_of_an_earlier_step_are_given_or_their_average(tmp_path, decay):
    state = new_state()
    if decay is None:
        state.ema = None
    state.history.append(torch.zeros(3))
    with Checkpoints(tmp_path, IDENTITY, rank=0) as saving:
        saving.save(state, 1.0)
        source = dict(state.model.named_parameters()) if state.ema is None else state.ema.weights
        expected = {name: weight.detach().clone() for name, weight in source.items()}
        with torch.no_grad():
            for weight in source.values():
                weight.add_(1)
    found = saved_weights(tmp_path, state, 1)
    assert expected.keys() == found.keys()
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


def test_without_a_metric_the_last_are_kept_and_none_is_best(tmp_path):
    state = new_state()
    for _ in range(4):
        train(state, 1)
        save(tmp_path, state, keep=3)
    assert [f"checkpoint-0000000{step}" for step in (2, 3, 4)] == names(tmp_path)
    assert state.best is None


def truncate(folder):
    file = folder / "state.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


DAMAGE = {
    "truncated": (truncate, "state.safetensors was altered"),
    "one bit": (flip_a_bit, "state.safetensors was altered"),
    "no tensors": (lambda folder: (folder / "state.safetensors").unlink(), "state.safetensors is missing"),
    "no json": (lambda folder: (folder / "state.json").unlink(), "state.json cannot be read"),
    "half a json": (lambda folder: (folder / "state.json").write_text('{"format": 3,'), "state.json cannot be read"),
    "other json": (lambda folder: (folder / "state.json").write_text("[]"), "state.json cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_with_a_note_and_the_one_before_taken(tmp_path, capsys, kind):
    state = new_state()
    for _ in range(2):
        train(state, 2)
        save(tmp_path, state)
    damage, text = DAMAGE[kind]
    damage(tmp_path / "checkpoint-00000004")
    resumed = new_state(seed=3)
    assert load_checkpoint(tmp_path, resumed, IDENTITY)
    assert resumed.step == 2
    note = f"{tmp_path}/checkpoint-00000004.damaged: skipped a damaged checkpoint, {text}; "
    assert note + "trying checkpoint-00000002\n" == capsys.readouterr().out
    save(tmp_path, resumed)
    assert ["checkpoint-00000002", "checkpoint-00000004.damaged"] == names(tmp_path)


def test_where_all_are_damaged_the_training_starts_anew_and_says_so(tmp_path, capsys):
    state = new_state()
    train(state, 1)
    save(tmp_path, state)
    truncate(tmp_path / "checkpoint-00000001")
    assert not load_checkpoint(tmp_path, new_state(), IDENTITY)
    assert capsys.readouterr().out.endswith("; starting again\n")


def test_an_unfinished_folder_is_never_taken_and_goes_with_the_next_write(tmp_path):
    for suffix in (".tmp", ".old"):
        folder = tmp_path / f"checkpoint-00000009{suffix}"
        folder.mkdir()
        (folder / "state.json").write_text("{")
    state = new_state()
    assert not load_checkpoint(tmp_path, state, IDENTITY)
    train(state, 1)
    save(tmp_path, state)
    assert ["checkpoint-00000001"] == names(tmp_path)


def test_a_checkpoint_of_another_config_is_refused_with_every_difference(tmp_path):
    state = new_state()
    train(state, 1)
    save(tmp_path, state)
    other = {"config": {"lr": 0.2, "gamma": None, "ema": 0.9}, "inputs": {"features": "abd"}}
    with pytest.raises(ConfigError) as caught:
        load_checkpoint(tmp_path, new_state(), other)
    assert str(caught.value).splitlines()[1:] == [
        "  config.ema: null then, 0.9 now",
        "  config.lr: 0.1 then, 0.2 now",
        '  inputs.features: "abc" then, "abd" now',
        "remove it to start again",
    ]


def test_a_checkpoint_of_another_format_is_refused_and_not_taken_for_damaged(tmp_path):
    state = new_state()
    train(state, 1)
    save(tmp_path, state)
    file = tmp_path / "checkpoint-00000001" / "state.json"
    file.write_text(json.dumps(read_json(file) | {"format": 1}))
    with pytest.raises(ConfigError, match="format: 1 then, 3 now"):
        load_checkpoint(tmp_path, new_state(), IDENTITY)


@pytest.fixture
def gate(monkeypatch):
    """Lets a background write begin only when it is set."""
    opened = threading.Event()
    write = checkpoint.write_checkpoint

    def held_up(*arguments):
        assert opened.wait(120)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "write_checkpoint", held_up)
    return opened


def test_the_steps_go_on_while_a_checkpoint_is_written_and_do_not_change_it(tmp_path, gate):
    state = new_state()
    train(state, 2)
    weights = [parameter.detach().clone() for parameter in state.model.parameters()]
    with Checkpoints(tmp_path, IDENTITY, rank=0) as saving:
        saving.save(state)
        train(state, 3)
        assert [] == names(tmp_path)
        gate.set()
        saving.wait()
        assert ["checkpoint-00000002"] == names(tmp_path)
    saved = load_file(tmp_path / "checkpoint-00000002" / "state.safetensors")
    for expected, (name, _) in zip(weights, state.model.named_parameters(), strict=True):
        assert torch.equal(expected, saved[f"model.{name}"])


def test_what_was_saved_is_there_after_close_even_where_the_training_failed(tmp_path, gate):
    state = new_state()
    train(state, 1)
    with pytest.raises(KeyError), Checkpoints(tmp_path, IDENTITY, rank=0) as saving:
        saving.save(state)
        threading.Timer(0.2, gate.set).start()
        raise KeyError
    assert ["checkpoint-00000001"] == names(tmp_path)


@pytest.mark.parametrize("call", ["save", "wait"])
def test_an_error_of_the_writer_comes_up_at_the_next_call(tmp_path, monkeypatch, call):
    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "write_checkpoint", fail)
    state = new_state()
    train(state, 1)
    saving = Checkpoints(tmp_path, IDENTITY, rank=0)
    saving.save(state)
    train(state, 1)
    arguments = (state,) if call == "save" else ()
    with pytest.raises(OSError, match="no space left"):
        getattr(saving, call)(*arguments)


def test_a_failed_write_is_told_to_the_user_where_the_training_ends_by_another_error(tmp_path, monkeypatch, capsys):
    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "write_checkpoint", fail)
    state = new_state()
    train(state, 2)
    with pytest.raises(DataError, match="loss nan"), Checkpoints(tmp_path, IDENTITY, rank=0) as saving:
        saving.save(state)
        raise DataError("loss nan")
    expected = "the checkpoint of step 2 was not written either: no space left on device\n"
    assert expected == capsys.readouterr().out


def test_a_step_that_is_saved_is_not_written_again_unless_a_metric_comes_with_it(tmp_path):
    state = new_state()
    train(state, 1)
    with Checkpoints(tmp_path, IDENTITY, rank=0) as saving:
        saving.save(state)
        saving.wait()
        inode = (tmp_path / "checkpoint-00000001").stat().st_ino
        saving.save(state)
        saving.wait()
        assert inode == (tmp_path / "checkpoint-00000001").stat().st_ino
        saving.save(state, 0.5)
    assert {"step": 1, "metric": 0.5} == read_json(tmp_path / "checkpoint-00000001" / "state.json")["best"]
