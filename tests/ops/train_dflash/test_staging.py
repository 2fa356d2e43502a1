"""The way of a micro-batch to its device: one copy of every byte, and buffers left alone while they are read."""

import pytest
import torch
from attrs import define, field
from case_reader import CPU, CaseReader, drawn_samples, prepare
from draft_cases import random_case
from draft_chain import make_features, make_target
from op_counts import Recorded, copied, memory_of

from ops.lib.drafts.losses.slots import block_weights
from ops.lib.target.feature_shards import FeatureReader
from ops.train_dflash.batches import Place, draw, idle_batch, pack
from ops.train_dflash.staging import BUFFERS, PIECE, Direct, Staged, transfer_to


def place_of(dtype=torch.float32, device=CPU, sp_rank=0, sp_degree=1):
    return Place(dp_rank=0, dp_size=1, sp_rank=sp_rank, sp_degree=sp_degree, device=device, dtype=dtype)


@define(eq=False)
class LateCopies:
    """A device that copies as late as it may: when somebody waits for the end of a copy."""

    pending: list = field(factory=list)
    buffers: list = field(factory=list)

    def allocate(self, size):
        self.buffers.append(torch.full((size,), 255, dtype=torch.uint8))
        return self.buffers[-1]

    def room(self, size):
        return torch.full((size,), 254, dtype=torch.uint8)

    def copy(self, host, memory):
        self.pending.append(LateCopy(self, host, memory))
        return self.pending[-1]


@define(eq=False)
class LateCopy:
    device: LateCopies
    host: torch.Tensor
    memory: torch.Tensor

    def synchronize(self):
        """The copies before it are done as well, as on a stream."""
        while self in self.device.pending:
            first = self.device.pending.pop(0)
            first.memory.copy_(first.host)

    wait = synchronize


def bytes_of(number, size):
    return torch.full((size,), number, dtype=torch.uint8)


@pytest.mark.parametrize("arrive_after", [1, 2, 5, 9])
def test_a_buffer_is_written_again_only_when_the_copy_out_of_it_is_done(arrive_after):
    device = LateCopies()
    transfer = Staged(device.allocate, device.room, device.copy)
    sizes = [7, 7, 3, 9, 9, 2, 9, 1, 9]
    sent = []
    for number, size in enumerate(sizes):
        assert len(device.pending) <= BUFFERS
        sent.append(transfer.send(size, lambda memory, _start, number=number: memory.fill_(number)))
        if number + 1 == arrive_after:
            sent[number].arrive()
    for number, (one, size) in enumerate(zip(sent, sizes, strict=True)):
        one.arrive()
        assert torch.equal(bytes_of(number, size), one.memory)
    assert [7, 7, 9, 9] == [len(buffer) for buffer in device.buffers]  # replaced only by larger ones


def test_an_error_while_writing_leaves_the_buffers_in_turn():
    device = LateCopies()
    transfer = Staged(device.allocate, device.room, device.copy)

    def fails(_memory, _start):
        raise OSError("the shard is gone")

    first = transfer.send(4, lambda memory, _start: memory.fill_(1))
    with pytest.raises(OSError, match="the shard is gone"):
        transfer.send(4, fails)
    later = [transfer.send(4, lambda memory, _start, number=number: memory.fill_(number)) for number in (2, 3)]
    for number, one in enumerate([first, *later], start=1):
        one.arrive()
        assert torch.equal(bytes_of(number, 4), one.memory)


@pytest.mark.parametrize("piece", [512, 1536, PIECE])
@pytest.mark.parametrize("with_teacher", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_staged_micro_batches_are_those_that_are_prepared_at_once(with_teacher, dtype, piece):
    case = random_case(3, samples=4).to(torch.float32)
    reader, drawn = CaseReader(case), drawn_samples(case)
    device = LateCopies()
    transfer = Staged(device.allocate, device.room, device.copy, piece)
    sent = []
    for rank in range(3):
        place = place_of(dtype, sp_rank=rank, sp_degree=3)
        for samples in (drawn, drawn[:1], drawn[1:]):
            batch, arrival = pack(reader, samples, place, with_teacher=with_teacher).send(transfer)
            sent.append((batch, arrival, prepare(reader, samples, place, with_teacher=with_teacher)))
    assert max(map(len, device.buffers)) <= piece
    if piece == 512:  # which cuts a tensor
        assert sent[0][0].features_tF.nbytes > 512
        assert [512] * BUFFERS == [len(buffer) for buffer in device.buffers]
    for batch, arrival, expected in sent:
        assert batch is arrival.arrive(batch)
        for name in expected.__slots__:
            one, other = getattr(expected, name, None), getattr(batch, name, None)
            if isinstance(one, torch.Tensor):
                assert one.dtype == other.dtype
                assert torch.equal(one, other), name
        assert (expected.teacher_UM is not None) == with_teacher == (batch.teacher_UM is not None)
        for one, other in zip(expected.seen, batch.seen, strict=True):
            assert torch.equal(one.start_N, other.start_N)
            assert torch.equal(one.end_N, other.end_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_features_of_a_sample_are_copied_once_from_the_shard_to_the_micro_batch(tmp_path, dtype):
    features = make_features(tmp_path / "features", make_target(tmp_path / "target"))
    reader = FeatureReader(features, "train")
    drawn = [draw(reader, index, block_weights(4), 6, seed=0, epoch=0) for index in (0, 5, 7)]
    recorded = Recorded()
    with recorded:
        batch = prepare(reader, drawn, place_of(dtype))
    assert [(sample.prefix, reader.width) for sample in drawn] == copied(recorded, reader.width)
    assert torch.equal(
        torch.cat([reader.features(sample.index, 0, sample.prefix) for sample in drawn]).to(dtype), batch.features_tF
    )
    assert batch.features_tF.dtype == dtype


def test_features_that_lie_on_the_device_stay_there():
    """On the meta device nothing can be read, so nothing of them went to the host."""
    case = random_case(3, samples=2).to(torch.float32)

    class Reader(CaseReader):
        def features(self, index, first, last):
            return super().features(index, first, last).to("meta")

    packed = pack(Reader(case), drawn_samples(case), place_of(torch.bfloat16, torch.device("meta")))
    sizes = []

    class OnHost:
        def send(self, size, write):
            sizes.append(size)
            return Direct(CPU).send(size, write)

    batch, _ = packed.send(OnHost())
    assert ("meta", torch.bfloat16) == (batch.features_tF.device.type, batch.features_tF.dtype)
    assert "cpu" == batch.labels_NK.device.type
    expected = prepare(CaseReader(case), drawn_samples(case), place_of())
    assert expected.features_tF.shape == batch.features_tF.shape
    assert torch.equal(expected.labels_NK, batch.labels_NK)
    assert sizes[0] < 8 * 512 + sum(x.numel() * x.itemsize for x in (expected.labels_NK, expected.positions_t)) * 3


def test_an_idle_batch_is_zero_and_the_tensors_of_a_batch_share_one_piece_of_memory():
    batch, _ = idle_batch(4, 6, place_of(torch.bfloat16, sp_degree=2)).send(Direct(CPU))
    tensors = [batch.features_tF, batch.positions_t, batch.anchor_ids_N, batch.positions_N, batch.labels_NK]
    assert [(1, 6), (1,), (1,), (1,), (1, 4)] == [tuple(tensor.shape) for tensor in tensors]
    assert [0] * 6 == [int(tensor.abs().sum()) for tensor in (*tensors, batch.weights_NK)]
    assert 1 == len(memory_of((*tensors, batch.weights_NK)))
    assert 2 == len(batch.seen)
    assert batch.teacher_UM is None
    taught, _ = idle_batch(4, 6, place_of(torch.bfloat16), teacher=3).send(Direct(CPU))
    assert [(1, 3), (1, 4)] == [tuple(taught.teacher_UM.shape), tuple(taught.teacher_rows_NK.shape)]
    assert 0 == int(taught.teacher_UM.abs().sum()) == int(taught.teacher_rows_NK.abs().sum())


def test_on_a_cpu_the_memory_that_is_written_to_is_the_batchs_own():
    written = []
    sent = transfer_to(CPU).send(8, lambda memory, _start: written.append(memory.fill_(3)))
    assert memory_of(written) == memory_of([sent.memory])
    sent.arrive()
    assert torch.equal(bytes_of(3, 8), sent.memory)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_micro_batches_arrive_on_a_gpu_as_they_were_written():
    transfer = transfer_to(torch.device("cuda", 0))
    sent = [transfer.send(1 << 22, lambda memory, _start, number=number: memory.fill_(number)) for number in range(6)]
    for number, one in enumerate(sent):
        one.arrive()
        assert [number, number] == [int(bound) for bound in one.memory.aminmax()]
