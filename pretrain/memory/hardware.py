"""What a plan runs on: one kind of GPU, how many a node, and what a node has beside them.

The figures are the vendors' (data sheets of the devices and of the usual servers), not measured ones; every one of
them has a flag. Rates are one way.
"""

from dataclasses import dataclass, replace

from pretrain.distributed.device import nvidia_smi
from pretrain.errors import ConfigError
from pretrain.monitor.peak_flops import peak_tflops

GIB = 2**30
GB = 10**9
DEFAULT_GPU = "h100"
DEFAULT_MARGIN = 0.05  # of a device: the CUDA context, NCCL's buffers, kernels' workspaces, which no tensor counts
HOST_MARGIN = 0.1  # of a node: the system, the processes themselves, the page cache
LARGEST_NODE = 8  # GPUs, where only the number of ranks is given


@dataclass(frozen=True)
class Gpu:
    """One kind of device. Rates in bytes a second, of one device, one way."""

    name: str
    memory_bytes: int  # as torch sees it: a little less than the label says
    label: str  # as pretrain.monitor.peak_flops knows it
    memory_rate: float
    peer_rate: float  # to the other devices of its node
    pcie_rate: float
    network_rate: float  # its share of the node's network
    host_memory_bytes: int  # its share of the node's
    nvme_bytes: int  # its share of the node's local disks
    nvme_rate: float
    knows_bf16: bool = True


def _gpu(name: str, gib: float, label: str, hbm: float, peer: float, pcie: float, network: float, host_gib: int,
         nvme_gb: int, nvme: float, **rest: bool) -> Gpu:
    """A row of the table, in GiB, GB and GB/s."""
    return Gpu(name, int(gib * GIB), label, hbm * GB, peer * GB, pcie * GB, network * GB, host_gib * GIB,
               nvme_gb * GB, nvme * GB, **rest)


# name, GiB, label, GB/s of: memory, NVLink or PCIe to its peers, PCIe to the host, network; GiB of host memory;
# GB and GB/s of NVMe. Nodes: DGX H200/H100/A100/V100 and the usual cloud servers of the others, an eighth of each.
GPUS = {gpu.name: gpu for gpu in (
    _gpu("b200", 178.3, "B200", 7700, 900, 63, 50, 256, 3840, 6.0),
    _gpu("h200", 139.8, "H200", 4800, 450, 63, 50, 256, 3840, 6.0),
    _gpu("h100", 79.1, "H100", 3350, 450, 63, 50, 256, 3840, 6.0),
    _gpu("h100-pcie", 79.1, "H100 PCIe", 2000, 63, 63, 25, 128, 1920, 3.0),
    _gpu("a100", 79.1, "A100", 2039, 300, 31, 25, 256, 3840, 3.0),
    _gpu("a100-40", 39.4, "A100", 1555, 300, 31, 25, 128, 1920, 3.0),
    _gpu("l40s", 44.4, "L40S", 864, 31, 31, 12.5, 96, 960, 1.5),
    _gpu("a10g", 22.1, "A10G", 600, 31, 31, 1.5, 96, 960, 1.0),
    _gpu("l4", 22.0, "L4", 300, 31, 31, 1.5, 48, 470, 0.5),
    _gpu("v100", 31.7, "V100", 900, 150, 15, 6.2, 64, 960, 0.8, knows_bf16=False),
    _gpu("v100-16", 15.7, "V100", 900, 150, 15, 6.2, 64, 960, 0.8, knows_bf16=False),
    _gpu("t4", 14.6, "T4", 320, 15, 15, 1.5, 48, 110, 0.3, knows_bf16=False),
)}
_ALIASES = {"a100-80": "a100", "v100-32": "v100", "h100-80": "h100", "h100-sxm": "h100"}


@dataclass(frozen=True)
class Cluster:
    """`nodes` equal machines of `gpus_per_node` devices. Bytes and bytes a second, of a node where they say so."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    host_memory_bytes: int  # of a node
    nvme_bytes: int  # of a node
    nvme_rate: float  # of a node
    network_rate: float  # of a device
    margin: float  # share of a device's memory that the plan leaves free

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def device_budget_bytes(self) -> int:
        """Of a device, for tensors."""
        return int(self.gpu.memory_bytes * (1 - self.margin))

    @property
    def host_budget_bytes(self) -> int:
        """Of a node, for tensors."""
        return int(self.host_memory_bytes * (1 - HOST_MARGIN))

    def peak_flops(self, precision: str) -> float:
        """Of a device, a second."""
        found = peak_tflops(self.gpu.label, precision)
        assert found is not None, self.gpu.label
        return found * 1e12

    def describe(self) -> str:
        """One line."""
        node = f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.gpus_per_node} {self.gpu.name}"
        return f"{node} of {self.gpu.memory_bytes / GIB:.4g} GiB; a node has {self.host_memory_bytes / GIB:,.0f} GiB " \
               f"of host memory and {self.nvme_bytes / GB:,.0f} GB of NVMe"


def find_gpu(word: str | None) -> Gpu:
    """The device that `--gpu` names: a row of the table, or a number of GiB, to which an H100's rates are given.

    None: that of this machine, where nvidia-smi knows one, otherwise an H100. Raises ConfigError.
    """
    if word is None:
        return _gpu_of_this_machine() or GPUS[DEFAULT_GPU]
    name = _ALIASES.get(word.lower(), word.lower())
    if name in GPUS:
        return GPUS[name]
    try:
        gib = float(name)
    except ValueError:
        raise ConfigError("--gpu", found=repr(word), expected=f"{', '.join(GPUS)}, or a number of GiB",
                          word=name, known=GPUS) from None
    if not 0 < gib < 1e5:
        raise ConfigError("--gpu", found=word, expected="a number of GiB above 0")
    return replace(GPUS[DEFAULT_GPU], name=f"{gib:g}-GiB device", memory_bytes=int(gib * GIB))


def _gpu_of_this_machine() -> Gpu | None:
    try:
        label, _, mib = nvidia_smi("name,memory.total")[0].rpartition(",")
        memory_bytes = int(mib) * 2**20
    except (ValueError, IndexError):
        return None
    close = [gpu for gpu in GPUS.values()
             if gpu.label in label and abs(gpu.memory_bytes - memory_bytes) < 0.1 * memory_bytes]
    return max(close, key=lambda gpu: len(gpu.label), default=None)


def make_cluster(*, gpu: str | None, world_size: int | None, nodes: int | None, gpus_per_node: int | None,
                 host_memory_gib: float | None = None, nvme_gb: float | None = None, nvme_gbps: float | None = None,
                 network_gbps: float | None = None, margin: float = DEFAULT_MARGIN) -> Cluster:
    """The machines that the flags describe; GB/s in `*_gbps`. Raises ConfigError."""
    _check(world_size=world_size, nodes=nodes, gpus_per_node=gpus_per_node)
    if not 0 <= margin < 1:
        raise ConfigError("--margin", found=margin, expected="a share from 0 to below 1")
    kind = find_gpu(gpu)
    nodes, gpus_per_node = _split(world_size, nodes, gpus_per_node)
    for flag, number in (("host_memory_gib", host_memory_gib), ("nvme_gb", nvme_gb), ("nvme_gbps", nvme_gbps),
                         ("network_gbps", network_gbps)):
        if number is not None and not 0 <= number < 1e9:
            raise ConfigError(f"--{flag}", found=number, expected="a number from 0")
    return Cluster(
        gpu=kind, nodes=nodes, gpus_per_node=gpus_per_node, margin=margin,
        host_memory_bytes=kind.host_memory_bytes * gpus_per_node if host_memory_gib is None
        else int(host_memory_gib * GIB),
        nvme_bytes=kind.nvme_bytes * gpus_per_node if nvme_gb is None else int(nvme_gb * GB),
        nvme_rate=kind.nvme_rate * gpus_per_node if nvme_gbps is None else nvme_gbps * GB,
        network_rate=kind.network_rate if network_gbps is None else network_gbps * GB)


def _check(**numbers: int | None) -> None:
    for flag, number in numbers.items():
        if number is not None and not 1 <= number <= 10**7:
            raise ConfigError(f"--{flag}", found=number, expected="a number from 1")


def _split(world_size: int | None, nodes: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """(nodes, GPUs a node) of what was given of the three."""
    if world_size is None:
        if nodes is None and gpus_per_node is None:
            raise ConfigError("--world_size", found="nothing", expected="a number of GPUs, or --nodes and "
                              "--gpus_per_node")
        return nodes or 1, gpus_per_node or LARGEST_NODE
    if gpus_per_node is None:
        gpus_per_node = -(-world_size // nodes) if nodes else min(world_size, LARGEST_NODE)
    nodes = nodes or -(-world_size // gpus_per_node)
    if nodes * gpus_per_node != world_size:
        raise ConfigError("--world_size", found=world_size,
                          expected=f"{nodes * gpus_per_node}, {nodes} nodes x {gpus_per_node} GPUs",
                          remedy="give --gpus_per_node, a divisor of --world_size")
    return nodes, gpus_per_node
