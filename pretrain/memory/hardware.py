"""Hardware of an estimate: the GPU model, GPUs per node, host memory, NVMe and links.

The numbers come from data sheets of GPUs and of common servers. The two efficiencies come from publications (see GPUS).
Flags override some of them. Rates are bytes per second in one direction.
"""

import os
from dataclasses import dataclass, replace

from pretrain.distributed.device import cpu_device, cpu_name, nvidia_smi, peak_tflops
from pretrain.errors import ConfigError, counted
from pretrain.memory.footprint import DEFAULT_MARGIN, GB, GIB

DEFAULT_GPU = "h100"
HOST_MARGIN = 0.1  # fraction of host memory that holds no tensors: operating system, processes, page cache
MAX_GPUS_PER_NODE = 8  # assumed if --gpus_per_node is not given
_OF_A_SIZE = "-GiB device"  # end of the name of a GPU that is only known by its memory


@dataclass(frozen=True)
class Gpu:
    """One GPU model. The field names are keys of `ds-pretrain compare --json`."""

    name: str
    memory_bytes: int  # as torch reports them: a little less than the marketed size
    label: str  # name of the GPU in distributed/device.py
    memory_rate: float
    peer_rate: float  # to the other GPUs of the node: NVLink or PCIe
    pcie_rate: float
    # The next four are values of a node, divided by the number of its GPUs.
    network_rate: float
    host_memory_bytes: int
    nvme_bytes: int
    nvme_rate: float
    multiprocessors: int  # processors that compute one tile of a matrix product at a time; 1 on CPUs
    product_efficiency: float  # fraction of the peak rate that large matrix products reach
    attention_efficiency: float  # fraction of the peak rate that FlashAttention-2 reaches on long sequences
    knows_bf16: bool = True
    kind: str = "cuda"  # cuda, cpu
    peak_tflops: float = 0.0  # 0: see distributed/device.py

    @property
    def word(self) -> str:
        """The value of `--gpu` that selects this GPU."""
        return self.name.removesuffix(_OF_A_SIZE)

    def peak_flops(self, precision: str) -> float:
        """Peak FLOPs per second."""
        tflops = self.peak_tflops or peak_tflops(self.label, precision)
        assert tflops is not None, self.label
        return tflops * 1e12


def _gpu(name: str, gib: float, label: str, hbm: float, peer: float, pcie: float, network: float, host_gib: int,
         nvme_gb: int, nvme: float, multiprocessors: int, products: float, attention: float,
         knows_bf16: bool = True) -> Gpu:
    """Make a row of the table from GiB, GB and GB/s."""
    return Gpu(name, int(gib * GIB), label, hbm * GB, peer * GB, pcie * GB, network * GB, host_gib * GIB,
               nvme_gb * GB, nvme * GB, multiprocessors, products, attention, knows_bf16)


# Columns: name, GiB, label; GB/s of device memory, to peers, PCIe to the host, network; GiB of host memory; GB and GB/s
# of NVMe; multiprocessors; efficiency of products and of attention. The four columns from the network on are an eighth
# of a node's values. The nodes are DGX H200/H100/A100/V100 or, for other GPUs, common cloud servers.
# Efficiency of products: A100 271 of 312, H100 794 and GH200 829 of 989 TFLOP/s were measured for the best shapes
# (Bekman, "Machine Learning Engineering", compute/accelerator, table of maximum achievable matmul FLOPS). Efficiency
# of attention: 0.50 to 0.73 on A100 (FlashAttention-2, arXiv 2307.08691), 0.35 on H100 (FlashAttention-3, arXiv
# 2407.08608). The values of all other GPUs are assumptions, by the similarity of the chips.
GPUS = {gpu.name: gpu for gpu in (
    _gpu("gb300", 277.0, "GB300", 8000, 900, 225, 100, 240, 3840, 6.0, 160, 0.80, 0.35),
    _gpu("b300", 268.0, "B300", 7700, 900, 63, 100, 256, 3840, 6.0, 160, 0.80, 0.35),
    _gpu("gb200", 185.0, "GB200", 8000, 900, 225, 50, 240, 3840, 6.0, 148, 0.80, 0.35),
    _gpu("b200", 178.3, "B200", 7700, 900, 63, 50, 256, 3840, 6.0, 148, 0.80, 0.35),
    _gpu("h200", 139.8, "H200", 4800, 450, 63, 50, 256, 3840, 6.0, 132, 0.80, 0.35),
    _gpu("h100", 79.1, "H100", 3350, 450, 63, 50, 256, 3840, 6.0, 132, 0.80, 0.35),
    _gpu("h100-pcie", 79.1, "H100 PCIe", 2000, 63, 63, 25, 128, 1920, 3.0, 114, 0.75, 0.35),
    _gpu("h20", 95.6, "H20", 4000, 450, 63, 50, 256, 3840, 6.0, 78, 0.90, 0.60),
    _gpu("a100", 79.1, "A100", 2039, 300, 31, 25, 256, 3840, 3.0, 108, 0.87, 0.60),
    _gpu("a100-40", 39.4, "A100", 1555, 300, 31, 25, 128, 1920, 3.0, 108, 0.87, 0.60),
    _gpu("l40s", 44.4, "L40S", 864, 31, 31, 12.5, 96, 960, 1.5, 142, 0.75, 0.50),
    _gpu("rtx6000-ada", 47.5, "RTX 6000 Ada", 960, 31, 31, 12.5, 96, 960, 1.5, 142, 0.75, 0.50),
    _gpu("a6000", 47.5, "RTX A6000", 768, 31, 31, 12.5, 64, 960, 1.5, 84, 0.85, 0.50),
    _gpu("rtx5090", 31.4, "RTX 5090", 1792, 63, 63, 1.2, 32, 960, 1.5, 170, 0.85, 0.50),
    _gpu("rtx4090", 23.6, "RTX 4090", 1008, 31, 31, 1.2, 32, 960, 1.5, 128, 0.85, 0.50),
    _gpu("rtx3090", 23.7, "RTX 3090", 936, 31, 31, 1.2, 32, 960, 1.5, 82, 0.85, 0.50),
    _gpu("a10", 22.1, "A10", 600, 31, 31, 1.5, 96, 960, 1.0, 72, 0.80, 0.50),
    _gpu("a10g", 22.1, "A10G", 600, 31, 31, 1.5, 96, 960, 1.0, 80, 0.85, 0.50),
    _gpu("l4", 22.0, "L4", 300, 31, 31, 1.5, 48, 470, 0.5, 58, 0.75, 0.50),
    _gpu("v100", 31.7, "V100", 900, 150, 15, 6.2, 64, 960, 0.8, 80, 0.80, 0.25, knows_bf16=False),
    _gpu("v100-16", 15.7, "V100", 900, 150, 15, 6.2, 64, 960, 0.8, 80, 0.80, 0.25, knows_bf16=False),
    _gpu("t4", 14.6, "T4", 320, 15, 15, 1.5, 48, 110, 0.3, 40, 0.70, 0.25, knows_bf16=False),
)}
# A CPU's rates, of a thread: assumptions. A calibration with measured runs scales all of them together.
_CPU_TFLOPS, _CPU_MEMORY_RATE, _CPU_ATTENTION = 0.5, 8 * GB, 0.1
_CPU_PEER_RATE = 1 * GB  # between processes of a host: an assumption
_ALIASES = {"a100-80": "a100", "v100-32": "v100", "h100-80": "h100", "h100-sxm": "h100", "rtx-a6000": "a6000",
            "3090": "rtx3090", "4090": "rtx4090", "5090": "rtx5090", "rtx-3090": "rtx3090", "rtx-4090": "rtx4090",
            "rtx-5090": "rtx5090"}
_LARGEST_GIB = 512  # of a number of GiB: above, it is rather the number in a GPU's name


@dataclass(frozen=True)
class Cluster:
    """`nodes` equal machines of `gpus_per_node` GPUs. The field names are keys of `ds-pretrain compare --json`."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    host_memory_bytes: int  # of a node
    nvme_bytes: int  # of a node
    nvme_rate: float  # of a node
    network_rate: float  # of a GPU
    margin: float  # fraction of device memory that is kept free of tensors

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def device_budget_bytes(self) -> int:
        """Bytes of one device that tensors may use."""
        return int(self.gpu.memory_bytes * (1 - self.margin))

    @property
    def host_budget_bytes(self) -> int:
        """Bytes of one node's host memory that tensors may use."""
        return int(self.host_memory_bytes * (1 - HOST_MARGIN))

    def describe(self) -> str:
        """Describe the cluster in one line."""
        node = f"{counted(self.nodes, 'node')} x {self.gpus_per_node} {self.gpu.name}"
        return f"{node} of {self.gpu.memory_bytes / GIB:.4g} GiB; a node has {self.host_memory_bytes / GIB:,.0f} GiB " \
               f"of host memory and {self.nvme_bytes / GB:,.0f} GB of NVMe"


def find_gpu(text: str | None) -> Gpu:
    """Return the GPU that `--gpu` selects by name. A number of GiB selects a GPU of that size with an H100's rates.

    Without `--gpu` (None), return this machine's GPU if nvidia-smi reports one of GPUS, otherwise an H100. Raises
    ConfigError.
    """
    if text is None:
        return _gpu_of_this_machine() or GPUS[DEFAULT_GPU]
    name = text.lower().replace(" ", "-")
    name = _ALIASES.get(name, name)
    if name in GPUS:
        return GPUS[name]
    try:
        gib = float(name)
    except ValueError:
        raise ConfigError("--gpu", found=repr(text), expected=f"{', '.join(GPUS)}, or a number of GiB",
                          word=name, known=GPUS) from None
    if not 0 < gib <= _LARGEST_GIB:
        raise ConfigError("--gpu", found=text, expected=f"{', '.join(GPUS)}, or a number of GiB up to {_LARGEST_GIB}")
    return replace(GPUS[DEFAULT_GPU], name=f"{gib:g}{_OF_A_SIZE}", memory_bytes=int(gib * GIB))


def _gpu_of_this_machine() -> Gpu | None:
    """Return the entry of GPUS with the name and (within 10%) the memory of this machine's first GPU, if any."""
    try:
        label, _, mebibytes = nvidia_smi("name,memory.total")[0].rpartition(",")
        memory_bytes = int(mebibytes) * 2**20
    except (ValueError, IndexError):
        return None
    return gpu_by_label(label, memory_bytes)


def gpu_by_label(label: str, memory_bytes: int) -> Gpu | None:
    """Return the entry of GPUS whose label is in a device's name and whose memory differs by less than 10%, if any."""
    similar = [gpu for gpu in GPUS.values()
               if gpu.label in label and abs(gpu.memory_bytes - memory_bytes) < 0.1 * memory_bytes]
    return max(similar, key=lambda gpu: len(gpu.label), default=None)


def make_cluster(*, gpu: str | None, world_size: int | None, nodes: int | None, gpus_per_node: int | None,
                 host_memory_gib: float | None = None, nvme_gb: float | None = None, nvme_gbps: float | None = None,
                 network_gbps: float | None = None, margin: float = DEFAULT_MARGIN) -> Cluster:
    """Return the cluster that the flags describe; `*_gbps` are GB/s. Raises ConfigError."""
    model = find_gpu(gpu)
    nodes, gpus_per_node = _nodes_and_gpus(world_size, nodes, gpus_per_node)
    return Cluster(
        gpu=model, nodes=nodes, gpus_per_node=gpus_per_node, margin=margin,
        host_memory_bytes=model.host_memory_bytes * gpus_per_node if host_memory_gib is None
        else int(host_memory_gib * GIB),
        nvme_bytes=model.nvme_bytes * gpus_per_node if nvme_gb is None else int(nvme_gb * GB),
        nvme_rate=model.nvme_rate * gpus_per_node if nvme_gbps is None else nvme_gbps * GB,
        network_rate=model.network_rate if network_gbps is None else network_gbps * GB)


def _nodes_and_gpus(world_size: int | None, nodes: int | None, gpus_per_node: int | None) -> tuple[int, int]:
    """Return (nodes, GPUs per node). Numbers that are None follow from the other ones, or from the defaults."""
    if world_size is None:
        if nodes is None and gpus_per_node is None:
            raise ConfigError("--world_size", found="nothing", expected="a number of GPUs, or --nodes and "
                              "--gpus_per_node")
        return nodes or 1, gpus_per_node or MAX_GPUS_PER_NODE
    if gpus_per_node is None:
        gpus_per_node = -(-world_size // nodes) if nodes else min(world_size, MAX_GPUS_PER_NODE)
    nodes = nodes or -(-world_size // gpus_per_node)
    if nodes * gpus_per_node != world_size:
        raise ConfigError("--world_size",
                          problem=f"{counted(world_size, 'GPU')} cannot fill {counted(nodes, 'node')} of "
                                  f"{counted(gpus_per_node, 'GPU')}",
                          remedy=f"give --world_size {nodes * gpus_per_node}, or other --nodes and --gpus_per_node")
    return nodes, gpus_per_node


def this_cpu_cluster(cluster: Cluster) -> Cluster:
    """Return the cluster with this machine's CPU in each node, whose cores the ranks of a node share."""
    threads = max(1.0, len(os.sched_getaffinity(0)) / cluster.gpus_per_node)
    return cpu_cluster(cluster, memory_bytes=cpu_device().memory_bytes, threads=threads, label=cpu_name())


def cpu_cluster(cluster: Cluster, *, memory_bytes: int, threads: float, label: str) -> Cluster:
    """Return the cluster with CPUs instead of GPUs. Each rank has `threads`, and its part of a host's memory."""
    of_rank = memory_bytes // cluster.gpus_per_node
    cpu = Gpu("cpu", of_rank, label, threads * _CPU_MEMORY_RATE, _CPU_PEER_RATE, threads * _CPU_MEMORY_RATE,
              cluster.network_rate, of_rank, 0, 1.0, 1, 1.0, _CPU_ATTENTION, kind="cpu",
              peak_tflops=threads * _CPU_TFLOPS)
    return replace(cluster, gpu=cpu, host_memory_bytes=memory_bytes, nvme_bytes=0, nvme_rate=1.0)
