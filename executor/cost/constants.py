"""What the cost model assumes of machines, each figure with its source. All rates are a second, all sizes bytes.

A store's own runs correct the shares of the peak (rates.py), `dflow plan --disk` and `--wire` the two rates.
"""

from __future__ import annotations

from attrs import field, frozen


@frozen
class Gpu:
    """A kind of GPU. name: what its driver's name contains. flops: of dense bfloat16 products.

    memory: bytes. bandwidth: of its memory. All three as its data sheet has them; None for a CPU, which has none.
    """

    name: str
    flops: float | None
    memory: float | None
    bandwidth: float | None


# Source: NVIDIA's data sheets, without sparsity; SXM where the name says no more.
GPUS = {
    "a100": Gpu("A100", 312e12, 80e9, 2.039e12),
    "l40s": Gpu("L40S", 362e12, 48e9, 0.864e12),
    "h100": Gpu("H100", 989e12, 80e9, 3.35e12),
    "h100-pcie": Gpu("H100 PCIe", 756e12, 80e9, 2.0e12),
    "h100-nvl": Gpu("H100 NVL", 835e12, 94e9, 3.9e12),
    "h200": Gpu("H200", 989e12, 141e9, 4.8e12),
    "gh200": Gpu("GH200", 989e12, 96e9, 4.0e12),
    "b200": Gpu("B200", 2250e12, 180e9, 8.0e12),
}
DEFAULT_GPU = "h100"
CPU = Gpu("cpu", None, None, None)  # a process of the CPU in the place of a GPU, by measured rates only
GPU_NAMES = (*GPUS, CPU.name)


@frozen
class Constant:
    """A figure that is not a GPU's, with its source."""

    value: float
    source: str


# Shares of the data sheet's peak that a GPU reaches.
CAPTURE_DENSE = Constant(0.40, "assumed: 26,700 tokens/s of Qwen3-8B; SpecForge reports about 27,000 on an H200")
CAPTURE_SPARSE = Constant(0.24, "assumed: experts have smaller products than dense layers")
TRAINING = Constant(0.28, "assumed: the draft's step has small products and a head of the whole vocabulary")

LOCAL_DISK = Constant(5e9, "assumed: one NVMe disk on PCIe 4, whose data sheets have 4 to 7 GB/s")
SHARED_DISK = Constant(20e9, "assumed: a parallel file system of all hosts together")
WIRE = Constant(12.5e9, "assumed: 100 Gbit/s Ethernet of each host, in each direction")
STREAM = Constant(1.5e9, "measured: a core that receives at 0.64 CPU seconds a GB, docs/benchmarks.md")
SUPPLY = Constant(1.1, "assumed: captured over trained tokens/s, so that queues of requests do not make ranks wait")
BUFFER = Constant(4, "simulated: with 2, ranks that end their steps together take up to 11 % longer")
GPUS_OF_HOST = Constant(8, "as HGX and DGX machines have")


@frozen(kw_only=True)
class Machines:
    """Machines of one kind. disk: None for LOCAL_DISK on one host and SHARED_DISK on several; else that rate.

    wire: of a host. stream: of a process that sends features, or receives them.
    """

    gpu: Gpu
    disk: float | None = None
    wire: float = field(default=WIRE.value)
    stream: float = field(default=STREAM.value)
    gpus_of_host: int = field(default=int(GPUS_OF_HOST.value))

    def hosts(self, gpus: int) -> int:
        return -(-gpus // self.gpus_of_host)

    def disk_of(self, hosts: int) -> float:
        """The rate of the disk that all hosts read and write together."""
        if self.disk is not None:
            return self.disk
        return LOCAL_DISK.value if hosts == 1 else SHARED_DISK.value


def gpu_named(name: str) -> Gpu | None:
    """The GPU in the table with the longest name that a driver's name contains; None without one."""
    found = [gpu for gpu in GPUS.values() if gpu.name in name]
    return max(found, key=lambda gpu: len(gpu.name), default=None)
