"""A training and the capture of its features on simulated machines: discrete events, nothing of executor/cost.

Processes are generators that yield the time at which they go on, or a `Bell` that another process rings. A `Line` (a
disk, a host's network in one direction, what one process sends or receives) passes one chunk after another, so that
transfers share it. Things go wrong as on real machines: every pass takes up to 5 % more or less, on 8 GPUs and more one
of each side is slow, and one capturing process is lost, starts again after a minute, and what it had is done once more.
The starts of queues and the wait for the slowest process are in the time too.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Generator, Sequence
from itertools import count

from attrs import define, field, frozen

CHUNK, CHUNKS = 128e6, 16  # bytes of a transfer before others have their turn; at most so many chunks
NOISE = 0.05
SLOW_CAPTURE, SLOW_TRAINING = 0.8, 0.95  # speeds of the slow GPU of each side
RESTART = 60.0  # seconds
REQUEST = 1e-3  # seconds that a rank takes to ask for a unit
UNIT_TOKENS = 16_384  # of a micro-batch
AHEAD = 5  # units that a rank has asked for or holds: buffer_batches = 4 and the one that it computes
FINISHED = 2  # units that a worker keeps before it computes no further
HOST = 8  # GPUs


@frozen(kw_only=True)
class Machines:
    """Tokens/s of a GPU that captures and of one that trains; bytes a token; bytes/s of the disk, of a host's network
    in each direction, and of a process; bytes of weights and gradients through each host's network in a step.
    """

    gpus: int
    capture: float
    train: float
    token_bytes: float
    disk: float
    wire: float
    process: float
    update: float


@define(eq=False)
class Bell:
    waiting: list[Process] = field(factory=list)


Process = Generator[float | Bell, None, None]


@define(eq=False)
class Line:
    """Serves one chunk after the other. rate: bytes/s."""

    rate: float
    free: float = 0.0

    def until(self, arrived: float, size: float) -> float:
        self.free = max(self.free, arrived) + size / self.rate
        return self.free


@define
class Clock:
    now: float = 0.0
    due: list[tuple[float, int, Process]] = field(factory=list)
    numbers: count[int] = field(factory=count)
    noise: random.Random = field(factory=lambda: random.Random(0))

    def start(self, process: Process, at: float | None = None) -> None:
        heapq.heappush(self.due, (self.now if at is None else at, next(self.numbers), process))

    def ring(self, bell: Bell) -> None:
        for process in bell.waiting:
            self.start(process)
        bell.waiting.clear()

    def run(self) -> float:
        """Run until nothing is due; returns the time, in seconds."""
        while self.due:
            self.now, _, process = heapq.heappop(self.due)
            for wait in process:
                if isinstance(wait, Bell):
                    wait.waiting.append(process)
                else:
                    self.start(process, wait)
                break
        return self.now

    def after(self, seconds: float) -> float:
        """The time after a pass that usually takes so many seconds."""
        return self.now + seconds * self.noise.uniform(1 - NOISE, 1 + NOISE)

    def transfer(self, size: float, lines: Sequence[Line]) -> Process:
        """Bytes through lines, chunk by chunk; a chunk goes on to the next line while its successor is in this one."""
        chunk, on_the_way, passed = max(CHUNK, size / CHUNKS), [0], Bell()

        def go_on(part: float) -> Process:
            for line in lines[1:]:
                yield line.until(self.now, part)
            on_the_way[0] -= 1
            self.ring(passed)

        while size > 0 and lines:
            part = min(chunk, size)
            size -= part
            yield lines[0].until(self.now, part)
            on_the_way[0] += 1
            self.start(go_on(part))
        while on_the_way[0]:
            yield passed


def stored_capture(machines: Machines, shards: int, shard_tokens: int) -> float:
    """Seconds in which all GPUs capture shards that they take from one pile, and write them behind the passes."""
    clock, pile = Clock(), deque(range(shards))
    disk, out = Line(machines.disk), _network(machines)

    def capturing(gpu: int) -> Process:
        speed = machines.capture * (SLOW_CAPTURE if gpu == 0 and machines.gpus >= HOST else 1)
        written, writing = Bell(), [0]
        is_lost = gpu == machines.gpus - 1

        def write() -> Process:
            yield from clock.transfer(shard_tokens * machines.token_bytes, [disk, *out[gpu]])
            writing[0] -= 1
            clock.ring(written)

        while pile:
            shard = pile.popleft()
            yield clock.after(shard_tokens / speed)
            if is_lost and len(pile) < shards // 2:
                is_lost = False
                pile.append(shard)
                yield clock.now + RESTART
                continue
            while writing[0]:
                yield written
            writing[0] += 1
            clock.start(write())

    for gpu in range(machines.gpus):
        clock.start(capturing(gpu))
    return clock.run()


def stored_training(machines: Machines, steps: Sequence[Sequence[int]]) -> float:
    """Seconds of a training that reads its features from the disk. steps: the lengths of each step's samples."""
    clock = Clock()
    disk, into = Line(machines.disk), _network(machines)
    ranks = _Ranks(clock, machines, steps, list(range(machines.gpus)), into)

    def reading(rank: int) -> Process:
        for number, tokens in enumerate(ranks.units[rank]):
            while number - ranks.done[rank] >= AHEAD:
                yield ranks.bells[rank]
            yield from clock.transfer(tokens * machines.token_bytes, [disk, *into[rank]])
            ranks.deliver(rank, number)

    for rank in range(machines.gpus):
        clock.start(reading(rank))
    return clock.run()


def streamed_training(machines: Machines, steps: Sequence[Sequence[int]], workers: int) -> float:
    """Seconds of a training whose features workers capture meanwhile; without any, its ranks capture in turns."""
    clock = Clock()
    if not workers:
        units = [tokens for step in steps for tokens in _units(step)]

        def alone() -> Process:
            for tokens in units:
                yield clock.after(tokens / machines.capture)
                yield clock.after(tokens / machines.train)

        clock.start(alone())
        return clock.run()
    into, out = _network(machines), _network(machines)
    ranks = _Ranks(clock, machines, steps, list(range(workers, machines.gpus)), into)
    asked: deque[tuple[int, int]] = deque()
    work = Bell()
    received = {rank: Line(machines.process) for rank in ranks.units}

    def asking(rank: int) -> Process:
        for number in range(len(ranks.units[rank])):
            while number - ranks.done[rank] >= AHEAD:
                yield ranks.bells[rank]
            asked.append((rank, number))
            clock.ring(work)
            yield clock.now + REQUEST

    def capturing(worker: int) -> Process:
        speed = machines.capture * (SLOW_CAPTURE if worker == 0 and machines.gpus >= HOST else 1)
        finished, sent, sends = [0], Bell(), Line(machines.process)

        def sending(rank: int, number: int) -> Process:
            is_near = worker // HOST == rank // HOST
            lines = [sends, received[rank]] if is_near else [sends, *out[worker], *into[rank], received[rank]]
            yield from clock.transfer(ranks.units[rank][number] * machines.token_bytes, lines)
            ranks.deliver(rank, number)
            finished[0] -= 1
            clock.ring(sent)

        losing = sum(map(len, ranks.units.values())) // workers // 3 if worker == workers - 1 else -1
        for turn in count():
            while not asked:
                yield work
            rank, number = asked.popleft()
            yield clock.after(ranks.units[rank][number] / speed)
            if turn == losing:
                asked.appendleft((rank, number))
                clock.ring(work)
                yield clock.now + RESTART
                continue
            while finished[0] >= FINISHED:
                yield sent
            finished[0] += 1
            clock.start(sending(rank, number))

    for rank in ranks.units:
        clock.start(asking(rank))
    for worker in range(workers):
        clock.start(capturing(worker))
    clock.run()
    return ranks.ended


class _Ranks:
    """Training ranks that compute the units of their samples in order, and end each step together."""

    def __init__(
        self,
        clock: Clock,
        machines: Machines,
        steps: Sequence[Sequence[int]],
        gpus: Sequence[int],
        into: Sequence[Sequence[Line]],
    ) -> None:
        self.clock, self.machines = clock, machines
        dealt = [_dealt(step, len(gpus)) for step in steps]
        self.by_step = {gpu: [_units(step[place]) for step in dealt] for place, gpu in enumerate(gpus)}
        self.units = {gpu: [tokens for units in by_step for tokens in units] for gpu, by_step in self.by_step.items()}
        self.bells = {gpu: Bell() for gpu in gpus}
        self.held: dict[int, set[int]] = {gpu: set() for gpu in gpus}
        self.done = dict.fromkeys(gpus, 0)
        hosts = {gpu // HOST: into[gpu] for gpu in gpus}
        self.updates = [lines for lines in hosts.values() if len(hosts) > 1]
        self.parties = len(gpus) + len(self.updates)
        self.arrived, self.together, self.ended = 0, Bell(), 0.0
        for gpu in gpus:
            clock.start(self._training(gpu, is_slow=gpu == gpus[-1] and machines.gpus >= HOST))
        for lines in self.updates:
            clock.start(self._updating(lines, len(steps)))

    def deliver(self, gpu: int, number: int) -> None:
        self.held[gpu].add(number)
        self.clock.ring(self.bells[gpu])

    def _training(self, gpu: int, is_slow: bool) -> Process:
        speed = self.machines.train * (SLOW_TRAINING if is_slow else 1)
        for units in self.by_step[gpu]:
            for tokens in units:
                while self.done[gpu] not in self.held[gpu]:
                    yield self.bells[gpu]
                yield self.clock.after(tokens / speed)
                self.held[gpu].remove(self.done[gpu])
                self.done[gpu] += 1
                self.clock.ring(self.bells[gpu])
            yield from self._meet()

    def _updating(self, lines: Sequence[Line], steps: int) -> Process:
        for _ in range(steps):
            yield from self.clock.transfer(self.machines.update, lines)
            yield from self._meet()

    def _meet(self) -> Process:
        self.arrived += 1
        if self.arrived < self.parties:
            yield self.together
        else:
            self.arrived, self.ended = 0, self.clock.now
            self.clock.ring(self.together)


def _network(machines: Machines) -> list[list[Line]]:
    """The network of the host of each GPU, in one direction; none on one host."""
    hosts = [Line(machines.wire) for _ in range(-(-machines.gpus // HOST))]
    return [[hosts[gpu // HOST]] if len(hosts) > 1 else [] for gpu in range(machines.gpus)]


def _dealt(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Samples dealt to ranks: the longest first, to the rank with the least so far."""
    loads = [(0, rank) for rank in range(ranks)]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for length in sorted(lengths, reverse=True):
        load, rank = heapq.heappop(loads)
        dealt[rank].append(length)
        heapq.heappush(loads, (load + length, rank))
    return dealt


def _units(lengths: Sequence[int]) -> list[int]:
    """The tokens of micro-batches that hold these samples in order."""
    units: list[int] = []
    for length in lengths:
        if units and units[-1] + length <= UNIT_TOKENS:
            units[-1] += length
        else:
            units.append(length)
    return units
