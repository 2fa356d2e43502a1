"""How long a training and the capture of its features take on N GPUs: stored first, or streamed while it trains.

Every resource allows a number of tokens a second, and the least of them is the rate. With N GPUs on H hosts, of which C
capture and R train, c and t tokens/s of a GPU, b bytes a token, D the disk's rate and W a host's network's:

    stored    capture   min(N c, D / b, H W / b)
              training  min(s, D / b, W / (b / H + u))
    streamed  both      min(C c / 1.1, s, W H_C / b, W / (b / H_R + u), min(C, R) P / b), by the best C

s is the rate of steps, whose samples are dealt over R / sp_degree rows: a row has as many as the mean, but a whole
number where all are alike, and never less than the longest one. u: the bytes a token of weights and gradients that
updates send through a host's network beside the pass; 0 on one host. P: what a process sends or receives. On one host
nothing goes over W. With too few GPUs for both, each rank captures for itself, and both take turns.

Not counted: starts, lost processes, slow GPUs, measuring on val, checkpoints, images' encoders.
tests/support/training/simulated_machines.py has the first three, with queues, and is slower by up to 15 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from attrs import evolve, frozen

from dsl.estimate import CaptureWork, TrainingWork
from dsl.shown import shown_bytes
from executor.cost.constants import BUFFER, SUPPLY, Machines

Limit = Literal["capture GPUs", "training GPUs", "batch", "disk", "wire", "processes"]
HOUR = 3600.0
FULL = 0.9  # of the GPUs' rate, below which steps of too few samples are what limits


@frozen(kw_only=True)
class Rates:
    """Tokens/s of a GPU that captures and of one that trains, and where each comes from."""

    capture: float
    train: float
    capture_source: str
    train_source: str


@frozen(kw_only=True)
class Part:
    """One side of a way, with its figures while it runs.

    gpus: those that it has. hours: from its start to its end. busy: the share of these hours for which they compute.
    memory: bytes on each GPU. disk: bytes/s of all hosts. wire: bytes/s of each host, in one direction. limit: what the
    rate is limited by.
    """

    gpus: int
    hours: float
    busy: float
    memory: int
    disk: float
    wire: float
    limit: Limit

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.hours


@frozen(kw_only=True)
class Way:
    """Stored or streamed capture with its training. hours: of both together. stored_bytes: what the store keeps.

    workers: the balanced number of capture workers, a GPU each; 0 where every GPU captures, in turns with the training
    or before it. advice: what to change, the bottleneck first.
    """

    hours: float
    capture: Part
    train: Part
    workers: int
    stored_bytes: int
    bottleneck: Limit
    advice: tuple[str, ...]


@frozen(kw_only=True)
class Cost:
    """The cost of one training node. tokens: trained on, in all epochs."""

    gpu: str
    gpus: int
    hosts: int
    tokens: int
    epochs: float
    is_counted: bool
    token_bytes: int
    rates: Rates
    stored: Way
    streamed: Way


@frozen(kw_only=True)
class Model:
    """The work on machines at given rates. captured: tokens that are captured once; tokens: those trained on, in all
    epochs.
    """

    training: TrainingWork
    capture: CaptureWork
    captured: int
    tokens: int
    machines: Machines
    rates: Rates

    @property
    def samples(self) -> float:
        """The samples of a step."""
        return max(1.0, self.training.step_tokens / self.training.sample_tokens)

    def cost(self, gpus: int) -> Cost:
        return Cost(
            gpu=self.machines.gpu.name,
            gpus=gpus,
            hosts=self.machines.hosts(gpus),
            tokens=self.tokens,
            epochs=self.training.epochs,
            is_counted=self.training.is_counted,
            token_bytes=self.capture.token_bytes,
            rates=self.rates,
            stored=self.stored(gpus),
            streamed=self.streamed(gpus),
        )

    def stored(self, gpus: int) -> Way:
        """All GPUs capture every token once, then all train."""
        hosts, size = self.machines.hosts(gpus), self.capture.token_bytes
        disk: dict[Limit, float] = {"disk": self.machines.disk_of(hosts) / size}
        sent: dict[Limit, float] = {"wire": hosts * self.machines.wire / size} if hosts > 1 else {}
        received: dict[Limit, float] = {"wire": self._received(hosts)} if hosts > 1 else {}
        capturing: dict[Limit, float] = {"capture GPUs": gpus * self.rates.capture}
        capture = self._part(
            "capture", gpus, self.captured, {**capturing, **disk, **sent}, self.capture.memory, hosts > 1
        )
        memory = self.training.memory(gpus)
        train = self._part("train", gpus, self.tokens, {**self._steps(gpus), **disk, **received}, memory, hosts > 1)
        longer = max((capture, train), key=lambda part: part.hours)
        return Way(
            hours=capture.hours + train.hours,
            capture=evolve(capture, disk=self.captured * size / HOUR / capture.hours),
            train=evolve(train, disk=self.tokens * size / HOUR / train.hours),
            workers=0,
            stored_bytes=self.captured * size,
            bottleneck=longer.limit,
            advice=self._advice(longer.limit, gpus, self.capture.memory, memory, streams=False),
        )

    def streamed(self, gpus: int) -> Way:
        """Workers capture every token of every epoch while the other GPUs train on them.

        Where there are too few GPUs for both, each rank captures for itself, and both take turns.
        """
        group, memory = self.training.sp_degree, self.capture.memory
        if gpus <= group:
            steps = min(self._steps(gpus).values())
            alone: dict[Limit, float] = {"training GPUs": 1 / (1 / (gpus * self.rates.capture) + 1 / steps)}
            return self._streaming(0, gpus, gpus, alone, memory + self.training.memory(gpus))
        found = {gpus - ranks: self._streaming_limits(gpus - ranks, ranks) for ranks in range(group, gpus, group)}
        workers = max(found, key=lambda count: (min(found[count].values()), -count))
        return self._streaming(workers, workers, gpus - workers, found[workers], memory)

    def _streaming(self, workers: int, capturing: int, ranks: int, limits: Mapping[Limit, float], memory: int) -> Way:
        """The way by its limits. memory: of a GPU that captures; without workers it trains as well."""
        has_wire = self.machines.hosts(workers + ranks) > 1
        capture = self._part("capture", capturing, self.tokens, limits, memory, has_wire)
        training = self.training.memory(ranks) if workers else memory
        train = self._part("train", ranks, self.tokens, limits, training, has_wire)
        return Way(
            hours=train.hours,
            capture=capture,
            train=train,
            workers=workers,
            stored_bytes=0,
            bottleneck=train.limit,
            advice=self._advice(train.limit, workers + ranks, self.capture.memory, training, streams=True),
        )

    def _streaming_limits(self, workers: int, ranks: int) -> dict[Limit, float]:
        """Tokens/s by what limits them, with so many workers and ranks on hosts of their own."""
        size, machines = self.capture.token_bytes, self.machines
        limits: dict[Limit, float] = {
            **self._steps(ranks),
            "capture GPUs": workers * self.rates.capture / SUPPLY.value,
            "processes": min(workers, ranks) * machines.stream / size,
        }
        if machines.hosts(workers + ranks) > 1:
            sent = machines.hosts(workers) * machines.wire / size
            limits["wire"] = min(sent, self._received(machines.hosts(ranks)))
        return limits

    def _steps(self, ranks: int) -> dict[Limit, float]:
        """The rate of steps on so many ranks, and whether it is the GPUs' or that of too few samples for them."""
        work = self.training
        mean, spread = self.samples / (ranks // work.sp_degree or 1), work.longest_flops / work.sample_flops - 1
        rounded_up = (math.ceil(mean - 1e-9) - mean) * max(0.0, 1 - spread)
        rate = self.samples * self.rates.train * min(ranks, work.sp_degree) / max(1 + spread, mean + rounded_up)
        return {"batch" if rate < FULL * ranks * self.rates.train else "training GPUs": rate}

    def _received(self, hosts: int) -> float:
        """The tokens/s whose features, and whose updates, hosts can receive."""
        return self.machines.wire / (self.capture.token_bytes / hosts + self._update_bytes(hosts))

    def _update_bytes(self, hosts: int) -> float:
        """The bytes of updates that a host sends and receives for each token of training."""
        return self.training.update_bytes / self.training.step_tokens if hosts > 1 else 0.0

    def _part(
        self,
        side: Literal["capture", "train"],
        gpus: int,
        tokens: int,
        limits: Mapping[Limit, float],
        memory: int,
        has_wire: bool,
    ) -> Part:
        limit = min(limits, key=limits.__getitem__)
        rate, hosts = limits[limit], self.machines.hosts(gpus)
        bytes_of_token = self.capture.token_bytes / hosts + (self._update_bytes(hosts) if side == "train" else 0.0)
        return Part(
            gpus=gpus,
            hours=tokens / rate / HOUR,
            busy=min(1.0, rate / gpus / (self.rates.capture if side == "capture" else self.rates.train)),
            memory=memory,
            disk=0.0,
            wire=rate * bytes_of_token if has_wire else 0.0,
            limit=limit,
        )

    def _advice(
        self, limit: Limit, gpus: int, capture_memory: int, train_memory: int, *, streams: bool
    ) -> tuple[str, ...]:
        """What to change: for the bottleneck, then for memory that does not suffice."""
        hosts = self.machines.hosts(gpus)
        disk = self.machines.disk_of(hosts) / self.capture.token_bytes
        most = math.floor(self.samples) * self.training.sp_degree
        smaller = "" if self.capture.is_float8 else 'feature_dtype = "float8", '
        of_limit: dict[Limit, str] = {
            "capture GPUs": "more GPUs, or fewer epochs",
            "training GPUs": "more GPUs, or less work: fewer num_anchors, epochs or draft layers",
            "batch": f"the {self.samples:,.0f} samples of a step keep at most {most:,} GPUs busy: a larger "
            "tokens_per_step of shard_sequence, or several trainings side by side",
            "disk": f"the disk is full at {disk / self.rates.capture:,.0f} capturing or {disk / self.rates.train:,.0f} "
            f'training GPUs: capture = "online", {smaller}or a faster disk',
            "wire": f"a faster network, {smaller}or a larger tokens_per_step, which updates less often",
            "processes": f"{smaller}or more workers and ranks, as each process sends by itself",
        }
        advice = [of_limit[limit]]
        if streams and hosts > 1:
            both = shown_bytes(capture_memory + train_memory)
            advice.append(f"a pool is on one host so far: on several, each rank captures for itself and needs {both}")
        if streams and self.training.buffer_batches < BUFFER.value:
            advice.append(f"set buffer_batches = {BUFFER.value:.0f} of train_dflash, as these figures assume")
        memory = self.machines.gpu.memory
        if memory is None:
            return tuple(advice)
        if capture_memory > memory:
            lacks = f"a capturing GPU needs {shown_bytes(capture_memory)} and has {shown_bytes(memory)}"
            advice.append(
                f"{lacks}: " + ("store the features, with" if streams else "set") + " tp_degree of capture_targets"
            )
        if train_memory > memory:
            lacks = f"a training GPU needs {shown_bytes(train_memory)} and has {shown_bytes(memory)}"
            advice.append(f"{lacks}: lower micro_batch_tokens, anchor_chunk or buffer_batches")
        if "float32" in (self.capture.dtype, self.training.dtype):
            advice.append("the rates are those of bfloat16: set the dtypes of capture and training to it")
        return tuple(advice)
