"""Data parallel training on two gloo ranks against one process."""

import multiprocessing
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from draft_chain import make_inputs, train_config
from fake_stage import FakeStage
from safetensors.torch import load_file

from dsl.errors import StopRequested
from ops.dflash.anchors import block_weights
from ops.dflash.model import DraftModel
from ops.train_dflash import ranks
from ops.train_dflash.batches import BlockMaker
from ops.train_dflash.inputs import open_inputs
from ops.train_dflash.run import train_dflash
from ops.train_dflash.step import Forward

SAMPLES = (2, 5, 7, 11, 0)


def gradients_and_tally(folder, inputs, rank, world_size):
    """One global step from fixed weights: flat gradients and the global tally."""
    stage = FakeStage(folder, inputs, rank=rank, world_size=world_size)
    with ranks.joined(stage):
        opened = open_inputs(train_config(), stage)
        model = DraftModel(opened.draft)
        model.initialise(0)
        forward = Forward(
            model=model,
            embed_VM=opened.embed_VM,
            head_VM=opened.head_VM,
            maker=BlockMaker(6, block_weights(4), opened.draft.mask_token_id),
            micro_batch_tokens=40,
            pad_multiple=8,
            rank=rank,
            world_size=world_size,
        )
        tally = forward.train(opened.train, SAMPLES, seed=0, epoch=0)
        alone = forward.train(opened.train, SAMPLES[:1], seed=0, epoch=0)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), tally, alone


def one_of_two(rank, folder, inputs, port):
    """A rank's process: one step's gradients, then a whole training, then one that rank 1 is asked to stop."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    gradients, tally, alone = gradients_and_tally(folder / "step", inputs, rank, 2)
    torch.save({"gradients": gradients, "tally": tally, "alone": alone}, folder / f"step-{rank}.pt")
    train_dflash(train_config(), FakeStage(folder / "train", inputs, rank=rank, world_size=2))
    stopping = FakeStage(folder / "stop", inputs, rank=rank, world_size=2, stop_after=3 if rank else None)
    try:
        train_dflash(train_config(), stopping)
    except StopRequested as error:
        (folder / f"stop-{rank}.txt").write_text(str(error))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    inputs = make_inputs(folder / "inputs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The server imports torch and transformers once for both ranks; it never computes, so forking it is safe.
    multiprocessing.set_forkserver_preload(["ops.train_dflash.run"])
    mp.start_processes(one_of_two, (folder, inputs, port), nprocs=2, start_method="forkserver")
    return folder, inputs


def test_gradients_of_two_ranks_equal_those_of_one(two_ranks, tmp_path):
    folder, inputs = two_ranks
    gradients, tally, _ = gradients_and_tally(tmp_path, inputs, 0, 1)
    for rank in (0, 1):
        theirs = torch.load(folder / f"step-{rank}.pt", weights_only=True)
        torch.testing.assert_close(theirs["tally"], tally, rtol=1e-6, atol=0)
        assert (theirs["gradients"] - gradients).norm() / gradients.norm() < 1e-5


def test_a_rank_without_samples_takes_part(two_ranks, tmp_path):
    folder, inputs = two_ranks
    _, _, alone = gradients_and_tally(tmp_path, inputs, 0, 1)
    theirs = torch.load(folder / "step-0.pt", weights_only=True)["alone"]
    torch.testing.assert_close(theirs, alone, rtol=1e-6, atol=0)


def test_a_training_on_two_ranks_gives_the_draft_of_one_within_rounding(two_ranks, tmp_path):
    folder, inputs = two_ranks
    stage = FakeStage(tmp_path, inputs)
    train_dflash(train_config(), stage)
    ours, theirs = (load_file(out / "model.safetensors") for out in (stage.out_dir, folder / "train" / "out"))
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=0, atol=2e-4)


def test_all_ranks_stop_when_one_is_asked_to(two_ranks):
    folder, _ = two_ranks
    texts = [Path(folder / f"stop-{rank}.txt").read_text() for rank in (0, 1)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("train_dflash stopped after step 3 of")
    assert [path.name for path in (folder / "stop" / "work").iterdir()] == ["checkpoint-00000003"]
